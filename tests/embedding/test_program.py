"""The embedding program: unit vectors, the same as the encoder's, in static batches."""

import pytest
import torch

from pipeline.backends import open_backend
from pipeline.embedding.config import EmbedConfig
from pipeline.embedding.program import EmbedProgram
from pipeline.model.config import ModelConfig
from pipeline.model.relevance import build_model
from tests.train.rows import SPEC

MODEL = ModelConfig(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, max_positions=16)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_vectors_are_the_encoders_and_of_length_one(precision: str, tolerance: float) -> None:
    tokens = torch.randint(1, SPEC.vocab_size, (4, 12), dtype=torch.int32)
    tokens[1, 5:] = SPEC.pad_id
    expected = torch.nn.functional.normalize(build_model(MODEL, SPEC, 1).encoder.eval()(tokens), dim=1)
    config = EmbedConfig(batch_size=4, precision=precision)  # type: ignore[arg-type]
    program = EmbedProgram(build_model(MODEL, SPEC, 1).encoder, open_backend("cpu"), config)
    vectors = program.vectors(tokens)
    assert vectors.dtype is torch.float32
    torch.testing.assert_close(vectors, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    # A text's vector does not depend on its neighbours.
    torch.testing.assert_close(program.vectors(tokens.flip(0)).flip(0), vectors, rtol=0, atol=1e-6)


def test_another_batch_size_would_be_another_graph() -> None:
    program = EmbedProgram(build_model(MODEL, SPEC, 1).encoder, open_backend("cpu"), EmbedConfig(batch_size=4))
    with pytest.raises(ValueError, match="every batch has 4"):
        program.vectors(torch.ones(3, 8, dtype=torch.int32))
