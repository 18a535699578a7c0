"""What a checkpoint says of itself, for tests that care for a few of its fields."""

from typing import Any

from pipeline.checkpoint.store import TrainState
from pipeline.model.config import InputSpec, ModelConfig


def train_state(**changes: Any) -> TrainState:
    """Make the state of a checkpoint of a first cycle, with these fields changed."""
    fields: dict[str, Any] = {
        "cycle": "c0",
        "step": 1,
        "max_steps": 100,
        "identity": "id",
        "identity_parts": {},
        "model": ModelConfig(preset="tiny"),
        "inputs": InputSpec(vocab_size=20, pad_id=0, labels=("no", "yes"), label_gains=(0.0, 1.0)),
        "tokenizer_fingerprint": "tok",
        "watermark": "",
        "partitions": {},
        "parent": None,
        "best": None,
        "settings_hash": "settings",
        "code_version": "1.0",
    }
    return TrainState(**fields | changes)
