"""`python -m steadykv` is the command `steadykv`."""

import sys

from steadykv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
