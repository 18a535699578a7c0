"""Must hold 4: the samples of a step and its loss do not depend on how many processes share it."""

from collections.abc import Callable

import pytest

from tests.backends.xla_process import needs_xla
from tests.fault.harness import MAX_STEPS, ON_XLA, TINY, Place, TooLate, Trace, again_when_late, reference

pytestmark = pytest.mark.slow

NUM_STEPS = 50


def digests(trace: Trace) -> dict[int, str]:
    return {step: samples for step, (_, _, samples) in trace.items()}


def assert_losses_agree(trace: Trace, other: Trace, *, num_steps: int, relative: float = 1e-5) -> None:
    assert len(trace) >= num_steps <= len(other)
    for step in range(1, num_steps + 1):
        assert trace[step][0] == pytest.approx(other[step][0], rel=relative), f"loss of step {step}"


def stop_at(place: Place, step: int, processes: int) -> None:
    """Train with so many processes and send SIGTERM to the launcher, as Batch does, once `step` is done."""
    run = place.start("train", f"--launch.processes={processes}")
    run.reach(lambda: place.step() >= step)
    assert run.terminate() == 143, run.err[-3000:]
    if max(place.steps_saved()) == MAX_STEPS:
        raise TooLate


@again_when_late
def test_two_processes_stopped_then_one_then_three(place: Callable[..., Place]) -> None:
    alone = reference("cpu")
    here = place("cpu")
    stop_at(here, 55, processes=2)
    first = max(here.steps_saved())
    assert first >= 55, "what was done is saved"
    assert_losses_agree(here.trace(), alone.trace, num_steps=NUM_STEPS)

    stop_at(here, first + 15, processes=1)
    second = max(here.steps_saved())
    assert first + 15 <= second < len(alone.trace)

    here.run_ranks("train", 3)
    resumed = [event["step"] for event in here.events("train_resumed")]
    worlds = [event["world_size"] for event in here.events("train_started")]
    assert (resumed, worlds) == ([first, second], [2, 1, 3])
    trace = here.trace()  # a step made twice by different worlds would differ in the last bits: none was
    assert digests(trace) == digests(alone.trace)
    assert len(trace) == len(alone.trace)


@needs_xla
@pytest.mark.thorough
def test_two_processes_on_xla(place: Callable[..., Place]) -> None:
    few = (*ON_XLA, "--train.max-steps=10", "--train.evaluate-every=0", "--train.candidates-per-query=4")
    alone = place("cpu", few)
    alone.run("train")
    here = place("xla", few)
    here.run("train", "--launch.processes=2")
    assert {event["world_size"] for event in here.events("train_started")} == {2}
    assert digests(here.trace()) == digests(alone.trace())
    assert_losses_agree(here.trace(), alone.trace(), num_steps=10, relative=1e-4)  # other kernels than eager PyTorch


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        pytest.param({"WORLD_SIZE": "two", "RANK": "0"}, "two", marks=pytest.mark.thorough),
        pytest.param(
            {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "RANK 2 of WORLD_SIZE 2", marks=pytest.mark.thorough
        ),
        pytest.param(
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "x"}, "launch environment", marks=pytest.mark.thorough
        ),
    ],
)
def test_broken_launch_variables(place: Callable[..., Place], variables: dict[str, str], said: str) -> None:
    here = place("cpu", TINY)
    here.env = variables
    run = here.run("train", code=78)
    assert said in run.err
    assert "Traceback" not in run.err
    assert not here.steps_saved()


@needs_xla
def test_a_runtime_that_sees_another_world(place: Callable[..., Place]) -> None:
    here = place("xla", ON_XLA)
    here.env = {"CPU_NUM_DEVICES": "2"}
    run = here.run("train", code=78)
    assert "world size 1, but the xla runtime reports 2" in run.err
    assert "CPU_NUM_DEVICES" in run.err
    assert "Traceback" not in run.err
    assert not here.steps_saved()
