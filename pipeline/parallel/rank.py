"""One rank of a script that knows nothing of us: `python -m pipeline.parallel.rank script.py ...` or `-m module ...`.

The script sees what it would see of `python script.py`; its exit code is left for the launcher, and an error of
trnpipe is a message without a traceback. Of several ranks each line begins with the number of its rank.
"""

import atexit
import faulthandler
import io
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType

from pipeline.core.errors import EXIT_BUG, EXIT_OK, TransientError, TrnpipeError, exit_code_of
from pipeline.parallel.launch import note_exit_code
from pipeline.proc.children import RANK_S
from pipeline.proc.signals import end_in_time, show_stacks_when_asked

# What collectives say in a plain RuntimeError when a peer is gone or does not come (gloo and its store, torch 2.9).
_PEER_IS_LOST = ("gloo/transport/", "Connection closed by peer", "Connection reset by peer", "timed out in monitored")


def main(words: Sequence[str]) -> None:
    """Run the script to its end. Raises SystemExit where it ends with anything but 0."""
    show_stacks_when_asked()
    end_in_time()
    # torchrun starts Python unbuffered, where the parts of a line come one by one, among those of other ranks.
    prefix = f"[{os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    for name in ("stdout", "stderr"):
        stream = RankLines(getattr(sys, name), prefix)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    codes = [EXIT_OK]
    atexit.register(lambda: note_exit_code(codes[0]))  # the first is the last to be called
    try:
        run_script(words)
    except SystemExit as ended:
        code = ended.code  # as the interpreter has it: nothing is 0, a text (which it prints) is 1
        codes[0] = EXIT_OK if code is None else code & 0xFF if isinstance(code, int) else EXIT_BUG
        raise
    except BaseException as error:
        codes[0] = exit_code(error)
        _show(error)
        note_exit_code(codes[0])
        # Threads that still wait for a peer must not keep a rank that has failed. A thread of C: it needs no GIL.
        faulthandler.dump_traceback_later(RANK_S, exit=True)
        sys.exit(codes[0])


class RankLines(io.TextIOWrapper):
    """A text stream, written line by line, whose lines begin with `prefix`. Takes the given stream's place."""

    def __init__(self, stream: io.TextIOWrapper, prefix: str) -> None:
        encoding, errors = stream.encoding, stream.errors
        super().__init__(stream.detach(), encoding=encoding, errors=errors, line_buffering=True)
        self._prefix, self._begins_line = prefix, True

    def write(self, text: str) -> int:
        """Write the text; a carriage return begins a line too, as progress bars have it."""
        marked = re.sub(r"(?<=[\r\n])(?=[^\r\n])", lambda _: self._prefix, text)
        if self._begins_line and text[:1] not in ("", "\r", "\n"):
            marked = self._prefix + marked
        if text:
            self._begins_line = text[-1] in "\r\n"
        super().write(marked)
        return len(text)


def run_script(words: Sequence[str]) -> None:
    """As __main__, with the sys.argv and sys.path of `python script.py ...` or `python -m module ...`."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    path = Path(words[0])
    sys.argv = list(words)
    if not sys.flags.safe_path:  # else there is no folder of the script, nor ours in its place
        sys.path[0] = str(path.resolve().parent)
    # Not runpy.run_path: its module is gone before threads and exit handlers, and has no absolute __file__.
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(path.absolute())
    exec(compile(path.read_bytes(), module.__file__, "exec", dont_inherit=True), module.__dict__)  # noqa: S102


def exit_code(error: BaseException) -> int:
    """Of a script that ended with `error`: as a command of ours, and a lost peer is a transient failure."""
    if isinstance(error, TrnpipeError) or not isinstance(error, RuntimeError):
        return exit_code_of(error)
    distributed = sys.modules.get("torch.distributed")
    of_library = distributed is not None and isinstance(error, distributed.DistError)
    if of_library or any(part in str(error) for part in _PEER_IS_LOST):
        return TransientError.exit_code
    return EXIT_BUG


def _show(error: BaseException) -> None:
    """In one write, so that ranks do not mix; a traceback is that of the script alone."""
    if isinstance(error, TrnpipeError):
        sys.stderr.write(f"rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {error}\n")
        return
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


if __name__ == "__main__":
    main(sys.argv[1:])
