"""Compiles the CPU kernels of csrc/, once per instruction set; without a compiler, goes on without.

The libraries have a plain C interface (model/kernels/native.py calls them through ctypes), so
neither Python's nor torch's headers are needed. They use OpenMP but are linked without its runtime:
at run time that is torch's own, so that one pool of threads serves both.
"""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = ["csrc/activation.cpp", "csrc/attention.cpp", "csrc/linear.cpp", "csrc/norm.cpp", "csrc/rope.cpp"]
HEADERS = ["csrc/multiply.h", "csrc/simd.h"]
# Contraction is off because which multiply-adds fuse must not depend on the optimiser's mood; the
# workspace of attention holds scores, then weights, in the same bytes.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden"]
FLAGS += ["-ffp-contract=off", "-fno-strict-aliasing"]
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 -mfma"
INSTRUCTION_SETS = {"generic": []}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {"avx2": ["-mavx2", "-mfma"], "avx512": AVX512.split()}


class BuildKernels(build_ext):
    """Compiles and links with the bare compiler: Python's own build flags have no say here."""

    def initialize_options(self):
        super().initialize_options()
        self.parallel = True
        self.failures = []

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self):
        super().run()
        if self.failures:
            names = ", ".join(name.rpartition(".")[2] for name, _ in self.failures)
            self.warn(
                f"{names} could not be built: {self.failures[0][1]}. Plain torch serves "
                "instead, several times slower. Install g++ (or name a compiler in CXX) and "
                "install trimaran again."
            )

    def build_extension(self, ext):
        try:
            self._compile(ext)
        except (OSError, subprocess.CalledProcessError) as error:
            self.failures.append((ext.name, error))
            raise CompileError(str(error)) from error

    def _compile(self, ext):
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)  # what an earlier build left is not this one's result
        folder = Path(self.build_temp, ext.name)
        folder.mkdir(parents=True, exist_ok=True)
        objects = [str(folder / f"{Path(source).stem}.o") for source in ext.sources]
        for source, target in zip(ext.sources, objects, strict=True):
            options = [*FLAGS, *ext.extra_compile_args]
            subprocess.run([*compiler, *options, "-c", source, "-o", target], check=True)
        subprocess.run([*compiler, "-shared", *objects, "-o", str(output)], check=True)


extensions = [
    Extension(
        f"trimaran.model.kernels._native.kernels_{name}",
        sources=SOURCES,
        depends=HEADERS,
        extra_compile_args=flags,
        optional=True,  # a failure is a warning
    )
    for name, flags in INSTRUCTION_SETS.items()
]
setup(
    ext_modules=extensions if sys.platform == "linux" else [], cmdclass={"build_ext": BuildKernels}
)
