"""What an image executes, executed here: the installed commands on PATH, and no shell in between.

How `trnjobs-entry` keeps nodes in step, passes signals on and reaps orphans as PID 1: tests/jobs/node.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jobs.config import JobsConfig
from jobs.plan.cycle import plan_cycle
from pipeline.core.errors import EXIT_BUG, EXIT_OK, EXIT_TABLE
from tests.docker.dockerfile import DOCKERFILES, ROOT, environment, executed, last_stage

pytestmark = pytest.mark.fault

CPU = ROOT / "docker" / "cpu.Dockerfile"
NASTY = [
    "two words",
    "",
    "'",
    '"',
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "$HOME",
    "*",
    "a\nb",
    "--",
    "\\",
]
STAND_IN = f"""#!{sys.executable}
import json, sys
print(json.dumps(sys.argv[1:]), flush=True)
sys.exit(int(sys.argv[1]) if sys.argv[1:2] and sys.argv[1].isdigit() else 0)
"""


@pytest.fixture
def container(tmp_path: Path) -> dict[str, str]:
    """The environment of a container: our commands on PATH, `trnpipe` a stand-in, and nothing of the tests'."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("trnjobs", "trnjobs-entry"):
        (folder / name).symlink_to(Path(sys.executable).parent / name)
    (folder / "trnpipe").write_text(STAND_IN)
    (folder / "trnpipe").chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(tmp_path)}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_words_arrive_as_they_are(path: Path, container: dict[str, str], tmp_path: Path) -> None:
    words = executed(path, ["trnjobs-entry", "--", "trnpipe", *NASTY])
    ended = subprocess.run(words, env=container, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout) == NASTY
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_job_is_executed_as_it_is_planned(path: Path) -> None:
    plan = plan_cycle(JobsConfig(name="relevance"), cycle="first", workspace="s3://bucket/a")
    for job in plan.jobs:
        assert executed(path, list(job.command)) == list(job.command)
        assert job.command[:2] == ("trnjobs-entry", "--")


def test_exit_codes_pass(container: dict[str, str]) -> None:
    codes = [EXIT_OK, EXIT_BUG, *(rule.exit_code for rule in EXIT_TABLE)]
    running = [
        subprocess.Popen(
            executed(CPU, ["trnjobs-entry", "--", "trnpipe", str(code)]), env=container, stdout=subprocess.DEVNULL
        )
        for code in codes
    ]
    assert [process.wait(timeout=300) for process in running] == codes


def test_without_a_command_the_cpu_image_does_what_make_cycle_does() -> None:
    show = ["make", "-C", str(ROOT), "--dry-run", "--no-print-directory", "cycle", "WORKSPACE=/workspace/quickstart"]
    env = {name: value for name, value in os.environ.items() if name not in ("CYCLE", "CONFIG", "ARGS", "DATA")}
    shown = subprocess.run(show, env=env, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    assert executed(CPU) == ["trnjobs-entry", "--", Path(shown[0]).name, *shown[1:]]
    assert environment(last_stage(CPU))["PJRT_DEVICE"] == "CPU"


@pytest.mark.parametrize("path", [path for path in DOCKERFILES if path != CPU], ids=lambda path: path.name)
def test_without_a_command_the_others_tell_how_they_are_used(path: Path, container: dict[str, str]) -> None:
    path_of_commands = f"{Path(sys.executable).parent}:{container['PATH']}"
    words = executed(path)
    found = shutil.which(words[0], path=path_of_commands)
    assert found is not None
    shown = subprocess.run([found, *words[1:]], env=container, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("usage: trnpipe")


@pytest.mark.slow
def test_the_cycle_of_the_cpu_image_stops_when_it_is_told_to(tmp_path: Path) -> None:
    """`docker stop` sends SIGTERM to the first process: the jobs save what they have, exit 143, nothing is left."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    words = [str(tmp_path / "workspace") if word == "/workspace/quickstart" else word for word in executed(CPU)]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "PJRT_DEVICE": "CPU"}
    with subprocess.Popen(words, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as first:
        try:
            wait_for(first, "RUNNING")
            while len(family := psutil.Process(first.pid).children(recursive=True)) < 2:
                time.sleep(0.05)
            first.send_signal(signal.SIGTERM)
            assert first.wait(timeout=300) == 143
            _, alive = psutil.wait_procs(family, timeout=60)
            assert alive == []
        finally:
            first.kill()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Until a line of the output holds `text`, and a moment more."""
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), f"it ended without a line that holds {text!r}"
    time.sleep(1)
