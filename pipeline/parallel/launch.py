"""Launch the ranks on this node with torchrun and combine their exit codes into one.

`launch` runs `python -m pipeline.parallel.launch torchrun ...`, which in turn starts each rank as
`python -m pipeline ...` or, for a user script, as `python -m pipeline.parallel.launch rank script.py ...`. The launcher
process itself never imports torch.
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
    reported_name,
)
from pipeline.core.interpreter import OWN_MODULE
from pipeline.core.stop import StopSignal
from pipeline.io.paths import temporary_folder
from pipeline.parallel.world import NUM_NODES, is_lost_rank, torchrun_arguments
from pipeline.proc.children import RANK_S
from pipeline.proc.signals import enable_stack_dumps, limit_shutdown_time

EXIT_DIR_VARIABLE = "TRN_EXIT_DIR"  # the prefix TRNPIPE_ is reserved for settings
MODULE = "pipeline.parallel.launch"
OWN_PACKAGES = ("pipeline", "jobs", "trnpipe")
_STANDARD_OUTPUT = 1
_LINE_BUFFERED = 1  # stdio.h: _IOLBF
_LINE_BUFFER = ctypes.create_string_buffer(4096)  # the C library uses this buffer until the process exits
_OUTPUT_S = 5.0  # don't wait longer for the last lines, since an orphaned child of a rank may keep the pipe open
MAX_RESTARTS = 2
_RESTARTED = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
_GLOO = b"[Gloo] Rank "
"""Prefix of the line that gloo prints whenever a process group is created (torch 2.9)."""


def needs_launch(processes: int, env: Mapping[str, str]) -> bool:
    """Return whether this process, which torchrun didn't start, has to launch ranks on multiple processes or nodes."""
    return "WORLD_SIZE" not in env and (processes > 1 or NUM_NODES in env)


def launch(
    arguments: Sequence[str], processes: int, stop: StopSignal, *, module: str = "pipeline", restarts: int = 0
) -> int:
    """Run `python -m <module> <arguments>` on `processes` ranks on this node and return their combined exit code.

    If a rank is killed, all ranks are started again, at most `restarts` times. This is much faster than a new attempt
    of the job, and suits programs that resume from a checkpoint.
    """
    for restart in range(restarts + 1):
        codes = _run_ranks(arguments, processes, stop, module)
        code = ranks_exit_code(codes, stopped=stop.is_set())
        if restart == restarts or code != TransientError.exit_code or not may_restart(codes, os.environ):
            break
        text = f"trnpipe: a rank was killed: starting all ranks of this node again ({restart + 1} of {restarts})"
        print(text, file=sys.stderr, flush=True)
    return code


def may_restart(codes: Sequence[int | None], env: Mapping[str, str]) -> bool:
    """Return whether ranks that ended with a transient failure can be started again in the same container.

    The first rank to end must have been killed by a signal that doesn't indicate a fault of its device, because the
    Neuron runtime aborts on these. With several nodes, the ranks of the others have failed as well, so the job must be
    retried as a whole.
    """
    return NUM_NODES not in env and any(code is not None and -code in _RESTARTED for code in codes)


