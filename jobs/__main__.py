"""`python -m jobs`, the same as `trnjobs`."""

import sys

from jobs.cli import main

if __name__ == "__main__":
    sys.exit(main())
