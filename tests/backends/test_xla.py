"""XLA:CPU, alone and as one of two replicas, each way of tracing in processes of its own."""

from pathlib import Path

import pytest

from tests.backends.xla_process import FUNCTIONALIZATION, needs_xla, run_cases

HERE = Path(__file__).parent
pytestmark = [pytest.mark.stage, needs_xla]


def test_xla_cases() -> None:
    run_cases(HERE / "xla_cases.py", "with-functionalization")


def test_xla_cases_of_values_as_on_neuron() -> None:
    run_cases(HERE / "xla_cases.py", "as-on-neuron", "-k", "eager or chunks or poisoned or dropout")


@pytest.mark.thorough
def test_all_xla_cases_as_on_neuron() -> None:
    run_cases(HERE / "xla_cases.py", "as-on-neuron")


@pytest.mark.parametrize("mode", FUNCTIONALIZATION)
def test_two_replicas(mode: str) -> None:
    run_cases(HERE / "replica_cases.py", mode, CPU_NUM_DEVICES="2")
