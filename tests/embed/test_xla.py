"""Embedding on XLA:CPU, each way of tracing in a process of its own."""

from pathlib import Path

import pytest

from tests.backends.xla_process import needs_xla, run_cases

pytestmark = [pytest.mark.stage, needs_xla]


@pytest.mark.parametrize("mode", ["with-functionalization", pytest.param("as-on-neuron", marks=pytest.mark.thorough)])
def test_xla_cases(mode: str) -> None:
    run_cases(Path(__file__).with_name("xla_cases.py"), mode)
