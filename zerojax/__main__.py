"""The command `zerojax`, also as `python -m zerojax`: of the planner, `export` of checkpoints, `pilot` of tuning."""

import sys

from zerojax.checkpoints import export
from zerojax.planner import cli
from zerojax.tuning import cli as pilot_cli

OTHERS = {
    "export": cli.Command("parameters of a checkpoint as safetensors or npz", export.main),
    "pilot": cli.Command("tries configurations on a training job of your own", pilot_cli.main),
}


def main() -> int:
    """Runs the command line; returns the exit status."""
    return cli.main(others=OTHERS)


if __name__ == "__main__":
    sys.exit(main())
