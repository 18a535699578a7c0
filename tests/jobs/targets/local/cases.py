"""An engine over nodes that are not there: time is counted, ends are given, and it may die at any call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from jobs.cycle.job_states import JobRecord, JobState, Task, new_record, tasks_of
from jobs.plan.spec import JobPlan, JobSpec
from jobs.targets.base import LatestRecords
from jobs.targets.local.nodes import LocalFiles, NodeEnd, NodeView, Phase, Signal, StoppedBy
from jobs.targets.local.target import LocalEngine, Slots
from pipeline.core.stop import StopSignal

START_S, STOP_S, POLL_S, GRACE_S = 0.25, 0.5, 0.1, 2.0


class Died(BaseException):
    """kill -9 of the engine."""


@dataclass(frozen=True)
class Fate:
    """How a node will end if it is left alone."""

    after_s: float = 1.0
    end: NodeEnd = field(default=NodeEnd(exit_code=0))
    hangs: str = ""
    """"starting" or "running": its keeper does nothing from there on."""


@dataclass(frozen=True)
class MemoryFiles(LocalFiles):
    """The same files without a disk."""

    saved: dict[int, tuple[JobRecord, ...]] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    before_save: Callable[[], None] = lambda: None
    touches: list[str] = field(default_factory=list)

    def touch(self) -> None:
        self.touches.append("")

    def state(self, submission: int) -> tuple[JobRecord, ...]:
        return self.saved.get(submission, ())

    def save_state(self, submission: int, records: tuple[JobRecord, ...]) -> None:
        self.before_save()
        self.saved[submission] = records
        self.before_save()

    def cancelled(self) -> dict[str, str]:
        return self.asked


@dataclass
class _Node:
    begins_at: float
    ends_at: float
    end: NodeEnd
    is_deaf: bool = False


@dataclass
class FakeNodes:
    """`fate` by name of leaf, attempt and node. Checks at every start what must hold at every moment."""

    tasks: Mapping[str, Task]
    machine: Slots
    fate: Callable[[str, int, int], Fate]
    now: float = 0.0
    before_call: Callable[[], None] = lambda: None
    nodes: dict[tuple[str, int, int], _Node] = field(default_factory=dict)
    starts: list[tuple[str, int, int]] = field(default_factory=list)
    stops: list[tuple[tuple[str, int, int], Signal]] = field(default_factory=list)
    kills: list[tuple[tuple[str, int, int], StoppedBy]] = field(default_factory=list)
    timeouts: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def observe(self, folder: Path) -> NodeView:
        node = self.nodes.get(self.key(folder))
        if node is None:
            return NodeView(Phase.ABSENT)
        if self.now >= node.ends_at:
            started = None if node.end.error else node.begins_at
            return NodeView(Phase.ENDED, started, node.end)
        if self.now >= node.begins_at:
            return NodeView(Phase.RUNNING, node.begins_at)
        return NodeView(Phase.STARTING)

    def start(self, folder: Path, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        self.before_call()
        key = self.key(folder)
        if key not in self.nodes:
            self._check_start(key)
            fate = self.fate(*key)
            begins = self.now + START_S
            ends = inf if fate.hangs else begins + fate.after_s
            self.nodes[key] = _Node(inf if fate.hangs == "starting" else begins, ends, fate.end, bool(fate.hangs))
            self.starts.append(key)
            self.timeouts[key] = timeout_s
        self.before_call()

    def stop(self, folder: Path, by: Signal) -> None:
        self.before_call()
        key = self.key(folder)
        node = self.nodes[key]
        if not any(one == key for one, _ in self.stops):
            self.stops.append((key, by))
            if not node.is_deaf and self.now + STOP_S < node.ends_at:
                self.nodes[key] = _Node(node.begins_at, self.now + STOP_S, NodeEnd(exit_code=143, stopped_by=by))

    def kill(self, folder: Path, by: StoppedBy) -> None:
        self.before_call()
        key = self.key(folder)
        node = self.nodes[key]
        self.kills.append((key, by))
        end = NodeEnd(lost=True, stopped_by=by) if self.now >= node.begins_at else NodeEnd(error="its keeper ended")
        self.nodes[key] = _Node(node.begins_at, min(self.now, node.ends_at), end)
        self.before_call()

    def exclude(self, folder: Path) -> None:
        self.before_call()
        self.nodes.setdefault(self.key(folder), _Node(self.now, self.now, NodeEnd(error="stopped before it began")))

    def pause(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 20_000, "the engine hangs"

    def key(self, folder: Path) -> tuple[str, int, int]:
        """Name of leaf, attempt, node. Ids are the names here."""
        task, attempt, node = folder.parts[-3:]
        return task.replace("_", ":"), int(attempt), int(node.removeprefix("node-"))

    def alive(self) -> set[tuple[str, int, int]]:
        return {key for key, node in self.nodes.items() if self.now < node.ends_at}

    def succeeded(self) -> set[str]:
        """Names of leaves and of whole arrays, by what really ended."""
        ended = {
            key[0]
            for key, node in self.nodes.items()
            if key[2] == 0 and self.now >= node.ends_at and node.end == NodeEnd(exit_code=0)
        }
        arrays = {task.spec.name: task.spec for task in self.tasks.values() if task.index is not None}
        whole = {name for name, spec in arrays.items() if all(task.name in ended for task in tasks_of(spec))}
        return ended | whole

    def _check_start(self, key: tuple[str, int, int]) -> None:
        name, attempt, node = key
        alive, succeeded = self.alive(), self.succeeded()
        known = {*self.tasks, *(task.spec.name for task in self.tasks.values())}
        assert not any(other[0] == name and other[1] != attempt for other in alive), f"{key} beside an earlier attempt"
        assert {*self.tasks[name].waits_for()} & known <= succeeded, f"{key} before its time"
        assert name not in succeeded, f"{key} has succeeded"
        assert attempt == 1 or (name, attempt - 1, 0) in self.nodes, f"{key} skips one"
        main = self.nodes.get((name, attempt, 0))
        assert node == 0 or (main and main.begins_at <= self.now < main.ends_at), f"{key} before the main node"
        used = Slots()
        for one in {other[0] for other in alive} | {name}:
            used = used.plus(self.tasks[one].spec)
        assert used.fits_in(self.machine), f"{key} does not fit: {used}"


@dataclass
class World:
    """What outlives an engine: the nodes and the files."""

    plan: JobPlan
    nodes: FakeNodes
    files: MemoryFiles
    said: list[str]
    ahead_s: float = 0.0
    """The wall clock, of the monotonic one."""

    def engine(self, stop: StopSignal | None = None) -> LocalEngine:
        """A new one, which knows what the files say."""
        saved = {record.name: record for record in self.files.state(1)}
        tasks = list(self.nodes.tasks.values())
        records = {task.name: saved.get(task.name, new_record(task, task.spec.name, 0.0)) for task in tasks}
        return LocalEngine(
            self.plan,
            LatestRecords(tasks, records, dict.fromkeys(records, 1)),
            self.files,
            self.nodes,  # type: ignore[arg-type]
            self.nodes.machine,
            stop or StopSignal(),
            self.said.append,
            clock=lambda: self.nodes.now + self.ahead_s,
            grace_s=GRACE_S,
            poll_s=POLL_S,
            pause=self.nodes.pause,
            monotonic=lambda: self.nodes.now,
        )

    def ends(self) -> dict[str, JobState]:
        return {record.name: record.state for record in self.files.state(1)}

    def record(self, name: str) -> JobRecord:
        return next(record for record in self.files.state(1) if record.name == name)


def world(
    jobs: Sequence[JobSpec],
    fate: Callable[[str, int, int], Fate] = lambda name, attempt, node: Fate(),
    vcpus: int = 6,
) -> World:
    tasks = {task.name: task for one in jobs for task in tasks_of(one)}
    plan = JobPlan(pipeline="p", cycle="c", workspace="/workspace", jobs=tuple(jobs))
    return World(
        plan, FakeNodes(tasks, Slots(vcpus=vcpus, memory_mib=10**6, groups=1), fate), MemoryFiles(Path("/jobs")), []
    )


def of_no_use(tasks: Iterable[Task], ends: Mapping[str, JobState]) -> set[str]:
    """Leaves whose jobs others wait for, all of which fail or are of no use themselves: they may be ended, or not."""
    tasks = list(tasks)
    failed = {task.spec.name for task in tasks if ends[task.name] is JobState.FAILED}
    specs = {task.spec.name: task.spec for task in tasks}
    useless = set[str]()
    for name in reversed(specs):
        after = {one.name for one in specs.values() if name in {of.job for of in one.depends_on}}
        if after and after <= failed | useless:
            useless.add(name)
    return {task.name for task in tasks if task.spec.name in useless}
