"""The simulation finds faults: each fault that is put into the product on purpose violates an invariant."""

import pytest

from tests.simulation.history import run_history
from tests.simulation.mutants import MUTANTS
from tests.simulation.people import product_in_world

pytestmark = [pytest.mark.fault, pytest.mark.thorough]
MAX_SEEDS = 1000


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str) -> None:
    with product_in_world(), MUTANTS[name]():
        assert any(run_history(seed).violation for seed in range(MAX_SEEDS))
