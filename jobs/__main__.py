"""`python -m jobs`, the same as `trnjobs`."""

import atexit
import gc
import sys

from jobs.cli import main

atexit.register(gc.freeze)  # without it the last collection scans all of torch, which takes 0.7 s

if __name__ == "__main__":
    sys.exit(main())
