"""The commands that people and the scheduler start: the product's own functions, over the services of the world."""

import gc
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import tenacity
from pydantic import TypeAdapter

from jobs import setup
from jobs.commands import submit
from jobs.cycle import cycle_store
from jobs.cycle.cycle_store import Claim, CycleStore
from jobs.cycle.job_states import Closed, SubmittedJob
from jobs.plan.spec import JobPlan, JobSpec
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle, make_plan
from jobs.targets.base import Target, placement_of
from jobs.targets.batch import account, client, target
from jobs.targets.batch import requests as batch_requests
from jobs.targets.batch.client import BatchClient, LogsClient
from jobs.targets.batch.target import BatchTarget
from jobs.targets.sagemaker import requests as training_requests
from jobs.targets.sagemaker import target as training_target
from jobs.targets.sagemaker.routes import DirectRoute, QueueRoute
from jobs.targets.sagemaker.target import SageMakerTarget
from pipeline.checkpoint.store import TrainState
from pipeline.core.errors import TransientError
from pipeline.core.manifest import Manifest
from pipeline.io import requests, s3, storage
from pipeline.registry import records
from pipeline.registry.model import Registry
from pipeline.registry.records import Author, Pointer, StoredVerdict
from pipeline.settings import resolve
from tests.simulation.batch import Platform
from tests.simulation.nodes import AT, MODEL, WORKERS
from tests.simulation.s3 import ROOT, FakeS3, SimulatedStorage
from tests.simulation.world import Process, World

FLAGS = {
    "--workspace": ROOT,
    "--jobs.queue": "relevance",
    "--jobs.share-identifier": "production",
    "--jobs.image": "trnpipe@sha256:0",
    "--jobs.role": "arn:aws:iam::123456789012:role/relevance",
    "--jobs.train.nodes": "2",
    "--jobs.train.instance": "trn1.32xlarge",
    "--jobs.train.timeout-s": "7200",
    "--jobs.compile.timeout-s": "7200",
    "--jobs.embed.timeout-s": "7200",
    "--jobs.embed.workers": str(WORKERS),
    "--jobs.schedule.expression": "cron(0 2 * * ? *)",
}


SAGEMAKER_FLAGS: list[dict[str, str]] = [
    {"--jobs.sagemaker.queue": "ml"},
    {"--jobs.sagemaker.spot": "true"},
    {"--jobs.sagemaker.queue": "ml", "--jobs.sagemaker.quota-share": "search"},
    {},
]
"""Of every fourth seed: through a fair-share queue, on Spot machines, through a quota share, or directly."""


@lru_cache
def settings_of(cycle: str, flags_number: int = -1) -> CycleSettings:
    """Return the settings of a cycle, with one job group of several nodes and one array."""
    flags = FLAGS | ({"--cycle": cycle} if cycle else {}) | SAGEMAKER_FLAGS[flags_number]
    return resolve((), {}, [*flags.items()], model=CycleSettings).settings


POLL_S = 600.0
"""Seconds between two looks of a process that follows training jobs. In production, it looks more often."""
STAGES = ("train", "evaluate", "embed", "verify")
"""The jobs of a short plan, which are those that write what the invariants protect."""


@lru_cache
def plan_of(cycle: str, *, is_whole: bool, flags_number: int) -> JobPlan:
    """Return the plan of a cycle, either with all of its jobs or a short one."""
    plan = make_plan(settings_of(cycle, flags_number))
    if is_whole:
        return plan
    jobs = [job for job in plan.jobs if job.name in STAGES]
    kept = [tuple(edge for edge in job.depends_on if edge.job in STAGES) for job in jobs]
    jobs = [job.model_copy(update={"depends_on": edges}) for job, edges in zip(jobs, kept, strict=True)]
    placements = {name: placement for name, placement in plan.placements.items() if name in STAGES}
    return plan.model_copy(update={"jobs": tuple(jobs), "placements": placements})


