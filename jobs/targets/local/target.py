"""This machine as a target: an engine runs the jobs of a cycle to the end, one tick after another.

What is decided is written before it is done, and what was done is found again: an engine may die between any two
lines, and the next one goes on with the same attempts. A tick that changed anything begins by writing that down; an
attempt is started by a later tick alone.
"""

import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
from pydantic import Field

from jobs.cycle import job_states
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import AttemptEnd, JobRecord, JobState, SubmittedJob, Task
from jobs.plan.cycle import script_of
from jobs.plan.spec import JobPlan, JobSpec
from jobs.targets.base import LatestRecords, More, Target, latest_records, log_stream, no_log_error
from jobs.targets.local.nodes import (
    LOOPBACK,
    LocalFiles,
    NodeEnd,
    Phase,
    Processes,
    Signal,
    end_leftovers,
    is_locked,
    local_command,
    local_files,
    node_environment,
)
from pipeline.core.errors import ConfigError
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.io.atomic import exclusive, make_dirs
from pipeline.io.paths import display_path
from pipeline.io.storage import os_errors, translate_os_error
from pipeline.parallel.world import own_address
from pipeline.proc.children import MARGIN_S, PLATFORM_S

MAX_WORD_BYTES = 128 * 1024  # of one argument of execve(2) on Linux
DISK_PATIENCE_S = 300.0
TOUCH_S = 5.0
START_PATIENCE_S = 300.0  # for a keeper to begin; it too waits for room on a full disk
NEWEST_BYTES = 4096
"""Of a log, in which its last line is found."""
SIGKILL_CODE = 137  # 128 + 9, as a container reports it


class Slots(Record):
    """Resources of a machine, or of what runs on it."""

    vcpus: int = 0
    memory_mib: int = 0
    groups: int = Field(0, description="Multi-node jobs at once")

    def plus(self, job: JobSpec) -> "Slots":
        """Add one leaf of a job: all its nodes, or one child of an array."""
        nodes, needs = max(1, job.num_nodes), job.resources
        return Slots(
            vcpus=self.vcpus + needs.vcpus * nodes,
            memory_mib=self.memory_mib + needs.memory_mib * nodes,
            groups=self.groups + (job.num_nodes > 0),
        )

    def fits_in(self, room: "Slots") -> bool:
        return self.vcpus <= room.vcpus and self.memory_mib <= room.memory_mib and self.groups <= room.groups

    def __str__(self) -> str:
        groups = f", {self.groups} node group" if self.groups else ""
        return f"{self.vcpus} vCPU, {self.memory_mib:,} MiB{groups}"


def startable_jobs(queue: Sequence[Task], active: Iterable[Task], machine: Slots) -> list[Task]:
    """Return what may start now. Nothing overtakes a job that does not fit, as in AWS Batch."""
    used = Slots()
    for task in active:
        used = used.plus(task.spec)
    chosen = []
    for task in queue:
        used = used.plus(task.spec)
        if not used.fits_in(machine):
            break
        chosen.append(task)
    return chosen


def check_fits(jobs: Iterable[JobSpec], machine: Slots) -> None:
    """Raises ConfigError naming every job that could never run here."""
    needs = {job.name: Slots().plus(job) for job in jobs}
    too_big = [f"{name}: {one}" for name, one in needs.items() if not one.fits_in(machine)]
    if too_big:
        raise ConfigError(
            "\n  ".join([f"{len(too_big)} jobs need more than this machine has:", *too_big]),
            expected=f"at most {machine} at once",
            next_command="fewer nodes or smaller jobs (settings under [jobs]), or trnjobs submit --target batch",
        )


def attempt_end(main: NodeEnd, *, cancelled: str = "", interrupted: bool = False) -> AttemptEnd:
    """Return the end of an attempt in the words of AWS Batch.

    `cancelled`: why it was to end before its time. `interrupted`: the engine is being stopped. A SIGKILL that is
    neither ours nor for want of memory did not come from the code: it counts as a lost machine.
    """
    code = main.exit_code
    if cancelled and (main.stopped_by or code != 0):
        return AttemptEnd(code, cancelled)
    if main.stopped_by == "timeout":
        return AttemptEnd(code, job_states.TIMED_OUT)
    if (main.stopped_by == "SIGINT" and code != 0) or (interrupted and main.error):
        return AttemptEnd(code, job_states.INTERRUPTED)
    if main.lost:
        return AttemptEnd(None, job_states.HOST_TERMINATED)
    if code is None:
        return AttemptEnd(None, job_states.TASK_NOT_STARTED, f"CannotStartContainerError: {main.error}")
    if code == SIGKILL_CODE and main.out_of_memory:
        return AttemptEnd(code, job_states.EXITED, "OutOfMemoryError: Container killed due to memory usage")
    if code == SIGKILL_CODE and not main.stopped_by:
        return AttemptEnd(code, job_states.HOST_TERMINATED, "Killed from outside")
    return AttemptEnd(code, job_states.EXITED)


