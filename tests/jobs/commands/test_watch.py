"""`trnjobs status --watch`: a cycle as it goes on, and the end of the watching."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import rich.console

from jobs.commands.watch import Row, doing_text, head_text, live_rows, watch
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import Closed, JobRecord, JobState
from jobs.plan.spec import Plan
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle
from jobs.targets.base import no_log
from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.telemetry.events import EventName
from tests.jobs.commands.test_cycle import Trnjobs, trnjobs
from tests.jobs.cycle.cases import cycle, job, plan
from tests.jobs.cycle.record_cases import bad, good, tried, under_way
from tests.jobs.cycle.test_ledger import at, attempt, ledger

__all__ = ["trnjobs"]
SHAPE = plan(job("prepare"), job("train", "prepare"), job("embed", "train"))
MOMENTS = (
    at(90, EventName.TRAIN_STEPS, step=70, losses=[9.0], samples_per_s=1, eta_s=1),  # of the try before
    at(101, EventName.TRAIN_STARTED, step=60, max_steps=2000),
    at(120, EventName.TRAIN_STEPS, step=120, losses=[0.5, 0.7], samples_per_s=812.4, eta_s=192.0),
)
TRAINS = under_way("train", "RUNNING", tried(75, at=(50.0, 90.0)), attempt(100, None, None))


def test_a_job_that_runs_and_one_that_failed() -> None:
    rows: list[Row] = live_rows(SHAPE, [good("prepare"), TRAINS], MOMENTS, 130.0)
    doing = "step 120/2000 | loss 0.6000 | 812 samples/s | eta 3m12s"
    assert rows[1:] == [("train", "RUNNING", "2", "30s", "-", doing)]
    failed = live_rows(SHAPE, [good("prepare"), bad("train", tried(70, reason="the loss is NaN"))], MOMENTS, 130.0)[1]
    assert failed[:3] == ("train", "FAILED", "1") and "the loss is NaN, exit code 70" in failed[5]
    children = tuple(under_way(f"embed:{n}", "RUNNING", attempt(10, None, None)) for n in range(2))
    embed = JobRecord(name="embed", id="e", state=JobState.PENDING, created_at=0.0, children=children)
    assert live_rows(cycle(), [good("train"), embed], (), 20.0)[1][:4] == ("embed", "PENDING 0/2", "2", "10s")


@pytest.mark.parametrize(("now", "words"), [(130.0, "for 2m10s | deadline in 57m"), (7200.0, "LATE")])
def test_the_head(now: float, words: str) -> None:
    found = ledger(SHAPE, [good("prepare"), TRAINS], MOMENTS, now=now, outcome=None, deadline_at=3600.0)
    text = head_text(SHAPE, found, "local", "under way", now)
    assert text.startswith("cycle 2026-11-20 on local: under way | 1 of 3 jobs done") and words in text


def test_what_a_job_is_doing() -> None:
    moments = (at(1, EventName.EMBED_STARTED, parts=8, done=2), *(at(n, EventName.PART_EMBEDDED) for n in (2, 3, 4)))
    assert doing_text("embed", moments) == "part 5/8"
    assert doing_text("embed", moments[1:]) == ""  # the start is further back than what was read
    assert doing_text("train", ()) == doing_text("verify", moments) == ""
    odd = at(1, EventName.TRAIN_STEPS, step="x", losses=["nan"], samples_per_s=None)
    assert doing_text("train", (odd,)) == "step 0 | loss - | 0 samples/s"


@dataclass
class Target:
    """Tells one thing after the other."""

    looks: list[Any]
    name: str = "batch"

    def records(self, plan: Plan) -> tuple[JobRecord, ...]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, BaseException):
            raise look
        return tuple(look)

    def logs(self, record: JobRecord, *, attempt: int, node: int) -> Iterator[str]:
        raise no_log(record, attempt, node)


def watched(
    looks: list[Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, *, terminal: bool = False
) -> tuple[int, str, list[str]]:
    """Exit code, what was drawn, and the plain lines."""
    store = CycleStore(open_storage(str(tmp_path), stop=StopSignal()), "2026-11-20", lambda: 100.0)
    shape = plan(job("prepare"), job("train", "prepare"))
    monkeypatch.setattr(CycleStore, "plan", lambda store: shape)
    monkeypatch.setattr("jobs.setup.open_target", lambda *given: Target(looks))
    out, lines = io.StringIO(), list[str]()
    console = rich.console.Console(file=out, force_terminal=terminal, width=120)
    opened = OpenCycle(CycleSettings(), store, lines.append, StopSignal())
    code = watch(opened, 1.0, console=console, sleep=lambda seconds: None)
    return code, out.getvalue(), lines


START = [under_way("prepare", "RUNNABLE")]
RUNS = [good("prepare"), under_way("train", "RUNNING", tried(None, at=(50.0, 60.0)))]


def test_until_it_has_ended(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = [good("prepare"), good("train")]
    looks = [START, TransientError("ThrottlingException"), RUNS, RUNS, done]
    code, out, lines = watched(looks, tmp_path, monkeypatch)
    assert (code, "not read: ThrottlingException" in out) == (0, True)
    assert [line.split()[0] for line in lines[1:-1]] == ["prepare", "prepare", "train", "train"]
    assert lines[0].startswith("cycle 2026-11-20 on batch: under way")
    assert lines[-1] == "cycle 2026-11-20: succeeded"


def test_other_ends_of_the_watching(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched([START, KeyboardInterrupt()], tmp_path, monkeypatch)[0] == 0, "that of the watching alone"
    failed = [good("prepare"), bad("train", tried(70, reason="[red]NaN[/red]"))]
    code, out, lines = watched([START, RUNS, failed], tmp_path, monkeypatch, terminal=True)
    assert code == 70 and "[red]NaN[/red], exit code 70" in out, "what jobs say is no markup"
    assert lines[0] == "train failed, attempt 1:" and "logs train" in lines[2]
    monkeypatch.setattr(CycleStore, "closed", lambda self: Closed(outcome="cancelled", at=50.0, reason="by hand"))
    code, _, lines = watched([START], tmp_path, monkeypatch)
    assert (code, lines[-1]) == (143, "cycle 2026-11-20: cancelled, by hand")


def test_as_it_is_typed(trnjobs: Trnjobs) -> None:
    assert trnjobs("status", "--watch")[0] == 78
    trnjobs.ends_with("train", 80)
    trnjobs("submit")
    code, text = trnjobs("status", "--watch", "--every", "0.5")
    assert code == 80 and "train  FAILED" in text
    assert trnjobs("status", "--watch", "--every", "0")[0] == 78
