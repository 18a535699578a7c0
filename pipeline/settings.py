"""The one tree of settings. Values come together in `pipeline.config_sources`."""

from pydantic import BaseModel, ConfigDict, Field
from pydantic.main import IncEx

from pipeline.backends import Name
from pipeline.checkpoint.config import CheckpointConfig
from pipeline.compile.config import CompileConfig, EstimateConfig
from pipeline.core.fingerprint import fingerprint
from pipeline.data.config import DataConfig
from pipeline.embed.config import EmbedConfig
from pipeline.evaluate.config import EvaluateConfig, GateConfig, ParityConfig
from pipeline.health.config import HealthConfig
from pipeline.io.requests import RetryPolicy
from pipeline.mine.config import MineConfig
from pipeline.model.config import ModelConfig
from pipeline.train.config import TrainConfig
from pipeline.tune.config import TuneConfig


class LaunchConfig(BaseModel):
    """Processes of one run on this machine; torchrun's own variables win when they are set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processes: int = Field(1, ge=1, le=1024, description="Training processes to start here, one per device")


class LogConfig(BaseModel):
    """What a run says while it works."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_steps: int = Field(10, ge=1, description="Steps between two lines of figures")
    tensorboard: bool = Field(False, description="Also write TensorBoard files (needs the tensorboard extra)")


class Settings(BaseModel):
    """Everything a cycle can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workspace: str = Field(
        "workspace", min_length=1, description="Folder or URI (file://, s3://) of all a cycle reads and writes"
    )
    cycle: str = Field(
        "", pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$", description="Name of this retraining; empty: today's date (UTC)"
    )
    model_name: str = Field(
        "relevance", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of the model in the registry"
    )
    backend: Name = Field("auto", description="Device; auto: cuda, else xla, else cpu")
    scratch: str | None = Field(
        None, description="Local folder for temporary files (default: in a local workspace, else the system's)"
    )
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    mine: MineConfig = MineConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    embed: EmbedConfig = EmbedConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    gate: GateConfig = GateConfig()
    parity: ParityConfig = ParityConfig()
    tune: TuneConfig = TuneConfig()
    compile: CompileConfig = CompileConfig()
    estimate: EstimateConfig = EstimateConfig()
    health: HealthConfig = HealthConfig()
    launch: LaunchConfig = LaunchConfig()
    storage: RetryPolicy = RetryPolicy()
    log: LogConfig = LogConfig()


# Where, when and how fast a cycle runs; the same work has the same hash without them.
_NOT_HASHED: dict[str, IncEx | bool] = {
    "workspace": True,
    "cycle": True,
    "scratch": True,
    "launch": True,
    "compile": True,
    "estimate": True,
    "health": True,
    "parity": True,
    "tune": True,
    "storage": True,
    "log": True,
    "data": {"num_workers": True},
    "train": {"deadline": True, "collective_timeout_s": True},
    "evaluate": {"candidate": True, "promote": True, "force_reason": True, "save_every_s": True},
    "mine": {"worker": True, "workers": True, "items_per_part": True, "queries_per_part": True},
    "embed": {"worker": True, "workers": True, "tokenise_processes": True, "verify": True},
}


def settings_hash(settings: Settings) -> str:
    """32 hex digits naming the settings that decide what is produced; equal on every machine and in every process."""
    return fingerprint(settings.model_dump(mode="json", exclude=_NOT_HASHED))
