"""A `trimaran serve` under measurement: started, watched until ready, weighed, ended.

Owns: the child and its log file.
"""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 15.0
_URL = re.compile(r"http://[\w.\[\]:]+:\d+")


class ServerProcess:
    """Context manager; ``url`` and ``ready_s`` are set once the server is ready."""

    def __init__(self, model: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", "trimaran", "serve", model, "--port", "0"]
        self._command += arguments
        self.url = ""
        self.ready_s = 0.0

    def __enter__(self) -> "ServerProcess":
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)
        start = time.perf_counter()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        try:
            self._wait_until_ready(start + START_DEADLINE_S)
        except BaseException:
            self._stop()
            raise
        self.ready_s = time.perf_counter() - start
        return self

    def _wait_until_ready(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self._tail()}")
            if not self.url:
                found = _URL.search(Path(self._log.name).read_text("utf-8", "replace"))
                self.url = found.group() if found else ""
            elif self._answers_ready():
                return
            time.sleep(0.02)
        raise TimeoutError(f"not ready in {START_DEADLINE_S:.0f} s:\n{self._tail()}")

    def _answers_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _tail(self) -> str:
        return "\n".join(Path(self._log.name).read_text("utf-8", "replace").splitlines()[-20:])

    def pss_bytes(self) -> dict[str, int]:
        """Proportional set size of every process of the tree, by role."""
        sizes: dict[str, int] = {}
        pids = [self._process.pid]
        for pid in pids:  # grows while it is walked: children of children
            with contextlib.suppress(OSError):  # a process that ended meanwhile weighs nothing
                for task in Path(f"/proc/{pid}/task").iterdir():
                    pids += [int(p) for p in (task / "children").read_text().split()]
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                pss = int(re.search(r"^Pss:\s+(\d+)", rollup, re.M).group(1)) * 1024  # type: ignore[union-attr]
                sizes[f"pid {pid}"] = pss
        return sizes

    @property
    def pid(self) -> int:
        """Of the root process."""
        return self._process.pid

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal and wait for the end; the exit code (negative: killed by us)."""
        if self._process.poll() is None:
            self._process.send_signal(number)
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode

    def _stop(self) -> None:
        self.stop()
        self._log.close()
        Path(self._log.name).unlink()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
