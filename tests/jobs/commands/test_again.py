"""`trnjobs submit` of a cycle that was submitted before: with other settings, and from the beginning."""

import json
import shlex
import signal
from typing import Any

import pytest

from jobs.commands import submit
from jobs.cycle import cycle_store as cycle
from jobs.cycle.job_states import JobState
from jobs.cycle.tables import value_text
from jobs.settings import CycleSettings, of_all_jobs, with_values
from jobs.setup import make_plan, open_cycle
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.registry.records import verdict_key
from pipeline.settings import resolve
from tests.jobs.commands.test_cycle import ALL, CYCLE, ORDER, Trnjobs, submitting, trnjobs
from tests.kit.killing import FILE_CHANGES, killed_at

__all__ = ["trnjobs"]
RIGHT = ("--data.columns.query=search_term", "--data.columns.title=item")


def jobs_file(trnjobs: Trnjobs, name: str) -> Any:
    return json.loads((trnjobs.place / "workspace" / "cycles" / "2026-11-20" / "jobs" / name).read_text())


def failed_in_prepare(trnjobs: Trnjobs) -> None:
    trnjobs.ends_with("prepare", 65)
    assert trnjobs("submit", "--jobs.vcpu-usd-per-hour=0.5")[0] == 65
    trnjobs.ends_with("prepare", 0)
    trnjobs.ran()


def test_a_mistake_is_named_and_started_again(trnjobs: Trnjobs) -> None:
    failed_in_prepare(trnjobs)
    code, text = trnjobs("submit", *RIGHT, "--jobs.train.attempts=2", "--jobs.prices=trn1.2xlarge=1")
    changed = "data.columns.query: query -> search_term, data.columns.title: title -> item, jobs.train.attempts: 3 -> 2"
    assert (code, f"with different settings: {changed}\n" in text) == (78, True), text
    assert "next: the same command with --fresh" in text and trnjobs.ran() == []
    code, text = trnjobs("submit")
    pasted = shlex.split(text.partition("To resume it with its settings, use ")[2].splitlines()[0])
    assert (code, trnjobs.ran()) == (65, [])
    assert pasted[-5:] == ["retry", "--workspace", str(trnjobs.place / "workspace"), "--cycle", "2026-11-20"]
    assert "ignores data.columns.query: query -> search_term" in trnjobs("retry", RIGHT[0])[1]
    trnjobs.ran()

    first = jobs_file(trnjobs, "plan.json")
    code, text = trnjobs("submit", "--fresh", *RIGHT)
    assert code == 78 and "cannot be restarted from the beginning: it has succeeded" in text
    assert (
        jobs_file(trnjobs, "records/round-1.json")[0]["state"] == "FAILED" and jobs_file(trnjobs, "plan.json") == first
    )


def test_retry_with_the_same_settings_reports_no_change(trnjobs: Trnjobs) -> None:
    trnjobs.ends_with("prepare", 65)
    assert trnjobs("submit", "--data.categorical=brand")[0] == 65
    trnjobs.ends_with("prepare", 0)
    code, text = trnjobs("retry", "--data.categorical=brand")
    assert code == 0 and "ignored" not in text


def test_from_the_beginning_with_other_settings(trnjobs: Trnjobs) -> None:
    failed_in_prepare(trnjobs)
    old_plan, old_settings = jobs_file(trnjobs, "plan.json"), jobs_file(trnjobs, "settings.json")
    leave(trnjobs, "cycles/2026-11-20/train/parent.json")  # the model that it was to start from
    assert trnjobs("submit", "--fresh", *RIGHT, "--jobs.vcpu-usd-per-hour=0.5")[0] == 0
    assert trnjobs.ran() == ALL
    assert trnjobs.states() == dict.fromkeys(ORDER, "SUCCEEDED")
    assert not (trnjobs.place / "workspace" / "cycles" / "2026-11-20" / "train" / "parent.json").exists()
    kept = [jobs_file(trnjobs, f"earlier/round-1/{name}.json") for name in ("plan", "settings")]
    assert kept == [old_plan, old_settings]
    assert jobs_file(trnjobs, "settings.json")["data"]["columns"]["query"] == "search_term"
    assert trnjobs("history")[1].splitlines()[1].split()[-1] == "6"
    found = json.loads(trnjobs("cost", "--json")[1])["cycles"][0]
    assert [(one["job"], one["submission"]) for one in found["entries"]][:2] == [("prepare", 1), ("prepare", 2)]
    assert (found["succeeded"], found["failed"], found["total"]["usd"] > 0) == (5, 0, True), "by the stored price"
    assert "5 of 5 jobs succeeded" in trnjobs.page()

    dearer = json.loads(trnjobs("cost", "--json", "--jobs.vcpu-usd-per-hour=5")[1])["cycles"][0]
    assert dearer["total"]["usd"] == pytest.approx(10 * found["total"]["usd"]), "what is given now wins"
    settings = trnjobs.place / "workspace" / "cycles" / "2026-11-20" / "jobs" / "settings.json"
    settings.write_text('{"of_a_later_version": 1}')
    assert json.loads(trnjobs("cost", "--json")[1])["cycles"][0]["total"]["usd"] is None
    trnjobs.expect(0, "ignoring its stored settings: unknown setting of_a_later_version", "cost")
    assert trnjobs.status()["closed"]["outcome"] == "succeeded"


