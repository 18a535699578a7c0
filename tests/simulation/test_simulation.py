"""Histories of the control plane under faults: no invariant is violated, and a seed always gives the same history."""

from collections.abc import Iterator

import pytest

from tests.simulation.history import run_history, shortest
from tests.simulation.people import product_in_world

pytestmark = pytest.mark.fault
CHUNKS, SEEDS = 50, 100


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with product_in_world():
        yield


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_history_violates_an_invariant(chunk: int) -> None:
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        if run_history(seed).violation:
            result = shortest(seed)
            pytest.fail("\n".join([*result.history, f"seed {seed}: {result.violation}"]))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_always_gives_the_same_history(seed: int) -> None:
    first, second = (run_history(seed, keeps_history=True) for _ in range(2))
    assert first == second
    assert first.num_cycles == 2 and len(first.history) > 300
