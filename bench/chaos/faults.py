"""What may happen to the jobs of a cycle, done from outside at random moments."""

import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.chaos.processes import Role, Seen, Watch, is_alive, scan
from bench.chaos.s3 import FailingServer

POLL_S = 0.05
JOBS = ("prepare", "health", "compile", "train", "train", "train", "evaluate", "embed", "embed", "verify", "report")
"""Where faults are aimed at; training most often."""
LOST_S = 12.0
"""A main node that is silent for longer has lost the others."""
SMALL_FILE_BYTES = 2048


@dataclass(frozen=True)
class Fault:
    """One that is to come: `delay_s` after a job has begun to run."""

    kind: str
    job: str
    delay_s: float


@dataclass(frozen=True)
class Hit:
    """One that has come to pass."""

    kind: str
    what: str
    at: float


@dataclass
class Injector:
    """Faults of one cycle, one after the other, in a thread of its own while inside `with`.

    `engine`: the process that runs the jobs now. A fault that finds nothing where it was aimed at takes whatever runs.
    """

    faults: Sequence[Fault]
    dice: random.Random
    watch: Watch
    workspace: str
    cycle: str
    server: FailingServer | None = None
    engine: subprocess.Popen[bytes] | None = None
    hits: list[Hit] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)
    _since: dict[str, float] = field(default_factory=dict)

    @property
    def jobs(self) -> list[str]:
        """Those that were seen at work."""
        return list(self._since)

    def __enter__(self) -> "Injector":
        self._thread = threading.Thread(target=self._guarded, name="faults", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.errors.append(error)
            raise

    def _run(self) -> None:
        waiting = list(self.faults)
        while not self._end.wait(POLL_S):
            now, running = time.monotonic(), self.watch.of(self.workspace, self.cycle)
            for job in {one.job for one in running}:
                self._since.setdefault(job, now)
            for fault in list(waiting):
                begun = self._since.get(fault.job)
                if begun is None or now - begun < fault.delay_s:
                    continue
                mine = [one for one in running if one.job == fault.job]
                # Only training has ranks and checkpoints; the rest may hit what runs now.
                if what := self._do(fault.kind, mine or running):
                    self.hits.append(Hit(fault.kind, what, time.time()))
                    waiting.remove(fault)

    def _do(self, kind: str, running: Sequence[Seen]) -> str:
        """What was hit; empty when there was nothing."""
        does: dict[str, Callable[[Sequence[Seen]], str]] = {
            "kill_process": self._kill_process,
            "kill_node": self._kill_node,
            "hang_rank": self._hang_rank,
            "lost_heartbeat": self._lose_heartbeat,
            "full_disk": self._fill_disk,
            "s3_errors": self._fail_s3,
            "corrupt_checkpoint": self._corrupt,
            "kill_engine": lambda _: self._kill_engine(),
        }
        return does[kind](running)

    def _kill_process(self, running: Sequence[Seen]) -> str:
        roles: list[Role] = sorted({one.role for one in running})
        if not roles:
            return ""
        role = self.dice.choice(roles)
        one = self.dice.choice([one for one in running if one.role == role])
        return f"{one.role} of {one.task}#{one.node}" if _signal(one, signal.SIGKILL) else ""

    def _kill_node(self, running: Sequence[Seen]) -> str:
        if not running:
            return ""
        chosen = self.dice.choice(sorted({(one.task, one.attempt, one.node) for one in running}))
        return f"{chosen[0]}#{chosen[2]}" if self._kill_all([one for one in running if _node(one) == chosen]) else ""

    def _kill_all(self, nodes: Sequence[Seen]) -> int:
        """Every process of those nodes, keepers first: nobody is left to tell of it."""
        wanted, killed = {_node(one) for one in nodes}, 0
        for _ in range(3):  # what they start meanwhile goes too
            now = [one for one in scan(self.workspace) if _node(one) in wanted and one.cycle == self.cycle]
            killed += sum(_signal(one, signal.SIGKILL) for one in sorted(now, key=lambda one: one.role != "keeper"))
        return killed

    def _hang_rank(self, running: Sequence[Seen]) -> str:
        ranks = [one for one in running if one.role == "rank" and one.in_group]
        one = self.dice.choice(ranks) if ranks else None
        return f"rank of {one.task}#{one.node}" if one and _signal(one, signal.SIGSTOP) else ""

    def _lose_heartbeat(self, running: Sequence[Seen]) -> str:
        """The entry of a node hangs: for good, or, on the main node, for longer than the others wait."""
        if not {one.node for one in running} - {0}:
            return ""
        entries = [one for one in running if one.role == "entry"]
        one = self.dice.choice(entries) if entries else None
        if one is None or not _signal(one, signal.SIGSTOP):
            return ""
        if one.node == 0:
            self._later(LOST_S, lambda: _signal(one, signal.SIGCONT))
        return f"entry of {one.task}#{one.node}"

    def _fill_disk(self, running: Sequence[Seen]) -> str:
        ones = [one for one in running if one.role in ("launcher", "rank")]
        if not ones:
            return ""
        one = self.dice.choice(ones)
        with suppress(ProcessLookupError):
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, resource.RLIM_INFINITY))
            return f"no file of {one.role} of {one.task} above {SMALL_FILE_BYTES} bytes"
        return ""

    def _fail_s3(self, running: Sequence[Seen]) -> str:
        if self.server is None:
            return ""
        seconds, share = self.dice.uniform(1.0, 14.0), self.dice.choice([0.2, 0.6, 1.0])
        self.server.fail_for(seconds, share)
        jobs = ", ".join(sorted({one.task for one in running}))
        return f"{share:.0%} of the requests for {seconds:.1f} s while {jobs or 'nothing'} ran"

    def _corrupt(self, running: Sequence[Seen]) -> str:
        """Training is killed, and while it is down a byte of its newest checkpoint changes."""
        train = [one for one in running if one.job == "train"]
        workspace = Path(self.workspace.removeprefix("file://"))
        folder = workspace / "checkpoints" / self.cycle
        result = workspace / "cycles" / self.cycle / "train" / "result.json"
        if not train or result.exists() or not list(folder.glob("step-*/MANIFEST.json")):
            return ""
        if not self._kill_all(train) or result.exists():
            return ""
        steps = {int(path.parent.name.removeprefix("step-")): path.parent for path in folder.glob("*/MANIFEST.json")}
        path = steps[max(steps)] / self.dice.choice(["model.safetensors", "optimizer.safetensors", "MANIFEST.json"])
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        return f"{path.parent.name}/{path.name}"

    def _kill_engine(self) -> str:
        engine = self.engine
        if engine is None or engine.poll() is not None:
            return ""
        engine.kill()
        return "kill -9"

    def _later(self, seconds: float, do: Callable[[], object]) -> None:
        """Also when the cycle has ended meanwhile."""
        timer = threading.Timer(seconds, do)
        timer.daemon = True
        timer.start()


def _node(one: Seen) -> tuple[str, str, int]:
    return one.task, one.attempt, one.node


def _signal(one: Seen, signum: signal.Signals) -> bool:
    """False when it has ended before."""
    if not is_alive(one):
        return False
    with suppress(ProcessLookupError):
        os.kill(one.pid, signum)
        return True
    return False


def draw(dice: random.Random, kinds: Sequence[str], *, process_group: bool) -> list[Fault]:
    """Faults of one cycle: none in a fifth of them, else one or several. `kinds`: those that this place allows."""
    faults = []
    for _ in range(dice.choices([0, 1, 2, 3], [20, 40, 28, 12])[0]):
        kind = dice.choice(kinds)
        in_train = kind in ("hang_rank", "lost_heartbeat", "corrupt_checkpoint") or (
            process_group and dice.random() < 0.3
        )
        job = "train" if in_train else dice.choice(JOBS)
        faults.append(Fault(kind, job, dice.uniform(0.0, 8.0 if in_train else 5.0)))
    return faults
