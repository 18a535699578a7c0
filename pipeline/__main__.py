"""`python -m pipeline`, the same as `trnpipe`."""

import sys

from pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
