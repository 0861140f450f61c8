"""The command `zerojax`, also as `python -m zerojax`.

`export` is of checkpoints, `pilot` of tuning, all else of the planner.
"""

import sys

from zerojax.checkpoints import export
from zerojax.planner import cli
from zerojax.tuning import cli as pilot_cli


def main() -> int:
    """Runs the command line; returns the exit status."""
    if sys.argv[1:2] == ["export"]:
        return export.main(sys.argv[2:])
    if sys.argv[1:2] == ["pilot"]:
        return pilot_cli.main(sys.argv[2:])
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
