"""From settings to what a command works on: the cycle in its workspace, its plan, and the target."""

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
from jobs.cycle.job_states import Closed, JobRecord, without_error
from jobs.cycle.page.gather import PageData, gather
from jobs.cycle.page.publish import report_key
from jobs.cycle.tables import failure_lines
from jobs.cycle.verdict import outcome_text, verdict_lines
from jobs.plan.cycle import AFTER, RUN_PREFIX, plan_cycle, plan_script
from jobs.plan.spec import JobPlan
from jobs.settings import CycleSettings, pipeline_fingerprint, values_of, with_values
from jobs.targets.base import Target, with_errors, with_placements
from pipeline.backends import may_use_neuron
from pipeline.context import check_workspace, load_result
from pipeline.core.errors import ConfigError, DataError
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
    """Return the cycle of the settings, else today's date: by the clocks of the schedule if there is one, else UTC."""
    schedule = settings.jobs.schedule
    zone = ZoneInfo(schedule.timezone) if schedule.is_set else UTC
    return settings.cycle or datetime.now(zone).date().isoformat()


@dataclass(frozen=True)
class OpenCycle:
    """One cycle of a workspace as a command works on it, whether it has jobs or not. `say` takes lines for the user."""

    settings: CycleSettings
    store: CycleStore
    say: Say
    stop: StopSignal
    is_shown: bool = False
    """Whether standard output shows the jobs while this process runs them."""

    @property
    def name(self) -> str:
        return self.store.cycle

    def other(self, name: str) -> Self:
        """Another cycle of the same workspace and settings."""
        settings = self.settings.model_copy(update={"cycle": name})
        return replace(self, settings=settings, store=replace(self.store, cycle=name))

    def with_stored(self) -> Self:
        """Return this cycle with the settings it was submitted with; those given now (file, environment, flag) win.

        So its machines, prices and deadline are known to whoever looks at it. As it is where nothing was submitted, or
        another version stored what this one cannot read.
        """
        try:
            stored = self.store.settings()
            if stored is None:
                return self
            given = values_of(self.settings.model_dump(mode="json", exclude_unset=True))
            settings = with_values(stored, given)
        except (ConfigError, DataError) as error:
            self.say(f"cycle {self.name}: its stored settings are not used: {error.seen}")
            return self
        return replace(self, settings=settings)

    def plan(self) -> JobPlan:
        """Return the plan that was submitted. Raises ConfigError when none was."""
        plan = self.store.plan()
        if plan is None:
            others = ", ".join(list(claims_by_age(self.store, runs=True))[-5:]) or "none"
            raise ConfigError(
                f"no jobs of cycle {self.name} in {self.store.storage.root} (cycles with jobs: {others})",
                expected="a cycle that was submitted",
                next_command="trnjobs submit, or another --cycle or --workspace",
            )
        return plan

    def target(self) -> Target:
        """Where the cycle was submitted to, whatever the settings say now."""
        claim = self.store.claim()
        return open_target(self, claim.target if claim else self.settings.jobs.target)

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Of a cycle that has ended what is on record, else what its target tells; with the errors of failed jobs."""
        return self.with_errors((self.store.records() if self.store.closed() else ()) or self.target().records(plan))

    def with_errors(self, records: Sequence[JobRecord]) -> tuple[JobRecord, ...]:
        """Return the records, with what the logs of failed jobs say."""
        return with_errors(
            self.store, records, lambda task, attempt, node: self.target().logs(task, attempt=attempt, node=node)
        )

    def interrupted_s(self) -> float | None:
        """How long ago the process ended that ran the jobs of a cycle on this machine; None while they go on."""
        claim, now = self.store.claim(), self.store.clock()
        if claim is None or claim.target != "local" or (claim.owner and claim.lease_until > now):
            return None
        at = self.target().interrupted_at()
        return None if at is None else max(0.0, now - at)

    def standing(self) -> str:
        """How a cycle stands that has not ended: `under way`, or interrupted, with the command that goes on."""
        ago_s = self.interrupted_s()
        if ago_s is None:
            return "under way"
        command = self.command("retry")
        return f"interrupted {format_duration(ago_s)} ago, the process that ran its jobs has ended; go on: {command}"

    def command(self, name: str) -> str:
        """Return a command about this cycle that can be pasted where this one was typed."""
        root = self.store.storage.root.removeprefix("file://")
        return shlex.join([program(), name, "--workspace", root, "--cycle", self.name])

    def outcome(self, closed: Closed) -> str:
        """Return how this cycle ended, with what became of its model."""
        judged = None
        with suppress(DataError):  # a damaged result hides no cycle
            judged = load_result(self.store.storage, self.name, "evaluate")
        return outcome_text(closed.outcome, judged.figures if judged else {})

    def failure_lines(self, records: Sequence[JobRecord]) -> list[str]:
        """Return the errors of failed jobs, and commands for their logs that can be pasted here."""
        return failure_lines(records, self.store.storage.root, self.name, program())

    def end_lines(
        self, plan: JobPlan, records: Sequence[JobRecord], closed: Closed | None, data: PageData | None = None
    ) -> list[str]:
        """Return the verdict on a cycle, where its page is, and what failed. `data`: what its page shows, if known."""
        storage, claim, key = self.store.storage, self.store.claim(), report_key(self.name)
        if data is None:
            ledger = read_ledger(self.store, plan, records, self.settings.jobs, closed=closed)
            data = gather(self.store, plan, ledger, records, closed)
        target, judged = claim.target if claim else "", data.figures.get("evaluate", {})
        lines = verdict_lines(data.ledger, data.evaluation, judged, data.vectors, target)
        failures, reason = self.failure_lines(records), without_error(closed.reason, records) if closed else ""
        if data.outcome == "refused" and data.evaluation:  # the reasons stand in the verdict
            failures, reason = failures[-1:], ""
        page = [f"  page: {display_path(storage.uri(key))}"] if storage.stat(key) is not None else []
        return [*lines, *([f"  {reason}"] if reason else []), *page, *failures]

    def ledger(self, plan: JobPlan, records: Sequence[JobRecord]) -> CycleLedger:
        return read_ledger(self.store, plan, records, self.settings.jobs)


def program() -> str:
    """How to call `trnjobs` from here: by its name where the shell finds it, else by its path."""
    beside = Path(sys.executable).parent / "trnjobs"
    return "trnjobs" if shutil.which("trnjobs") or not beside.exists() else display_path(str(beside))


def open_cycle(
    settings: CycleSettings, say: Say, stop: StopSignal | None = None, *, is_shown: bool = False
) -> OpenCycle:
    stop = stop or StopSignal()
    storage = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    return OpenCycle(settings, CycleStore(storage, cycle_of(settings), time.time), say, stop, is_shown)


def open_newest(
    settings: CycleSettings, say: Say, stop: StopSignal | None = None, *, is_shown: bool = False
) -> OpenCycle:
    """Open the cycle that the settings name; if they name none, the newest with jobs."""
    asked = open_cycle(settings, say, stop, is_shown=is_shown)
    check_workspace(asked.store.storage)
    newest = [] if settings.cycle else newest_cycles(asked.store) or list(claims_by_age(asked.store, runs=True))
    return asked.other(newest[-1]) if newest else asked


def newest_cycles(store: CycleStore) -> list[str]:
    """Return the names of the cycles with jobs in a workspace, the newest last."""
    return list(claims_by_age(store))


@contextmanager
def stopping_jobs(settings: CycleSettings) -> Iterator[StopSignal]:
    """Signals set the stop that is given here; this process then has the time that local jobs need to end."""
    stop = StopSignal()
    with stop_on_signals(stop, grace_s=PLATFORM_S + ENGINE_MARGIN_S):
        yield stop


def make_plan(settings: CycleSettings) -> JobPlan:
    """Return the plan of the settings; asks nobody.

    Raises ConfigError, also for a batch that its ranks cannot share, and for mined negatives that nobody mines.
    """
    if settings.cycle.startswith(RUN_PREFIX):
        raise ConfigError(
            f"cycle {settings.cycle!r}",
            expected=f"a name that does not begin with {RUN_PREFIX}: that is reserved for trnjobs run",
        )
    jobs = settings.jobs
    for job in (jobs.compile, jobs.train, jobs.evaluate):
        rank_slice(settings.train, job.ranks)
    on_neuron = {name for name in AFTER if may_use_neuron(settings.backend) and jobs.stage(name).instance in NODES}
    if settings.compile.on_unknown_graph == "error" and {"compile", "train"} <= on_neuron:
        _check_compiled_ranks(settings, on_neuron)
    if settings.train.mined_per_query and not settings.mine.enabled:
        raise ConfigError(
            f"train.mined_per_query is {settings.train.mined_per_query}, and no job of the cycle mines negatives",
            expected="mine.enabled true, or no mined negatives",
            next_command="--mine.enabled true, or --train.mined-per-query 0",
        )
    # Stages that end themselves after some time, on the machines that their jobs are meant for.
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
        settings=pipeline_fingerprint(settings),
        mines=settings.mine.enabled,
        stage_limits_s=limits_s,
    )
    return with_placements(plan, jobs)


def make_run(settings: CycleSettings) -> JobPlan:
    """Return the plan of the one script in the settings. Raises ConfigError."""
    (step,) = settings.jobs.steps
    plan = plan_script(settings.jobs, step, cycle=settings.cycle, workspace=_workspace_uri(settings))
    return with_placements(plan, settings.jobs)


def _workspace_uri(settings: CycleSettings) -> str:
    return settings.workspace if "://" in settings.workspace else f"file://{user_path(settings.workspace)}"


def _check_compiled_ranks(settings: CycleSettings, on_neuron: Collection[str]) -> None:
    """Graphs are found again by as many ranks as they were compiled for. Raises ConfigError for a job of others."""
    compiled, trained = settings.jobs.compile, settings.jobs.train
    if compiled.ranks != trained.ranks:
        raise ConfigError(
            f"jobs.compile has {compiled.ranks} ranks (nodes x processes), jobs.train {trained.ranks}",
            expected="as many: the number of replicas is part of a compiled graph",
            next_command=f"--jobs.compile.nodes {trained.nodes} --jobs.compile.processes {trained.processes}",
        )
    scoring, names = settings.compile.scoring_ranks, ("evaluate", "embed", *(["mine"] if settings.mine.enabled else []))
    known = sorted({trained.ranks, *scoring})
    for name, ranks in ((name, settings.jobs.stage(name).ranks) for name in names if name in on_neuron):
        if ranks not in known:
            raise ConfigError(
                f"jobs.{name} has {ranks} ranks, graphs are compiled for {', '.join(map(str, known))}",
                expected="a number of ranks that graphs are compiled for",
                next_command=f"--compile.scoring-ranks {','.join(map(str, (*scoring, ranks)))}",
            )


def submitter() -> str:
    """Who submits, for others to read: the job, else this process."""
    return os.environ.get(JOB_ID) or f"{socket.gethostname()}:{os.getpid()}"


def open_target(cycle: OpenCycle, name: str, renew: Callable[[], None] = lambda: None) -> Target:
    """Return the target of that name, for the jobs of one cycle. Raises ConfigError when it cannot be reached.

    `renew` keeps the claim of the one who submits, while that takes long.
    """
    settings, store, say, stop = cycle.settings, cycle.store, cycle.say, cycle.stop
    if name == "local":
        from jobs.targets.local.target import LocalTarget, this_machine
        from pipeline.context import scratch_folder

        scratch, machine = scratch_folder(settings, store.storage, os.environ), this_machine()
        machine = machine.model_copy(update={"vcpus": settings.jobs.local_vcpus or machine.vcpus})
        return LocalTarget(store, scratch, machine, say, stop)
    from jobs.targets.batch.client import BatchClient, LogsClient, connect  # boto3 takes a while to import

    logs = LogsClient(connect("logs"), stop=stop)
    if name == "sagemaker":
        from jobs.targets.sagemaker.routes import DirectRoute, QueueRoute
        from jobs.targets.sagemaker.target import SageMakerTarget

        direct = DirectRoute(connect("sagemaker"), stop=stop)
        queue = QueueRoute(connect("batch"), direct, say, stop=stop)
        return SageMakerTarget(direct, queue, logs, store, say, stop)
    from jobs.targets.batch.target import BatchTarget

    return BatchTarget(BatchClient(connect("batch"), stop=stop), logs, store, renew, say)
