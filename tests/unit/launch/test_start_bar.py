"""One line, only on terminals, never in the way of what is logged."""

import io

from trimaran.clock import ManualClock
from trimaran.launch.start_bar import StartBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_line():
    terminal, clock = Terminal(), ManualClock()
    bar = StartBar(terminal, clock)
    clock.advance(2.5)
    bar.update("loading", 50.0, "120 of 235 MiB")
    line = terminal.getvalue()
    assert line == f"loading       {'━' * 12}{'╌' * 12}   50 %  120 of 235 MiB  2.5 s\x1b[K\r"
    bar.update("loading", 60.0)
    assert terminal.getvalue() == line, "twenty times a second is enough"
    clock.advance(1)
    bar.close()
    bar.close()
    bar.update("loading", 70.0)
    assert terminal.getvalue() == line + "\x1b[2K\r"


def test_nothing_where_it_is_no_terminal():
    stream = io.StringIO()
    bar = StartBar(stream, ManualClock())
    bar.update("loading", 50.0)
    bar.close()
    assert stream.getvalue() == ""
