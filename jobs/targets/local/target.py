"""The target that runs the jobs of a cycle on this machine, by an engine that repeatedly advances all tasks.

Each decision is written to disk before it is carried out, and running nodes can be found again from their files. This
allows the engine to die at any point, because the next engine continues with the same attempts. Changes are saved at
the end of a tick, or at the start of the next tick if there was an error. An attempt is therefore never started in the
tick that decided to start it.
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
from jobs.targets.base import LatestRecords, More, Target, latest_records, log_stream, no_log
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

MAX_ARGUMENT_BYTES = 128 * 1024  # limit of Linux for a single argument of execve(2)
DISK_PATIENCE_S = 300.0
TOUCH_S = 5.0
START_PATIENCE_S = 300.0  # how long a keeper may take to start, which includes waiting while the disk is full
NEWEST_BYTES = 4096
"""Number of bytes to read from the end of a log to find its last line."""
SIGKILL_CODE = 137  # 128 + 9, the exit code that a container reports


class Slots(Record):
    """The resources of a machine, or those that the jobs on it use."""

    vcpus: int = 0
    memory_mib: int = 0
    groups: int = Field(0, description="Number of multi-node jobs at the same time")

    def plus(self, job: JobSpec) -> "Slots":
        """Return the sum of these resources and those of one task: all nodes of a job, or one child of an array."""
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
    """Return the tasks that may start now. As in AWS Batch, a task that does not fit blocks all tasks after it."""
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
    """Check that every job fits on this machine. Raises a ConfigError that lists the jobs that do not fit."""
    needs = {job.name: Slots().plus(job) for job in jobs}
    too_large = [f"{name}: {slots}" for name, slots in needs.items() if not slots.fits_in(machine)]
    if too_large:
        raise ConfigError(
            "\n  ".join([f"{len(too_large)} jobs need more than this machine has:", *too_large]),
            expected=f"at most {machine} at once",
            next_command="fewer nodes or smaller jobs (settings under [jobs]), or trnjobs submit --target batch",
        )


def attempt_end(main: NodeEnd, *, cancelled: str = "", interrupted: bool = False) -> AttemptEnd:
    """Determine how an attempt ended from the end of its main node, with the same reasons as AWS Batch.

    `cancelled` is the reason if the job was cancelled. `interrupted` is whether the engine is being stopped. If a node
    was killed by SIGKILL, but neither by the engine nor because it ran out of memory, the cause is not in its code, so
    the attempt is treated as if the machine was lost.
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
    """The scheduler of the jobs on this machine.

    `latest` contains the records of all tasks. `say` is called with a line for each state change. `grace_s` is the time
    from SIGTERM to SIGKILL. It is enforced by the keepers, or by the engine if a keeper hangs or is suspended. `clock`
    returns the seconds since 1970 for recorded times. Durations are measured by `monotonic` instead, because it is not
    affected by clock corrections or while the machine is suspended.
    """

    plan: JobPlan
    latest: LatestRecords
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
    """The time (by `monotonic`) at which a node was first observed to be starting, running or being stopped."""

    def run(self) -> None:
        """Run until the last job has ended.

        If the engine is stopped, it ends the running attempts, which do not count towards the retries, and raises
        Preempted. If its files cannot be written for five minutes, it raises TransientError. In that case, the running
        jobs continue without the engine.
        """
        trouble_since: float | None = None
        while not self.is_done():
            if self.monotonic() - self._touched_at >= TOUCH_S:
                self._touched_at = self.monotonic()
                self.files.touch()
            try:
                changed = self.tick()
                trouble_since = None
            except OSError as error:
                changed, now = False, self.monotonic()
                if trouble_since is None:
                    trouble_since = now
                    self.say(f"cannot write to {self.files.folder}: {error} (no job is started until this is resolved)")
                elif now - trouble_since > DISK_PATIENCE_S:
                    raise translate_os_error(error, "writing", str(self.files.folder)) from error
            if not changed:
                self.pause(self.poll_s)
        self.files.touch()
        self.stop.raise_if_set("running the jobs of the cycle")

    def is_done(self) -> bool:
        """Return whether there is nothing left to run or to save."""
        is_stopping, records = self.stop.is_set(), self.latest.records.values()
        open_tasks = (record.state.is_active if is_stopping else not record.state.is_final for record in records)
        return not self._unsaved and not any(open_tasks)

    def tick(self) -> bool:
        """Advance every task once and return whether anything changed.

        If this raises an OSError, the next tick continues from there.
        """
        self._save()
        tasks, records = self.latest.tasks, self.latest.records
        cancelled = self.files.cancelled()  # by job id, without the index of an array child
        reasons = {name: cancelled.get(record.id.partition(":")[0], "") for name, record in records.items()}
        for name, why in job_states.unneeded_jobs(tasks, records).items():
            reasons[name] = reasons[name] or why
        # Do this first, so that a job does not fail because of a dependency that was cancelled together with it.
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
        """Start, stop and observe the nodes of an attempt in the same way as AWS Batch.

        The main node is started first, and the other nodes once it is running. When the main node ends, the attempt
        ends, and the other nodes are stopped. If a different node ends, this has no effect. A job with a single
        container is handled as a main node without other nodes. Source: user guide, multi-node parallel jobs.
        """
        record = self.latest.records[task.name]
        task_id, attempt, submission = record.id, len(record.attempts), self.latest.submissions[task.name]
        folders = [self.files.node(task_id, attempt, node) for node in range(max(1, task.spec.num_nodes))]
        views = [self.nodes.observe(folder) for folder in folders]
        main = views[0]
        ran_s = 0.0  # the timeout of the attempt is measured from the start of the main node
        if main.started_at is not None:
            if record.state is JobState.STARTING:
                record = job_states.running_record(record, main.started_at)
                self._update({task.name: record})
            # If the node was started before this engine, use the wall clock for the time until now.
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
                    os.environ, self.plan, task, task_id, attempt, node, _address(), submission=submission
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

    def _waited_s(self, key: Path, before_s: float = 0.0) -> float:
        """Return the seconds since the first call with this key, plus the value of `before_s` in that call."""
        now = self.monotonic()
        return now - self._since.setdefault(key, now - before_s)

    def _active(self) -> list[Task]:
        return [task for task in self.latest.tasks if self.latest.records[task.name].state.is_active]

    def _update(self, changed: Mapping[str, JobRecord]) -> None:
        for name, record in changed.items():
            if record.state is not self.latest.records[name].state:
                stream = log_stream(record, len(record.attempts), 0)
                log = display_path(str(self.files.log_path(stream))) if stream else ""
                self.say(job_states.change_line(record, log))
            self.latest.records[name] = record
            self._unsaved.add(self.latest.submissions[name])

    def _save(self) -> None:
        for submission in sorted(self._unsaved):
            names = [name for name, number in self.latest.submissions.items() if number == submission]
            self.files.save_state(submission, tuple(self.latest.records[name] for name in names))
            self._unsaved.remove(submission)


