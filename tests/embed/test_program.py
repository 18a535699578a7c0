"""Rows of several texts: each has the vector the encoder gives it alone, whatever its neighbours are."""

import pytest
import torch
from torch import Tensor

from pipeline.backends import open_backend
from pipeline.data.tokenizer import Tokens
from pipeline.embed.config import EmbedConfig
from pipeline.embed.engine import EmbedProgram, RowEncoder, row_batches, row_shapes
from tests.embed.models import CONFIG, SPEC, encoder, one_by_one, texts

LENGTHS = [2, 3, 24, 25, 80, 7, 7, 7, 11, 24, 40, 2, 2, 2]


def in_rows(program: EmbedProgram, tokens: Tokens) -> Tensor:
    result = torch.full((len(tokens.lengths), 32), float("nan"))
    for batch in row_batches(tokens, program.shapes, SPEC.pad_id):
        result[batch.texts] = program.vectors(batch.tensors)[batch.places]
    return result


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-2)])
def test_vectors_are_those_of_each_text_alone(pooling: str, precision: str, tolerance: float) -> None:
    tokens = texts(LENGTHS)
    config = EmbedConfig.model_validate({**CONFIG.model_dump(), "precision": precision})
    program = EmbedProgram(encoder(pooling), open_backend("cpu"), config)
    vectors = in_rows(program, tokens)
    assert vectors.dtype is torch.float32
    torch.testing.assert_close(vectors, one_by_one(encoder(pooling), tokens), rtol=0, atol=tolerance)


def test_a_batch_without_texts_has_no_nan() -> None:
    program = EmbedProgram(encoder(), open_backend("cpu"), CONFIG)
    assert all(program.vectors(shape.blank()).isfinite().all() for shape in program.shapes)


def test_another_shape_would_be_another_graph() -> None:
    program = EmbedProgram(encoder(), open_backend("cpu"), CONFIG)
    assert program.shapes == row_shapes((24, 80), 160)
    for rows, length in ((program.shapes[0].rows - 1, 24), (6, 16)):
        with pytest.raises(ValueError, match=f"{rows} rows of {length} tokens"):
            program.vectors({name: torch.zeros(rows, length, dtype=torch.int32) for name in ("tokens", "positions")})


def test_the_whole_of_it_is_one_graph_for_a_compiler() -> None:
    """As on cuda; captured here without generating code."""
    plain = RowEncoder(encoder())
    compiled = torch.compile(plain, fullgraph=True, dynamic=False, backend="eager")
    (shape, _) = row_shapes(CONFIG.buckets, 160)
    (batch,) = row_batches(texts([24, 7, 7]), (shape,), SPEC.pad_id)
    inputs = (batch.tensors["tokens"], batch.tensors["positions"], batch.tensors["segments"], shape.texts)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), plain(*inputs))
