"""Logs, cost and the way from settings to the target."""

from pathlib import Path
from typing import Any

import pytest

from jobs.cycle.ledger import ledger_of
from jobs.plan.resources import prices_of
from jobs.settings import CycleSettings
from jobs.targets.sagemaker.target import LOG_GROUP
from pipeline.core.errors import ConfigError
from tests.jobs.cycle.cases import TRN1, job
from tests.jobs.targets.sagemaker.setting import Setting, ml_plan


class FakeLogs:
    """CloudWatch with these streams of one line each."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def describe_log_streams(self, logGroupName: str, logStreamNamePrefix: str) -> dict[str, Any]:
        assert logGroupName == LOG_GROUP
        return {"logStreams": [{"logStreamName": n} for n in self.names if n.startswith(logStreamNamePrefix)]}

    def get_log_events(self, logStreamName: str, **more: Any) -> dict[str, Any]:
        return {"events": [{"message": f"line of {logStreamName}"}], "nextForwardToken": more.get("nextToken", "end")}


def test_the_log_of_a_node_is_that_of_all_starts_of_its_host(tmp_path: Path) -> None:
    at = Setting(tmp_path, plan=ml_plan(job("train", num_nodes=11, resources=TRN1)))
    record = at.tick()["train"]
    name = at.name("train")
    at.logs = FakeLogs(f"{name}/algo-1-1700000009", f"{name}/algo-10-1700000001", f"{name}/algo-1-1700000001")
    target = at.target()
    streams = [f"line of {name}/algo-1-170000000{end}" for end in (1, 9)]
    assert [*dict.fromkeys(target.logs(record, attempt=1, node=0))] == streams
    assert [*dict.fromkeys(target.logs(record, attempt=1, node=1))] == [f"line of {name}/algo-10-1700000001"]
    for attempt, node in ((1, 2), (2, 0), (1, 11)):
        with pytest.raises(ConfigError, match="no log of attempt"):
            next(target.logs(record, attempt=attempt, node=node))


def test_cost_is_that_of_billable_seconds_of_whole_machines(tmp_path: Path) -> None:
    at = Setting(tmp_path, plan=ml_plan(job("train", num_nodes=2, resources=TRN1)))
    at.tick()
    name = at.name("train")
    at.ml.start(name)
    at.clock.now += 7200
    at.ml.finish(name, 0)
    at.ml.jobs[name]["BillableTimeInSeconds"] = 1800  # Spot: a quarter of the time was paid
    records = tuple(at.tick().values())
    settings = CycleSettings.model_validate({"jobs": {"prices": {"ml.trn1.32xlarge": 24.0}}})
    prices = prices_of(settings.jobs, "sagemaker")
    ledger = ledger_of(at.plan, records, (), prices, now=at.clock(), outcome="succeeded", deadline_at=None)
    assert ledger.total.usd == pytest.approx(2 * 0.5 * 24.0)
