"""`trnjobs run`: a script of a user as a job of this machine, killed at random."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from jobs import cli
from jobs.commands import submit
from jobs.plan.spec import JobPlan
from jobs.setup import OpenCycle
from tests.jobs.targets.local.waiting import until_no_keepers
from tests.kit.ports import free_port
from tests.kit.ranks import environments
from tests.kit.zygote import Forked

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "ddp_script.py"
ROOM = ("--jobs.local-vcpus=4",)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    until_no_keepers(tmp_path)


def words(place: Path, *more: str, name: str = "mine") -> list[str]:
    return ["run", f"--workspace={place / 'workspace'}", f"--name={name}", *ROOM, *more]


def write(place: Path, code: str) -> None:
    (place / "script.sh").write_text(f"#!{sys.executable}\n{code}\n")
    (place / "script.sh").chmod(0o755)


def weights(file: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["model"]
    return model


def weights_of_ranks(ranks: int, folder: Path, *more: str) -> dict[str, torch.Tensor]:
    """Of the script by itself, which nobody launches and nobody kills."""
    env = {**os.environ, "TRNJOBS_CHECKPOINT_URI": f"file://{folder / 'alone'}"}
    with (folder / "alone.txt").open("wb") as said:
        started = [
            Forked("examples.ddp_script", more, env=env | rank, cwd=ROOT, stdout=said, stderr=said)
            for rank in environments(ranks, free_port())
        ]
        assert [one.wait(300) for one in started] == [0] * ranks, (folder / "alone.txt").read_text()
    return weights(folder / "alone" / "last.pt")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -u train.py -m ./", "run-train"),
        ("python -m package.train -m small", "run-train"),
        ("./go.sh -m", "run-go"),
    ],
)
def test_a_run_is_named_after_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    seen = list[str]()

    def submitted(cycle: OpenCycle, plan: JobPlan, target: str, *, again: bool) -> int:
        seen.append(cycle.name)
        return 0

    monkeypatch.setattr(submit, "submit_plan", submitted)
    assert cli.main(["run", f"--workspace={tmp_path / 'workspace'}", *ROOM, "--", *command.split()]) == 0
    assert seen == [name]


@pytest.mark.parametrize("flag", ["--attempts", "--nodes", "--timeout-s", "--vcpus"])
def test_a_run_with_none_of_something_is_refused(flag: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words(place), f"{flag}=0", "--", "./script.sh"]) == 78
    assert f"{flag[2:].replace('-', '_')} 0: " in capsys.readouterr().err


def test_a_command_and_its_retries(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """75 is tried again, 3 is an error; what it is on record as is found by every other command."""
    code = (
        "import os, sys; from pathlib import Path; print('it is', 'attempt', os.environ['TRNJOBS_ATTEMPT'], flush=True)"
    )
    code += "\nPath('ran').open('a').write(os.environ['TRNJOBS_CHECKPOINT_URI'])"
    again = "sys.exit(int(os.environ['TRNJOBS_ATTEMPT'] == '1') * 75 or 3)"
    write(place, f"{code}\n{again}")
    assert cli.main([*words(place), "--", "./script.sh"]) == 3
    assert (place / "ran").read_text() == f"file://{place}/workspace/checkpoints/run-mine/mine" * 2
    out = capsys.readouterr().out
    assert "cycle run-mine: failed in " in out and "  mine: exit code 3" in out
    ended = out.index("cycle run-mine: failed")
    assert 0 <= out.index("it is attempt 1\n") < out.index("it is attempt 2\n") < ended, "shown as it is printed"
    at = [f"--workspace={place / 'workspace'}", "--cycle=run-mine"]
    for command in (["status"], ["logs", "mine"], ["cost"], ["report"]):
        assert cli.main([*command, *at]) == 0
    assert cli.main(["history", at[0]]) == 0
    assert "run-mine" in capsys.readouterr().out
    write(place, "")
    assert cli.main(["retry", *at, *ROOM]) == 0


def test_a_script_that_has_ended_runs_again_when_it_is_asked_to(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ran is compared with the file as it is now; arguments are settings."""

    def run(*more: str) -> tuple[int, str, int]:
        code = cli.main([*words(place, *more[:-1]), "--", "./script.sh", *more[-1].split()])
        said = capsys.readouterr()
        return code, said.out + said.err, len((place / "ran").read_text())

    ends = "open('ran', 'a').write('.')\nraise SystemExit({})"
    write(place, ends.format(3))
    assert run("")[::2] == (3, 1)
    code, text, ran = run("")
    assert (code, ran, "run-mine failed" in text, "script.sh is unchanged" in text) == (3, 1, True, True)
    write(place, ends.format(0))
    code, text, ran = run("")
    assert (code, ran, "nothing ran, because ./script.sh has changed" in text, "--again" in text) == (78, 1, True, True)
    assert run("--again", "")[::2] == (0, 2)
    code, text, ran = run("")
    assert (code, ran, "already succeeded" in text, "SUCCEEDED" in text) == (0, 2, True, False)
    code, text, ran = run("--lr 1")
    assert (code, ran, "the same command with --again" in text) == (78, 2, True)
    assert "different settings: jobs.steps.mine.command: ./script.sh -> ./script.sh --lr 1\n" in text
    assert run("--again", "--lr 1")[::2] == (0, 3)
    cli.main(["history", f"--workspace={place / 'workspace'}"])
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "3", "tries of all three"


