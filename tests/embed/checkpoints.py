"""A tiny model that was never trained, committed as a checkpoint and promoted."""

from functools import cache
from pathlib import Path

import torch

from pipeline.checkpoint.save import Snapshot, commit_snapshot
from pipeline.checkpoint.store import TrainState
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.storage import Storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import hf_config, to_hf
from pipeline.model.relevance import build_model
from tests.embed.catalogues import MAX_TOKENS, tokenizer_json
from tests.kit.states import train_state
from tests.registry.cases import put

MODEL = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32)


def state_of(
    model: ModelConfig, spec: InputSpec, tokenizer: TextTokenizer, *, cycle: str = "c", max_tokens: int = MAX_TOKENS
) -> TrainState:
    """Of a model that was never trained."""
    return train_state(
        cycle=cycle, model=model, inputs=spec, tokenizer_fingerprint=tokenizer.fingerprint, max_tokens=max_tokens
    )


@cache
def snapshot_of(cycle: str, seed: int) -> Snapshot:
    """A model of random weights."""
    tokenizer = TextTokenizer(tokenizer_json())
    spec = InputSpec(
        vocab_size=tokenizer.vocab_size, pad_id=tokenizer.pad_id, labels=("no", "yes"), label_gains=(0.0, 1.0)
    )
    state = state_of(MODEL, spec, tokenizer, cycle=cycle)
    weights = to_hf(build_model(MODEL, spec, seed).state_dict())
    return Snapshot(state, weights, {"moment": torch.zeros(1)}, hf_config(MODEL, spec), tokenizer_json())


def make_checkpoint(
    workspace: Storage, scratch: Path, cycle: str = "c0", seed: int = 1, *, promoted: bool = True
) -> str:
    """The prefix of a fresh checkpoint; other seeds are other models."""
    commit_snapshot(workspace, snapshot_of(cycle, seed), scratch / "snapshot")
    prefix = f"checkpoints/{cycle}/step-1"
    if promoted:
        put(workspace, prefix)
    return prefix