@pytest.mark.parametrize("ended_by", ["interrupt", "kill"])
def test_what_nobody_runs_any_more_is_ended_and_started_again(ended_by: str, trnjobs: Trnjobs) -> None:
    """Ctrl-C at the first wrong line, or a machine that was restarted."""
    process = submitting(trnjobs)
    for flags, seen in (["--fresh"], ""), ([], "--fresh is refused: "):
        trnjobs.expect(78, f"{seen}another process is running its jobs", "submit", *flags, *RIGHT)
    process.terminate() if ended_by == "interrupt" else process.kill()
    process.join()
    assert trnjobs.ran() == ["prepare 1", "train 1"]
    (trnjobs.place / "hold-train").unlink()
    trnjobs.expect(78, "the same command with --fresh", "submit", *RIGHT)
    code, text = trnjobs("submit", "--fresh", *RIGHT)
    assert (code, trnjobs.ran()) == (0, ALL), text
    records = jobs_file(trnjobs, "records/round-1.json")
    assert len(records) == len(ORDER) and all(JobState(one["state"]).is_final for one in records)


def leave(trnjobs: Trnjobs, key: str) -> None:
    path = trnjobs.place / "workspace" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


@pytest.mark.parametrize(
    ("key", "is_refused"),
    [
        (f"checkpoints/2026-11-20/step-7/{MANIFEST_NAME}", True),
        ("checkpoints/2026-11-20/step-7/model.safetensors", False),  # a checkpoint that was never committed
        ("checkpoints/2026-11-20/mine/last.pt", True),  # of a script
        ("cycles/2026-11-20/train/result.json", True),
        ("cycles/2026-11-20/prepare/result.json", False),
        (verdict_key("2026-11-20"), True),
        (f"checkpoints/2026-11-21/step-7/{MANIFEST_NAME}", False),
    ],
)
def test_what_was_trained_or_judged_stays(key: str, is_refused: bool, trnjobs: Trnjobs) -> None:
    """And the error offers --fresh exactly where it would work."""
    failed_in_prepare(trnjobs)
    leave(trnjobs, key)
    code, text = trnjobs("submit", *RIGHT)
    offers, refuses = "the same command with --fresh" in text, "--fresh is refused: " in text
    assert (code, offers, refuses) == (78, not is_refused, is_refused)
    assert bool(submit.obstacle(open_cycle(settings_of(trnjobs), lambda _: None))) is is_refused
    if is_refused:
        assert trnjobs("submit", "--fresh", *RIGHT)[0] == 78
        assert trnjobs.ran() == []


def settings_of(trnjobs: Trnjobs, *words: str) -> CycleSettings:
    given = [("--workspace", str(trnjobs.place / "workspace"))]
    given += [(flag, value) for flag, _, value in (word.partition("=") for word in (*CYCLE, *words))]
    return resolve((), {}, given, model=CycleSettings).settings


