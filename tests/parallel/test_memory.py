"""Memory tracked without devices. The private parts of torch that do it are used here as they are there."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.core.errors import ConfigError
from pipeline.model.config import InputSpec, LossConfig, ModelConfig
from pipeline.model.losses import Targets, relevance_loss
from pipeline.model.relevance import RelevanceInputs, RelevanceModel
from pipeline.parallel.config import Plan
from pipeline.parallel.memory import Memory, track

MIB = 2**20
SPEC = InputSpec(
    vocab_size=30522,
    pad_id=0,
    labels=("exact", "related", "irrelevant"),
    label_gains=(1.0, 0.1, 0.0),
    numeric=("n1",),
    categorical_ids=(7,),
)
PAIRS = 64


def base(plan: Plan, ranks: int) -> Memory:
    """BERT-base, 64 pairs of 64 + 64 tokens a rank."""

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(PAIRS, 64, dtype=torch.int32)
        keys = torch.arange(PAIRS, dtype=torch.int32)
        targets = Targets(torch.zeros_like(keys), torch.ones(PAIRS), keys, keys)
        outputs = model(
            RelevanceInputs(tokens, tokens, torch.zeros(PAIRS, 1), torch.zeros(PAIRS, 1, dtype=torch.int32))
        )
        return relevance_loss(outputs, targets, LossConfig())

    return track(lambda: RelevanceModel(ModelConfig(preset="base"), SPEC), loss, plan, ranks)


@pytest.mark.parametrize(
    ("plan", "ranks", "peak_mib"),
    [
        pytest.param(Plan(), 1, 6117, marks=pytest.mark.thorough),
        pytest.param(Plan(), 8, 5049, marks=pytest.mark.thorough),
        (Plan(recompute="units"), 8, 1090),
        pytest.param(Plan(recompute="units", offload_horizon=2), 64, 950, marks=pytest.mark.thorough),
    ],
)
def test_the_table_of_bert_base(plan: Plan, ranks: int, peak_mib: float) -> None:
    memory = base(plan, ranks)
    assert memory.peak / MIB == pytest.approx(peak_mib, rel=0.02)
    layer = 2 * PAIRS * 64 * 768 * 4
    assert memory.unit_inputs[:12] == (layer,) * 12 and max(memory.unit_inputs[12:]) < 0.01 * layer
    assert memory.peak - memory.offloaded(2) == pytest.approx(10 * layer, rel=0.01)
    assert memory.offloaded(0) == memory.peak


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Linear(30, 30) for _ in range(7)))


def squares(model: nn.Module) -> Tensor:
    return model(torch.zeros(5, 30)).square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("plan", "ranks"), [(Plan(shard_degree=1), 2), (Plan(), 4), (Plan(shard_degree=2), 8)])
def test_states_are_twelve_bytes_a_parameter_over_the_shard_degree(plan: Plan, ranks: int) -> None:
    """And padding: fully_shard cuts the first dimension, and the first rank has the larger part."""
    degree = plan.shard_degree or ranks
    expected = 12 * sum(math.ceil(p.shape[0] / degree) * p[0].numel() for p in mlp().parameters())
    memory = track(mlp, squares, plan, ranks)
    assert memory.states == expected
    assert memory.states + memory.beside == memory.peak == list(memory.by_use().values())[-1]


def test_the_last_of_several_micro_steps_holds_the_gradients_of_the_others() -> None:
    once = track(mlp, squares, Plan(), 4)
    again = track(mlp, squares, Plan(), 4, accumulates=True)
    assert again.gathered - once.gathered == 4 * 6 * (30 * 30 + 30)


def test_a_process_with_peers_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises(ConfigError, match="this process has a real one"):
            track(mlp, squares, Plan(), 4)
    finally:
        dist.destroy_process_group()
