"""The commands over the fake of AWS Batch: a whole cycle from settings, submitted, killed, followed, cancelled."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs import setup
from jobs.commands import submit
from jobs.cycle.cycle_store import LEASE_S, CycleStore
from jobs.cycle.job_states import Closed, SubmittedJob
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle, make_plan
from jobs.targets.batch import requests
from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound
from pipeline.settings import resolve
from tests.jobs.targets.batch.setting import Setting
from tests.jobs.targets.faults import Faults, Killed

CYCLE = "2026-11-20"
FLAGS = {
    "--jobs.queue": "relevance",
    "--jobs.share-identifier": "production",
    "--jobs.image": "trnpipe@sha256:0",
    "--jobs.train.nodes": "2",
    "--jobs.train.instance": "trn1.32xlarge",
    "--jobs.embed.workers": "4",
}
NAMES = ["prepare", "health", "compile", "train", "evaluate", "embed", "verify", "report"]
OTHER = {"--data.columns.query": "search_term"}


class Commands(Setting):
    """`trnjobs` in one workspace and account."""

    faults = Faults()

    def settings(self, more: Mapping[str, str] = {"--cycle": CYCLE}) -> CycleSettings:
        flags = {"--workspace": str(self.folder), **FLAGS, **more}
        return resolve((), {}, [*flags.items()], model=CycleSettings).settings

    def submit(self, more: Mapping[str, str] = {}, faults: Faults | None = None, *, fresh: bool = False) -> bool:
        """Whether it came to its end."""
        self.faults = self.batch.faults = faults or Faults()
        try:
            settings = self.settings({"--cycle": CYCLE, **more})
            opened = self.open_cycle(settings, self.warnings.append)
            assert submit.submit_plan(opened, make_plan(settings), "batch", again=fresh) == 0
        except Killed:
            self.clock.now += LEASE_S + 1
            return False
        finally:
            self.faults = self.batch.faults = Faults()
        return True

    def open_cycle(
        self, settings: CycleSettings, say: Say, stop: StopSignal | None = None, *, is_shown: bool = False
    ) -> OpenCycle:
        return OpenCycle(settings, self.store(self.faults), say, stop or StopSignal())

    def reconcile(self) -> Closed | None:
        """How it was closed."""
        assert submit.run_reconcile(Namespace(settings=self.settings({})), self.warnings.append) == 0
        return self.store().closed()

    def has_ended(self) -> bool:
        """Whether the driver finds so."""
        return submit.has_ended(self.open_cycle(self.settings(), self.warnings.append))

    def page(self) -> str:
        return self.store().storage.read_bytes(f"reports/{CYCLE}.html").decode()

    def fail(self, failed: str, code: int = 65) -> Namespace:
        """AWS Batch ends all jobs, since one has failed; the arguments of commands about it."""
        ids = self.ids()
        for place, name in enumerate(NAMES):
            before, after = place < NAMES.index(failed), place > NAMES.index(failed)
            ran = {"startedAt": 1000, "stoppedAt": 2000, "container": {"exitCode": 0 if before else code}}
            self.batch.jobs[ids[name]] |= {
                "status": "SUCCEEDED" if before else "FAILED",
                "stoppedAt": 2000,
                "attempts": [] if after else [ran],
                "statusReason": "Dependent Job failed" if after else "",
            }
        return Namespace(settings=self.settings(), target="batch", fresh=False)

    def succeed(self) -> None:
        for job in self.batch.jobs.values():
            job |= {"status": "SUCCEEDED", "stoppedAt": 3000}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """With a cycle that was submitted, in a folder that the jobs could not share."""
    made = Commands(tmp_path)
    monkeypatch.setattr(requests, "SHARED", "file://")
    monkeypatch.setattr(submit, "open_cycle", made.open_cycle)
    for module in (submit, setup):
        monkeypatch.setattr(
            module, "open_target", lambda cycle, _, renew=lambda: None: made.target(cycle.store, renew=renew)
        )
    made.plan = make_plan(made.settings())
    assert made.submit()
    return made


def test_a_cycle_is_submitted_once_and_the_driver_sees_when_it_has_ended(commands: Commands) -> None:
    assert commands.submit()
    assert commands.live_names() == NAMES
    commands.assert_one_dag()
    under_way, watch = commands.warnings[-1].splitlines()
    assert under_way == f"cycle {CYCLE}: submitted to batch, under way"
    assert watch.endswith(f"trnjobs status --workspace {commands.folder} --cycle {CYCLE} --watch")
    assert not commands.has_ended()
    commands.succeed()
    assert commands.has_ended()
    closed = commands.store().closed()
    assert closed is not None and closed.outcome == "succeeded"
    page = commands.page()
    assert 'class="succeeded">succeeded' in page and "11 of 11 jobs succeeded" in page and "RUNNING" not in page


@pytest.mark.parametrize(("code", "outcome"), [(80, "refused"), (65, "failed")])
def test_the_watch_closes_a_cycle_and_writes_its_page(code: int, outcome: str, commands: Commands) -> None:
    assert commands.reconcile() is None
    with pytest.raises(KeyNotFound):
        commands.page()
    commands.fail("evaluate", code)
    closed = commands.reconcile()
    assert closed is not None and closed.outcome == outcome
    page = commands.page()
    assert f'class="{outcome}">{outcome}' in page and f"evaluate: exit code {code}" in page and "RUNNING" not in page


@pytest.mark.parametrize("again", [submit.run_retry, submit.run_submit])
@pytest.mark.parametrize("handed_over", [1, 3])
def test_a_retry_that_was_cut_goes_on(
    handed_over: int, again: Any, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, left, save = commands.fail("train"), handed_over, CycleStore.save_submitted

    def save_and_die(store: CycleStore, submission: int, one: SubmittedJob) -> None:
        nonlocal left
        save(store, submission, one)
        left -= 1
        if not left:
            raise TransientError("no answer", next_command="run the same command again")

    with monkeypatch.context() as patch:
        patch.setattr(CycleStore, "save_submitted", save_and_die)
        with pytest.raises(TransientError, match="no answer"):
            submit.run_retry(arguments, commands.warnings.append)
    late = ["train", "evaluate", "embed", "verify", "report"]
    assert {*commands.ids(2)} == {*late[:handed_over]}
    assert commands.reconcile() is None, "the watch ends no job because those after it failed in the first submission"
    assert again(arguments, commands.warnings.append) == 0
    recorded, made = commands.ids(2), {one["jobId"] for one in commands.live()}
    assert {*recorded} == {*late} and {*recorded.values()} <= made
    assert sorted(commands.live_names()) == sorted(
        ["prepare", "health", "compile", *(f"{one}-round-2" for one in late)]
    )
    assert commands.batch.jobs[recorded["evaluate"]]["dependsOn"] == [{"jobId": recorded["train"]}]
    assert commands.store().submissions() == [1, 2]
    with pytest.raises(ConfigError, match="is under way"):
        submit.run_retry(arguments, commands.warnings.append)


def test_a_retry_is_refused_if_another_process_resumed_the_submission_that_it_saw_as_ended(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry was cut after two jobs, which have succeeded. While the next one starts, `submit` completes the first."""
    arguments, save = commands.fail("train"), CycleStore.save_submitted

    def save_and_die(store: CycleStore, submission: int, one: SubmittedJob) -> None:
        save(store, submission, one)
        if one.job == "evaluate":
            raise TransientError("no answer", next_command="run the same command again")

    with monkeypatch.context() as patch:
        patch.setattr(CycleStore, "save_submitted", save_and_die)
        with pytest.raises(TransientError, match="no answer"):
            submit.run_retry(arguments, commands.warnings.append)
    for job_id in commands.ids(2).values():
        commands.batch.jobs[job_id] |= {"status": "SUCCEEDED", "stoppedAt": 3000}
    claim = CycleStore.submitting

    def claim_late(*words: Any, **more: Any) -> Any:
        monkeypatch.setattr(CycleStore, "submitting", claim)
        assert submit.run_submit(arguments, commands.warnings.append) == 0
        return claim(*words, **more)

    monkeypatch.setattr(CycleStore, "submitting", claim_late)
    with pytest.raises(ConfigError, match="is under way, because another process has submitted jobs of submission 2"):
        submit.run_retry(arguments, commands.warnings.append)
    assert commands.store().submissions() == [1, 2]
    late = [name for name in commands.live_names() if name.startswith(("embed", "verify", "report"))]
    assert late == ["embed-round-2", "verify-round-2", "report-round-2"]
    assert commands.store().storage.stat(f"cycles/{CYCLE}/jobs/records/round-2.json") is None


