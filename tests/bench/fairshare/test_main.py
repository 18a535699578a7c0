"""`python -m bench.fairshare` as it is typed."""

import json
from pathlib import Path

import pytest

from bench.fairshare.__main__ import main

POLICY = """
name = "search"
share_decay_s = 7200
compute_reservation = 10
shares = [{ share_identifier = "production", weight = 0.25 }, { share_identifier = "backfill", weight = 4 }]
"""


def test_policies_are_compared_on_the_same_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "search.toml").write_text(POLICY)
    (tmp_path / "equal.toml").write_text('name = "equal"')
    files = [f"--policy={tmp_path / name}.toml" for name in ("equal", "search")]
    assert main(["--num-jobs=300", *files, "--json"]) == 0
    equal, search = json.loads(capsys.readouterr().out)
    waits = [{one["share"]: one["wait_p95_s"] for one in policy["shares"]} for policy in (equal, search)]
    assert waits[1]["production"] < waits[0]["production"]
    assert main(["--num-jobs=300", *files]) == 0
    text = capsys.readouterr().out
    assert "policy equal: 300 jobs" in text and "policy search: 300 jobs" in text
    assert max(map(len, text.splitlines())) <= 130


def test_a_workload_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [{"id": f"j{i}", "share": "a", "submit_s": i, "duration_s": 60, "vcpus": 4} for i in range(3)]
    (tmp_path / "jobs.json").write_text(json.dumps({"jobs": jobs}))
    assert main([str(tmp_path / "jobs.json"), "--max-vcpus", "4", "--json"]) == 0
    (replayed,) = json.loads(capsys.readouterr().out)
    assert replayed["span_s"] == 180
    assert replayed["utilisation"] == 1.0


@pytest.mark.parametrize(
    ("words", "text", "code"),
    [
        (["none.json"], "none.json", 65),
        (["bad.json"], "bad.json", 65),
        (["--policy=bad.json"], "bad.json", 78),
        (["--policy=hyphen.toml"], "shares.0.share_identifier", 78),
        (["--num-jobs=0"], "num_jobs", 78),
        (["--num-jobs=5", "--max-vcpus=1"], "expected: at most the 1 of the fleet", 78),
    ],
)
def test_rubbish_is_refused_in_one_message(
    words: list[str],
    text: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"jobs": [')
    Path("hyphen.toml").write_text('shares = [{ share_identifier = "prod-1", weight = 1 }]')
    assert main(words) == code
    captured = capsys.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err