@dataclass(frozen=True)
class Account:
    """The services of one history."""

    world: World
    s3: FakeS3
    platform: Platform

    def plan_of(self, cycle: str) -> JobPlan:
        """Return the plan of a cycle, which is a short one in four of five histories."""
        number = self.world.seed // 4 % len(SAGEMAKER_FLAGS) if self.platform.target == "sagemaker" else -1
        return plan_of(cycle, is_whole=self.world.seed % 5 == 0, flags_number=number)

    def open_cycle(self, cycle: str) -> OpenCycle:
        """Return a cycle for the current process."""
        process = self.process
        store = CycleStore(SimulatedStorage(self.s3, process.stop), cycle, self.world.clock(process))
        return OpenCycle(settings_of(cycle), store, self._say, process.stop)

    def open_target(self, cycle: OpenCycle, name: str, renew: Callable[[], None] = lambda: None) -> Target:
        logs, store, say, stop = LogsClient(None, stop=cycle.stop), cycle.store, cycle.say, cycle.stop
        if name == "sagemaker":
            direct = DirectRoute(self.platform, stop=stop)
            queue = QueueRoute(self.platform, direct, say, stop=stop)
            return SageMakerTarget(direct, queue, logs, store, say, stop, poll_s=POLL_S)
        return BatchTarget(BatchClient(self.platform, stop=stop), logs, store, renew, say)

    @property
    def process(self) -> Process:
        assert self.world.current is not None
        return self.world.current

    def _say(self, line: str) -> None:
        self.world.log("|", line)

    # Commands. Each runs in a process of its own.

    def drive(self, scheduled: datetime) -> int:
        """Run `trnjobs driver`, as the scheduler does."""
        base, now = self.open_cycle(""), datetime.fromtimestamp(self.world.now, UTC)
        return submit.drive(base.settings.jobs.schedule, scheduled, now, base, self.platform.target)

    def submit(self, cycle: str) -> int:
        return submit.submit_plan(self.open_cycle(cycle), self.plan_of(cycle), self.platform.target)

    def retry(self, cycle: str) -> int:
        return submit.run_retry(Namespace(settings=settings_of(cycle)), self._say)

    def cancel(self, cycle: str) -> int:
        submit.cancel_cycle(self.open_cycle(cycle), "by hand")
        return 0

    def reconcile(self) -> int:
        return submit.run_reconcile(Namespace(settings=settings_of("")), self._say)

    def roll_back(self) -> int:
        """Roll back to the previous model. A person repeats the command if it fails and may be repeated."""
        process = self.process
        registry = Registry(SimulatedStorage(self.s3, process.stop), MODEL, author=Author(by=process.name, at=AT))
        for _ in range(3):
            try:
                registry.rollback(reason="fewer clicks")
                return 0
            except TransientError as error:
                self.world.log(str(error).partition("\n")[0])
                self.world.sleep(60.0)
        return 75


_ACCOUNT: list[Account] = []


def _open(settings: CycleSettings, *_: Any, **__: Any) -> OpenCycle:
    return _ACCOUNT[-1].open_cycle(settings.cycle)


def _write_page(store: CycleStore, plan: JobPlan, *_: Any) -> None:
    store.storage.write_bytes(f"reports/{store.cycle}.html", b"page")


def _lean_retry(call: Callable[[], Any], policy: Any, *, stop: Any, doing: str, **more: Any) -> Any:
    """Call once, and leave everything else to the product's call_with_retry, which is slow if nothing fails."""
    stop.raise_if_set(doing)
    try:
        return call()
    except Exception as error:
        if not more["retryable"](error):
            raise
        first = [error]

    def again() -> Any:
        if first:
            raise first.pop()
        return call()

    return _RETRY(again, policy, stop=stop, doing=doing, **more)


_RETRY = requests.call_with_retry


def _in_order(call: Callable[[Any], Any], items: list[Any], *_: Any) -> list[Any]:
    return [call(item) for item in items]


