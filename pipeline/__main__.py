"""Run `trnpipe` as `python -m pipeline`."""

import atexit
import gc
import sys

from pipeline.cli import main

# Otherwise, the last garbage collection visits all objects of torch, which adds 0.7 s to every command.
atexit.register(gc.freeze)

if __name__ == "__main__":
    sys.exit(main())
