"""A user's own pipeline.py, jobs.py, pipeline/ or jobs/ beside a script, or in the current folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRNPIPE = Path(sys.executable).with_name("trnpipe")
OWN = {"pipeline.py": "print('own pipeline')", "jobs.py": "print('own jobs')"}


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([*words], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(params=["modules", "packages", "folders"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for name, text in OWN.items():
        stem = tmp_path / name.removesuffix(".py")
        if request.param == "modules":
            (tmp_path / name).write_text(text)
            continue
        stem.mkdir()
        (stem / ("__init__.py" if request.param == "packages" else "notes.txt")).write_text(text)
    return tmp_path


@pytest.mark.stage
def test_commands_with_processes_of_their_own_work_there(folder: Path) -> None:
    prepare = ("prepare", "--workspace=w", "--cycle=c", "--data.num-workers=2", "--data.synthetic.num-queries=20")
    done = run(folder, str(TRNPIPE), *prepare)
    assert done.returncode == 0, done.stderr
    (folder / "script.py").write_text("import os; print('rank', os.environ['RANK'])")
    done = run(folder, str(TRNPIPE), "launch", "--launch.processes=2", "--", "script.py")
    assert (done.returncode, sorted(done.stdout.split("\n"))[1:]) == (0, ["[0] rank 0", "[1] rank 1"]), done.stderr


def test_import_trnpipe_finds_its_own_packages(folder: Path) -> None:
    (folder / "script.py").write_text("import trnpipe; print(trnpipe.Plan.__module__, trnpipe.Cycle.__module__)")
    assert run(folder, sys.executable, "script.py").stdout == "pipeline.parallel.config jobs.api\n"


@pytest.mark.parametrize("folder", ["modules", "packages"], indirect=True)
def test_a_script_without_trnpipe_finds_its_own(folder: Path) -> None:
    (folder / "script.py").write_text("import pipeline, jobs")
    expected = "own pipeline\nown jobs\n"
    assert run(folder, sys.executable, "script.py").stdout == expected
    done = run(folder, str(TRNPIPE), "launch", "--", "script.py")
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


@pytest.mark.parametrize("folder", ["modules", "packages"], indirect=True)
@pytest.mark.parametrize("name", ["pipeline", "jobs"])
def test_both_in_one_script_are_refused_by_name(folder: Path, name: str) -> None:
    (folder / "script.py").write_text(f"import {name}; import trnpipe; print(trnpipe.Cycle)")
    done = run(folder, sys.executable, "script.py")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ") and str(folder / name) in last and "rename it" in last
