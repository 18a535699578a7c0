"""The commands over the fake of AWS Batch: a whole cycle from settings, submitted, killed, followed, cancelled."""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jobs import setup
from jobs.commands import submit
from jobs.cycle.cycle_store import LEASE_S, CycleStore
from jobs.cycle.job_states import Submission
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle, make_plan
from jobs.targets.batch.client import BatchClient, LogsClient
from jobs.targets.batch.target import BatchTarget
from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound, open_storage
from pipeline.settings import resolve
from tests.jobs.targets.batch.fake_batch import FakeBatch
from tests.jobs.targets.batch.faults import Faults, Killed, faulty
from tests.jobs.targets.batch.setting import FAST, Clock

FLAGS = {
    "--jobs.queue": "relevance",
    "--jobs.share-identifier": "production",
    "--jobs.image": "trnpipe@sha256:0",
    "--jobs.train.nodes": "2",
    "--jobs.train.instance": "trn1.32xlarge",
    "--jobs.embed.workers": "4",
}
NAMES = ["prepare", "health", "compile", "train", "evaluate", "embed", "verify", "report"]


def _nothing() -> None:
    """No claim to renew."""


@dataclass
class Commands:
    """`trnjobs` in one workspace and account."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    clock: Clock = field(default_factory=Clock)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = FakeBatch(self.clock)
        self.faults = Faults()
        self.monkeypatch.setattr(submit, "open_cycle", self.open_cycle)
        for module in (submit, setup):
            self.monkeypatch.setattr(module, "open_target", self._open_target)

    def settings(self, **more: str) -> CycleSettings:
        flags = FLAGS | {f"--{name.replace('__', '.')}": value for name, value in more.items()}
        return resolve((), {}, [("--workspace", str(self.folder)), *flags.items()], model=CycleSettings).settings

    def store(self, cycle: str = "2026-11-20") -> CycleStore:
        return CycleStore(open_storage(str(self.folder)), cycle, self.clock)

    def submit(self, faults: Faults | None = None, *, fresh: bool = False, **more: str) -> bool:
        """Whether it came to its end."""
        self.faults = self.batch.faults = faults or Faults()
        try:
            settings = self.settings(cycle="2026-11-20", **more)
            opened, plan = self.open_cycle(settings, self.said.append), make_plan(settings)
            assert submit.submit_plan(opened, plan, "batch", again=fresh) == 0
        except Killed:
            self.clock.now += LEASE_S + 1
            return False
        finally:
            self.faults = self.batch.faults = Faults()
        return True

    def live(self) -> dict[str, str]:
        """Id by name of job; fails when there are two of one name."""
        jobs = [
            one for one in self.batch.jobs.values() if not {":", "#"} & {*one["jobId"]} and one["status"] != "FAILED"
        ]
        found = {one["jobName"].removeprefix("trnpipe-2026-11-20-"): one["jobId"] for one in jobs}
        assert len(found) == len(jobs)
        return found

    def page(self) -> str:
        return open_storage(str(self.folder)).read_bytes("reports/2026-11-20.html").decode()

    def open_cycle(self, settings: CycleSettings, say: Say, stop: StopSignal | None = None) -> OpenCycle:
        store = CycleStore(faulty(open_storage(settings.workspace), self.faults), settings.cycle, self.clock)
        return OpenCycle(settings, store, say, stop or StopSignal())

    def _open_target(self, cycle: OpenCycle, _: str, renew: Any = _nothing) -> BatchTarget:
        client, logs = BatchClient(self.batch, policy=FAST), LogsClient(None, policy=FAST)
        return BatchTarget(client, logs, cycle.store, renew, cycle.say)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tmp_path, monkeypatch)


def test_a_cycle_is_submitted_once(commands: Commands) -> None:
    for _ in range(2):
        assert commands.submit()
    assert list(commands.live()) == NAMES
    assert {name: one.id for name, one in commands.store().submitted(1).items()} == commands.live()
    assert commands.said[-1] == "cycle 2026-11-20: under way; next: trnjobs status --cycle 2026-11-20"


def test_the_driver_sees_that_a_cycle_has_ended(commands: Commands) -> None:
    cycle = commands.open_cycle(commands.settings(cycle="2026-11-20"), commands.said.append)
    assert commands.submit()
    assert not submit.has_ended(cycle)
    for job in commands.batch.jobs.values():
        job |= {"status": "SUCCEEDED", "stoppedAt": 1000}
    assert submit.has_ended(cycle)
    closed = commands.store().closed()
    assert closed is not None
    assert closed.outcome == "succeeded"
    page = commands.page()
    assert 'class="succeeded">succeeded' in page and "11 of 11 succeeded" in page and "RUNNING" not in page


@pytest.mark.parametrize(("code", "outcome"), [(80, "refused"), (65, "failed")])
def test_the_watch_closes_a_cycle_and_writes_its_page(code: int, outcome: str, commands: Commands) -> None:
    assert commands.submit()
    arguments = Namespace(settings=commands.settings(cycle=""))
    assert submit.run_reconcile(arguments, commands.said.append) == 0
    with pytest.raises(KeyNotFound):
        commands.page()
    for name, job_id in commands.live().items():
        attempt = {"startedAt": 1000, "stoppedAt": 2000, "container": {"exitCode": code if name == "evaluate" else 0}}
        late = name in ("embed", "verify", "report")
        ended = {"status": "FAILED"} if late or name == "evaluate" else {"status": "SUCCEEDED"}
        commands.batch.jobs[job_id] |= ended | {"stoppedAt": 2000, "attempts": [] if late else [attempt]}
    assert submit.run_reconcile(arguments, commands.said.append) == 0
    closed = commands.store().closed()
    assert closed is not None and closed.outcome == outcome
    page = commands.page()
    assert f'class="{outcome}">{outcome}' in page and f"evaluate: exit code {code}" in page and "RUNNING" not in page


def failed_at(commands: Commands, failed: str) -> Namespace:
    """A cycle of which AWS Batch has ended all jobs, since one has failed; the arguments of commands about it."""
    assert commands.submit()
    for name, job_id in commands.live().items():
        before = NAMES.index(name) < NAMES.index(failed)
        ran = {"startedAt": 1000, "stoppedAt": 2000, "container": {"exitCode": 0 if before else 65}}
        after = NAMES.index(name) > NAMES.index(failed)
        job = commands.batch.jobs[job_id]
        job |= {"status": "SUCCEEDED" if before else "FAILED", "stoppedAt": 2000, "attempts": [] if after else [ran]}
        job["statusReason"] = "Dependent Job failed" if after else ""
    return Namespace(settings=commands.settings(cycle="2026-11-20"))


@pytest.mark.parametrize("again", [submit.run_retry, submit.run_submit])
@pytest.mark.parametrize("handed_over", [1, 3])
def test_a_retry_that_was_cut_goes_on(
    handed_over: int, again: Any, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = failed_at(commands, "train")
    arguments.target, arguments.fresh = "batch", False
    left, save = handed_over, CycleStore.save_submission

    def save_and_die(store: CycleStore, round_: int, one: Submission) -> None:
        nonlocal left
        save(store, round_, one)
        left -= 1
        if not left:
            raise TransientError("no answer", next_command="run the same command again")

    with monkeypatch.context() as patch:
        patch.setattr(CycleStore, "save_submission", save_and_die)
        with pytest.raises(TransientError, match="no answer"):
            submit.run_retry(arguments, commands.said.append)
    late = ["train", "evaluate", "embed", "verify", "report"]
    assert {*commands.store().submitted(2)} == {*late[:handed_over]}
    assert again(arguments, commands.said.append) == 0
    recorded = {name: one.id for name, one in commands.store().submitted(2).items()}
    assert {f"{name}-round-2": job_id for name, job_id in recorded.items()}.items() <= commands.live().items()
    assert {*recorded} == {*late}
    assert commands.batch.jobs[recorded["evaluate"]]["dependsOn"] == [{"jobId": recorded["train"]}]
    assert commands.store().rounds() == [1, 2]
    with pytest.raises(ConfigError, match="is under way"):
        submit.run_retry(arguments, commands.said.append)


@pytest.mark.parametrize("step", ["write_page", "outcome_of"])
def test_the_watch_does_not_close_a_cycle_that_is_retried_meanwhile(
    step: str, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = failed_at(commands, "train")
    work = getattr(submit, step)

    def retried_before(*words: Any, **more: Any) -> Any:
        monkeypatch.setattr(submit, step, work)
        assert submit.run_retry(arguments, commands.said.append) == 0
        return work(*words, **more)

    monkeypatch.setattr(submit, step, retried_before)
    assert submit.run_reconcile(arguments, commands.said.append) == 0
    assert commands.store().closed() is None
    assert not submit.has_ended(commands.open_cycle(commands.settings(cycle="2026-11-20"), commands.said.append))
    for job in commands.batch.jobs.values():
        job |= {"status": "SUCCEEDED", "stoppedAt": 3000}
    assert submit.run_reconcile(Namespace(settings=commands.settings()), commands.said.append) == 0
    closed = commands.store().closed()
    assert closed is not None and (closed.outcome, closed.round) == ("succeeded", 2)


def test_a_cycle_starts_from_the_beginning_once_its_jobs_have_ended(commands: Commands) -> None:
    assert commands.submit()
    with pytest.raises(
        ConfigError,
        match=r"data.columns.query: query -> search_term\n.*\n.*--fresh is refused: prepare, health, .* not ended",
    ):
        commands.submit(data__columns__query="search_term")
    with pytest.raises(ConfigError, match="have not ended"):
        commands.submit(fresh=True, data__columns__query="search_term")
    assert len(commands.live()) == len(NAMES)


@pytest.mark.parametrize("number", [None, *range(1, 200, 17)])
def test_a_start_from_the_beginning_killed_and_repeated(number: int | None, commands: Commands) -> None:
    """After any call; a job of the earlier submission that nobody has recorded is ended first."""
    failed_at(commands, "prepare")
    recorded = {*commands.batch.jobs}
    stray = dict(next(one for one in commands.batch.jobs.values() if one["jobName"].endswith("-embed")))
    commands.batch.jobs["stray"] = stray | {"jobId": "stray", "status": "RUNNABLE", "attempts": []}
    commands.batch._seen_at["stray"] = 0
    if number and not commands.submit(Faults(kill_after=number), fresh=True, data__columns__query="search_term"):
        under_way = commands.store().rounds() == [2]
        assert commands.submit(fresh=not under_way, data__columns__query="search_term")
    elif not number:
        assert commands.submit(fresh=True, data__columns__query="search_term")
    assert list(commands.live()) == [f"{name}-round-2" for name in NAMES]
    assert {one.id for one in commands.store().submitted(2).values()} == {*commands.live().values()}
    assert recorded.isdisjoint(commands.live().values()) and "stray" not in commands.live().values()
    assert commands.store().settings()["data"]["columns"]["query"] == "search_term"  # type: ignore[index]
    earlier = commands.store().earlier_records(commands.store().records())
    assert {one.name for one in earlier} == {*NAMES}
