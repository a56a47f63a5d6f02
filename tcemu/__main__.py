"""`python -m tcemu`: the command line, as `tcemu`."""

import sys

from tcemu.cli import main

if __name__ == "__main__":
    sys.exit(main())
