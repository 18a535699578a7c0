"""A run whose model lies in slices over ranks is killed and goes on, over the same ranks or others."""

from collections.abc import Callable

import pytest

from tests.fault.harness import TINY, WAIT_S, Place, again_when_late, reference
from tests.fault.kills import Moment, kill_at
from tests.fault.test_elastic import assert_losses_agree, digests

pytestmark = pytest.mark.slow

SHORT = (
    *TINY,
    "--train.max-steps=24",
    "--train.evaluate-every=12",
    "--checkpoint.every-steps=6",
    "--log.every-steps=2",
    "--train.candidates-per-query=2",
)


def over(processes: int, **plan: object) -> tuple[str, ...]:
    keys = (f"--train.parallel.{name.replace('_', '-')}={value}" for name, value in plan.items())
    return (f"--launch.processes={processes}", *keys)


@again_when_late
def test_two_ranks_with_slices_go_on_to_the_bit(place: Callable[..., Place]) -> None:
    """Launched and killed; what goes on, and what was left alone, are forked ranks of another hash seed."""
    sliced = (*SHORT, *over(2, shard_degree=2))
    here = place("cpu", sliced)
    run, doing = kill_at(here, Moment("step", 14, 0.02))
    run.assert_not_late()
    assert doing, f"ended before, exit {run.process.returncode}\n{run.err[-2000:]}"
    saved = here.steps_saved()
    here.run_ranks("train", 2)
    assert here.ended() == reference("cpu", sliced, ranks=2)
    assert {event["world_size"] for event in here.events("train_started")} == {2}
    assert [event["step"] for event in here.events("train_resumed")] == saved[-1:]


@pytest.mark.thorough
@again_when_late
def test_a_run_goes_on_under_other_plans(place: Callable[..., Place]) -> None:
    alone, here = reference("cpu", SHORT), place("cpu", SHORT)
    plans = [over(4, shard_degree=2), over(1), over(4, shard_degree=2, tensor_degree=2), over(2, shard_degree=0)]
    for step, plan in zip((6, 11, 17), plans, strict=False):
        run = here.start("train", *plan)
        run.reach(lambda step=step: here.step() >= step)  # type: ignore[misc]
        assert run.terminate(WAIT_S) == 143, run.err[-3000:]  # four ranks on two cores take their time to leave
    here.run("train", *plans[-1])
    worlds = [event["world_size"] for event in here.events("train_started")]
    assert worlds == [4, 1, 4, 2]
    assert digests(here.trace()) == digests(alone.trace)
    assert_losses_agree(here.trace(), alone.trace, num_steps=24, relative=1e-6)
