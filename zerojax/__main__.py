"""`python -m zerojax`: the command `zerojax`, for where the script is not on the path."""

import sys

from zerojax.planner.cli import main

if __name__ == "__main__":
    sys.exit(main())