@pytest.mark.fault
@pytest.mark.parametrize("calls", [(6, 14), (22, 30, 38), (50, 70)])
def test_a_start_from_the_beginning_killed_and_repeated(
    calls: tuple[int, ...], trnjobs: Trnjobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycle, "LEASE_S", 0.0)  # else the next one has to wait for that of the dead
    failed_in_prepare(trnjobs)
    changes = FILE_CHANGES | {"subprocess.Popen", "os.kill"}
    ends = [killed_at(number, lambda: trnjobs("submit", "--fresh", *RIGHT), changes) for number in calls]
    assert -signal.SIGKILL in ends
    code, text = trnjobs("submit", "--fresh", *RIGHT)
    assert code == 0, text
    ran = trnjobs.ran()
    assert all(ran.count(one) <= 1 + len(calls) for one in ran) and set(ran) == set(ALL)
    assert trnjobs.states() == dict.fromkeys(ORDER, "SUCCEEDED")
    assert jobs_file(trnjobs, "settings.json")["data"]["columns"]["query"] == "search_term"
    assert jobs_file(trnjobs, "earlier/round-1/settings.json")["data"]["columns"]["query"] == "query"
    assert "5 of 5 jobs succeeded" in trnjobs.page()


def test_a_workspace_elsewhere(trnjobs: Trnjobs, s3_uri: str) -> None:
    """Its local jobs are known on the machine that runs them alone."""
    at, here = f"--workspace={s3_uri}", f"--scratch={trnjobs.place / 'scratch'}"
    trnjobs.ends_with("prepare", 65)
    assert trnjobs("submit", at, here)[0] == 65
    trnjobs.ends_with("prepare", 0)
    opened = open_cycle(settings_of(trnjobs, at), lambda _: None)
    opened.store.reopen()  # as while it runs
    elsewhere = f"--scratch={trnjobs.place / 'other'}"
    trnjobs.expect(78, "--fresh is refused: its jobs may run on another machine", "submit", at, elsewhere, *RIGHT)
    trnjobs.ran()
    assert trnjobs("submit", at, here, "--fresh", *RIGHT)[0] == 0
    assert trnjobs.ran() == ALL


@pytest.mark.parametrize(
    ("before", "now", "shown"),
    [
        ({}, {"jobs.environment": {"HF_TOKEN": "hf_secretsecret"}}, "jobs.environment.HF_TOKEN: *** -> ***"),
        ({"data.path": "s3://me:hunter2@b/x"}, {"data.path": "s3://b/y"}, "data.path: s3://***@b/x -> s3://b/y"),
        ({"data.path": "d" * 200 + "1"}, {"data.path": "e"}, "d… -> e"),
        ({"data.labels": ["0", "1"]}, {"data.labels": ["1", "0"]}, "data.labels: 0 1 -> 1 0"),
        ({"data.filter": {"locale": "us"}}, {"data.filter": {"locale": "jp"}}, "data.filter.locale: us -> jp"),
        ({}, {"backend": "cpu"}, "backend: auto -> cpu"),
        ({}, {"data.query_prefix": "a\x1b[31m"}, 'data.query_prefix: "" -> "a\\u001b[31m"'),
    ],
)
def test_what_differs_is_short_and_shows_no_secret(
    before: dict[str, Any], now: dict[str, Any], shown: str, trnjobs: Trnjobs
) -> None:
    base = of_all_jobs(settings_of(trnjobs))
    here = {"cycle": "2026-11-20", "workspace": str(trnjobs.place / "workspace")}
    stored, given = (with_values(base, values).model_copy(update=here) for values in (before, now))
    first = open_cycle(stored, lambda _: None)
    with first.store.submitting(make_plan(stored), "local", "me"):
        first.store.save_settings(of_all_jobs(stored))
    found = submit.changes(open_cycle(given, lambda _: None), make_plan(given), "batch")
    assert found[0] == "target: local -> batch"
    assert any(shown in one for one in found[1:]), found
    assert not any("hunter" in one or "secretsecret" in one or len(one) > 200 for one in found)


def test_of_equal_settings_that_another_version_planned(trnjobs: Trnjobs, monkeypatch: pytest.MonkeyPatch) -> None:
    failed_in_prepare(trnjobs)
    monkeypatch.setattr("jobs.plan.resources.SHARED_MEMORY_SHARE", 4)
    text = trnjobs("submit")[1]
    assert "jobs.prepare.resources.shared_memory_mib: 256 -> 512" in text


def test_a_secret_in_a_command_is_not_shown() -> None:
    words = ["python", "--api-key", "abc", "--token=def", "HF_TOKEN=g", "--max-tokens", "5"]
    steps = json.loads(value_text("jobs.steps", [{"name": "x", "command": words}]))
    assert steps[0]["command"] == ["python", "--api-key", "***", "--token=***", "HF_TOKEN=***", "--max-tokens", "5"]
    assert value_text("command", words) == ("python --api-key '***' '--token=***' 'HF_TOKEN=***' --max-tokens 5")
