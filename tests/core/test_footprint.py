"""The estimate per core against the real model, published figures and the arithmetic of the papers."""

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.core.errors import ConfigError
from pipeline.core.footprint import (
    ContrastiveBatch,
    EncoderSizes,
    Precision,
    Workload,
    estimate,
    footprint,
    step_flops,
)
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.encoder import BertEncoder
from pipeline.model.relevance import GroupInputs, RelevanceModel, TokenMatch
from pipeline.parallel.activations import recompute_units

TINY = EncoderSizes(vocab=40, positions=64, layers=2, width=128, heads=2, intermediate=512)
BASE = EncoderSizes(vocab=30522, positions=512, layers=12, width=768, heads=12, intermediate=3072)
LARGE = EncoderSizes(vocab=30522, positions=512, layers=24, width=1024, heads=16, intermediate=4096)
SPEC = InputSpec(vocab_size=40, pad_id=0, labels=("bad", "good"), label_gains=(0.0, 1.0))
PRECISIONS: tuple[Precision, ...] = ("fp32", "autocast", "bf16")


def written_out() -> AbstractContextManager[None]:
    """Attention as plain products, as on XLA; torch does not count its fused kernel on CPU."""
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return context


def encoder() -> BertEncoder:
    return BertEncoder(ModelConfig(preset="tiny", max_positions=64), vocab_size=40, pad_id=0)


def test_parameters_are_those_of_the_encoder() -> None:
    assert TINY.parameters == sum(p.numel() for p in encoder().parameters())


def test_parameters_are_those_published() -> None:
    # Hugging Face bert-base-uncased and bert-large-uncased without the pooler (D^2 + D).
    assert BASE.parameters == 109_482_240 - (768**2 + 768)
    assert LARGE.parameters == 335_141_888 - (1024**2 + 1024)


@pytest.mark.parametrize(("tokens", "tolerance"), [(8, 0.02), (64, 0.02)])
def test_flops_are_those_that_torch_counts(tokens: int, tolerance: float) -> None:
    model = encoder()
    with FlopCounterMode(display=False) as counter, written_out():
        model(torch.ones(3, tokens, dtype=torch.int32)).sum().backward()
    expected = step_flops(TINY, Workload(3, tokens, samples=3))
    assert counter.get_total_flops() == pytest.approx(expected, rel=tolerance)


def test_mined_products_are_products_of_their_query() -> None:
    work = Workload.for_groups(12, 24, slots=4, mined=2)
    assert (work.rows, work.row_tokens) == (3, 24) and work.samples == 18
    assert Workload.for_groups(12, 24, slots=4, mined=0) == Workload.for_groups(12, 24, slots=4)


def test_what_matched_tokens_keep_for_the_backward_pass() -> None:
    groups, slots, tokens = 3, 4, 24
    match = TokenMatch(ModelConfig(preset="tiny"))
    states = torch.randn(groups, tokens, 128, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] == (tokens, tokens):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = match(states, torch.ones(groups, tokens), states, torch.ones(groups, slots, tokens))
    assert found.requires_grad
    work = Workload.for_groups(groups * slots, tokens, slots=slots, token_match=True)
    assert work.match_bytes == sum(kept.values())
    without = footprint(1000, TINY, Workload.for_groups(groups * slots, tokens, slots=slots))
    assert footprint(1000, TINY, work).activation_bytes - without.activation_bytes == work.match_bytes


def test_flops_of_groups_with_the_heads() -> None:
    model = RelevanceModel(ModelConfig(preset="tiny", max_positions=64), SPEC)
    ids, segments = torch.ones(4, 24, dtype=torch.int32), torch.ones(4, 24, dtype=torch.int32)
    segments[:, 8:] = 2
    inputs = GroupInputs(ids, ids, segments, torch.zeros(4, 0), torch.zeros(4, 0, dtype=torch.int32))
    with FlopCounterMode(display=False) as counter, written_out():
        model(inputs).logits.sum().backward()
    heads = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("encoder."))
    expected = step_flops(TINY, Workload.for_groups(4, 24), heads)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_activations_are_those_of_the_paper() -> None:
    """Korthikanti et al., equation 1: s b h (34 + 5 a s / h) bytes a layer in 16 bit with dropout."""
    workload = Workload(4, 128, samples=4, precision="bf16", dropout=True)
    layers = BASE.layers * 128 * 4 * 768 * (34 + 5 * 12 * 128 / 768)
    embedding = 128 * 4 * 768 * 3
    assert footprint(BASE.parameters, BASE, workload).activation_bytes == layers + embedding


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_of_fp32_are_what_autograd_keeps(recompute: bool) -> None:
    """Within a third: torch keeps some tensors once for two users, and masks and views on top."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = encoder()
    if recompute:
        recompute_units(list(model.layers))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        written_out(),
    ):
        loss = model(torch.ones(8, 32, dtype=torch.int32)).sum()
    real = sum(size for address, size in kept.items() if address not in weights)
    workload = Workload(8, 32, samples=8)
    whole, less = (footprint(0, TINY, replace(workload, recompute=again)).activation_bytes for again in (False, True))
    layer = (whole - 8 * 32 * TINY.width * 4) // TINY.layers  # computed again in backward, which has not begun
    assert loss.requires_grad and (less - layer if recompute else whole) == pytest.approx(real, rel=0.33)


def test_unknown_instance() -> None:
    with pytest.raises(ConfigError, match=r"p4d\.24xlarge"):
        estimate(1, TINY, Workload.for_groups(1, 16), instance="p4d.24xlarge", mfu=0.4)


def test_two_passes_cost_a_forward_pass_more() -> None:
    one, two = (ContrastiveBatch(6, 24, two_passes=two) for two in (False, True))
    work = {c: Workload.for_groups(8, 32, slots=4, accumulation=3, contrastive=c) for c in (None, one, two)}
    flops = {c: step_flops(TINY, of, sample_parameters=10) for c, of in work.items()}
    heads = 3 * 8 * 6.0 * 10
    loss = 6.0 * 6 * 24 * TINY.width  # three matrix products over the whole global batch
    assert flops[one] == flops[None] + loss
    assert flops[two] - flops[one] == pytest.approx((flops[None] - heads) / 3)