@dataclass
class LocalEngine:
    """`known`: of all leaves. `say` gets a line per change of state.

    `grace_s`: from SIGTERM to SIGKILL, which keepers enforce, and the engine where a keeper hangs or is suspended.
    `clock`: seconds since 1970, for what is written down; how long something takes is measured by `monotonic`, which
    neither a correction of the clock nor a suspended machine moves.
    """

    plan: JobPlan
    known: LatestRecords
    files: LocalFiles
    nodes: Processes
    machine: Slots
    stop: StopSignal
    say: Callable[[str], object]
    clock: Callable[[], float]
    grace_s: float
    poll_s: float = 0.1
    pause: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    _touched_at: float = -math.inf
    _unsaved: set[int] = field(default_factory=set)
    _since: dict[Path, float] = field(default_factory=dict)
    """When a node was first seen to start, began to run, or was asked to end; by `monotonic`."""

    def run(self) -> None:
        """Run to the end of the last job. When stopped, end what runs, which does not count, and raise Preempted.

        Raises TransientError when its files cannot be written for five minutes; the jobs go on without it.
        """
        trouble_since: float | None = None
        while not self.is_done():
            if self.monotonic() - self._touched_at >= TOUCH_S:  # show that the engine lives
                self._touched_at = self.monotonic()
                self.files.touch()
            try:
                changed = self.tick()
                trouble_since = None
            except OSError as error:
                changed, now = False, self.monotonic()
                if trouble_since is None:
                    trouble_since = now
                    self.say(f"cannot write below {self.files.folder}: {error}; no job is started until it can")
                elif now - trouble_since > DISK_PATIENCE_S:
                    raise translate_os_error(error, "writing", str(self.files.folder)) from error
            if not changed:
                self.pause(self.poll_s)
        self.files.touch()
        self.stop.raise_if_set("running the jobs of the cycle")

    def is_done(self) -> bool:
        """Whether nothing is left to do, now that it is written down."""
        stopping = self.stop.is_set()
        left = (one.state.is_active if stopping else not one.state.is_final for one in self.known.records.values())
        return not self._unsaved and not any(left)

    def tick(self) -> bool:
        """Look at everything once; return whether anything changed. After an OSError the next tick goes on."""
        self._save()
        tasks, records = self.known.tasks, self.known.records
        cancelled = self.files.cancelled()  # by id of job; that of a child of an array is <id of job>:<index>
        reasons = {name: cancelled.get(record.id.partition(":")[0], "") for name, record in records.items()}
        for name, why in job_states.unneeded_jobs(tasks, records).items():
            reasons[name] = reasons[name] or why
        # Before anything else changes, so that no job fails for one that is cancelled with it.
        for task in tasks:
            record = records[task.name]
            if reasons[task.name] and not record.state.is_final and not record.state.is_active:
                self._update({task.name: job_states.failed_record(record, reasons[task.name], self.clock())})
        for task in self._active():
            self._drive(task, reasons[task.name])
        while changed := job_states.advance_waiting_jobs(tasks, records, self.clock()):
            self._update(changed)
        if not self.stop.is_set():
            for task in startable_jobs(job_states.queue(tasks, records), self._active(), self.machine):
                record = records[task.name]
                nodes, attempt = range(max(1, task.spec.num_nodes)), len(record.attempts) + 1
                streams = [self.files.log_stream(record.id, attempt, node) for node in nodes]
                self._update({task.name: job_states.starting_record(record, streams)})
        changed_any = bool(self._unsaved)
        self._save()
        return changed_any

    def _drive(self, task: Task, cancelled: str) -> None:
        """Move the nodes of an attempt as AWS Batch does; a job of one container is its main node alone.

        The main node starts first, the others when it runs. When it ends the others are stopped, and its end is that
        of the attempt. The end of another node changes nothing. Source: user guide, multi-node parallel jobs.
        """
        record = self.known.records[task.name]
        task_id, attempt = record.id, len(record.attempts)
        folders = [self.files.node(task_id, attempt, node) for node in range(max(1, task.spec.num_nodes))]
        views = [self.nodes.look(folder) for folder in folders]
        main = views[0]
        ran_s = 0.0  # the time-out is that of the attempt: it runs from the start of the main node on
        if main.started_at is not None:
            if record.state is JobState.STARTING:
                record = job_states.running_record(record, main.started_at)
                self._update({task.name: record})
            # The wall clock tells how long it ran before this engine first saw it.
            ran_s = self._waited_s(folders[0] / "run", max(0.0, self.clock() - main.started_at))
        is_stopping = main.phase is Phase.ENDED or bool(cancelled) or self.stop.is_set()
        by: Signal = "SIGINT" if self.stop.is_set() and not cancelled else "SIGTERM"
        to_end_s = self.grace_s + MARGIN_S
        is_late = main.phase is Phase.RUNNING and ran_s > task.spec.timeout_s + to_end_s
        for node, (folder, phase) in enumerate(zip(folders, [view.phase for view in views], strict=True)):
            if phase is Phase.ABSENT and is_stopping:
                self.nodes.exclude(folder)
            elif phase is Phase.ABSENT and (node == 0 or main.phase is Phase.RUNNING):
                environment = node_environment(
                    os.environ,
                    self.plan,
                    task,
                    task_id,
                    attempt,
                    node,
                    _address(),
                    submission=self.known.submissions[task.name],
                )
                command, left_s = local_command(task.spec.command), max(0.0, task.spec.timeout_s - ran_s)
                self.nodes.start(folder, command, environment, left_s)
            elif phase in (Phase.STARTING, Phase.RUNNING):
                if is_stopping:
                    self.nodes.stop(folder, by)
                if is_late:
                    self.nodes.kill(folder, "timeout")
                elif is_stopping and self._waited_s(folder / "stop") > to_end_s:
                    self.nodes.kill(folder, by)
                elif node == 0 and phase is Phase.STARTING and self._waited_s(folder / "start") > START_PATIENCE_S:
                    self.nodes.kill(folder, "")
        if main.end is not None and all(view.phase is Phase.ENDED for view in views):
            end = attempt_end(main.end, cancelled=cancelled, interrupted=self.stop.is_set())
            at = self.clock() if main.end.at is None else main.end.at
            self._update({task.name: job_states.record_after_attempt(record, task.spec.retry, end, at)})

    def _waited_s(self, what: Path, before_s: float = 0.0) -> float:
        """Return the time since the first call for `what`, and `before_s` of that call."""
        now = self.monotonic()
        return now - self._since.setdefault(what, now - before_s)

    def _active(self) -> list[Task]:
        return [task for task in self.known.tasks if self.known.records[task.name].state.is_active]

    def _update(self, changed: Mapping[str, JobRecord]) -> None:
        for name, record in changed.items():
            if record.state is not self.known.records[name].state:
                stream = log_stream(record, len(record.attempts), 0)
                log = display_path(str(self.files.log_path(stream))) if stream else ""
                self.say(job_states.change_line(record, log))
            self.known.records[name] = record
            self._unsaved.add(self.known.submissions[name])

    def _save(self) -> None:
        for submission in sorted(self._unsaved):
            mine = (record for name, record in self.known.records.items() if self.known.submissions[name] == submission)
            self.files.save_state(submission, tuple(mine))
            self._unsaved.remove(submission)


