"""torchrun, as the launcher starts it: says in a line, not in tracebacks of its own, how ranks have ended."""

import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from pipeline.core.errors import EXIT_BUG, EXIT_OK, Preempted
from pipeline.parallel.launch import note_end


def main() -> int:
    """0 when all ranks of this node ended with 0; LOGLEVEL in the environment brings torchrun's own messages back."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        run(parse_args(None))  # type: ignore[no-untyped-call]
    except SignalException:
        return Preempted.exit_code
    except ChildFailedError as error:  # it holds those that failed first; the others were told to stop
        for rank, failure in sorted(error.failures.items()):
            note_end(failure.local_rank, failure.exitcode)
            ended = f"exited with {failure.exitcode}"
            if failure.exitcode < 0:
                ended = f"was ended by {signal.Signals(-failure.exitcode).name}"
            print(f"trnpipe: rank {rank} (process {failure.pid}) {ended}", file=sys.stderr, flush=True)
        return EXIT_BUG
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
