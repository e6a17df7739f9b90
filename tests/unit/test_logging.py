"""What a process writes to stderr, seen from outside: one JSON object a line, come what may."""

import json
import os
import subprocess
import sys

import pytest

# Everything by which Python and its libraries speak to stderr; each with what must be found again.
PROGRAM = """
import asyncio, logging, sys, threading, warnings
from trimaran.logging import configure

configure("api-0", level=LEVEL, log_format=FORMAT)
log = logging.getLogger("trimaran.server")
log.info("two\\nlines, caf\\u00e9, \\ud83d\\ude0a and \\udc80", extra={"request_id": "r-1"})
fields = {"phases": {"loading": 1.5}, "path": sys}
log.info("table", extra={"fields": fields, "block": "row 1\\nrow 2"})
log.debug("too low")
try:
    raise ValueError("first\\nsecond")
except ValueError:
    log.exception("caught")
log.info("%d arguments", "no number")
logging.getLogger("uvicorn.error").error("Exception in ASGI application")
logging.getLogger("some.library").warning("theirs")
logging.getLogger("some.library").info("theirs, too low")
warnings.warn("old\\nthing")

def fail():
    raise RuntimeError("in a thread")

thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()

class Broken:
    def __del__(self):
        raise RuntimeError("in a destructor")

Broken()

async def main():
    asyncio.get_running_loop().call_soon(fail_soon)
    await asyncio.sleep(0)

def fail_soon():
    raise RuntimeError("in a callback")

asyncio.run(main())
raise KeyError("nobody catches me")
"""


def run(log_format, level="info"):
    program = PROGRAM.replace("FORMAT", repr(log_format)).replace("LEVEL", repr(level))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == b""
    return done.stderr.decode("ascii")


def test_every_line_is_json():
    records = [json.loads(line) for line in run("json").splitlines()]
    assert all(r["role"] == "api-0" and r["time"].endswith("Z") for r in records)
    messages = [r["message"] for r in records]
    assert messages[0] == "two\nlines, café, 😊 and \udc80"
    assert records[0]["request_id"] == "r-1"
    assert messages[1] == "table"
    assert records[1]["phases"] == {"loading": 1.5}
    assert records[1]["path"].startswith("<module 'sys'")
    assert messages[2] == "caught"
    assert "ValueError: first\nsecond" in records[2]["traceback"]
    assert messages[3].startswith("a log record of <string>:")
    assert [(r["logger"], r["level"]) for r in records[4:7]] == [
        ("uvicorn.error", "ERROR"),
        ("some.library", "WARNING"),
        ("py.warnings", "WARNING"),
    ]
    for record, cause in zip(
        records[7:],
        ("in a thread", "in a destructor", "in a callback", "nobody catches me"),
        strict=True,
    ):
        assert cause in record["traceback"]


def test_text_has_the_block_below_the_message():
    lines = run("text").splitlines()
    assert any(line.endswith(" I api-0: table") for line in lines)
    assert lines[lines.index("row 1") + 1] == "row 2"
    assert not any("too low" in line for line in lines)
    assert any(line.endswith(" W api-0: theirs") for line in lines)


@pytest.mark.parametrize(("level", "found"), [("debug", True), ("warning", False)])
def test_the_level_is_that_of_our_own_loggers(level, found):
    written = run("text", level)
    assert ("too low" in written) is found
    assert "theirs, too low" not in written