@cache
def _address() -> str:
    """Return the address of this machine; all nodes are here."""
    try:
        return own_address()
    except ConfigError:  # no network but the loopback
        return LOOPBACK


def this_machine() -> Slots:
    """Return all its resources, for one node group at a time."""
    return Slots(vcpus=psutil.cpu_count() or 1, memory_mib=psutil.virtual_memory().total // 2**20, groups=1)


@dataclass(frozen=True)
class LocalTarget(Target):
    """`machine`: what the jobs may use at once. `scratch`: for a workspace elsewhere.

    When `stop` is set it ends what runs, for which this process must live `grace_s` and a moment longer.
    """

    name = "local"
    store: CycleStore
    scratch: Path
    machine: Slots
    say: Callable[[str], object]
    stop: StopSignal
    grace_s: float = PLATFORM_S
    poll_s: float = 0.1

    @property
    def files(self) -> LocalFiles:
        return local_files(self.store.storage, self.scratch, self.store.cycle)

    def submit(self, plan: JobPlan, submission: int, jobs: Sequence[str]) -> None:
        """Raises ConfigError before anything starts when a job cannot fit or still runs, Preempted when stopped."""
        with self._only_engine():
            known = latest_records(plan, self.store, self._saved())
            unfinished = [task.spec for task in known.tasks if not known.records[task.name].state.is_final]
            check_fits([*map(plan.job, jobs), *unfinished], self.machine)
            done = self.store.submitted(submission)
            new = [job.name for job in plan.jobs if job.name in jobs and job.name not in done]
            for name, record in known.records.items():  # what may still run must not run twice
                if name.partition(":")[0] in new and not record.state.is_final:
                    raise ConfigError(
                        f"{name} is {record.state} in round {known.submissions[name]}",
                        expected="a job that has ended",
                        next_command="trnjobs submit --target local (to finish that round), or trnjobs cancel",
                    )
            for name in new:
                submitted_job = SubmittedJob(job=name, id=str(uuid.uuid4()), submitted_at=self.store.clock())
                self.store.save_submitted(submission, submitted_job)
            self._run(plan)

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        known = latest_records(plan, self.store, self._saved())
        return known.by_job(plan, known.records)

    def busy_reason(self, records: Sequence[JobRecord]) -> str:
        """Return why not; jobs of an interrupted submission, which no process runs, can be ended here."""
        if is_locked(self.files.engine_lock):
            return "another process runs its jobs"
        unseen = self.files.workspace is None and self.store.submissions() and not self._saved()
        return "its jobs may run on another machine" if unseen and super().busy_reason(records) else ""

    def check(self, plan: JobPlan) -> None:
        check_fits(plan.jobs, self.machine)
        for job in plan.jobs:
            if (script := script_of(job)) and not Path(script).is_file():
                raise ConfigError(
                    f"{job.name}: {script}: no such file in {Path.cwd()}",
                    expected="a script on this machine",
                    next_command="run the same command in the folder of the script, or name it by its whole path",
                )
            if any(len(word.encode()) >= MAX_WORD_BYTES for word in job.command):  # no process can be started with it
                seen = f"{job.name}: a command argument is {max(map(len, job.command)):,} characters long"
                raise ConfigError(
                    seen, expected=f"less than {MAX_WORD_BYTES:,} bytes", next_command="put it into a file"
                )

    def interrupted_at(self) -> float | None:
        """Return the time of the engine's lock, if the kernel has freed it: the engine has died."""
        lock = self.files.engine_lock
        return lock.stat().st_mtime if lock.exists() and not is_locked(lock) else None

    def logs(self, record: JobRecord, *, attempt: int, node: int, more: More = lambda: False) -> Iterator[str]:
        stream = log_stream(record, attempt, node)
        path = self.files.log_path(stream)
        if not stream or not path.is_file():
            raise no_log_error(record, attempt, node)
        held = ""  # a line that is being written
        with path.open(encoding="utf-8", errors="replace") as log:
            while True:
                for piece in iter(log.readline, ""):
                    held += piece
                    if held.endswith("\n"):
                        yield held[:-1]
                        held = ""
                if not more():
                    break
        if held:
            yield held

    def newest_line(self, record: JobRecord) -> str:
        stream = log_stream(record, len(record.attempts), 0)
        path = self.files.log_path(stream)
        if not stream or not path.is_file():
            return ""
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - NEWEST_BYTES))
            text = log.read().decode("utf-8", errors="replace")
        return next((line for line in reversed(re.split("[\r\n]", text)) if line.strip()), "")

    def cancel(self, plan: JobPlan, reason: str) -> None:
        """Return when all is final: the running engine ends the jobs, or this process in its place."""
        if ids := [record.id for record in self.records(plan) if not record.state.is_final]:
            make_dirs(self.files.folder)
            with os_errors("writing", str(self.files.folder)):
                self.files.cancel(ids, reason)
            with self._only_engine():
                self._run(plan)

    def _run(self, plan: JobPlan) -> None:
        # What lives on of attempts that are over, with keeper and engine dead, must not be beside the next ones.
        saved = self._saved()
        if number := end_leftovers({one.id: len(one.attempts) - one.state.is_active for one in saved}):
            self.say(f"ended {number} processes left over from earlier attempts")
        LocalEngine(
            plan,
            latest_records(plan, self.store, saved),
            self.files,
            Processes(self.grace_s),
            self.machine,
            self.stop,
            self.say,
            self.store.clock,
            self.grace_s,
            self.poll_s,
        ).run()

    def _saved(self) -> list[JobRecord]:
        """Return the records of all leaves in all rounds."""
        return [record for submission in self.store.submissions() for record in self.files.state(submission)]

    @contextmanager
    def _only_engine(self) -> Iterator[None]:
        """Hold the lock of the cycle's engine, once any other engine has ended."""
        lock = self.files.engine_lock
        make_dirs(lock.parent)
        if is_locked(lock):
            self.say("another process runs the jobs of this cycle; waiting for it")
        with exclusive(lock, self.stop):
            yield
