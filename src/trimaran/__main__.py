"""``python -m trimaran`` is the ``trimaran`` command."""

import sys

from trimaran.cli import main

if __name__ == "__main__":
    sys.exit(main())
