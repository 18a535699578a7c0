"""The encoder without padding says the same of every text as the one for static shapes."""

import pytest
import torch

from pipeline.embed.engine import flat_batches
from pipeline.embed.unpadded import FlatEncoder, PackedLinear, packs_weights, runs_of
from tests.embed.models import SPEC, encoder, one_by_one, texts

PACKS = packs_weights(torch.float32) and packs_weights(torch.bfloat16)
packs = pytest.param(True, marks=pytest.mark.skipif(not PACKS, reason="no oneDNN for bf16 here"))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("packed", [packs, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str)
def test_vectors_are_those_of_each_text_alone(pooling: str, packed: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Lengths on both sides of where attention takes another form, alone and several of one length."""
    tokens = texts([70, 64, 64, 63, 40, 40, 40, 16, 16, 15, 15, 9, 3, 2, 2])
    made = FlatEncoder(encoder(pooling), dtype, 128, packed=packed)
    for batch in flat_batches(tokens, 200, SPEC.pad_id):
        vectors = made(batch.tensors["ids"], batch.lengths.tolist())
        expected = one_by_one(encoder(pooling), tokens)[batch.texts]
        torch.testing.assert_close(vectors, expected, rtol=0, atol=tolerance)


def test_neighbours_of_one_length_are_a_run() -> None:
    assert runs_of([5, 5, 3, 5]) == [(0, 2, 5), (10, 1, 3), (13, 1, 5)]
    assert runs_of([]) == []


@pytest.mark.skipif(not packs_weights(torch.float32), reason="PyTorch without oneDNN")
@pytest.mark.parametrize("rows", [64, 65, 1])
def test_packed_products_are_the_ordinary_ones(rows: int) -> None:
    torch.manual_seed(1)
    layer, values, other = torch.nn.Linear(48, 80), torch.randn(rows, 48), torch.randn(rows, 80)
    packed, plain = (PackedLinear(layer, torch.float32, 64, packed=packed) for packed in (True, False))
    torch.testing.assert_close(packed(values), plain(values))
    torch.testing.assert_close(packed.gelu(values), plain.gelu(values))
    torch.testing.assert_close(packed.plus(values, other), plain.plus(values, other))
