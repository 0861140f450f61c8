"""The command `zerojax`, also as `python -m zerojax`: the commands of the planner, and `export` of checkpoints."""

import sys

from zerojax.checkpoints import export
from zerojax.planner import cli


def main() -> int:
    """Runs the command line; returns the exit status."""
    return cli.main(others={"export": cli.Command("parameters of a checkpoint as safetensors or npz", export.main)})


if __name__ == "__main__":
    sys.exit(main())
