"""The model a run from scratch starts with: random, or with the encoder of a Hugging Face folder."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from pipeline.core.errors import CheckpointError
from pipeline.io.storage import Storage, open_storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import encoder_from_hf
from pipeline.model.relevance import RelevanceModel, build_model


def initial_model(config: ModelConfig, spec: InputSpec, seed: int, scratch: Path) -> RelevanceModel:
    """A model on CPU, the same on every rank. `config.init_from` names a folder with model.safetensors."""
    model = build_model(config, spec, seed)
    if config.init_from is None:
        return model
    storage: Storage = open_storage(config.init_from)
    source = storage.uri("model.safetensors")
    local = storage.local_path("model.safetensors")
    if local is None:
        local = scratch / "init.safetensors"
        storage.download("model.safetensors", local)
    try:
        weights = load_file(local)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{source}: {error}",
            expected="the safetensors weights of a BERT encoder",
            next_command="--model.init-from FOLDER",
        ) from error
    state = model.state_dict()
    model.load_state_dict(state | encoder_from_hf(weights, state, source=source))
    return model