@pytest.mark.parametrize("step", ["write_page", "outcome_of"])
def test_the_watch_does_not_close_a_cycle_that_is_retried_meanwhile(
    step: str, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, work = commands.fail("train"), getattr(submit, step)

    def retried_before(*words: Any, **more: Any) -> Any:
        monkeypatch.setattr(submit, step, work)
        assert submit.run_retry(arguments, commands.warnings.append) == 0
        return work(*words, **more)

    monkeypatch.setattr(submit, step, retried_before)
    assert commands.reconcile() is None
    assert not commands.has_ended()
    commands.succeed()
    closed = commands.reconcile()
    assert closed is not None and (closed.outcome, closed.round) == ("succeeded", 2)


def test_the_watch_reopens_a_cycle_of_which_a_job_was_submitted_meanwhile(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.fail("evaluate")
    close = CycleStore.close

    def submitted_before(store: CycleStore, closed: Closed) -> None:
        store.save_submitted(1, SubmittedJob(job="late", id="late", submitted_at=1.0))
        close(store, closed)

    monkeypatch.setattr(CycleStore, "close", submitted_before)
    assert commands.reconcile() is None


def test_a_retry_corrects_the_end_that_a_watch_recorded_too_early(commands: Commands) -> None:
    """The watch had read the records before the last job was submitted, and wrote the end after it."""
    early = Closed(outcome="failed", at=1.0, reason="verify: not run", round=1)
    commands.store().close(early)
    with pytest.raises(ConfigError, match="is under way"):
        submit.run_retry(Namespace(settings=commands.settings()), commands.warnings.append)
    assert commands.store().closed() is None and commands.live_names() == NAMES
    commands.store().close(early)
    commands.succeed()
    assert submit.run_retry(Namespace(settings=commands.settings()), commands.warnings.append) == 0
    closed = commands.store().closed()
    assert closed is not None and (closed.outcome, closed.round) == ("succeeded", 1)
    with pytest.raises(ConfigError, match="has no failed jobs"):
        submit.run_retry(Namespace(settings=commands.settings()), commands.warnings.append)


def test_a_cycle_starts_from_the_beginning_once_its_jobs_have_ended(commands: Commands) -> None:
    with pytest.raises(
        ConfigError,
        match=r"data.columns.query: query -> search_term\n.*\n.*--fresh is refused: prepare, health, .* not ended",
    ):
        commands.submit(OTHER)
    with pytest.raises(ConfigError, match="have not ended"):
        commands.submit(OTHER, fresh=True)
    assert commands.live_names() == NAMES


@pytest.mark.parametrize("number", [0, *range(1, 200, 17)])
def test_a_start_from_the_beginning_killed_and_repeated(number: int, commands: Commands) -> None:
    """After any call; a job of the earlier submission that nobody has recorded is ended first."""
    commands.fail("prepare")
    recorded = {*commands.batch.jobs}
    stray = commands.batch.jobs[commands.ids()["embed"]] | {"jobId": "stray", "status": "RUNNABLE", "attempts": []}
    commands.batch.add(stray)
    if not commands.submit(OTHER, Faults(kill_after=number), fresh=True):
        under_way = commands.store().submissions() == [2]
        assert commands.submit(OTHER, fresh=not under_way)
    assert commands.live_names() == [f"{name}-round-2" for name in NAMES]
    assert {*commands.ids(2).values()} == {one["jobId"] for one in commands.live()}
    assert ({*recorded, "stray"}).isdisjoint(commands.ids(2).values())
    assert commands.store().settings()["data"]["columns"]["query"] == "search_term"  # type: ignore[index]
    earlier = commands.store().earlier_records(commands.store().records())
    assert {one.name for one in earlier} == {*NAMES}