def _run_ranks(arguments: Sequence[str], processes: int, stop: StopSignal, module: str) -> list[int | None]:
    """Run the ranks of this node once and return their exit codes, as far as they are known."""
    with tempfile.TemporaryDirectory(prefix="trnpipe-exit-", dir=temporary_folder()) as folder:
        command = [*OWN_MODULE, MODULE, "torchrun", *torchrun_arguments(processes, os.environ), "--no-python"]
        command += [*OWN_MODULE, module, *arguments]
        threads = str(max(1, (os.cpu_count() or 1) // processes))
        env = {"OMP_NUM_THREADS": threads, **os.environ, EXIT_DIR_VARIABLE: folder}
        # Start a new session so that Ctrl-C is only delivered to this process, which forwards it once.
        readable, writable = os.pipe()
        torchrun = subprocess.Popen(command, env=env, start_new_session=True, stdout=writable)  # noqa: S603 - no shell
        os.close(writable)
        output = threading.Thread(target=forward_output, args=(readable, _STANDARD_OUTPUT), daemon=True)
        output.start()
        while torchrun.poll() is None and not stop.wait(0.2):
            continue
        if torchrun.poll() is None:
            torchrun.terminate()  # torchrun forwards the signal to every rank and waits for them
        code = torchrun.wait()
        output.join(_OUTPUT_S)
        if code == EXIT_OK:
            return [EXIT_OK] * processes  # a rank that called os._exit(0) has not recorded a code
        return [_exit_code(Path(folder), rank) for rank in range(processes)]


def launch_script(arguments: Sequence[str], processes: int, stop: StopSignal) -> int:
    """Run `script.py ...` or `-m module ...` on `processes` ranks and return their combined exit code."""
    return launch(["rank", *arguments], processes, stop, module=MODULE)


def forward_output(source: int, target: int) -> None:
    """Copy the output of the ranks from one file descriptor to another until EOF, dropping the lines from gloo."""
    pending = b""  # an incomplete line that may turn out to be from gloo
    with suppress(BrokenPipeError):  # the reader is gone, and closing the source propagates that to the ranks
        while chunk := os.read(source, 2**16):
            *lines, pending = (pending + chunk).split(b"\n")
            output = b"".join(line + b"\n" for line in lines if not line.startswith(_GLOO))
            if not _GLOO.startswith(pending[: len(_GLOO)]):
                output, pending = output + pending, b""
            while output:
                output = output[os.write(target, output) :]
    os.close(source)


def record_exit_code(code: int, env: Mapping[str, str] = os.environ, *, name: str = "") -> None:
    """Write this rank's exit code to a file for the launcher, because torchrun always exits with 1 on failure."""
    folder = env.get(EXIT_DIR_VARIABLE)
    if folder and Path(folder).is_dir():
        (Path(folder) / (name or f"local-rank-{env.get('LOCAL_RANK', '0')}")).write_text(str(code))


def _exit_code(folder: Path, local_rank: int) -> int | None:
    """Return the exit code recorded by the rank, or else the one observed by torchrun, which is negative for a signal.

    Returns None if no exit code was recorded.
    """
    for name in (f"local-rank-{local_rank}", f"local-rank-{local_rank}.ended"):
        with suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return None


def ranks_exit_code(codes: Sequence[int | None], *, stopped: bool) -> int:
    """Combine the exit codes of all ranks into one.

    A code is None if the rank died without recording one, negative if it was killed by a signal, and 128 or higher if a
    shell reported the signal. Non-retryable codes take precedence, followed by bugs and unknown codes, and finally
    transient failures, which include lost connections. If the ranks were stopped, the last category is reported as a
    preemption instead. If any rank received SIGKILL, bugs in the other ranks are ignored.
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


def run_torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun in this process and return an exit code, which is 0 if all ranks on this node succeeded.

    Prints one line per failed rank instead of torchrun's tracebacks. Set LOGLEVEL to see torchrun's own log messages.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    try:
        run(parse_args(list(arguments)))  # type: ignore[no-untyped-call]
    except SignalException:
        return Preempted.exit_code
    except ChildFailedError as error:  # only includes the ranks that failed first, since torchrun stops the others
        for rank, failure in sorted(error.failures.items()):
            record_exit_code(failure.exitcode, name=f"local-rank-{failure.local_rank}.ended")
            ended = f"exited with {failure.exitcode}"
            if failure.exitcode < 0:
                ended = f"was killed by {signal.Signals(-failure.exitcode).name}"
            print(f"trnpipe: rank {rank} (process {failure.pid}) {ended}", file=sys.stderr, flush=True)
        return EXIT_BUG
    return EXIT_OK


# Running a user script on one rank. The script behaves as if it was started with `python script.py`, except that its
# exit code is recorded for the launcher and trnpipe errors are printed without a traceback. If there are multiple
# ranks, each line of output is prefixed with the rank.


def line_buffer_c_stdout(env: Mapping[str, str] = os.environ) -> None:
    """Re-enable line buffering of C's stdout, which torchrun disables, so that gloo's output isn't interleaved."""
    if sys.platform == "linux" and "LOCAL_RANK" in env:
        libc = ctypes.CDLL(None)
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf(stdout, _LINE_BUFFER, _LINE_BUFFERED, ctypes.c_size_t(len(_LINE_BUFFER)))


def run_rank(arguments: Sequence[str]) -> None:
    """Run the script to completion. Raises SystemExit if the script fails."""
    line_buffer_c_stdout()
    enable_stack_dumps()
    limit_shutdown_time()
    # torchrun starts Python in unbuffered mode, in which fragments of lines from different ranks can be interleaved.
    prefix = f"[{os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    for name in ("stdout", "stderr"):
        stream = RankLines(getattr(sys, name), prefix)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    codes = [EXIT_OK]
    atexit.register(lambda: record_exit_code(codes[0]))  # handlers run in reverse order, so this one runs last
    try:
        run_script(arguments)
    except SystemExit as ended:
        code = ended.code  # the interpreter exits with 0 for None, and with 1 for a string, which it prints
        codes[0] = EXIT_OK if code is None else code & 0xFF if isinstance(code, int) else EXIT_BUG
        raise
    except BaseException as error:
        codes[0] = exit_code(error)
        _print_error(error)
        record_exit_code(codes[0])
        # Threads that are waiting for other ranks must not keep a failed rank alive. faulthandler uses a thread that
        # doesn't need the GIL.
        faulthandler.dump_traceback_later(RANK_S, exit=True)
        sys.exit(codes[0])


class RankLines(io.TextIOWrapper):
    """A line-buffered text stream that takes over the buffer of `stream` and adds `prefix` to each line."""

    def __init__(self, stream: io.TextIOWrapper, prefix: str) -> None:
        encoding, errors = stream.encoding, stream.errors
        super().__init__(stream.detach(), encoding=encoding, errors=errors, line_buffering=True)
        self._prefix, self._begins_line = prefix, True

    def write(self, text: str) -> int:
        """Write the text. A carriage return, as used by progress bars, also starts a new line."""
        marked = re.sub(r"(?<=[\r\n])(?=[^\r\n])", lambda _: self._prefix, text)
        if self._begins_line and text[:1] not in ("", "\r", "\n"):
            marked = self._prefix + marked
        if text:
            self._begins_line = text[-1] in "\r\n"
        lines, newline, rest = marked.rpartition("\n")
        for part in (lines + newline, rest):  # complete lines are flushed, while the rest stays in the buffer
            super().write(part)
        return len(text)


def run_script(arguments: Sequence[str]) -> None:
    """Run a script as __main__, setting sys.argv and sys.path the same way as `python script.py` or `python -m module`.

    `arguments`: the script or `-m` and the module, followed by the script's own arguments.
    """
    folder = str(Path.cwd() if arguments[0] == "-m" else Path(arguments[0]).resolve().parent)
    if "PYTHONSAFEPATH" not in os.environ:  # if set, Python doesn't import from the script's folder
        sys.path.insert(0, folder)
        if any(_is_other_module(name, folder) for name in OWN_PACKAGES):  # a user's package has the same name
            for name in [module for module in sys.modules if module.partition(".")[0] in OWN_PACKAGES]:
                del sys.modules[name]
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    path = Path(arguments[0])
    sys.argv = list(arguments)
    # Don't use runpy.run_path, which doesn't make __file__ absolute and discards the module's globals before threads
    # and exit handlers have finished.
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(path.absolute())
    exec(compile(path.read_bytes(), module.__file__, "exec", dont_inherit=True), module.__dict__)  # noqa: S102


def _is_other_module(name: str, folder: str) -> bool:
    """Return whether the folder contains a module or package with this name that is not the imported one."""
    spec, imported = PathFinder.find_spec(name, [folder]), sys.modules.get(name)
    return spec is not None and spec.origin not in (None, imported and imported.__file__)


def exit_code(error: BaseException) -> int:
    """Return the exit code for a script that raised `error`, treating a lost rank as a transient failure."""
    if isinstance(error, TrnpipeError) or not isinstance(error, RuntimeError):
        return exit_code_of(error)
    return TransientError.exit_code if is_lost_rank(error) else EXIT_BUG


def _print_error(error: BaseException) -> None:
    """Print an error with a single write, so that output from different ranks isn't interleaved.

    Frames of the launcher are removed from the traceback.
    """
    if isinstance(error, TrnpipeError):
        sys.stderr.write(f"rank {os.environ.get('RANK', '0')}: {reported_name(error)}: {error}\n")
        return
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


if __name__ == "__main__":
    if sys.argv[1] == "torchrun":
        sys.exit(run_torchrun(sys.argv[2:]))
    run_rank(sys.argv[2:])
