"""Run `trnjobs` as `python -m jobs`."""

import atexit
import gc
import sys

from jobs.cli import main

atexit.register(gc.freeze)  # keeps the final garbage collection from scanning all of torch, which takes 0.7 s

if __name__ == "__main__":
    sys.exit(main())
