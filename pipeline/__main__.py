"""`python -m pipeline`, the same as `trnpipe`."""

import atexit
import gc
import sys

from pipeline.cli import main

atexit.register(gc.freeze)  # without it the last garbage collection visits all of torch, 0.7 s of every command

if __name__ == "__main__":
    sys.exit(main())
