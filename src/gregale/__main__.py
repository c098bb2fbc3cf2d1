"""`python -m gregale` is the command line."""

import sys

from gregale.cli import main

if __name__ == "__main__":
    sys.exit(main())
