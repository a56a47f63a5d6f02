"""`python -m tcemu` is the command line `tcemu`."""

import sys

from tcemu.cli import main

if __name__ == "__main__":
    sys.exit(main())