@pytest.mark.parametrize(
    ("more", "command", "seen"),
    [
        ((), (), "no script"),
        ((), ("python", "nowhere.py"), "no such file: nowhere.py"),
        ((), ("./nowhere.sh",), "no such file: ./nowhere.sh"),
        (("--timeout-s=5",), ("aws", "s3"), "timeout_s 5"),
        (("--environment=A",), ("aws", "s3"), "expected NAME=VALUE"),
        (("--environment=RANK=1",), ("aws", "s3"), "variable RANK"),
        ((), ("aws", "s3", "a\0b"), "command"),
        ((), ("aws", "x" * 200_000), "argument is 200,000"),
        (("--target=batch",), ("aws", "s3"), "no queue"),
    ],
)
def test_what_cannot_be_a_job(
    place: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], command: tuple[str, ...], seen: str
) -> None:
    assert cli.main([*words(place, *more), *(["--", *command] if command else [])]) == 78
    said = capsys.readouterr()
    assert seen in said.err and "Traceback" not in said.err
    assert not list((place / "workspace").rglob("submitted"))


KILLS = [
    pytest.param(1, 2, 20, 0.1, id="2"),
    pytest.param(2, 20, 60, 3.0, id="20", marks=[pytest.mark.thorough, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize(("nodes", "kills", "steps", "step_s"), KILLS)
def test_nodes_of_two_ranks_killed_at_random(place: Path, nodes: int, kills: int, steps: int, step_s: float) -> None:
    """The weights are those of a run that was left alone, by the checkpoints of the script itself.

    Of two ranks bit for bit. Of four, DDP adds in another order in the first step of a process than in the others: 1e-7
    off after one continuation that nothing killed.
    """
    ranks, rng, done = (f"--nodes={nodes}", "--processes=2", "--attempts=10"), random.Random(kills), 0
    script = ("--", str(SCRIPT), "--steps", str(steps), "--every", "1")
    alone = weights_of_ranks(2 * nodes, place, *script[2:])
    submit = [*words(place, *ranks, name="killed"), *script, "--step-s", str(step_s)]
    again = ["retry", f"--workspace={place / 'workspace'}", "--cycle=run-killed", *ROOM]
    env, code, command = {**os.environ, "PYTHONPATH": str(ROOT)}, 1, submit
    while code:
        process = subprocess.Popen([sys.executable, "-m", "jobs", *command], env=env, cwd=place)
        while process.poll() is None:
            until = time.monotonic() + rng.uniform(0.5, steps / 3)
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            done += done < kills and process.poll() is None and _kill_one(process, rng)
        code = process.wait()
        command = again if code > 0 else submit  # its tries were spent; or it was killed with everything
    killed = weights(place / "workspace" / "checkpoints" / "run-killed" / "killed" / "last.pt")
    for name, expected in alone.items():
        torch.testing.assert_close(killed[name], expected, rtol=0, atol=0 if nodes == 1 else 1e-5, msg=name)
    print(f"{done} kills")


def _kill_one(process: "subprocess.Popen[bytes]", rng: random.Random) -> bool:
    """One rank, or the command with everything; whether there was one."""
    try:
        ranks = [
            one
            for one in psutil.Process(process.pid).children(recursive=True)
            if "rank" in one.cmdline() and "torchrun" not in one.cmdline()
        ]
        victim = rng.choice([*ranks, psutil.Process(process.pid)])
        victim.send_signal(signal.SIGKILL)
    except psutil.Error:
        return False
    return True
