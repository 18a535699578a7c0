"""Must hold 6: SIGTERM in every phase ends with 143 within 20 s, and the next run ends as if nothing had happened."""

from collections.abc import Callable

import pytest

from tests.backends.xla_process import needs_xla
from tests.fault.harness import EVALUATE_EVERY, MAX_STEPS, ON_XLA, Place, Run, TooLate, again_when_late, reference

pytestmark = pytest.mark.slow


def terminate_when(run: Run, condition: Callable[[], bool]) -> None:
    run.reach(condition)
    assert run.terminate() == 143, run.err[-3000:]
    assert "Traceback" not in run.err


def assert_stopped(place: Place, stage: str) -> None:
    last = place.events()[-1]
    assert (last["event"], last["stage"]) == ("stage_stopped", stage)


@pytest.mark.thorough
@again_when_late
def test_in_prepare(bare_place: Callable[..., Place]) -> None:
    here = bare_place("cpu")
    run = here.start("prepare")
    terminate_when(run, lambda: any((here.scratch / "tokens").glob("*/records/*")))
    assert_stopped(here, "prepare")
    here.run("prepare")
    here.run("train")
    assert here.ended() == reference("cpu")


@again_when_late
def test_in_a_step(place: Callable[..., Place]) -> None:
    here = place("cpu")
    run = here.start("train")
    terminate_when(run, lambda: here.step() >= 35)
    assert_stopped(here, "train")
    done = here.step()
    if done == MAX_STEPS:
        raise TooLate
    assert max(here.steps_saved()) == done >= 35, "every step done is saved"
    assert f"step {done} of {MAX_STEPS} is saved" in run.err
    here.run("train")
    assert here.ended() == reference("cpu")


@pytest.mark.thorough
@again_when_late
def test_in_an_evaluation(place: Callable[..., Place]) -> None:
    """The figures of a step are written just before its evaluation starts."""
    here = place("cpu")
    for step in (EVALUATE_EVERY, 2 * EVALUATE_EVERY, 3 * EVALUATE_EVERY):
        run = here.start("train")
        terminate_when(run, lambda step=step: here.step() >= step)  # type: ignore[misc]
        assert max(here.steps_saved()) == here.step()
        if step not in [event["step"] for event in here.events("holdout_evaluated")]:
            break
    else:
        pytest.fail("no signal fell into an evaluation")
    here.run("train")
    assert here.ended() == reference("cpu")


@again_when_late
def test_in_a_save(place: Callable[..., Place]) -> None:
    here = place("cpu")
    run = here.start("train")
    terminate_when(run, lambda: bool(here.staged()))
    assert max(here.steps_saved()) == here.step()
    assert not here.half_committed()
    here.run("train")
    assert here.ended() == reference("cpu")


@pytest.mark.thorough
@again_when_late
def test_after_the_last_step(place: Callable[..., Place]) -> None:
    here = place("cpu")
    run = here.start("train")
    terminate_when(run, lambda: here.step() == MAX_STEPS)
    assert max(here.steps_saved()) == MAX_STEPS
    here.run("train")
    assert here.ended() == reference("cpu")


@needs_xla
@pytest.mark.thorough
@again_when_late
def test_in_the_first_compile(place: Callable[..., Place]) -> None:
    here = place("xla", ON_XLA)
    run = here.start("train")
    terminate_when(run, lambda: bool(here.events("train_started")))
    assert not here.events("holdout_evaluated")
    assert_stopped(here, "train")
    here.run("train")
    assert here.ended() == reference("xla", ON_XLA)


@again_when_late
def test_to_launched_ranks_while_they_start(place: Callable[..., Place]) -> None:
    """No rank may be left behind. Steps that two ranks took before the stop round otherwise: samples are compared."""
    here = place("cpu")
    run = here.start("train", "--launch.processes=2")
    run.reach(lambda: here.events("stage_started")[-1]["stage"] == "train")
    # A rank that waits for one that died as it started is ended after 15 s, which leaves no room on a busy machine.
    assert run.terminate(60.0) == 143 and "Traceback" not in run.err, run.err[-3000:]
    here.run("train")
    expected = {step: samples for step, (_, _, samples) in reference("cpu").trace.items()}
    assert {step: samples for step, (_, _, samples) in here.ended().trace.items()} == expected
