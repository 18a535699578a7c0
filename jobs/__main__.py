"""`python -m jobs`, the same as `trnjobs`."""

import argparse
import sys
from collections.abc import Sequence

import pipeline


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line; only --version and --help exist so far."""
    parser = argparse.ArgumentParser(prog="trnjobs", description="Plan and run a cycle as jobs.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"trnjobs {pipeline.__version__}")
    parser.parse_args(argv)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
