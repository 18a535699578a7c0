"""`trnjobs cost`, `history` and `report` over a workspace with cycles that have ended."""

import argparse
import json
from pathlib import Path

import pytest

from jobs.commands import show
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import Closed
from jobs.settings import CycleSettings
from jobs.setup import open_cycle
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.test_costs import attempt, record

NIGHTLY = ["2026-11-18", "2026-11-19", "2026-11-20"]


def cycle(workspace: Path, name: str, code: int, claimed_at: float = 1000.0) -> None:
    store = CycleStore(open_storage(str(workspace)), name, lambda: claimed_at)
    shape = plan(job("prepare")).model_copy(update={"cycle": name})
    with store.submitting(shape, "local", "me"):
        store.save_records((record("prepare", attempt(1010, 1070, code), created_at=1000.0),))
        store.close(Closed(outcome="failed" if code else "succeeded", at=1070.0))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for name, code in zip(NIGHTLY, (65, 0, 0), strict=True):
        cycle(tmp_path, name, code)
    return tmp_path


def said(command: str, workspace: Path, **flags: object) -> list[str]:
    jobs = {"sla_s": 60, "vcpu_usd_per_hour": 0.6}
    settings = CycleSettings.model_validate({"workspace": str(workspace), "cycle": "2026-11-20", "jobs": jobs})
    lines = list[str]()
    arguments = argparse.Namespace(**{"settings": settings, "last": None, "json": False} | flags)
    assert getattr(show, f"run_{command}")(arguments, lines.append) == EXIT_OK
    return lines


def cycles(command: str, workspace: Path, last: int) -> list[str]:
    """The cycles that have a row, without the errors of failed jobs below."""
    rows = [line.split()[0] for line in said(command, workspace, last=last)]
    return [name for name in dict.fromkeys(rows) if name[:5] in ("2026-", "check", "run-s")]


def test_the_last_cycles_are_those_claimed_last_whatever_their_names(workspace: Path) -> None:
    for number in range(5):
        cycle(workspace, f"check-{number}", 0, claimed_at=900.0 + number)
    cycle(workspace, "run-script", 0, claimed_at=950.0)
    assert cycles("cost", workspace, 2) == NIGHTLY[1:]
    assert cycles("history", workspace, 3) == NIGHTLY
    assert cycles("history", workspace, 5) == ["check-4", "run-script", *NIGHTLY]
    settings = CycleSettings.model_validate({"workspace": str(workspace), "cycle": "none"})
    with pytest.raises(ConfigError, match="check-4, run-script, 2026-11-18, 2026-11-19, 2026-11-20"):
        open_cycle(settings, print).plan()


@pytest.mark.parametrize(
    ("name", "seen"),
    [("claim.json", "its claim.json is not a valid record"), ("plan.json", "it was claimed but not submitted")],
)
def test_a_cycle_without_a_claim_or_a_plan_is_left_out(workspace: Path, name: str, seen: str) -> None:
    path = workspace / "cycles" / "2026-11-19" / "jobs" / name
    path.write_text("{") if name == "claim.json" else path.unlink()
    lines = said("cost", workspace, last=9)
    assert lines[0].startswith(f"skipping cycle 2026-11-19: {seen}")
    assert cycles("cost", workspace, 9) == [NIGHTLY[0], NIGHTLY[2]]
    assert sorted(cycles("history", workspace, 9)) == NIGHTLY
    if name == "claim.json":
        assert said("history", workspace, last=9)[1].endswith(seen)


def test_the_history_of_a_failed_cycle_whose_claim_is_damaged(workspace: Path) -> None:
    (workspace / "cycles" / NIGHTLY[0] / "jobs" / "claim.json").write_text("{")
    lines = said("history", workspace, last=9)
    assert lines[1].endswith("its claim.json is not a valid record")
    assert sorted(cycles("history", workspace, 9)) == NIGHTLY


def test_for_people_and_for_machines(workspace: Path) -> None:
    *_, summed, goodput, charge = said("cost", workspace, last=9)
    assert "goodput" in goodput and charge.startswith("local: no charge")
    assert summed == "2 of 3 cycles done | 2 of 3 jobs succeeded | 0 of 3 deadlines met"
    found = json.loads("\n".join(said("cost", workspace, last=3, json=True)))["cycles"]
    assert [one["cycle"] for one in found] == NIGHTLY
    failed = found[0]
    assert (failed["goodput"], failed["total"]["machine_ms"]["wasted"]) == (0, 60_000)
    assert failed["entries"][0]["ending"] == "exit 65"


@pytest.mark.parametrize("last", [None, 3])
def test_a_workspace_without_jobs_is_refused(tmp_path: Path, last: int | None) -> None:
    with pytest.raises(ConfigError, match=r"no (jobs|cycle)"):
        said("cost", tmp_path, last=last)


def test_the_report_is_written_and_written_again(workspace: Path) -> None:
    for _ in range(2):
        lines = said("report", workspace)
        page = f"  page: {workspace}/reports/2026-11-20.html"
        assert lines == ["cycle 2026-11-20: succeeded in 1m10s, deadline MISSED, local: no charge", page]
    assert "Cycle 2026-11-20" in (workspace / "reports/2026-11-20.html").read_text()
