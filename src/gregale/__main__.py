"""Runs the command line for `python -m gregale`."""

import sys

from gregale.cli import main

if __name__ == "__main__":
    sys.exit(main())
