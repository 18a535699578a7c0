"""`trnjobs status --watch`: a cycle as it goes on, and the end of the watching."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import rich.console

from jobs.commands.watch import watch
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import Closed, JobRecord
from jobs.plan.dag import Plan
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle
from jobs.targets.base import no_log
from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from tests.jobs.commands.test_cycle import Trnjobs, trnjobs
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.record_cases import bad, good, tried, under_way

__all__ = ["trnjobs"]
SHAPE = plan(job("prepare"), job("train", "prepare"))


@dataclass
class Target:
    """Tells one thing after the other."""

    looks: list[Any]
    name: str = "batch"
    seen: list[str] = field(default_factory=list)

    def records(self, plan: Plan) -> tuple[JobRecord, ...]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, BaseException):
            raise look
        return tuple(look)

    def logs(self, record: JobRecord, *, attempt: int, node: int) -> Iterator[str]:
        raise no_log(record, attempt, node)


def watched(
    target: Target, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, *, terminal: bool
) -> tuple[int, str, list[str]]:
    """Exit code, what was drawn, and the plain lines."""
    store = CycleStore(open_storage(str(tmp_path), stop=StopSignal()), "2026-11-20", lambda: 100.0)
    monkeypatch.setattr(CycleStore, "plan", lambda store: SHAPE)
    monkeypatch.setattr("jobs.setup.open_target", lambda *given: target)
    out, lines = io.StringIO(), list[str]()
    console = rich.console.Console(file=out, force_terminal=terminal, width=120)
    cycle = OpenCycle(CycleSettings(), store, lines.append, StopSignal())
    code = watch(cycle, 1.0, console=console, sleep=lambda seconds: None)
    return code, out.getvalue(), lines


START = [under_way("prepare", "RUNNABLE")]
TRAINS = [good("prepare"), under_way("train", "RUNNING", tried(None, at=(50.0, 60.0)))]
DONE = [good("prepare"), good("train")]


def test_until_it_has_ended(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [START, TransientError("ThrottlingException"), TRAINS, TRAINS, DONE]
    code, out, lines = watched(Target(looks), tmp_path, monkeypatch, terminal=False)
    assert (code, "not read: ThrottlingException" in out) == (0, True)
    assert [line.split()[1] for line in lines[1:-1]] == ["prepare", "train", "prepare", "train", "train"]
    assert lines[0].startswith("cycle 2026-11-20 on batch: under way")
    assert lines[-1] == "cycle 2026-11-20: succeeded"


def test_on_a_terminal_it_is_one_picture(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    failed = [good("prepare"), bad("train", tried(70, reason="[red]NaN[/red]"))]
    code, out, lines = watched(Target([START, TRAINS, failed]), tmp_path, monkeypatch, terminal=True)
    assert code == 70
    assert "[red]NaN[/red], exit code 70" in out and "✗" in out  # what jobs say is no markup
    assert lines == [
        "train failed, attempt 1:",
        "  its log is gone or cannot be read",
        f"  log: trnjobs logs train --workspace {tmp_path} --cycle 2026-11-20",
        "cycle 2026-11-20: failed, train: [red]NaN[/red], exit code 70 (NumericError)",
    ]


def test_ctrl_c_ends_the_watching_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(Target([START, KeyboardInterrupt()]), tmp_path, monkeypatch, terminal=False)[0] == 0


def test_as_it_is_typed(trnjobs: Trnjobs) -> None:
    code, text = trnjobs("status", "--watch")
    assert (code, "no jobs of cycle" in text) == (78, True)
    trnjobs.ends_with("train", 80)
    trnjobs("submit")
    code, text = trnjobs("status", "--watch", "--every", "0.5")
    assert code == 80 and "✗  train  FAILED" in text
    assert trnjobs("status", "--watch", "--every", "0")[0] == 78


def test_a_closed_cycle_is_shown_as_it_ended(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CycleStore, "closed", lambda self: Closed(outcome="cancelled", at=50.0, reason="by hand"))
    code, _, lines = watched(Target([START]), tmp_path, monkeypatch, terminal=False)
    assert (code, lines[-1]) == (143, "cycle 2026-11-20: cancelled, by hand")
