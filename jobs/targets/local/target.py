"""This machine as a target: submit runs the jobs to the end."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import JobRecord, Submission
from jobs.plan.script import script_of
from jobs.plan.spec import Plan
from jobs.targets.base import Target, latest_records, log_stream, no_log
from jobs.targets.local.engine import Engine, Slots, check_fits
from jobs.targets.local.nodes import LocalFiles, Processes, end_leftovers, is_locked, local_files
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.atomic import exclusive, make_dirs
from pipeline.io.storage import os_errors
from pipeline.proc.children import PLATFORM_S

MAX_WORD_BYTES = 128 * 1024  # of one argument of execve(2) on Linux


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
    new_id: Callable[[], str] = lambda: str(uuid.uuid4())
    monotonic: Callable[[], float] = time.monotonic

    @property
    def files(self) -> LocalFiles:
        return local_files(self.store.storage, self.scratch, self.store.cycle)

    def submit(self, plan: Plan, round_: int, jobs: Sequence[str]) -> None:
        """Raises ConfigError before anything starts when a job cannot fit or still runs, Preempted when stopped."""
        check_fits([plan.job(name) for name in jobs], self.machine)
        with self._only_engine():
            known = latest_records(plan, self.store, self._saved())
            unfinished = [leaf.spec for leaf in known.leaves if not known.records[leaf.name].state.is_final]
            check_fits(unfinished, self.machine)
            done = self.store.submitted(round_)
            new = [job.name for job in plan.jobs if job.name in jobs and job.name not in done]
            for name, record in known.records.items():  # what may still run must not run twice
                if name.partition(":")[0] in new and not record.state.is_final:
                    raise ConfigError(
                        f"{name} is {record.state} in round {known.rounds[name]}",
                        expected="a job that has ended",
                        next_command="trnjobs submit --target local (to finish that round), or trnjobs cancel",
                    )
            for name in new:
                submission = Submission(job=name, id=self.new_id(), submitted_at=self.store.clock())
                self.store.save_submission(round_, submission)
            self._run(plan)

    def records(self, plan: Plan) -> tuple[JobRecord, ...]:
        known = latest_records(plan, self.store, self._saved())
        return known.by_job(plan, known.records)

    def under_way(self, records: Sequence[JobRecord]) -> str:
        """Return why not; jobs of an interrupted submission, which no process runs, can be ended here."""
        if is_locked(self.files.engine_lock):
            return "another process runs its jobs"
        unseen = self.files.workspace is None and self.store.rounds() and not self._saved()
        return "its jobs may run on another machine" if unseen and super().under_way(records) else ""

    def check(self, plan: Plan) -> None:
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

    def logs(self, record: JobRecord, *, attempt: int, node: int) -> Iterator[str]:
        stream = log_stream(record, attempt, node)
        path = (self.files.workspace or self.files.folder) / stream
        if not stream or not path.is_file():
            raise no_log(record, attempt, node)
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from (line.rstrip("\n") for line in lines)

    def cancel(self, plan: Plan, reason: str) -> None:
        """Return when all is final: the running engine ends the jobs, or this process in its place."""
        if ids := [record.id for record in self.records(plan) if not record.state.is_final]:
            make_dirs(self.files.folder)
            with os_errors("writing", str(self.files.folder)):
                self.files.cancel(ids, reason)
            with self._only_engine():
                self._run(plan)

    def _run(self, plan: Plan) -> None:
        # What lives on of attempts that are over, with keeper and engine dead, must not be beside the next ones.
        saved = self._saved()
        if number := end_leftovers({one.id: len(one.attempts) - one.state.is_active for one in saved}):
            self.say(f"ended {number} processes left over from earlier attempts")
        known = latest_records(plan, self.store, saved)
        Engine(
            plan=plan,
            leaves=known.leaves,
            records=known.records,
            rounds=known.rounds,
            files=self.files,
            nodes=Processes(self.grace_s),
            machine=self.machine,
            stop=self.stop,
            say=self.say,
            clock=self.store.clock,
            grace_s=self.grace_s,
            poll_s=self.poll_s,
            monotonic=self.monotonic,
        ).run()

    def _saved(self) -> list[JobRecord]:
        """Return the records of all leaves in all rounds."""
        return [record for round_ in self.store.rounds() for record in self.files.state(round_)]

    @contextmanager
    def _only_engine(self) -> Iterator[None]:
        """Hold the lock of the cycle's engine, once any other engine has ended."""
        lock = self.files.engine_lock
        make_dirs(lock.parent)
        if is_locked(lock):
            self.say("another process runs the jobs of this cycle; waiting for it")
        with exclusive(lock, self.stop):
            yield
