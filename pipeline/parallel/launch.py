"""Local data parallelism: the same command under torchrun, with the exit code of the rank that says most."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.core.errors import EXIT_BUG, EXIT_OK, EXIT_TABLE, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.parallel.network import torchrun_arguments

EXIT_DIR_VARIABLE = "TRN_EXIT_DIR"  # not TRNPIPE_: those are settings


def needs_launch(processes: int, env: Mapping[str, str]) -> bool:
    """True where ranks must be started: several processes or a node of a Batch gang, and torchrun has not done it."""
    return "WORLD_SIZE" not in env and (processes > 1 or "AWS_BATCH_JOB_NUM_NODES" in env)


def launch(words: Sequence[str], processes: int, stop: StopSignal) -> int:
    """Run `trnpipe <words>` in `processes` ranks on this node and return one exit code for all of them."""
    with tempfile.TemporaryDirectory(prefix="trnpipe-exit-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun_arguments(processes, os.environ)]
        command += ["-m", "pipeline", *words]
        threads = str(max(1, (os.cpu_count() or 1) // processes))
        env = {"OMP_NUM_THREADS": threads, **os.environ, EXIT_DIR_VARIABLE: folder}
        # A session of its own: Ctrl-C reaches us alone, and we pass it on once.
        torchrun = subprocess.Popen(command, env=env, start_new_session=True)  # noqa: S603 - a list, no shell
        terminating = False
        while torchrun.poll() is None:
            if stop.wait(0.2) and not terminating:
                torchrun.terminate()  # torchrun passes it on to every rank and waits for them
                terminating = True
            elif terminating:
                try:
                    torchrun.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
        codes = [_read(Path(folder) / f"local-rank-{rank}") for rank in range(processes)]
    return gang_exit_code(codes, stopped=stop.is_set())


def note_exit_code(code: int, env: Mapping[str, str] = os.environ) -> None:
    """Leave this rank's exit code for the launcher, which torchrun would otherwise turn into 1."""
    folder = env.get(EXIT_DIR_VARIABLE)
    if folder and Path(folder).is_dir():
        (Path(folder) / f"local-rank-{env.get('LOCAL_RANK', '0')}").write_text(str(code))


def gang_exit_code(codes: Sequence[int | None], *, stopped: bool) -> int:
    """One code for a gang (None: the rank died without one).

    A rank's own fault says more than its peers' lost connections: codes that must not be retried come first, then a
    bug, then (unless all were stopped) a transient failure.
    """
    if all(code == EXIT_OK for code in codes):
        return EXIT_OK
    for rule in EXIT_TABLE:
        if not rule.retry and rule.exit_code in codes:
            return rule.exit_code
    if EXIT_BUG in codes:
        return EXIT_BUG
    return Preempted.exit_code if stopped else TransientError.exit_code


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
