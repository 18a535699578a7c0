"""Open the cycle, the plan and the target that the settings of a command describe."""

import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self
from zoneinfo import ZoneInfo

from jobs.cycle.costs import CycleLedger, read_ledger
from jobs.cycle.cycle_store import CycleStore, claims_by_age
from jobs.cycle.job_states import Closed, JobRecord, outcome_of, without_error
from jobs.cycle.page.gather import PageData, gather
from jobs.cycle.page.publish import report_key
from jobs.cycle.tables import failure_lines
from jobs.cycle.verdict import outcome_text, verdict_lines
from jobs.plan.cycle import AFTER, MINE, RUN_PREFIX, TEACH, plan_cycle, plan_script
from jobs.plan.spec import JobPlan
from jobs.settings import CycleSettings, of_all_jobs, values_of, with_values
from jobs.targets.base import Target, with_errors, with_placements
from pipeline.backends import may_use_neuron
from pipeline.context import check_workspace, load_result
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.format import format_duration
from pipeline.core.machines import NODES
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.io.paths import display_path, user_path
from pipeline.io.storage import open_storage
from pipeline.parallel.world import JOB_ID
from pipeline.proc.children import ENGINE_MARGIN_S, PLATFORM_S
from pipeline.proc.signals import stop_on_signals
from pipeline.train.config import rank_slice


def cycle_of(settings: CycleSettings) -> str:
    """Return the name of the cycle, which defaults to today's date in the time zone of the schedule (or in UTC)."""
    schedule = settings.jobs.schedule
    zone = ZoneInfo(schedule.timezone) if schedule.is_set else UTC
    return settings.cycle or datetime.now(zone).date().isoformat()


