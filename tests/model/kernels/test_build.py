"""setup.py: the libraries a wheel would hold, and an install that survives without a compiler."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = Path("src/trimaran/model/kernels/_native")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in ("csrc", "src"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    return tmp_path


def build(checkout: Path, compiler: str) -> tuple[str, list[str]]:
    """What was printed, and the libraries that came of it."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=checkout,
        env={**os.environ, "CXX": compiler},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, sorted(path.stem for path in checkout.rglob(f"{FOLDER}/*.so"))


def test_no_compiler(checkout):
    said, built = build(checkout, str(checkout / "no-such-compiler"))
    assert built == []
    assert "kernels_generic" in said
    assert "Plain torch serves instead" in said
    assert "Install g++" in said


def test_a_compiler_too_old_for_one_instruction_set(checkout):
    compiler = checkout / "compiler.py"
    compiler.write_text(
        "import subprocess, sys\n"
        "if '-mavx512f' in sys.argv: sys.exit('unrecognized option -mavx512f')\n"
        "sys.exit(subprocess.run(['c++', '-O0', *sys.argv[1:]]).returncode)\n"
    )
    said, built = build(checkout, f"{sys.executable} {compiler}")
    if platform.machine() == "x86_64":
        assert built == ["kernels_avx2", "kernels_generic"]
        assert "kernels_avx512 could not be built" in said
    else:
        assert built == ["kernels_generic"]
