"""Mining that is killed goes on where it was, and ends with the same negatives."""

from collections.abc import Callable

import pytest

from pipeline.mine.store import find_negatives
from pipeline.parallel.world import ARRAY_INDEX
from tests.fault.harness import TINY, Place

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
MANY_PARTS = (*TINY, "--mine.queries-per-part=1")


def negatives(place: Place) -> str:
    found = find_negatives(place.storage, place.result("mine")["outputs"]["negatives"])
    assert found is not None
    return found.digest


def done(place: Place, kind: str) -> int:
    """Committed parts."""
    return len([*place.path.glob(f"cycles/c1/mine/*/{kind}-done/*.json")])


def kill_after_three(place: Place, kind: str, worker: int, flags: list[str]) -> None:
    """Start, and kill when three more pieces are there. One of two workers: it does not come to the end, however late
    we look."""
    enough = done(place, kind) + 3
    run = place.start("mine", "--mine.workers=2", *flags, env={ARRAY_INDEX: str(worker)})
    assert run.until(lambda: done(place, kind) >= enough), f"it had ended before: {run.err}"
    run.kill()


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        pytest.param("bm25", ("negatives",), id="bm25"),
        pytest.param(
            "checkpoint", ("vectors", "negatives"), id="vectors", marks=[pytest.mark.slow, pytest.mark.thorough]
        ),
    ],
)
def test_killed_and_run_again(place: Callable[..., Place], source: str, kinds: tuple[str, ...]) -> None:
    whole, killed = place("cpu", MANY_PARTS), place("cpu", MANY_PARTS)
    flags = []
    if source == "checkpoint":
        whole.run("train", "--train.max-steps=2", "--train.evaluate-every=0")
        flags = [f"--mine.source={whole.storage.uri(whole.result()['outputs']['checkpoint'])}"]
    whole.run("mine", *flags)
    for worker, kind in enumerate(kinds):
        kill_after_three(killed, kind, worker, flags)
    there = done(killed, "negatives")
    assert there >= 3 and "negatives/tiny" not in {
        str(path.relative_to(killed.path)) for path in killed.path.rglob("*")
    }
    last = killed.run("mine", *flags)
    assert f"{there} of " in last.out and negatives(killed) == negatives(whole)
    assert "already done" in killed.run("mine", *flags).out
