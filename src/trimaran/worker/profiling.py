"""Recordings of what a worker does, as Chrome traces (chrome://tracing, ui.perfetto.dev).

Owns: torch's profiler and the file of a recording. With the Python functions around torch's
operations, since the compiled kernels are none of those. Called by ``worker``, always in the thread
that computes: that is the one which is recorded.
"""

import os
import time
from pathlib import Path

import torch

from trimaran.errors import ConflictError


class Recorder:
    """One recording at a time. ``folder`` None: none at all."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._profiler: torch.profiler.profile | None = None
        self._file = Path()

    def start(self) -> Path:
        """Begin; returns the file that ``stop`` will write.

        Raises ConflictError: no folder is set or it cannot be made, or a recording is under way.
        """
        if self._folder is None:
            raise ConflictError(
                "there is no folder for profiles", hint="start with --profile-dir FOLDER"
            )
        if self._profiler is not None:
            raise ConflictError("a profile is being recorded already", hint="stop it first")
        folder = Path(self._folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConflictError(f"--profile-dir {folder}: {error.strerror or error}") from error
        now = time.strftime("%Y%m%d-%H%M%S")
        self._file = folder / f"trimaran-{os.getpid()}-{now}.trace.json.gz"
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True
        )
        profiler.start()
        self._profiler = profiler
        return self._file

    def stop(self) -> Path:
        """End, and write the file. Raises ConflictError: there is no recording."""
        if self._profiler is None:
            raise ConflictError("no profile is being recorded", hint="start one first")
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self._file))
        return self._file

    def close(self) -> None:
        """End a recording that nobody stopped; it is lost."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
