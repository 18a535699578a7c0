"""An operator of a user's own encoder (model.factory) that the device lacks: counted, and named once in a run."""

from pathlib import Path

import pytest

from tests.native.conftest import InChild
from tests.native.cycle import Cycle
from tests.native.standin import needs_compiler
from tests.native.test_two_processes import ONE_SHAPE

OWN = ONE_SHAPE.replace(
    "[model]\n", '[model]\nfactory = "examples.own_encoder:build"\nfactory_options = { width = 32 }\n'
)
WATCHED = """
import torch_neuronx
from pipeline.train.loop import TrainLoop
one_step = TrainLoop._one_step
def watched(self, batches):
    torch_neuronx._C.odd_lengths()
    one_step(self, batches)
    assert not (odd := torch_neuronx._C.odd_lengths()), f"eager operators on odd lengths: {odd}"
TrainLoop._one_step = watched
"""
"""Of a step of two micro-batches; no parameter of this model that is odd is small."""


@needs_compiler
@pytest.mark.stage
def test_an_operator_of_a_factorys_module_is_named_in_a_training_step(tmp_path: Path, in_child: InChild) -> None:
    """tanh is in that module alone: nothing else of the model has one."""
    cycle = Cycle(tmp_path, OWN)
    cycle.on_host("prepare")
    words = cycle.command("train")[3:]
    said = in_child(WATCHED + f"from pipeline.cli import main\nassert main({words}) == 0", missing=("aten::tanh",))
    assert sorted(cycle.losses()) == [1, 2, 3, 4]
    warnings = [line for line in said.splitlines() if "ran on the host" in line]
    [warning] = [line for line in warnings if "aten::tanh is not an operator of neuron" in line]
    assert "times in the last 2 steps" in warning
