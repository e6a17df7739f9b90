"""The model's place on this machine, found (and downloaded) once for all processes.

Owns: the call of formats.hub with the settings of a ModelConfig, and the thread in which the
supervisor makes it, so that /ready answers while gigabytes arrive. Called by ``supervisor``, LLM.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from trimaran.config import ModelConfig
from trimaran.formats.hub import locate_model

# Called with (bytes done, bytes in all, file at work).
Progress = Callable[[int, int, str], None]


def locate(model: ModelConfig, on_progress: Progress | None = None) -> str:
    """The folder or file to open. Raises CheckpointError: there is none, or it cannot be had."""
    return str(
        locate_model(
            model.model,
            revision=model.revision,
            download_dir=model.download_dir,
            offline=model.offline,
            on_progress=on_progress,
        )
    )


class ModelLocator:
    """``locate`` in a thread; readable (``fileno``) once ``result`` is there."""

    def __init__(self, model: ModelConfig, find: Callable[..., str] = locate) -> None:
        self.result: Future[str] = Future()
        self.share = 0.0  # of the bytes to download, 0 to 1
        self.detail = ""  # "120 of 235 MiB file"
        self._model = model
        self._find = find
        self._done = os.eventfd(0, os.EFD_CLOEXEC)
        # Not waited for at the end: a download may hang in the network, and dies with us.
        self._thread = threading.Thread(target=self._run, name="model-locator", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._done

    def close(self) -> None:
        if not self._thread.is_alive():
            os.close(self._done)

    def _run(self) -> None:
        try:
            self.result.set_result(self._find(self._model, self._on_progress))
        except BaseException as error:  # noqa: BLE001  the main of a thread: the supervisor is told
            self.result.set_exception(error)
        os.eventfd_write(self._done, 1)

    def _on_progress(self, done: int, total: int, file: str) -> None:
        self.share = done / total if total else 0.0
        self.detail = f"{done >> 20} of {total >> 20} MiB {file}".rstrip()