@cache
def _address() -> str:
    """Return the address of this machine, which all nodes share."""
    try:
        return own_address()
    except ConfigError:  # there is only the loopback interface
        return LOOPBACK


def this_machine() -> Slots:
    """Return the resources of this machine, which runs at most one node group at a time."""
    return Slots(vcpus=psutil.cpu_count() or 1, memory_mib=psutil.virtual_memory().total // 2**20, groups=1)


@dataclass(frozen=True)
class LocalTarget(Target):
    """A target that runs the jobs of one cycle on this machine.

    `machine` contains the resources that the jobs may use in total. `scratch` is the folder for files of the engine if
    the workspace is remote. When `stop` is set, running jobs are ended, so this process must be able to run for a
    little longer than `grace_s` after that.
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
        """Run the jobs until the last one has ended.

        Raises ConfigError before any job is started if a job does not fit on this machine or is still running, and
        Preempted if the engine is stopped.
        """
        with self._only_engine():
            latest = latest_records(plan, self.store, self._saved())
            unfinished = [task.spec for task in latest.tasks if not latest.records[task.name].state.is_final]
            check_fits([*map(plan.job, jobs), *unfinished], self.machine)
            done = self.store.submitted(submission)
            new = [job.name for job in plan.jobs if job.name in jobs and job.name not in done]
            for name, record in latest.records.items():  # a job must not run twice
                if name.partition(":")[0] in new and not record.state.is_final:
                    raise ConfigError(
                        f"{name} is {record.state} in submission {latest.submissions[name]}",
                        expected="a job that has ended",
                        next_command="trnjobs submit --target local (to finish it), or trnjobs cancel",
                    )
            for name in new:
                submitted_job = SubmittedJob(job=name, id=str(uuid.uuid4()), submitted_at=self.store.clock())
                self.store.save_submitted(submission, submitted_job)
            self._run(plan)

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        latest = latest_records(plan, self.store, self._saved())
        return latest.by_job(plan, latest.records)

    def busy_reason(self, records: Sequence[JobRecord]) -> str:
        """Return why the jobs cannot be replaced yet. Interrupted jobs can be, since no process runs them."""
        if is_locked(self.files.engine_lock):
            return "another process is running its jobs"
        is_remote = self.files.workspace is None and self.store.submissions() and not self._saved()
        return "its jobs may run on another machine" if is_remote and super().busy_reason(records) else ""

    def check(self, plan: JobPlan) -> None:
        """Check that jobs fit, that scripts exist and that arguments are short enough. Raises ConfigError if not."""
        check_fits(plan.jobs, self.machine)
        for job in plan.jobs:
            if (script := script_of(job)) and not Path(script).is_file():
                raise ConfigError(
                    f"{job.name}: no such file: {script} (in {Path.cwd()})",
                    expected="a script on this machine",
                    next_command="run the same command in the folder of the script, or use its absolute path",
                )
            if any(len(argument.encode()) >= MAX_ARGUMENT_BYTES for argument in job.command):  # a limit of the kernel
                raise ConfigError(
                    f"{job.name}: a command argument is {max(map(len, job.command)):,} characters long",
                    expected=f"less than {MAX_ARGUMENT_BYTES:,} bytes",
                    next_command="put it into a file",
                )

    def interrupted_at(self) -> float | None:
        """Return when the engine was last alive if it has died, that is if its lock exists but is free."""
        lock = self.files.engine_lock
        return lock.stat().st_mtime if lock.exists() and not is_locked(lock) else None

    def logs(self, record: JobRecord, *, attempt: int, node: int, more: More = lambda: False) -> Iterator[str]:
        """Yield the lines of a log file. Raises ConfigError if there is no such log."""
        stream = log_stream(record, attempt, node)
        path = self.files.log_path(stream)
        if not stream or not path.is_file():
            raise no_log(record, attempt, node)
        line = ""  # the last line may be incomplete
        with path.open(encoding="utf-8", errors="replace") as log:
            while True:
                for text in iter(log.readline, ""):
                    line += text
                    if line.endswith("\n"):
                        yield line[:-1]
                        line = ""
                if not more():
                    break
        if line:
            yield line

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
        """End all unfinished jobs and wait for them to end.

        If an engine is running, it ends the jobs. Otherwise, this process does.
        """
        if ids := [record.id for record in self.records(plan) if not record.state.is_final]:
            make_dirs(self.files.folder)
            with os_errors("writing", str(self.files.folder)):
                self.files.cancel(ids, reason)
            with self._only_engine():
                self._run(plan)

    def _run(self, plan: JobPlan) -> None:
        # Processes of earlier attempts may outlive their keeper and engine. Ensure that none run next to new attempts.
        saved = self._saved()
        if number := end_leftovers({task.id: len(task.attempts) - task.state.is_active for task in saved}):
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
        return [record for submission in self.store.submissions() for record in self.files.state(submission)]

    @contextmanager
    def _only_engine(self) -> Iterator[None]:
        """Hold the engine lock of the cycle, after waiting for any other engine to end."""
        lock = self.files.engine_lock
        make_dirs(lock.parent)
        if is_locked(lock):
            self.say("waiting for another process that is running the jobs of this cycle")
        with exclusive(lock, self.stop):
            yield
