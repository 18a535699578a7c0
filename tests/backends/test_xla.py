"""XLA:CPU, alone and as one of two replicas, each way of tracing in processes of its own."""

from pathlib import Path

import pytest

from tests.backends.xla_process import FUNCTIONALIZATION, LITTLE_WORK, needs_xla, run_cases

HERE = Path(__file__).parent
pytestmark = [pytest.mark.stage, needs_xla]


def test_xla_cases() -> None:
    run_cases(HERE / "xla_cases.py", "with-functionalization")


def test_values_as_on_neuron() -> None:
    run_cases(HERE / "xla_cases.py", "as-on-neuron", "-k", "eager")


@pytest.mark.thorough
@pytest.mark.parametrize("mode", FUNCTIONALIZATION)
def test_all_xla_cases(mode: str) -> None:
    run_cases(HERE / "xla_cases.py", mode, "-m", "thorough or not thorough", flags=LITTLE_WORK)


def test_two_replicas() -> None:
    run_cases(HERE / "replica_cases.py", "as-on-neuron", CPU_NUM_DEVICES="2")


@pytest.mark.thorough
@pytest.mark.parametrize("mode", FUNCTIONALIZATION)
def test_all_replica_cases(mode: str) -> None:
    run_cases(HERE / "replica_cases.py", mode, "-m", "thorough or not thorough", CPU_NUM_DEVICES="2")
