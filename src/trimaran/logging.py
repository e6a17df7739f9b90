"""Log set-up, once per process.

Owns: format and level of the ``trimaran`` logger tree. Modules call ``logging.getLogger(__name__)``
from the standard library; mains of processes call ``configure`` first. One line is one record.
"""

import json
import logging
import sys
import time


class _TextFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {role}: %(message)s", datefmt="%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(role: str, *, level: str = "info", log_format: str = "text") -> None:
    """Send the ``trimaran`` loggers to stderr, lines in ``log_format``, marked with ``role``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(role) if log_format == "json" else _TextFormatter(role))
    root = logging.getLogger("trimaran")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
