"""`trnjobs cost` and `trnjobs report` over a workspace with cycles that have ended."""

import argparse
import json
from pathlib import Path

import pytest

from jobs.commands import show
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import Closed
from jobs.settings import CycleSettings
from jobs.setup import open_cycle
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.test_ledger import attempt, record


def cycle(workspace: Path, name: str, code: int, claimed_at: float = 1000.0) -> None:
    store = CycleStore(open_storage(str(workspace)), name, lambda: claimed_at)
    shape = plan(job("prepare")).model_copy(update={"cycle": name})
    with store.submitting(shape, "local", "me"):
        store.save_records((record("prepare", attempt(1010, 1070, code), created_at=1000.0),))
        store.close(Closed(outcome="failed" if code else "succeeded", at=1070.0))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for name, code in (("2026-11-18", 65), ("2026-11-19", 0), ("2026-11-20", 0)):
        cycle(tmp_path, name, code)
    return tmp_path


def said(command: str, workspace: Path, **flags: object) -> list[str]:
    jobs = {"sla_s": 60, "vcpu_usd_per_hour": 0.6}
    settings = CycleSettings.model_validate({"workspace": str(workspace), "cycle": "2026-11-20", "jobs": jobs})
    commands = {"cost": show.run_cost, "report": show.run_report, "history": show.run_history}
    run, lines = commands[command], list[str]()
    arguments = argparse.Namespace(**{"settings": settings, "last": None, "json": False} | flags)
    assert run(arguments, lines.append) == EXIT_OK
    return lines


def test_the_last_cycles_and_their_success(workspace: Path) -> None:
    lines = said("cost", workspace, last=2)
    assert [line.split()[1] for line in lines[:2]] == ["2026-11-19:", "2026-11-20:"]
    assert lines[-2] == "2 of 2 cycles done | 2 of 2 jobs succeeded | 0 of 2 deadlines met"
    assert said("cost", workspace, last=9)[-2].startswith("2 of 3 cycles done")


def history(workspace: Path, last: int) -> list[str]:
    """The rows, without the errors of failed jobs below them."""
    return [line for line in said("history", workspace, last=last)[1:] if not line.startswith(("cycle ", " "))]


def test_the_last_cycles_are_those_claimed_last_whatever_their_names(workspace: Path) -> None:
    cycle(workspace, "check-base", 0, claimed_at=900.0)
    cycle(workspace, "run-script", 0, claimed_at=950.0)
    assert [line.split()[1] for line in said("cost", workspace, last=2)[:2]] == ["2026-11-19:", "2026-11-20:"]
    nightly = ["2026-11-18", "2026-11-19", "2026-11-20"]
    assert [line.split()[0] for line in history(workspace, 3)] == nightly
    assert [line.split()[0] for line in history(workspace, 9)] == [
        "check-base",
        "run-script",
        *nightly,
    ]


def test_a_damaged_claim_does_not_hide_the_other_cycles(workspace: Path) -> None:
    (workspace / "cycles/2026-11-19/jobs/claim.json").write_text("{")
    damaged, *others = history(workspace, 9)
    assert damaged.split()[:3] == ["2026-11-19", "-", "-"]
    assert damaged.endswith("its claim.json is not a valid record")
    assert [line.split()[0] for line in others] == ["2026-11-18", "2026-11-20"]
    lines = said("cost", workspace, last=9)
    assert lines[0].startswith("cycle 2026-11-19: its claim.json is not a valid record: left out")
    assert [line.split()[1] for line in lines[1:3]] == ["2026-11-18:", "2026-11-20:"]
    assert len(said("cost", workspace, last=9, json=True)) == 1


def test_the_cycles_named_for_one_that_has_no_jobs_are_the_newest(workspace: Path) -> None:
    for number in range(5):
        cycle(workspace, f"check-{number}", 0, claimed_at=900.0 + number)
    settings = CycleSettings.model_validate({"workspace": str(workspace), "cycle": "none"})
    with pytest.raises(ConfigError, match="check-3, check-4, 2026-11-18, 2026-11-19, 2026-11-20"):
        open_cycle(settings, print).plan()


def test_a_cycle_that_was_only_claimed_is_left_out(workspace: Path) -> None:
    store = CycleStore(open_storage(str(workspace)), "2026-11-19", lambda: 1000.0)
    store.storage.delete([store.key("plan.json")])
    lines = said("cost", workspace, last=3)
    assert lines[0].startswith("cycle 2026-11-19: claimed, but nothing was submitted")
    assert [line.split()[1] for line in lines[1:3]] == ["2026-11-18:", "2026-11-20:"]
    assert len(json.loads("\n".join(said("cost", workspace, last=3, json=True)))["cycles"]) == 2


def test_for_machines(workspace: Path) -> None:
    found = json.loads("\n".join(said("cost", workspace, last=3, json=True)))
    assert [one["cycle"] for one in found["cycles"]] == ["2026-11-18", "2026-11-19", "2026-11-20"]
    failed = found["cycles"][0]
    assert (failed["goodput"], failed["total"]["machine_ms"]["wasted"], failed["entries"][0]["ending"]) == (
        0,
        60_000,
        "exit 65",
    )


def test_a_workspace_without_jobs_is_refused(tmp_path: Path) -> None:
    for flags in ({}, {"last": 3}):
        with pytest.raises(ConfigError, match=r"no (jobs|cycle)"):
            said("cost", tmp_path, **flags)


def test_the_report_is_written_and_written_again(workspace: Path) -> None:
    for _ in range(2):
        lines = said("report", workspace)
        assert lines[0].startswith("cycle 2026-11-20: succeeded")
        assert lines[-1] == f"report: file://{workspace}/reports/2026-11-20.html"
    text = (workspace / "reports/2026-11-20.html").read_text()
    assert "Cycle 2026-11-20" in text and text.endswith("</html>\n")