def _by_plan(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the results of a pure function of a plan and the name of a job."""
    known = dict[tuple[int, str], tuple[JobPlan, Any]]()

    def call(*args: Any) -> Any:
        plan = next(argument for argument in args if isinstance(argument, JobPlan))
        name = args[-1].name if isinstance(args[-1], JobSpec) else ""
        if (id(plan), name) not in known:
            known[id(plan), name] = plan, function(*args)
        return known[id(plan), name][1]

    return call


def _remembering(adapter: TypeAdapter[Any]) -> Any:
    return SimpleNamespace(validate_json=lru_cache(adapter.validate_json), dump_json=adapter.dump_json)


_PARSED = (JobPlan, Claim, Closed, SubmittedJob, Manifest, TrainState, StoredVerdict, Pointer)
"""Records that are often parsed again from the same bytes. They are immutable."""


def _with_stored(cycle: OpenCycle) -> OpenCycle:
    cycle.store.settings()
    return cycle


@contextmanager
def product_in_world() -> Iterator[None]:
    """Let the product's commands run in the world of the newest account.

    Replaced are the ways out of the process (clients, clocks, waits and threads) and what no invariant needs: the page,
    the figures, and repeated parsing of the same plans and settings.
    """
    clock = SimpleNamespace(monotonic=lambda: _ACCOUNT[-1].world.now, sleep=None)
    chance = SimpleNamespace(uniform=lambda low, high: _ACCOUNT[-1].world.rng.uniform(low, high))
    replaced: list[tuple[Any, str, Any]] = [
        (submit, "open_cycle", _open),
        (submit, "open_newest", _open),
        (submit, "open_target", lambda cycle, *more: _ACCOUNT[-1].open_target(cycle, *more)),
        (setup, "open_target", lambda cycle, *more: _ACCOUNT[-1].open_target(cycle, *more)),
        (submit, "stopping_jobs", nullcontext),
        (submit, "submitter", lambda: _ACCOUNT[-1].process.name),
        (submit, "make_plan", lambda settings: _ACCOUNT[-1].plan_of(settings.cycle)),
        (submit, "write_page", _write_page),
        (setup, "program", lambda: "trnjobs"),
        (submit, "summary", lambda *_, **__: ""),
        (submit, "unused_settings", lambda *_: []),
        (submit, "of_all_jobs", lambda settings: {"settings": settings.cycle}),
        (submit, "check_plan", _by_plan(batch_requests.check_plan)),
        (submit, "check_training_jobs", _by_plan(training_requests.check_plan)),
        (training_target, "check_plan", _by_plan(training_requests.check_plan)),
        (account, "check_plan", _by_plan(batch_requests.check_plan)),
        (target, "definition_request", _by_plan(batch_requests.definition_request)),
        (target, "placement_of", _by_plan(placement_of)),
        (JobPlan, "plan_id", property(_by_plan(JobPlan.plan_id.fget))),  # type: ignore[attr-defined]
        *((record, "model_validate_json", lru_cache(record.model_validate_json)) for record in _PARSED),
        (cycle_store, "_RECORDS", _remembering(cycle_store._RECORDS)),
        (storage, "check_key", lru_cache(storage.check_key)),
        (OpenCycle, "with_stored", _with_stored),
        (OpenCycle, "ledger", lambda *_: None),
        (OpenCycle, "end_lines", lambda *_, **__: []),
        (tenacity, "time", clock),
        (records, "time", clock),
        (tenacity.wait, "random", chance),
        (records, "random", chance),
        (requests, "_in_threads", _in_order),
        (s3, "secrets", SimpleNamespace(token_hex=lambda _: f"{_ACCOUNT[-1].world.rng.getrandbits(64):016x}")),
        (client, "call_with_retry", _lean_retry),
    ]
    with ExitStack() as stack:
        for where, name, what in replaced:
            stack.enter_context(patch.object(where, name, what))
        # Garbage is only collected between histories (see run_history), and never searched for in what was imported,
        # which would take longer than a cycle.
        gc.disable()
        stack.callback(gc.enable)
        stack.callback(gc.unfreeze)
        yield


@contextmanager
def using(services: Account) -> Iterator[None]:
    _ACCOUNT.append(services)
    try:
        yield
    finally:
        _ACCOUNT.pop()
