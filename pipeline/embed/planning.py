"""Making the plan: find the catalogue, look at the checkpoint, choose the earlier vectors."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from pipeline.checkpoint.store import Checkpoint
from pipeline.core.errors import DataError
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.sources import find_files
from pipeline.embed.carry import find_earlier
from pipeline.embed.catalogue import Catalogue, CatalogueColumns, look_at
from pipeline.embed.catalogue_config import CatalogueConfig
from pipeline.embed.config import EmbedConfig
from pipeline.embed.gather import COLUMNS, Gathered, format_of, gather_products, gather_rows
from pipeline.embed.output import VectorLayout, check_dimensions
from pipeline.embed.plan import EmbedPlan, ModelRef
from pipeline.io.retry import RetryPolicy
from pipeline.io.storage import Storage

_DATA_FIELDS = {"path", "format", "esci_locale", "columns", "filter", "synthetic"}


@dataclass(frozen=True)
class Surroundings:
    """Where plans are made."""

    workspace: Storage
    scratch: Path
    retry: RetryPolicy
    stop: StopSignal


def asked_for(config: EmbedConfig, data: DataConfig) -> dict[str, JsonValue]:
    """The settings that decide the work, by name; the data input counts where there is no catalogue."""
    asked: dict[str, JsonValue] = {"embed.checkpoint": config.checkpoint, "embed.precision": config.precision}
    catalogue = config.catalogue.model_dump(mode="json", exclude={"max_bad_fraction"})
    asked |= {f"embed.catalogue.{name}": value for name, value in catalogue.items()}
    asked |= {f"embed.output.{name}": value for name, value in config.output.model_dump(mode="json").items()}
    if config.catalogue.path is None:
        asked |= {f"data.{name}": value for name, value in data.model_dump(mode="json", include=_DATA_FIELDS).items()}
    return asked


def make_plan(
    cycle: str,
    config: EmbedConfig,
    data: DataConfig,
    checkpoint: Checkpoint,
    model: ModelRef,
    max_tokens: int,
    around: Surroundings,
) -> EmbedPlan:
    """What this cycle embeds, and with what. Raises DataError, ConfigError, TransientError, Preempted."""
    width = checkpoint.state.model.encoder.hidden_size
    check_dimensions("embed.output.dimensions", config.output.dimensions, width)
    catalogue = find_catalogue(config.catalogue, data, around)
    layout = VectorLayout(
        format=config.output.format,
        dtype=config.output.dtype,
        dim=config.output.dimensions or width,
        id_type=catalogue.id_type,
    )
    made_by: dict[str, JsonValue] = {
        "checkpoint_digest": model.digest,
        "tokenizer": checkpoint.state.tokenizer_fingerprint,
        "pooling": checkpoint.state.model.pooling,
        "precision": config.precision,
        "max_tokens": max_tokens,
        "normalised": True,
    }
    earlier = find_earlier(around.workspace, cycle, config.output.carry_over, made_by, layout)
    return EmbedPlan(
        cycle=cycle,
        generation=earlier.generation + 1,
        asked=asked_for(config, data),
        catalogue=catalogue,
        model=model,
        made_by=made_by,
        layout=layout,
        max_tokens=max_tokens,
        rows_per_part=config.output.rows_per_part,
        window_rows=config.catalogue.window_rows,
        quarantine_rows=config.catalogue.quarantine_rows,
        previous=earlier.previous,
        carry_from=earlier.carry_from,
    )


def find_catalogue(config: CatalogueConfig, data: DataConfig, around: Surroundings) -> Catalogue:
    """The files to read; what is no Parquet is brought into the workspace first. Raises DataError."""
    if config.path is None:
        return _look_at_gathered(
            gather_products(data, around.workspace, scratch=around.scratch, stop=around.stop), around.workspace
        )
    columns = CatalogueColumns(id=config.id, title=config.title, text=config.text, filter=config.filter)
    storage, stats = find_files(config.path, around.stop, "--embed.catalogue.path", around.retry)
    files = [(stat, name) for stat in stats if (name := format_of(stat.key, config.format))]
    if not files:
        seen = ", ".join(stat.key for stat in stats[:5]) or "nothing"
        raise DataError(
            f"no catalogue file below {config.path}; seen: {seen}",
            expected="*.parquet, *.csv or *.jsonl files",
            next_command="correct --embed.catalogue.path, or set --embed.catalogue.format",
        )
    if all(name == "parquet" for _, name in files):
        return look_at(storage, [stat for stat, _ in files], columns)
    return _look_at_gathered(gather_rows(columns, storage, files, around.workspace, around.stop), around.workspace)


def _look_at_gathered(gathered: Gathered, workspace: Storage) -> Catalogue:
    stats = [stat for stat in workspace.list(gathered.prefix) if stat.key.endswith(".parquet")]
    if not stats:
        raise DataError(
            f"the catalogue has no row to embed ({sum(gathered.info.unreadable.values())} could not be read)",
            expected="rows with an id and a title",
            next_command="check --embed.catalogue.path (or --data.path) and the filter",
        )
    found = look_at(workspace, stats, COLUMNS)
    update = {"root": "", "unreadable": gathered.info.unreadable, "unreadable_sample": gathered.info.sample}
    return found.model_copy(update=update)
