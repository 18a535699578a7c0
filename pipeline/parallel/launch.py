"""Ranks of this node under torchrun: one exit code for all of them, that of the rank that says most.

`launch` starts `python -m pipeline.parallel.launch torchrun ...`, whose ranks are processes of a module of ours, or
`python -m pipeline.parallel.launch rank script.py ...`, one rank of a script that knows nothing of us. Without torch.
"""

import atexit
import ctypes
import faulthandler
import io
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType

from pipeline.core.errors import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_TABLE,
    Preempted,
    TransientError,
    TrnpipeError,
    exit_code_of,
)
from pipeline.core.interpreter import OWN_MODULE
from pipeline.core.stop import StopSignal
from pipeline.io.paths import temporary_folder
from pipeline.parallel.world import NUM_NODES, is_lost_peer, torchrun_arguments
from pipeline.proc.children import RANK_S
from pipeline.proc.signals import enable_stack_dumps, limit_shutdown_time

EXIT_DIR_VARIABLE = "TRN_EXIT_DIR"  # not TRNPIPE_: those are settings
MODULE = "pipeline.parallel.launch"
OWN_PACKAGES = ("pipeline", "jobs", "trnpipe")
_STANDARD_OUTPUT = 1
_LINE_BUFFERED = 1  # stdio.h: _IOLBF
_LINE_BUFFER = ctypes.create_string_buffer(4096)  # the C library's as long as the process lives
_OUTPUT_S = 5.0  # for the last lines; a process that a rank left behind may hold the pipe open for ever
_GLOO = b"[Gloo] Rank "
"""Begins a line that gloo writes for each group it makes (torch 2.9)."""


def needs_launch(processes: int, env: Mapping[str, str]) -> bool:
    """Return whether ranks must be started: several processes or a node of several, and torchrun has not done it."""
    return "WORLD_SIZE" not in env and (processes > 1 or NUM_NODES in env)


