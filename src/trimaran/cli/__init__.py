"""The ``trimaran`` command: parses, prints and hands over; imports what a command needs late."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    from trimaran.cli.parser import build_parser, parse
    from trimaran.errors import ConfigError, StartupError

    parser = build_parser()
    try:
        arguments = parse(parser, list(sys.argv[1:] if argv is None else argv))
        return int(arguments.run(arguments))
    except ConfigError as error:
        print(f"trimaran: {error}", file=sys.stderr)
        return 2
    except StartupError as error:
        print(f"trimaran: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
