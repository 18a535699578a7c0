"""What `trnpipe launch` is given, and how it starts it."""

import sys
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.commands import launch as command
from pipeline.commands.launch import script_arguments
from pipeline.core.errors import ConfigError


def test_what_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    for python in (["python"], ["python3"], ["python3.11", "-u"], ["/usr/bin/python3"], [sys.executable], []):
        assert script_arguments([*python, "x.py", "--", "-m", "a"]) == ["x.py", "--", "-m", "a"]
        assert script_arguments([*python, "-m", "a.b", "x.py"]) == ["-m", "a.b", "x.py"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "no script"),
        (["python"], "no script"),
        (["python", "-m"], "no script"),
        (["y.py"], "y.py does not exist"),
        (["python", "-X", "dev", "x.py"], "option -X is not supported"),
        (["torchrun", "x.py"], "torchrun does not exist"),
    ],
)
def test_what_is_no_script_is_refused(words: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        script_arguments(words)


def test_the_words_behind_the_dashes_are_the_script_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may look like ours; a plan in the environment is not taken for a setting."""
    monkeypatch.setattr(command, "launch_script", lambda words, processes, stop: print(words, processes) or 7)
    monkeypatch.setenv("TRNPIPE_PARALLEL", '{"shard_degree": 2}')
    words = ["-m", "a", "--help", "--", "--train.seed", "x"]
    assert cli.main(["launch", "--launch.processes", "4", "--", *words]) == 7
    assert capsys.readouterr().out == f"{words} 4\n"
    assert cli.main(["launch", "x.py"]) == 78
    assert "-- [python] SCRIPT.py|-m MODULE [ARGUMENT ...]" in capsys.readouterr().err
