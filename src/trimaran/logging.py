"""Log set-up, once per process.

Owns: format and destination of all that a process logs, and the level of the ``trimaran`` loggers.
Modules call ``logging.getLogger(__name__)`` from the standard library; mains of processes call
``configure`` first. One record is one line of JSON; text may go on in further lines.

What a record may carry (``extra={…}``): ``request_id``; ``fields``, a dict whose items are members
of the JSON object; ``block``, lines that follow the message in text.

What is not ours goes the same way: other loggers (from warnings on), ``warnings``, and exceptions
that nobody catches, in threads and destructors too. Only what native code prints stays as it is.
"""

import json
import logging
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

logger = logging.getLogger(__name__)

# A record is one write, so that the lines of several processes do not mix: it must fit the buffer.
_BUFFER_BYTES = 1 << 20


class _TextFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {role}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        block = getattr(record, "block", None)
        return super().formatMessage(record) + (f"\n{block}" if block else "")


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
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        # Escapes keep it JSON whatever the encoding of stderr, and one line whatever is in it.
        return json.dumps(entry, default=str)


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """A record that cannot be formatted is told of in the same format."""
        if record.name == __name__:
            super().handleError(record)  # stderr itself fails
        else:
            logger.exception("a log record of %s:%d is lost", record.pathname, record.lineno)


def configure(role: str, *, level: str = "info", log_format: str = "text") -> None:
    """Send all that is logged to stderr, in ``log_format`` ("text", "json"), marked with ``role``.

    ``level`` is that of our own loggers.
    """
    handler: _Handler
    if log_format == "json":
        stream = open(sys.stderr.fileno(), "w", buffering=_BUFFER_BYTES, closefd=False)  # noqa: SIM115
        handler = _Handler(stream)
        handler.setFormatter(_JsonFormatter(role))
    else:
        handler = _Handler(sys.stderr)
        handler.setFormatter(_TextFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("trimaran").setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    sys.unraisablehook = _log_unraisable


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logger.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value
    if error is not None and not isinstance(error, SystemExit):
        name = arguments.thread.name if arguments.thread else "a thread"
        logger.error("%s failed with %s: %s", name, type(error).__name__, error, exc_info=error)


def _log_unraisable(arguments: "sys.UnraisableHookArgs") -> None:
    what = arguments.err_msg or "exception ignored in"
    logger.error(
        "%s %r: %s", what, arguments.object, arguments.exc_value, exc_info=arguments.exc_value
    )
