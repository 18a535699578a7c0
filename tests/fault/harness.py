"""A tiny training case run as real processes, and everything such a run leaves behind.

One run takes seconds on `cpu`; on `xla` most of its time is compiling.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, wraps
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ParamSpec

import psutil

from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.launch import ranks_exit_code
from tests.backends.xla_process import FAST_COMPILE
from tests.kit.ranks import environments
from tests.kit.zygote import Forked

ROOT = Path(__file__).parents[2]
CYCLE = "c1"
MAX_STEPS, SAVE_EVERY, EVALUATE_EVERY, LOG_EVERY = 120, 10, 30, 5
WAIT_S = 300.0  # longest wait for something that must happen; generous, machines may be loaded

DATA = (
    "--data.name=tiny",
    "--data.buckets=16x32,24x48",
    "--data.num-workers=1",
    "--data.rows-per-chunk=100",
    "--data.valid-fraction=0.15",
    "--data.test-fraction=0.1",
    "--data.synthetic.num-queries=60",
    "--data.tokenizer.vocab-size=400",
)
MODEL = (
    "--model.hidden-size=32",
    "--model.num-layers=1",
    "--model.intermediate-size=64",
    "--model.max-positions=48",
    "--model.interaction-size=16",
    "--model.cross-layers=1",
    "--model.mlp-sizes=16",
)
TRAIN = (
    "--train.start=scratch",
    f"--train.max-steps={MAX_STEPS}",
    "--train.global-batch-size=48",
    "--train.micro-batch-size=48",
    f"--train.evaluate-every={EVALUATE_EVERY}",
    "--train.optimizer.learning-rate=0.003",
    "--train.candidates-per-query=4",
    f"--checkpoint.every-steps={SAVE_EVERY}",
    f"--log.every-steps={LOG_EVERY}",
)
TINY = (*DATA, *MODEL, *TRAIN)
TEACHER = "--train.teacher="
UNJUDGED = "--gate.first-without-comparison=true"
"""For `evaluate`: the holdout has a handful of queries."""
ON_XLA = (
    *TINY,
    "--data.buckets=16x24",
    "--train.max-steps=60",
    "--train.global-batch-size=24",
    "--train.micro-batch-size=24",
    "--train.evaluate-every=20",
)
"""Few and small graphs, for tests on xla that are not about shapes."""
ENV = {
    "PJRT_DEVICE": "CPU",
    # Two spinning OpenMP threads on a loaded machine of two cores take a second for a step of ten milliseconds.
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": FAST_COMPILE,  # every run of a comparison has the same
}
_DROPPED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "CPU_NUM_DEVICES",
    "PYTEST_XDIST_WORKER",
)

Event = dict[str, Any]
Trace = dict[int, tuple[float, float, str]]
"""Step to (loss, gradient norm, digest of the global batch's samples)."""


@dataclass
class Run:
    """One `trnpipe` process and what it printed."""

    process: subprocess.Popen[bytes] | Forked
    log: Path
    _turn: threading.Lock = field(default_factory=threading.Lock)
    """A watcher of the S3 server kills in a thread of its own: of two that read an exit code each would get a part."""

    @property
    def out(self) -> str:
        return self.log.with_suffix(".out").read_text()

    @property
    def err(self) -> str:
        return self.log.with_suffix(".err").read_text()

    @property
    def is_alive(self) -> bool:
        with self._turn:
            return self.process.poll() is None

    def wait(self, limit_s: float | None = None) -> int:
        """The exit code; fails the test, and ends the process, when it does not come (None: in WAIT_S)."""
        limit_s = WAIT_S if limit_s is None else limit_s
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {limit_s:g} s\n{self.out[-2000:]}\n{self.err[-4000:]}") from None

    def until(self, condition: Callable[[], bool], *, every_s: float = 0.001) -> bool:
        """Poll until the condition holds (True) or the process has ended (False)."""
        end = time.monotonic() + WAIT_S
        while not condition():
            if not self.is_alive:
                return condition()
            assert time.monotonic() < end, f"waited in vain\n{self.out[-2000:]}\n{self.err[-2000:]}"
            time.sleep(every_s)
        return True

    def reach(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds. TooLate when it did not while the process lived."""
        if not self.until(condition):
            self.assert_not_late()
            raise AssertionError(f"ended before, exit {self.process.returncode}\n{self.err[-3000:]}")

    def assert_not_late(self) -> None:
        """Of a run that was to be ended by us. TooLate when it came to its own end."""
        if self.process.returncode == 0:
            raise TooLate(f"{self.log.name} has ended by itself")

    def kill(self) -> None:
        """kill -9 to the process and all below it: what the end of a container or a machine does."""
        try:  # of one that has ended, another may have the number by now
            family = psutil.Process(self.process.pid).children(recursive=True) if self.is_alive else []
        except psutil.NoSuchProcess:
            family = []
        with self._turn:
            self.process.kill()
            for member in family:
                try:
                    member.kill()
                except psutil.NoSuchProcess:
                    continue
            self.process.wait()
        psutil.wait_procs(family, timeout=30)

    def terminate(self, limit_s: float = 20.0) -> int:
        """SIGTERM as Batch sends it. Asserts the promise of 20 s; the monitor forces the end after 15."""
        self.process.terminate()
        code = self.wait(limit_s)
        self.assert_not_late()
        return code


class TooLate(AssertionError):
    """A run had ended by itself: on a busy machine nobody may look at it for seconds."""


P = ParamSpec("P")


def again_when_late(test: Callable[P, None]) -> Callable[P, None]:
    """A test that was TooLate is run again, in places of its own, three times at most."""

    @wraps(test)
    def attempts(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(2):
            with contextlib.suppress(TooLate):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return attempts


@dataclass(frozen=True)
class Ended:
    """All of a finished cycle that must not depend on how often it was interrupted."""

    candidate: str
    digests: dict[str, str]
    """sha256 of the weights of the candidate, and of weights and optimizer of the last step."""
    trace: Trace
    figures: dict[str, Any]


@dataclass
class Place:
    """A workspace and how to run the tiny case in it."""

    workspace: str
    folder: Path
    """For logs, and for scratch when the workspace is not local."""
    flags: tuple[str, ...] = TINY
    env: Mapping[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    forked: bool = True
    """From the zygote, see there; else by `python -m pipeline`."""
    _read: dict[Path, tuple[int, list[Event]]] = field(default_factory=dict)
    """Of files of events: bytes read, and what they hold."""

    @cached_property
    def storage(self) -> Storage:
        return open_storage(self.workspace)

    @property
    def path(self) -> Path:
        """The workspace as a folder (file:// only)."""
        return Path(self.workspace)

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch"

    def number(self, flag: str) -> int:
        """The value of a numeric flag of this place."""
        return int(next(text.partition("=")[2] for text in reversed(self.flags) if text.startswith(f"{flag}=")))

    @property
    def max_steps(self) -> int:
        return self.number("--train.max-steps")

    @property
    def evaluate_every(self) -> int:
        return self.number("--train.evaluate-every")

    def start(self, stage: str, *flags: str, cycle: str = CYCLE, env: Mapping[str, str] | None = None) -> Run:
        """Start `trnpipe <stage>` (or `embed verify`); later flags win. `env`: beside this place's."""
        words = [*stage.split(), f"--workspace={self.workspace}", f"--cycle={cycle}"]
        words += _last_wins([f"--scratch={self.scratch}", *self.flags, *flags])
        outer = {name: value for name, value in os.environ.items() if name not in _DROPPED}
        outer = {name: value for name, value in outer.items() if not name.startswith("TRNPIPE_")}
        whole = {**outer, **ENV, **self.env, **(env or {})}
        log = self.folder / f"run-{len(self.runs)}-{stage.replace(' ', '-')}"
        with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
            process: subprocess.Popen[bytes] | Forked
            if self.forked:
                process = Forked("pipeline", words, env=whole, cwd=ROOT, stdout=out, stderr=err)
            else:
                command = [sys.executable, "-m", "pipeline", *words]
                process = subprocess.Popen(command, stdout=out, stderr=err, env=whole, cwd=ROOT, start_new_session=True)
        run = Run(process, log)
        self.runs.append(run)
        return run

    def run(self, stage: str, *flags: str, code: int = 0, cycle: str = CYCLE) -> Run:
        """Run to the end; asserts the exit code."""
        run = self.start(stage, *flags, cycle=cycle)
        ended = run.wait()
        assert ended == code, f"exit {ended}, expected {code}\n{run.out[-3000:]}\n{run.err[-3000:]}"
        return run

    @property
    def has_teacher(self) -> bool:
        return any(flag.startswith(TEACHER) for flag in self.flags)

    def prepare(self) -> None:
        """Prepare the data, and what a teacher says of it where there is one."""
        self.run("prepare")
        if self.has_teacher:
            self.run("teach")

    def run_ranks(self, stage: str, processes: int, *flags: str, code: int = 0) -> list[Run]:
        """Run to the end in ranks as torchrun starts them, without it: they are forked, and import nothing.

        Asserts the one exit code of them all. The store is held here, as torchrun does, so that a rank may leave
        before the others.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # here: most users of this need no torch

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        held = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        runs = [self.start(stage, *flags, env=held | rank) for rank in environments(processes, store.port)]
        codes = [run.wait() for run in runs]
        said = "\n".join(run.out[-2000:] + run.err[-3000:] for run in runs)
        assert ranks_exit_code(codes, stopped=False) == code, f"exits {codes}, expected {code}\n{said}"
        return runs

    def close(self) -> None:
        """End what a failed test left running."""
        for run in self.runs:
            if run.is_alive:
                run.kill()

    def events(self, name: str | None = None, *, cycle: str = CYCLE) -> list[Event]:
        """Events so far; a half-written last line is left out."""
        local = self.storage.local_path(f"cycles/{cycle}/events.jsonl")
        if local is not None:
            found = self._read_on(local)
        else:
            found = _parsed(b"".join(self._segments(f"cycles/{cycle}/events")))
        return [event for event in found if name in (None, event["event"])]

    def _read_on(self, path: Path) -> list[Event]:
        """All events of a file that grows. What was read stays read: who polls asks a thousand times a second."""
        size = path.stat().st_size if path.exists() else 0
        end, found = self._read.get(path, (0, []))
        if size < end:  # another file
            end, found = 0, []
        if size > end:
            with path.open("rb") as file:
                file.seek(end)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            end, found = end + len(data), [*found, *_parsed(data)]
        self._read[path] = end, found
        return found

    def _segments(self, folder: str) -> Iterator[bytes]:
        """Of the log, in the order of their writers; the journal of one says more than what was put of it."""
        found: dict[str, bytes] = {}
        for path in self.scratch.glob("events-*/*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # put meanwhile
                found[path.name] = path.read_bytes()
        for stat in self.storage.list(folder):
            name = stat.key.removeprefix(f"{folder}/")
            found[name] = max(found.get(name, b""), self.storage.read_bytes(stat.key), key=len)
        for name in sorted(found):
            yield found[name][: found[name].rfind(b"\n") + 1]

    def step(self, seen: int = 0) -> int:
        """The newest step whose figures are in the log, after the first `seen` events; -1 before the first."""
        return max((event["step"] for event in self.events()[seen:] if event["event"] == "train_steps"), default=-1)

    def trace(self, *, cycle: str = CYCLE) -> Trace:
        """Figures of every step. Asserts that a step made twice was the same both times."""
        return trace_of(self.events(cycle=cycle))

    def result(self, stage: str = "train", *, cycle: str = CYCLE) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.storage.read_bytes(f"cycles/{cycle}/{stage}/result.json"))
        return content

    def sha256(self, key: str) -> str:
        return hashlib.sha256(self.storage.read_bytes(key)).hexdigest()

    def ended(self, *, cycle: str = CYCLE) -> Ended:
        """What the finished train stage left."""
        result = self.result(cycle=cycle)
        candidate, last = result["outputs"]["checkpoint"], f"checkpoints/{cycle}/step-{result['figures']['steps_done']}"
        keys = {f"{candidate}/model.safetensors", f"{last}/model.safetensors", f"{last}/optimizer.safetensors"}
        return Ended(
            candidate, {key: self.sha256(key) for key in sorted(keys)}, self.trace(cycle=cycle), result["figures"]
        )

    def steps_saved(self) -> list[int]:
        """Steps of committed checkpoints."""
        names = self.storage.list_dirs(f"checkpoints/{CYCLE}/")
        markers = ((name, f"checkpoints/{CYCLE}/{name}/MANIFEST.json") for name in names)
        return sorted(int(name.removeprefix("step-")) for name, key in markers if self.storage.stat(key))

    def staged(self) -> set[int]:
        """Steps whose files are being written to the staging folder now."""
        return {step for folder in (self.scratch / "saving").glob("*") for step in _steps_of(folder)}

    def half_committed(self) -> set[int]:
        """Steps with files in the workspace but no manifest (file:// only)."""
        folder = self.path / "checkpoints" / CYCLE
        return {step for step in _steps_of(folder) if not (folder / f"step-{step}" / "MANIFEST.json").exists()}

    def manifests(self, prefix: str = "") -> dict[str, str]:
        """sha256 of every file below a key, by key."""
        return {stat.key: self.sha256(stat.key) for stat in self.storage.list(prefix)}


def trace_of(events: Iterable[Event]) -> Trace:
    """Figures of every step that the events tell of. Asserts that a step made twice was the same both times."""
    result: Trace = {}
    for event in events:
        if event["event"] != "train_steps":
            continue
        rows = list(zip(event["losses"], event["grad_norms"], event["samples"], strict=True))
        for step, row in enumerate(rows, start=event["step"] - len(rows) + 1):
            assert result.setdefault(step, row) == row, f"step {step}: {result[step]} and again {row}"
    return result


def _parsed(data: bytes) -> list[Event]:
    """Without half-written lines, as `read_events` reads them: of a writer that was killed, or had a full disk."""
    found = list[Event]()
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _steps_of(folder: Path) -> set[int]:
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return set()
    return {int(name.removeprefix("step-")) for name in names if name.startswith("step-")}


def _last_wins(flags: Iterable[str]) -> tuple[str, ...]:
    return tuple({flag.partition("=")[0]: flag for flag in flags}.values())


@cache
def prepared(flags: tuple[str, ...] = TINY) -> Path:
    """A workspace in which the data is prepared, made once per process and setting."""
    folder = Path(mkdtemp(prefix="trnpipe-prepared-"))
    _FOLDERS.append(folder)
    place = Place(str(folder / "workspace"), folder, flags)
    place.prepare()
    return place.path


@cache
def teacher() -> str:
    """The flag of a teacher: the case after two steps."""
    folder = Path(mkdtemp(prefix="trnpipe-teacher-"))
    _FOLDERS.append(folder)
    place = copy_of_prepared(folder)
    place.run("train", "--train.max-steps=2", "--train.evaluate-every=0")
    return f"{TEACHER}{place.storage.uri(place.result()['outputs']['checkpoint'])}"


@cache
def reference(backend: str, flags: tuple[str, ...] = TINY, ranks: int = 1) -> Ended:
    """How the case ends when nobody interrupts it. `ranks`: forked ones, for what is compared with a launched run."""
    folder = Path(mkdtemp(prefix="trnpipe-reference-"))
    _FOLDERS.append(folder)
    place = copy_of_prepared(folder, backend, flags)
    if ranks > 1:
        place.run_ranks("train", ranks)
    else:
        place.forked = False  # another hash seed than those that are compared with it
        place.run("train")
    ended = place.ended()
    assert sorted(ended.trace) == list(range(1, len(ended.trace) + 1))
    return ended


_FOLDERS: list[Path] = []


def forget() -> None:
    """Remove the folders of `prepared`, `teacher` and `reference`."""
    for made in (prepared, teacher, reference):
        made.cache_clear()
    while _FOLDERS:
        shutil.rmtree(_FOLDERS.pop(), ignore_errors=True)


def copy_of_prepared(folder: Path, backend: str = "cpu", flags: tuple[str, ...] = TINY) -> Place:
    """A fresh local workspace with prepared data."""
    shutil.copytree(prepared(flags), folder / "workspace")
    return Place(str(folder / "workspace"), folder, (*_last_wins(flags), f"--backend={backend}"))


def empty_place(folder: Path, backend: str = "cpu", flags: tuple[str, ...] = TINY) -> Place:
    """A workspace with nothing in it."""
    return Place(str(folder / "workspace"), folder, (*_last_wins(flags), f"--backend={backend}"))


def closing_places(make: Callable[..., Place], folder: Path) -> Iterator[Callable[..., Place]]:
    """For fixtures: places in numbered folders, whose processes are ended at the end."""
    made: list[Place] = []

    def place(*args: Any, **kwargs: Any) -> Place:
        home = folder / f"place-{len(made)}"
        home.mkdir()
        made.append(make(home, *args, **kwargs))
        return made[-1]

    yield place
    for one in made:
        one.close()