@dataclass(frozen=True)
class OpenCycle:
    """A cycle that a command works on, whether or not it was submitted. `say` prints a line for the user."""

    settings: CycleSettings
    store: CycleStore
    say: Say
    stop: StopSignal
    is_shown: bool = False
    """Whether standard output shows the progress of the jobs while this process runs them."""

    @property
    def name(self) -> str:
        return self.store.cycle

    def other(self, name: str) -> Self:
        """Return a different cycle in the same workspace, with the same settings."""
        settings = self.settings.model_copy(update={"cycle": name})
        return replace(self, settings=settings, store=replace(self.store, cycle=name))

    def with_stored(self) -> Self:
        """Return this cycle with the settings of its submission, so that its machines, prices and deadline are known.

        Settings that are set explicitly for this command (in a file, the environment or a flag) take precedence. The
        cycle is returned unchanged if nothing was submitted, or if a different version stored settings that this
        version cannot read.
        """
        try:
            stored = self.store.settings()
            if stored is None:
                return self
            overrides = values_of(self.settings.model_dump(mode="json", exclude_unset=True))
            settings = with_values(stored, overrides)
        except (ConfigError, DataError) as error:
            self.say(f"cycle {self.name}: ignoring its stored settings: {error.seen}")
            return self
        return replace(self, settings=settings)

    def plan(self) -> JobPlan:
        """Return the submitted plan. Raises ConfigError if there is none."""
        plan = self.store.plan()
        if plan is None:
            claimed = list(claims_by_age(self.store, runs=True))
            others = ", ".join([name for name in claimed if name != self.name][-5:]) or "none"
            commands = f"trnjobs submit --cycle {self.name}", f"trnjobs cancel --cycle {self.name}"
            raise ConfigError(
                f"cycle {self.name} has no jobs in {self.store.storage.root} (other cycles: {others})",
                expected="a submitted cycle",
                next_command=" or ".join(commands)
                if self.name in claimed
                else "trnjobs submit, or a different --cycle or --workspace",
            )
        return plan

    def target(self) -> Target:
        """Return the target that the cycle was submitted to, or the target in the settings if it was not submitted."""
        claim = self.store.claim()
        return open_target(self, claim.target if claim else self.settings.jobs.target)

    @property
    def is_local(self) -> bool:
        """Whether the cycle was submitted to this machine, which costs nothing."""
        claim = self.store.claim()
        return claim is not None and claim.target == "local"

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Return the records of all jobs, with the errors of failed jobs.

        If the cycle has ended, its stored records are used. Otherwise, the target is queried.
        """
        return self.with_errors((self.store.records() if self.store.closed() else ()) or self.target().records(plan))

    def state(self) -> tuple[JobPlan, tuple[JobRecord, ...], Closed | None]:
        """Return the plan, the records of `records()`, and how the cycle ended, even if that is not on record yet.

        Raises ConfigError if it was not submitted.
        """
        plan = self.plan()
        records = self.records(plan)
        return plan, records, self.store.closed() or outcome_of(plan, records)

    def with_errors(self, records: Sequence[JobRecord]) -> tuple[JobRecord, ...]:
        """Add to the record of each failed job the error from its log."""
        return with_errors(
            self.store, records, lambda task, attempt, node: self.target().logs(task, attempt=attempt, node=node)
        )

    def interrupted_s(self) -> float | None:
        """Return the seconds since the process that ran the jobs on this machine died, or None if it is still alive."""
        claim, now = self.store.claim(), self.store.clock()
        if claim is None or claim.target != "local" or (claim.owner and claim.lease_until > now):
            return None
        at = self.target().interrupted_at()
        return None if at is None else max(0.0, now - at)

    def progress(self) -> str:
        """Return `under way`, or a message that the cycle was interrupted, with the command that resumes it."""
        ago_s = self.interrupted_s()
        if ago_s is None:
            return "under way"
        ago, command = format_duration(ago_s), self.command("retry")
        return f"interrupted {ago} ago because the process that ran its jobs ended (to resume: {command})"

    def command(self, name: str) -> str:
        """Return the command line of `trnjobs <name>` for this cycle, ready to be pasted into the same shell."""
        root = self.store.storage.root.removeprefix("file://")
        return shlex.join([program(), name, "--workspace", root, "--cycle", self.name])

    def outcome(self, closed: Closed) -> str:
        """Return the outcome of this cycle as text, which includes whether its model was promoted."""
        evaluated = None
        with suppress(DataError):  # ensure that a damaged result does not hide the cycle
            evaluated = load_result(self.store.storage, self.name, "evaluate")
        return outcome_text(closed.outcome, evaluated.figures if evaluated else {})

    def failure_lines(self, records: Sequence[JobRecord]) -> list[str]:
        """Return the error of each failed job, with a command that shows its log in the same shell."""
        return failure_lines(records, self.store.storage.root, self.name, program())

    def end_lines(
        self, plan: JobPlan, records: Sequence[JobRecord], closed: Closed | None, data: PageData | None = None
    ) -> list[str]:
        """Return the verdict on a cycle, the path of its page, and the errors of failed jobs.

        `data` contains the data of the page, if they were already gathered.
        """
        storage, claim, key = self.store.storage, self.store.claim(), report_key(self.name)
        if data is None:
            data = gather(self.store, plan, records, self.settings.jobs, closed)
        target, evaluated = claim.target if claim else "", data.figures.get("evaluate", {})
        lines = verdict_lines(data.ledger, data.evaluation, evaluated, data.vectors, target)
        failures, reason = self.failure_lines(records), without_error(closed.reason, records) if closed else ""
        if data.outcome == "refused" and data.evaluation:  # the verdict already contains the reasons
            failures, reason = failures[-1:], ""
        page = [f"  page: {display_path(storage.uri(key))}"] if storage.stat(key) is not None else []
        return [*lines, *([f"  {reason}"] if reason else []), *page, *failures]

    def ledger(self, plan: JobPlan, records: Sequence[JobRecord]) -> CycleLedger:
        return read_ledger(self.store, plan, records, self.settings.jobs)


def program() -> str:
    """Return how to run `trnjobs` in this shell: by name if it is on the PATH, otherwise by its path."""
    script = Path(sys.executable).parent / "trnjobs"
    return "trnjobs" if shutil.which("trnjobs") or not script.exists() else display_path(str(script))


def open_cycle(
    settings: CycleSettings, say: Say, stop: StopSignal | None = None, *, is_shown: bool = False
) -> OpenCycle:
    stop = stop or StopSignal()
    storage = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    return OpenCycle(settings, CycleStore(storage, cycle_of(settings), time.time), say, stop, is_shown)


def open_newest(
    settings: CycleSettings, say: Say, stop: StopSignal | None = None, *, is_shown: bool = False
) -> OpenCycle:
    """Open the cycle in the settings, or the newest cycle with jobs if none is set.

    Raises ConfigError if there is no workspace.
    """
    cycle = open_cycle(settings, say, stop, is_shown=is_shown)
    check_workspace(cycle.store.storage)
    newest = [] if settings.cycle else list(claims_by_age(cycle.store) or claims_by_age(cycle.store, runs=True))
    return cycle.other(newest[-1]) if newest else cycle


@contextmanager
def stopping_jobs() -> Iterator[StopSignal]:
    """Yield a stop signal that SIGINT and SIGTERM set, with a grace period long enough for local jobs to end."""
    stop = StopSignal()
    with stop_on_signals(stop, grace_s=PLATFORM_S + ENGINE_MARGIN_S):
        yield stop


def make_plan(settings: CycleSettings) -> JobPlan:
    """Return the plan for these settings. Raises ConfigError if the settings are inconsistent."""
    if settings.cycle.startswith(RUN_PREFIX):
        raise ConfigError(
            f"cycle {settings.cycle!r} begins with {RUN_PREFIX}, which is reserved for trnjobs run",
            expected="a different name",
            next_command="--cycle NAME",
        )
    if settings.cycle == "index":
        raise ConfigError(
            f"cycle {settings.cycle!r} has the name of the page that lists all cycles",
            expected="a different name",
            next_command="--cycle NAME",
        )
    jobs = settings.jobs
    for job in (jobs.compile, jobs.train, jobs.evaluate):
        rank_slice(settings.train, job.ranks)
    on_neuron = {name for name in AFTER if may_use_neuron(settings.backend) and jobs.stage(name).instance in NODES}
    if settings.compile.on_unknown_graph == "error" and {"compile", "train"} <= on_neuron:
        _check_compiled_ranks(settings, on_neuron)
    if settings.train.mined_per_query and not settings.mine.enabled:
        raise ConfigError(
            f"train.mined_per_query is {settings.train.mined_per_query}, but no job of the cycle mines negatives",
            expected="mine.enabled true, or no mined negatives",
            next_command="--mine.enabled true, or --train.mined-per-query 0",
        )
    # The time limits of these stages depend on the machines of their jobs.
    health, limits_s = jobs.health, dict[str, float]()
    limits_s["health"] = settings.health.stage_limit_s(
        on_neuron="health" in on_neuron, num_nodes=health.nodes, processes=health.processes
    )
    if "compile" in on_neuron:
        limits_s["compile"] = settings.compile.stage_limit_s(num_nodes=jobs.compile.nodes)
    plan = plan_cycle(
        jobs,
        cycle=cycle_of(settings),
        workspace=_workspace_uri(settings),
        settings=fingerprint({name: value for name, value in of_all_jobs(settings).items() if name != "jobs"}),
        mines=settings.mine.enabled,
        teaches=bool(settings.train.teacher),
        stage_limits_s=limits_s,
    )
    return with_placements(plan, jobs)


def make_run(settings: CycleSettings) -> JobPlan:
    """Return the plan that runs the single script in the settings. Raises ConfigError if it cannot run as a job."""
    (step,) = settings.jobs.steps
    plan = plan_script(settings.jobs, step, cycle=settings.cycle, workspace=_workspace_uri(settings))
    return with_placements(plan, settings.jobs)


def _workspace_uri(settings: CycleSettings) -> str:
    return settings.workspace if "://" in settings.workspace else f"file://{user_path(settings.workspace)}"


def _check_compiled_ranks(settings: CycleSettings, on_neuron: Collection[str]) -> None:
    """Check that graphs are compiled for the number of ranks of each job. Raises ConfigError if not."""
    compiled, trained = settings.jobs.compile, settings.jobs.train
    if compiled.ranks != trained.ranks:
        raise ConfigError(
            f"jobs.compile has {compiled.ranks} ranks (nodes x processes), but jobs.train has {trained.ranks}",
            expected="equal numbers, because the number of replicas is part of a compiled graph",
            next_command=f"--jobs.compile.nodes {trained.nodes} --jobs.compile.processes {trained.processes}",
        )
    scoring, names = settings.compile.scoring_ranks, ["evaluate", "embed"]
    names += [MINE] * settings.mine.enabled + [TEACH] * bool(settings.train.teacher)
    counts = sorted({trained.ranks, *scoring})
    for name, ranks in ((name, settings.jobs.stage(name).ranks) for name in names if name in on_neuron):
        if ranks not in counts:
            raise ConfigError(
                f"jobs.{name} has {ranks} ranks, but graphs are compiled for {', '.join(map(str, counts))}",
                expected="a number of ranks for which graphs are compiled",
                next_command=f"--compile.scoring-ranks {','.join(map(str, (*scoring, ranks)))}",
            )


def submitter() -> str:
    """Return the name of this process for the claim: the id of this job, or else its host name and process id."""
    return os.environ.get(JOB_ID) or f"{socket.gethostname()}:{os.getpid()}"


def open_target(cycle: OpenCycle, name: str, renew: Callable[[], None] = lambda: None) -> Target:
    """Return the target with this name for a cycle. `renew` extends the lease of the submitter.

    Raises ConfigError if a client for AWS cannot be created.
    """
    settings, store, say, stop = cycle.settings, cycle.store, cycle.say, cycle.stop
    if name == "local":
        from jobs.targets.local.target import LocalTarget, this_machine
        from pipeline.context import scratch_folder

        scratch, machine = scratch_folder(settings, store.storage, os.environ), this_machine()
        machine = machine.model_copy(update={"vcpus": settings.jobs.local_vcpus or machine.vcpus})
        return LocalTarget(store, scratch, machine, say, stop)
    from jobs.targets.batch.client import BatchClient, LogsClient, connect  # importing boto3 is slow

    logs = LogsClient(connect("logs"), stop=stop)
    if name == "sagemaker":
        from jobs.targets.sagemaker.routes import DirectRoute, QueueRoute
        from jobs.targets.sagemaker.target import SageMakerTarget

        direct = DirectRoute(connect("sagemaker"), stop=stop)
        queue = QueueRoute(connect("batch"), direct, say, stop=stop)
        return SageMakerTarget(direct, queue, logs, store, say, stop)
    from jobs.targets.batch.target import BatchTarget

    return BatchTarget(BatchClient(connect("batch"), stop=stop), logs, store, renew, say)
