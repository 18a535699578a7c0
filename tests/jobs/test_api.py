"""A cycle from Python: submitted, watched, cancelled; from threads and inside a running event loop."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import trnpipe
from jobs.api import Cycle
from pipeline.core.errors import ConfigError, Preempted, TransientError
from tests.jobs.commands.test_cycle import Trnjobs, submitting, trnjobs
from tests.jobs.cycle.test_page import HOSTILE
from tests.jobs.targets.local.waiting import until

__all__ = ["trnjobs"]
SETTINGS = {"jobs": {"embed": {"workers": 2}, "local_vcpus": 4}}


def cycle_in(trnjobs: Trnjobs, name: str = "2026-11-20", **more: object) -> Cycle:
    return trnpipe.Cycle(None, trnjobs.place / "workspace", name, settings=SETTINGS, **more)  # type: ignore[arg-type]


def test_a_cycle_from_plan_to_page(trnjobs: Trnjobs) -> None:
    said: list[str] = []
    cycle = cycle_in(trnjobs, say=said.append)
    assert [job.name for job in cycle.plan().jobs] == ["prepare", "train", "embed", "report"]
    assert cycle.status().outcome == "not submitted" and not cycle.status().has_ended
    assert cycle.plan().plan_id == cycle_in(trnjobs).plan().plan_id
    held = trnjobs.hold("train")
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    assert cycle.submit().outcome == "open"
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers
    until(lambda: cycle.status().jobs[1].state == "RUNNING", "train")
    assert cycle.submit().outcome == "open", "twice is once"
    with pytest.raises(TransientError, match="has not ended within"):
        cycle.wait(0.1)
    assert cycle.result().exit_code is None and cycle.result().outcome == "open"
    held.unlink()
    status = cycle.wait(300, every_s=0.1)
    assert (status.outcome, status.target, status.has_ended) == ("succeeded", "local", True)
    assert [(row["name"], row["state"], row["tries"]) for row in status.table][1] == ("train", "SUCCEEDED", 1)
    result = cycle.result()
    assert (result.exit_code, result.outcome, result.promoted, result.table) == (0, "succeeded", False, [])
    assert "this is train" in "".join(cycle.logs("train"))
    with pytest.raises(ConfigError, match="no job 'rank'"):
        list(cycle.logs("rank"))
    written = trnjobs.page_file.read_bytes()
    page = cycle.report()
    assert trnjobs.page_file.read_bytes() == written and page.uri == trnjobs.page_file.as_uri()
    assert page.data.outcome == "succeeded" and any("succeeded" in line for line in said)
    assert cycle_in(trnjobs).wait(1).outcome == "succeeded", "from elsewhere, too"
    assert cycle.submit().outcome == "succeeded"


def test_a_failure_is_a_result_and_cancel_ends_what_runs(trnjobs: Trnjobs) -> None:
    trnjobs.ends_with("train", 65)
    cycle = cycle_in(trnjobs)
    cycle.submit()
    status = cycle.wait(300, every_s=0.1)
    said = "this is train trnpipe train"
    assert (status.outcome, status.reason) == ("failed", f"train: exit code 65 (DataError): {said}")
    assert [job.error for job in status.jobs if job.name == "train"] == [said]
    assert cycle.result().exit_code == 65
    title, head, *rows = str(status).splitlines()
    assert title == f"cycle 2026-11-20: failed, {status.reason}" and head.split() == ["job", "state", "ran", "why"]
    assert [row.split()[:2] for row in rows[:2]] == [["prepare", "SUCCEEDED"], ["train", "FAILED"]]
    assert str(cycle.result()) == "cycle 2026-11-20: failed" and str(cycle.report()).startswith("CyclePage(uri=")
    trnjobs.hold("train")
    other = cycle_in(trnjobs, "2026-11-21")
    other.submit()
    until(lambda: other.status().jobs[1].state == "RUNNING", "train")
    assert cycle_in(trnjobs, "2026-11-21").cancel("wrong data").outcome == "cancelled"
    assert other.wait(300, every_s=0.1).outcome == "cancelled"


def test_a_cycle_whose_process_was_killed_is_not_waited_for(trnjobs: Trnjobs) -> None:
    process = submitting(trnjobs)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(Preempted, match=r"interrupted .* ago") as ended:
        cycle_in(trnjobs).wait(300, every_s=0.1)
    assert ended.value.next_command == "submit() to resume it"
    trnjobs("cancel")


def test_from_the_beginning_is_not_the_end_of_the_submission_before(trnjobs: Trnjobs) -> None:
    trnjobs.ends_with("prepare", 65)
    cycle = cycle_in(trnjobs)
    cycle.submit()
    assert cycle.wait(300, every_s=0.1).outcome == "failed"
    trnjobs.ends_with("prepare", 0)
    held = trnjobs.hold("prepare")
    assert cycle.submit(fresh=True).outcome == "open"
    held.unlink()
    assert cycle.wait(300, every_s=0.1).outcome == "succeeded"


def test_from_a_thread_and_inside_a_running_loop(trnjobs: Trnjobs) -> None:
    def work(name: str) -> str:
        cycle = cycle_in(trnjobs, name)
        cycle.submit()
        return cycle.wait(300, every_s=0.1).outcome

    async def notebook() -> str:
        return work("2026-11-21")

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(work, "2026-11-20").result() == "succeeded"
    assert asyncio.run(notebook()) == "succeeded"


def test_settings_from_files_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRNPIPE_TRAIN__SEED", "5")
    file = tmp_path / "one.toml"
    file.write_text('model_name = "mine"\n[train]\nseed = 4\nepochs = 3\n')
    cycle = Cycle([file], tmp_path / "w", "c", settings={"train": {"epochs": 2.0}})
    assert (cycle.settings.model_name, cycle.settings.train.seed, cycle.settings.train.epochs) == ("mine", 5, 2.0)
    with pytest.raises(ConfigError, match="a value set in Python") as refused:
        Cycle(file, tmp_path / "w", settings={"train": {"epochz": 2.0}})
    assert "epochs" in str(refused.value)
    with pytest.raises(ConfigError, match="has no jobs") as nothing:
        Cycle(file, tmp_path / "w").wait()
    assert nothing.value.exit_code == 78
    with pytest.raises(ConfigError, match="has 0 models"):
        trnpipe.Registry(str(tmp_path / "w"))


def test_what_a_notebook_shows_is_text(trnjobs: Trnjobs) -> None:
    cycle = cycle_in(trnjobs)
    status = cycle.status()
    cycle.submit()
    cycle.wait(300, every_s=0.1)
    result, page = cycle.result(), cycle.report()
    for text in HOSTILE:
        jobs = tuple(job.model_copy(update={"why": text}) for job in status.jobs)
        for shown in (
            status.model_copy(update={"reason": text, "jobs": jobs}),
            result.model_copy(update={"figures": {text: {text: text}}}),
            page.model_copy(update={"data": page.data.model_copy(update={"reason": text})}),
        ):
            html = shown._repr_html_()
            assert "<script" not in html and "\u202e" not in html and "\x00" not in html and "<img" not in html