def launch(words: Sequence[str], processes: int, stop: StopSignal, *, module: str = "pipeline") -> int:
    """Run `python -m <module> <words>` in `processes` ranks on this node and return one exit code for all of them."""
    with tempfile.TemporaryDirectory(prefix="trnpipe-exit-", dir=temporary_folder()) as folder:
        command = [*OWN_MODULE, MODULE, "torchrun", *torchrun_arguments(processes, os.environ), "--no-python"]
        command += [*OWN_MODULE, module, *words]
        threads = str(max(1, (os.cpu_count() or 1) // processes))
        env = {"OMP_NUM_THREADS": threads, **os.environ, EXIT_DIR_VARIABLE: folder}
        # A session of its own: Ctrl-C reaches us alone, and we pass it on once.
        readable, writable = os.pipe()
        torchrun = subprocess.Popen(command, env=env, start_new_session=True, stdout=writable)  # noqa: S603 - no shell
        os.close(writable)
        output = threading.Thread(target=pass_on, args=(readable, _STANDARD_OUTPUT), daemon=True)
        output.start()
        while torchrun.poll() is None and not stop.wait(0.2):
            continue
        if torchrun.poll() is None:
            torchrun.terminate()  # torchrun passes it on to every rank and waits for them
        code = torchrun.wait()
        output.join(_OUTPUT_S)
        if code == EXIT_OK:
            return EXIT_OK  # of ranks that end by os._exit, too
        codes = [_exit_code(Path(folder), rank) for rank in range(processes)]
    return ranks_exit_code(codes, stopped=stop.is_set())


def launch_script(words: Sequence[str], processes: int, stop: StopSignal) -> int:
    """Run `script.py ...` or `-m module ...` in ranks, as `launch` does."""
    return launch(["rank", *words], processes, stop, module=MODULE)


def pass_on(source: int, target: int) -> None:
    """Copy the output of ranks from one file descriptor to another, without gloo's lines, until its end."""
    held = b""  # the beginning of a line that may be gloo's
    with suppress(BrokenPipeError):  # nobody reads on: so the ranks will hear of it
        while chunk := os.read(source, 2**16):
            *lines, held = (held + chunk).split(b"\n")
            passed = b"".join(line + b"\n" for line in lines if not line.startswith(_GLOO))
            if not _GLOO.startswith(held[: len(_GLOO)]):
                passed, held = passed + held, b""
            while passed:
                passed = passed[os.write(target, passed) :]
    os.close(source)


def note_exit_code(code: int, env: Mapping[str, str] = os.environ, *, name: str = "") -> None:
    """Leave this rank's exit code for the launcher, which torchrun would otherwise turn into 1."""
    folder = env.get(EXIT_DIR_VARIABLE)
    if folder and Path(folder).is_dir():
        (Path(folder) / (name or f"local-rank-{env.get('LOCAL_RANK', '0')}")).write_text(str(code))


def _exit_code(folder: Path, local_rank: int) -> int | None:
    """Return what the rank left itself, else how its process ended: minus a signal."""
    for name in (f"local-rank-{local_rank}", f"local-rank-{local_rank}.ended"):
        with suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return None


def ranks_exit_code(codes: Sequence[int | None], *, stopped: bool) -> int:
    """Return one code for all ranks (None: the rank died without one; below 0: of a signal; 128 and above: a shell's).

    A rank's own fault says more than its peers' lost connections: codes that must not be retried come first, then a
    bug or another code of its own, then (unless all were stopped) a transient failure. Where a rank was killed, what
    its peers say comes of that.
    """
    if all(code == EXIT_OK for code in codes):
        return EXIT_OK
    for rule in EXIT_TABLE:
        if not rule.retry and rule.exit_code in codes:
            return rule.exit_code
    faults = [code for code in codes if code is not None and 0 < code < 128 and code != TransientError.exit_code]
    if faults and -signal.SIGKILL not in codes:
        return min(faults)
    return Preempted.exit_code if stopped else TransientError.exit_code


def run_torchrun(words: Sequence[str]) -> int:
    """Run torchrun, with a line, not tracebacks of its own, on how ranks have ended; LOGLEVEL brings its messages back.

    Return 0 when all ranks of this node ended with 0.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        run(parse_args(list(words)))  # type: ignore[no-untyped-call]
    except SignalException:
        return Preempted.exit_code
    except ChildFailedError as error:  # it holds those that failed first; the others were told to stop
        for rank, failure in sorted(error.failures.items()):
            note_exit_code(failure.exitcode, name=f"local-rank-{failure.local_rank}.ended")
            ended = f"exited with {failure.exitcode}"
            if failure.exitcode < 0:
                ended = f"was ended by {signal.Signals(-failure.exitcode).name}"
            print(f"trnpipe: rank {rank} (process {failure.pid}) {ended}", file=sys.stderr, flush=True)
        return EXIT_BUG
    return EXIT_OK


# One rank of a script. It sees what it would see of `python script.py`, its exit code is left for the launcher, and an
# error of trnpipe is a message without a traceback. Of several ranks each line begins with the number of its rank.


def write_whole_lines(env: Mapping[str, str] = os.environ) -> None:
    """In a rank, make C write whole lines to standard output, as pieces of gloo's would mix with those of other ranks.

    Python makes it unbuffered, as torchrun and PYTHONUNBUFFERED ask it to.
    """
    if sys.platform == "linux" and "LOCAL_RANK" in env:
        libc = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf(stdout, _LINE_BUFFER, _LINE_BUFFERED, ctypes.c_size_t(len(_LINE_BUFFER)))


def run_rank(words: Sequence[str]) -> None:
    """Run the script to its end. Raises SystemExit where it ends with anything but 0."""
    write_whole_lines()
    enable_stack_dumps()
    limit_shutdown_time()
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
        whole, newline, begun = marked.rpartition("\n")
        for part in (whole + newline, begun):  # the first is flushed: `begun` waits for its end
            super().write(part)
        return len(text)


def run_script(words: Sequence[str]) -> None:
    """Run it as __main__, with the sys.argv and sys.path of `python script.py ...` or `python -m module ...`."""
    folder = str(Path.cwd() if words[0] == "-m" else Path(words[0]).resolve().parent)
    if "PYTHONSAFEPATH" not in os.environ:  # which keeps a script from finding what lies beside it
        sys.path.insert(0, folder)
        if any(_is_other_module(name, folder) for name in OWN_PACKAGES):  # the script's own, by our names
            for name in [one for one in sys.modules if one.partition(".")[0] in OWN_PACKAGES]:
                del sys.modules[name]
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    path = Path(words[0])
    sys.argv = list(words)
    # Not runpy.run_path: its module is gone before threads and exit handlers, and has no absolute __file__.
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(path.absolute())
    exec(compile(path.read_bytes(), module.__file__, "exec", dont_inherit=True), module.__dict__)  # noqa: S102


def _is_other_module(name: str, folder: str) -> bool:
    """Return whether a folder has a module or package of that name which is not the imported one."""
    found, imported = PathFinder.find_spec(name, [folder]), sys.modules.get(name)
    return found is not None and found.origin not in (None, imported and imported.__file__)


def exit_code(error: BaseException) -> int:
    """Return that of a script that ended with `error`: a command's of ours, and a lost peer is a transient failure."""
    if isinstance(error, TrnpipeError) or not isinstance(error, RuntimeError):
        return exit_code_of(error)
    return TransientError.exit_code if is_lost_peer(error) else EXIT_BUG


def _show(error: BaseException) -> None:
    """Print it in one write, so that ranks do not mix; a traceback is that of the script alone."""
    if isinstance(error, TrnpipeError):
        sys.stderr.write(f"rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {error}\n")
        return
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


if __name__ == "__main__":
    if sys.argv[1] == "torchrun":
        sys.exit(run_torchrun(sys.argv[2:]))
    run_rank(sys.argv[2:])
