"""`python -m tests.docs.forked SOCKET MODULE WORDS...`: a command typed in a shell, as a child of that zygote."""

import os
import sys
from pathlib import Path

from tests.zygote import Forked


def main() -> int:
    socket, module, *words = sys.argv[1:]
    streams = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    code = Forked(module, words, env=os.environ, cwd=Path.cwd(), zygote=socket, **streams).wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
