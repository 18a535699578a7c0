"""kill -9 at random moments: the finished cycle is, bit for bit, the one that nobody touched.

The full count (20 kills each on cpu, on xla, and on S3) is `python -m tests.fault.kill_marathon`.
"""

import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.backends.xla_process import needs_xla
from tests.fault.harness import ON_XLA, TINY, Place, again_when_late, reference
from tests.fault.kills import Moment, finish, kill_at, lose_scratch
from tests.fault.s3_server import S3Server

pytestmark = pytest.mark.slow


def kill(place: Place, moment: Moment, server: S3Server | None = None) -> None:
    """Kill at the moment; asserts that the process was alive then."""
    run, doing = kill_at(place, moment, server)
    run.assert_not_late()
    assert doing, f"{moment}: ended before, exit {run.process.returncode}\n{run.err[-2000:]}"


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
@again_when_late
def test_a_killed_cycle_ends_like_a_whole_one(bare_place: Callable[..., Place], seed: int) -> None:
    rng = random.Random(seed)
    place = bare_place("cpu")
    kill(place, Moment("prepare", delay_s=rng.uniform(0.1, 0.4)))
    place.run("prepare")
    kill(place, Moment("start", delay_s=rng.uniform(0.0, 0.6)))
    kill(place, Moment("step", rng.randint(5, 30), rng.uniform(0.0, 0.1)))
    kill(place, Moment("saving", rng.randint(31, 60)))
    kill(place, Moment("evaluation", 90, rng.uniform(0.0, 0.02)))
    finish(place)
    assert place.ended() == reference("cpu")


@again_when_late
def test_ranks_start_again_where_one_was_killed(place: Callable[..., Place]) -> None:
    """Without an end of the command, and so of its container."""
    here = place("cpu")
    run = here.start("train", "--launch.processes=2")
    run.reach(lambda: here.step() >= 35)
    (torchrun,) = psutil.Process(run.process.pid).children()
    ranks = torchrun.children()
    assert len(ranks) == 2
    ranks[1].kill()
    assert run.wait() == 0, run.err[-3000:]
    assert "starting all ranks of this node again (1 of 2)" in run.err and "resuming from" in run.out
    assert here.ended() == reference("cpu", ranks=2)


@again_when_late
def test_killed_while_a_checkpoint_is_committed(place: Callable[..., Place]) -> None:
    """Files are in place, the manifest is not: that step is not a checkpoint, and the next attempt makes it again."""
    here = place("cpu")
    for step in range(20, 110, 10):  # the window is milliseconds: take the first kill that falls into it
        kill(here, Moment("commit", step))
        torn = here.half_committed()
        if torn:
            break
    else:
        pytest.fail("no kill fell into a commit")
    assert not torn & set(here.steps_saved())
    here.run("train")
    assert here.ended() == reference("cpu")


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "flags"), [("cpu", TINY), pytest.param("xla", ON_XLA, marks=needs_xla)])
@again_when_late
def test_two_processes_killed_together(place: Callable[..., Place], backend: str, flags: tuple[str, ...]) -> None:
    two = (*flags, "--launch.processes=2", "--train.candidates-per-query=2")
    here = place(backend, two)
    kill(here, Moment("saving", 15))
    kill(here, Moment("step", 40, 0.02))
    here.run("train")
    assert here.ended() == reference(backend, two)
    assert {event["world_size"] for event in here.events("train_started")} == {2}


@needs_xla
@pytest.mark.thorough
@again_when_late
def test_killed_on_xla(place: Callable[..., Place]) -> None:
    here = place("xla", ON_XLA)
    kill(here, Moment("saving", 15))
    kill(here, Moment("step", 40, 0.02))
    here.run("train")
    assert here.ended() == reference("xla", ON_XLA)


def test_killed_in_uploads_and_continued_on_another_machine(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is lost with its scratch folder, so all that the run needs, the loss trace too, must be on S3."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    place = s3.place(tmp_path)
    kill(place, Moment("upload", 30), s3)
    assert 30 not in place.steps_saved()
    lose_scratch(place)
    kill(place, Moment("marker", 70), s3)  # the server may still carry it out, or not: both must do
    lose_scratch(place)
    place.run("train")
    assert place.ended() == reference("cpu", TINY)
