"""Runs each piece of code that it is sent in a child of its own, which has the stand-in device, not yet opened.

`python -m tests.native.server`, a line of JSON for each piece: torch and its compiler take seconds to import.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch_neuronx

import pipeline.stages.train  # noqa: F401 - what a child would import

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


def run(code: str, said: Path, cache: str, missing: set[str]) -> int:
    """0, or 1 where it raised; what it wrote is in `said`."""
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor in (STANDARD_OUTPUT, STANDARD_ERROR):
        os.dup2(output, descriptor)
    os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] = cache
    torch_neuronx._C.set_missing(missing)
    try:
        exec(code, {"__name__": "__main__"})  # noqa: S102 - the code of a test
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            code = run(request["code"], Path(request["said"]), request["cache"], set(request["missing"]))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
