"""The identity of a run: a hash of all that decides its weights. A run continues only its own checkpoints."""

from collections.abc import Mapping, Sequence

from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.data.tokens import Selection
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.train.config import TrainConfig

# These change where, when and in what pieces the same run is computed, not what is computed.
_NOT_IDENTITY = {
    "start",
    "micro_batch_size",
    "step_boundary",
    "batches_per_execution",
    "chunk_mib",
    "deadline",
    "on_deadline",
    "collective_timeout_s",
}


def identity_parts(
    train: TrainConfig,
    model: ModelConfig,
    inputs: InputSpec,
    selection: Selection,
    buckets: Sequence[str],
    parent: str,
    negatives: str,
) -> dict[str, str]:
    """Name to fingerprint of each thing that decides the weights.

    `parent` and `negatives` are manifest digests, or empty.
    """
    parts = {f"train.{name}": value for name, value in train.model_dump(mode="json", exclude=_NOT_IDENTITY).items()}
    parts |= {f"model.{name}": value for name, value in model.model_dump(mode="json").items()}
    parts |= {
        "inputs": inputs.model_dump(mode="json"),
        "data.new": [p.fingerprint for p in selection.new],
        "data.old": [p.fingerprint for p in selection.old],
        "data.buckets": list(buckets),
        "parent": parent,
        "negatives": negatives,
    }
    return {name: fingerprint(value) for name, value in parts.items()}


def check_identity(found: Mapping[str, str], ours: Mapping[str, str], *, where: str) -> None:
    """Raises ConfigError naming what differs, when a checkpoint is of another run."""
    different = sorted(name for name in found.keys() | ours.keys() if found.get(name) != ours.get(name))
    if different:
        raise ConfigError(
            f"{where} was trained with other {', '.join(different)}",
            expected="the settings and data this cycle was started with",
            next_command="go back to them, or start another cycle with --cycle NAME",
        )
