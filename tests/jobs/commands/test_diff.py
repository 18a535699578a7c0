"""`trnjobs diff`, and the newest cycle as the one that reading commands show."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs import cli
from jobs.commands.diff import _changed
from pipeline.core.errors import ConfigError

RUN = ["--jobs.local-vcpus=4"]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A workspace with two submitted cycles, whose one job writes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jobs.plan.cycle.AFTER", {"prepare": ()})
    monkeypatch.setattr("jobs.plan.cycle._COMMANDS", {"prepare": ("true",)})
    flags = [f"--workspace={tmp_path}/workspace", *RUN]
    for name, epochs in (("b", "2"), ("a", "3")):
        assert cli.main(["submit", *flags, f"--cycle={name}", f"--train.epochs={epochs}"]) == 0
    return flags


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    capsys.readouterr()
    code = cli.main([*words])
    seen = capsys.readouterr()
    return code, seen.out.splitlines(), seen.err


def test_the_newest_two_cycles_are_compared(two: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, "diff", *two)
    assert code == 0
    assert lines[:3] == ["b -> a", "settings:", "  train.epochs  2.0  ->  3.0"]
    assert lines[3:] == ["data of all prepared days: no difference", "metrics:", "  the first was not evaluated"]
    assert run(capsys, "diff", "a", "b", *two)[1][2] == "  train.epochs  3.0  ->  2.0"


@pytest.mark.parametrize("cycles", [["a"], ["a", "b", "c"], ["a", "c"]])
def test_what_cannot_be_compared_is_refused(
    two: Sequence[str], cycles: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "diff", *cycles, *two)
    assert code == ConfigError.exit_code and "trnjobs" in err


def test_reading_commands_show_the_newest_cycle(two: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "status", *two)[1][-1].startswith("cycle a: succeeded")
    assert run(capsys, "cost", *two)[1][-3].split()[0] == "a"
    assert run(capsys, "logs", "prepare", *two)[0] == 0
    assert run(capsys, "status", *two, "--cycle=b")[1][-1].startswith("cycle b: succeeded")


def test_a_script_that_ran_is_shown_where_no_cycle_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hello.sh").write_text("echo hello")
    assert run(capsys, "run", *RUN, "--", "sh", "hello.sh")[0] == 0
    assert run(capsys, "status")[1][-1] == "cycle run-sh: succeeded"
    assert run(capsys, "logs", "sh")[1] == ["hello"]


def test_the_history_says_what_became_of_the_model(
    two: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcomes() -> list[str]:
        return [" ".join(line.split()[4:-3]) for line in run(capsys, "history", *two)[1][1:]]

    path = tmp_path / "workspace/cycles/b/evaluate/result.json"
    path.parent.mkdir()
    result: dict[str, Any] = {"stage": "evaluate", "cycle": "b", "status": "done", "inputs": {}, "settings_hash": ""}
    result |= {"code_version": "", "started": "2026-11-20T02:00:00Z", "finished": "2026-11-20T02:00:00Z"}
    path.write_text(json.dumps(result | {"figures": {"promoted": True, "without_comparison": True}}))
    assert outcomes() == ["promoted WITHOUT a comparison", "succeeded"]
    path.write_text("{")
    assert outcomes() == ["succeeded", "succeeded"]


def test_values_are_short_and_numbers_have_thousands() -> None:
    lines = _changed({"rows": 18000, "name": "x" * 99, "on": True}, {"rows": 1, "name": "", "on": False})
    assert [line.split()[0] for line in lines] == ["rows", "name", "on"]
    assert lines[0].split() == ["rows", "18,000", "->", "1"] and max(map(len, lines)) < 80


def test_secrets_are_shown_by_nobody() -> None:
    before, now = (
        {"jobs": {"environment": {"API_TOKEN": "old-one"}}},
        {"jobs": {"environment": {"API_TOKEN": "new-one"}}},
    )
    (line,) = _changed(before, now)
    assert "API_TOKEN" in line and "-one" not in line
