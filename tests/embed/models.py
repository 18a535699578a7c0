"""A small encoder and random texts for the tests of the engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.backends import Backend, open_backend
from pipeline.compile.manifest import GraphWatch
from pipeline.core.arrays import Float32s
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens
from pipeline.embed.config import EmbedConfig
from pipeline.embed.engine import CpuEngine, Embedder, EmbeddingEngine, EmbedProgram, open_engine
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.encoder import BertEncoder, TextEncoder
from pipeline.model.relevance import build_model

MODEL = ModelConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_positions=80)
SPEC = InputSpec(vocab_size=97, pad_id=0, labels=("bad", "good"), label_gains=(0.0, 1.0))
CLS, SEP = 1, 2
CONFIG = EmbedConfig(buckets=(24, 80), tokens_per_batch=160)


def encoder(pooling: str = "mean") -> BertEncoder:
    """The same weights every time. Larger than BERT's at the start: neighbours that leak would be seen."""
    model = MODEL.model_copy(update={"pooling": pooling})
    made = build_model(model, SPEC, 3).encoder.eval().requires_grad_(False)
    assert isinstance(made, BertEncoder)
    for parameter in made.parameters():
        parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return made


def texts(lengths: Sequence[int], seed: int = 0) -> Tokens:
    """[CLS], random tokens, [SEP]; at least two tokens each."""
    ids = np.random.default_rng(seed).integers(3, SPEC.vocab_size, sum(lengths)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = CLS, SEP
    return Tokens(ids, offsets)


def one_by_one(made: TextEncoder, tokens: Tokens) -> Tensor:
    """What it says of each text alone [N, D], of length one."""
    parts = np.split(tokens.ids, tokens.offsets[1:-1])
    return torch.nn.functional.normalize(torch.cat([made(torch.from_numpy(part)[None]) for part in parts]), dim=1)


def embedder(
    backend: Backend | None = None,
    config: EmbedConfig = CONFIG,
    *,
    rows: bool = False,
    pooling: str = "mean",
    limit: int = 80,
    **options: Any,
) -> Embedder:
    """On the CPU; `rows`: with the engine of devices with static shapes."""
    device, made = backend or open_backend("cpu"), encoder(pooling)
    engine: EmbeddingEngine = (
        EmbedProgram(made, device, config) if rows else open_engine(made, device, config, GraphWatch())
    )
    assert rows or backend is not None or isinstance(engine, CpuEngine)
    return Embedder(engine, device, **{"limit": limit, "sep_id": SEP, "stop": StopSignal(), **options})


def vectors_of(made: Embedder, *windows: Tokens) -> list[Float32s]:
    return list(made.stream(iter(windows)))
