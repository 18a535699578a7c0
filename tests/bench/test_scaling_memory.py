"""Memory tracked without devices: the figures of docs/parallel.md, and torch's private parts that give them."""

import math

import pytest
import torch
from torch import Tensor, nn

from bench.scaling.memory import Memory, track
from pipeline.model.config import InputSpec, LossConfig, ModelConfig
from pipeline.model.relevance import RelevanceInputs, RelevanceModel
from pipeline.parallel.config import Plan
from pipeline.train.loss import Targets, relevance_loss

SPEC = InputSpec(vocab_size=30522, pad_id=0, labels=("no", "yes"), label_gains=(0.0, 1.0))
PAIRS = 64


def bert_base(plan: Plan, ranks: int) -> Memory:
    """BERT-base, 64 pairs of 64 + 64 tokens a rank."""

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(PAIRS, 64, dtype=torch.int32)
        keys = torch.arange(PAIRS, dtype=torch.int32)
        targets = Targets(torch.zeros_like(keys), torch.ones(PAIRS), keys, keys)
        features = torch.zeros(PAIRS, 0), torch.zeros(PAIRS, 0, dtype=torch.int32)
        return relevance_loss(model(RelevanceInputs(tokens, tokens, *features)), targets, LossConfig())

    return track(lambda: RelevanceModel(ModelConfig(preset="base"), SPEC), loss, plan, ranks)


@pytest.mark.parametrize(
    ("plan", "ranks", "peak_mib"),
    [
        pytest.param(Plan(), 1, 6117, marks=pytest.mark.thorough),
        pytest.param(Plan(), 8, 5049, marks=pytest.mark.thorough),
        (Plan(recompute="units"), 8, 1090),
        pytest.param(Plan(recompute="units"), 64, 950, marks=pytest.mark.thorough),
    ],
)
def test_the_table_of_bert_base(plan: Plan, ranks: int, peak_mib: float) -> None:
    assert bert_base(plan, ranks).peak / 2**20 == pytest.approx(peak_mib, rel=0.02)


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Linear(30, 30) for _ in range(7)))


def squares(model: nn.Module) -> Tensor:
    return model(torch.zeros(5, 30)).square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("plan", "ranks"), [(Plan(shard_degree=1), 2), (Plan(), 4), (Plan(shard_degree=2), 8)])
def test_states_are_twelve_bytes_a_parameter_over_the_shard_degree(plan: Plan, ranks: int) -> None:
    """And padding: fully_shard cuts the first dimension, and the first rank has the larger part."""
    degree = plan.shard_degree or ranks
    expected = 12 * sum(math.ceil(p.shape[0] / degree) * p[0].numel() for p in mlp().parameters())
    assert track(mlp, squares, plan, ranks).states == expected
