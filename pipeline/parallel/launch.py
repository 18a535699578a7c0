"""Ranks of this node under torchrun: one exit code for all of them, that of the rank that says most."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.core.errors import EXIT_BUG, EXIT_OK, EXIT_TABLE, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.paths import temporary_folder
from pipeline.parallel.world import NUM_NODES, torchrun_arguments

EXIT_DIR_VARIABLE = "TRN_EXIT_DIR"  # not TRNPIPE_: those are settings


def needs_launch(processes: int, env: Mapping[str, str]) -> bool:
    """True where ranks must be started: several processes or a node of a gang, and torchrun has not done it."""
    return "WORLD_SIZE" not in env and (processes > 1 or NUM_NODES in env)


def launch(words: Sequence[str], processes: int, stop: StopSignal, *, module: str = "pipeline") -> int:
    """Run `python -m <module> <words>` in `processes` ranks on this node and return one exit code for all of them."""
    with tempfile.TemporaryDirectory(prefix="trnpipe-exit-", dir=temporary_folder()) as folder:
        command = [sys.executable, "-m", "pipeline.parallel.launch", *torchrun_arguments(processes, os.environ)]
        command += ["-m", module, *words]
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
    return gang_exit_code(codes, stopped=stop.is_set())


_GLOO = b"[Gloo] Rank "
"""Begins a line that gloo writes for each group it makes (torch 2.9)."""
_STANDARD_OUTPUT = 1
_OUTPUT_S = 5.0  # for the last lines; a process that a rank left behind may hold the pipe open for ever


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


def note_exit_code(code: int, env: Mapping[str, str] = os.environ) -> None:
    """Leave this rank's exit code for the launcher, which torchrun would otherwise turn into 1."""
    _note(f"local-rank-{env.get('LOCAL_RANK', '0')}", code, env)


def note_end(local_rank: int, returncode: int, env: Mapping[str, str] = os.environ) -> None:
    """In torchrun: how the process of a rank ended, minus a signal. What a rank has left itself says more."""
    _note(f"local-rank-{local_rank}.ended", returncode, env)


def _note(name: str, code: int, env: Mapping[str, str]) -> None:
    folder = env.get(EXIT_DIR_VARIABLE)
    if folder and Path(folder).is_dir():
        (Path(folder) / name).write_text(str(code))


def gang_exit_code(codes: Sequence[int | None], *, stopped: bool) -> int:
    """One code for a gang (None: the rank died without one; below 0: of a signal, as 128 and above in a shell).

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


def _exit_code(folder: Path, local_rank: int) -> int | None:
    for name in (f"local-rank-{local_rank}", f"local-rank-{local_rank}.ended"):
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None


# torchrun, as `launch` starts it: it says in a line, not in tracebacks of its own, how ranks have ended.


def main() -> int:
    """0 when all ranks of this node ended with 0; LOGLEVEL in the environment brings torchrun's own messages back."""
    # Not in the launcher, which needs no torch.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

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
