"""The commands over the fake of AWS Batch: a whole cycle from settings, submitted, killed, followed, cancelled."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from jobs.batch.client import BatchClient
from jobs.batch.logs import LogsClient
from jobs.batch.target import BatchTarget
from jobs.commands import driver, submit
from jobs.settings import SCHEMA, CycleSettings
from jobs.store.cycle import LEASE_S, CycleStore
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from tests.jobs.batch.fake_batch import FakeBatch
from tests.jobs.batch.faults import Faults, Killed, faulty
from tests.jobs.batch.setting import FAST, Clock

FLAGS = {
    "--jobs.queue": "relevance",
    "--jobs.share-identifier": "production",
    "--jobs.image": "trnpipe@sha256:0",
    "--jobs.train.nodes": "2",
    "--jobs.train.instance": "trn1.32xlarge",
    "--jobs.embed.workers": "4",
}
NAMES = ["prepare", "health", "compile", "train", "evaluate", "embed", "verify", "report"]


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
        for module in (submit, driver):
            self.monkeypatch.setattr(module, "open_cycle", self._open_cycle)
        self.monkeypatch.setattr(submit, "open_target", lambda _, store, *rest: self._target(store, rest[-1]))
        self.monkeypatch.setattr(driver, "open_target_of", lambda _, store, *rest: self._target(store, lambda: None))

    def settings(self, **more: str) -> CycleSettings:
        flags = FLAGS | {f"--{name.replace('__', '.')}": value for name, value in more.items()}
        return SCHEMA.resolve((), {}, [("--workspace", str(self.folder)), *flags.items()]).settings

    def store(self, cycle: str = "2026-11-20") -> CycleStore:
        return CycleStore(open_storage(str(self.folder)), cycle, self.clock)

    def submit(self, faults: Faults | None = None, **more: str) -> bool:
        """Whether it came to its end."""
        self.faults = self.batch.faults = faults or Faults()
        try:
            settings = self.settings(cycle="2026-11-20", **more)
            assert submit.submit_cycle(settings, "batch", self.said.append, StopSignal()) == 0
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

    def _open_cycle(self, settings: CycleSettings, stop: StopSignal) -> CycleStore:
        return CycleStore(faulty(open_storage(settings.workspace), self.faults), settings.cycle, self.clock)

    def _target(self, store: CycleStore, renew: Any) -> BatchTarget:
        client, logs = BatchClient(self.batch, policy=FAST), LogsClient(None, policy=FAST)
        return BatchTarget(client, logs, store, renew, self.said.append)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tmp_path, monkeypatch)


def test_a_cycle_is_submitted_once(commands: Commands) -> None:
    for _ in range(2):
        assert commands.submit()
    assert list(commands.live()) == NAMES
    assert {name: one.id for name, one in commands.store().submitted(1).items()} == commands.live()
    assert commands.said[-1] == "cycle 2026-11-20: under way; next: trnjobs status"


def test_submit_killed_after_single_calls_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of BatchTarget itself is tried in test_submit.py."""
    count = Commands(tmp_path / "count", monkeypatch)
    faults = Faults()
    count.submit(faults)
    for number in range(1, len(faults.calls) + 1, 9):
        commands = Commands(tmp_path / f"{number}", monkeypatch)
        assert not commands.submit(Faults(kill_after=number))
        assert commands.submit()
        assert list(commands.live()) == NAMES, number
        assert {name: one.id for name, one in commands.store().submitted(1).items()} == commands.live()


def test_a_wrong_queue_is_corrected_and_submitted(commands: Commands) -> None:
    with pytest.raises(ConfigError, match="queue typo: does not exist"):
        commands.submit(jobs__queue="typo")
    assert (commands.batch.definitions, commands.batch.submitted) == ([], [])
    assert commands.submit()
    assert list(commands.live()) == NAMES


def test_the_driver_starts_one_cycle_after_the_other(commands: Commands) -> None:
    cycles = driver.WorkspaceCycles(commands.settings(), "batch", commands.said.append, StopSignal())
    assert commands.submit()
    assert not cycles.has_ended("2026-11-20")
    for job_id in commands.live().values():
        commands.batch.jobs[job_id] |= {"status": "SUCCEEDED", "stoppedAt": 1000}
    assert cycles.has_ended("2026-11-20")
    closed = commands.store().closed()
    assert closed is not None
    assert closed.outcome == "succeeded"
    assert cycles.submit("2026-11-21") == 0
    assert list(cycles.claimed()) == ["2026-11-20", "2026-11-21"]
    assert commands.store("2026-11-21").submitted(1).keys() == {*NAMES}
