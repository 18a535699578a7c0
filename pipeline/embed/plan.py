"""The embedding plan of a cycle: the catalogue and the model, chosen by the first worker and then pinned.

It is pinned with one conditional write, so that all workers and later attempts do the same work even if another model
is promoted or the catalogue changes. The work shards depend only on the plan.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, JsonValue

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.context import StageContext
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.core.fingerprint import fingerprint, hash63
from pipeline.core.manifest import FileRecord
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.input_files import Files, names_of, open_files
from pipeline.data.rows import RawBatch, quarantined
from pipeline.data.sources import open_source, read_products
from pipeline.data.token_sets import QuarantinedRow
from pipeline.data.validate import filter_mask
from pipeline.embed.carry_over import EarlierCycle, find_earlier
from pipeline.embed.catalogue import Catalogue, CatalogueColumns, WorkShard, read_footers
from pipeline.embed.config import CatalogueConfig, EmbedConfig
from pipeline.embed.vectors import ModelRef, VectorLayout, check_dimensions, vectors_prefix
from pipeline.io import atomic
from pipeline.io.commit import commit_files, hash_bytes, read_manifest
from pipeline.io.storage import Storage, join_key, open_storage, os_errors, read_record
from pipeline.registry.checkpoints import key_in, locate, production_prefix
from pipeline.settings import Settings

# The catalogue of the settings. A catalogue that is not Parquet is converted and stored in the workspace once.
#
# This applies to CSV and JSON lines and, if no catalogue is set, to the distinct products of the data input. The first
# row of each product id is used. Memory: the rows of a file, and about 100 bytes per product.

KIND = "catalogue"
FORMAT_VERSION = 1
FILE_ROWS = 50_000
FILE_BYTES = 4 * 2**20
"""Approximate size of a file, small enough for local storage to compute its etag from its content."""
WINDOW_ROWS = 16_384
"""Rows that are tokenised together, and texts that are sorted by length together."""
QUARANTINE_ROWS = 1000
"""Maximum number of bad rows to keep, with reasons."""
_BATCH_ROWS = 4096
_SAMPLE_ROWS = 100
_SCHEMA = pa.schema([("id", pa.large_binary()), ("title", pa.large_binary()), ("text", pa.large_binary())])
COLUMNS = CatalogueColumns(id="id", title="title", text="text")
"""Column names of a gathered catalogue."""


class GatheredInfo(Record):
    """The fields of the manifest. Unreadable rows are in no file."""

    rows: int
    unreadable: dict[str, int]
    sample: tuple[QuarantinedRow, ...]


def gather_products(
    config: DataConfig, workspace: Storage, *, scratch: Path, stop: StopSignal
) -> tuple[str, GatheredInfo]:
    """Gather the distinct products of the data input. Raises DataError if it cannot be used."""
    source = open_source(config, scratch=scratch, stop=stop)
    content: dict[str, JsonValue] = {
        "format": FORMAT_VERSION,
        "content": [partition.content_id for partition in source.partitions],
        "columns": config.columns.model_dump(include={"product_id", "title", "text"}),
        "filter": dict(config.filter),
        "esci_locale": None,
    }

    def products() -> Iterator[RawBatch]:
        observed = set[bytes]()
        for batch in read_products(source, stop):
            rows = _as_catalogue(batch, "product_id", config.filter)
            is_first = np.ones(len(rows.rows), dtype=np.bool_)
            for row, value in enumerate(rows.columns["id"].to_pylist()):
                if value:  # rows without an id are all kept, to be counted as bad
                    is_first[row] = value not in observed
                    observed.add(value)
            yield replace(rows, columns=rows.columns.filter(pa.array(is_first)), rows=rows.rows[is_first])

    return _gather(workspace, content, products())


def gather_rows(columns: CatalogueColumns, files: Files, workspace: Storage) -> tuple[str, GatheredInfo]:
    """Gather all rows of files. Raises DataError if a file lacks a column."""
    content: dict[str, JsonValue] = {
        "format": FORMAT_VERSION,
        "content": [[file.key, file.content_id] for file in files.inputs],
        "columns": columns.model_dump(),
    }
    batches = files.read(lambda uri: partial(columns.plan, file=uri), _BATCH_ROWS, "reading the catalogue")
    return _gather(workspace, content, (_as_catalogue(batch, "id", columns.filter) for batch in batches))


def _as_catalogue(batch: RawBatch, id_field: str, row_filter: dict[str, str]) -> RawBatch:
    """Return rows with fields id, title, text. The id of a product without one is the hash of its title."""
    columns, rows = batch.columns, batch.rows
    if row_filter:
        keep = filter_mask(columns, row_filter)
        columns, rows = columns.filter(pa.array(keep)), rows[keep]
    names, title = columns.schema.names, columns["title"]
    text = columns["text"] if "text" in names else pa.nulls(len(rows), pa.large_binary())
    if id_field in names:
        ids = columns[id_field]
    else:
        hashes = [str(hash63(value.strip())).encode() if value else None for value in title.to_pylist()]
        ids = pa.array(hashes, pa.large_binary())
    return replace(batch, columns=pa.RecordBatch.from_arrays([ids, title, text], schema=_SCHEMA), rows=rows)


def _gather(workspace: Storage, content: dict[str, JsonValue], batches: Iterator[RawBatch]) -> tuple[str, GatheredInfo]:
    """Write the rows as a committed folder of Parquet files with COLUMNS, unless it exists. Return its prefix."""
    prefix = f"catalogues/{fingerprint(content)}"
    if (existing := read_manifest(workspace, prefix)) is not None:
        return prefix, GatheredInfo.model_validate(existing.fields)
    files: dict[str, FileRecord] = {}
    unreadable, sample = Counter[str](), list[QuarantinedRow]()
    buffered: list[pa.RecordBatch] = []
    rows = 0
    for batch in chain(batches, [None]):
        if buffered and (
            batch is None
            or sum(map(len, buffered)) + len(batch.columns) > FILE_ROWS
            or sum(columns.nbytes for columns in buffered) + batch.columns.nbytes > FILE_BYTES
        ):
            sink = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_batches(buffered, _SCHEMA), sink, compression="zstd")
            name, data = f"part-{len(files):05d}.parquet", sink.getvalue().to_pybytes()
            key = join_key(prefix, name)
            if not workspace.write_if_absent(key, data) and workspace.read_bytes(key) != data:
                workspace.write_bytes(key, data)  # replaces the file of another version
            files[name] = FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))
            buffered.clear()
        if batch is not None:
            for bad in batch.bad:
                unreadable[bad.reason] += bad.count
            sample += quarantined(batch.bad[: _SAMPLE_ROWS - len(sample)])
            buffered.append(batch.columns)
            rows += len(batch.columns)
    info = GatheredInfo(rows=rows, unreadable=dict(sorted(unreadable.items())), sample=tuple(sample))
    commit_files(workspace, prefix, kind=KIND, fields=info.model_dump(mode="json"), files=files)
    return prefix, info


def find_catalogue(config: CatalogueConfig, data: DataConfig, ctx: StageContext) -> Catalogue:
    """Find the catalogue's files, after conversion to Parquet if necessary. Raises DataError if it cannot be read."""
    if config.path is None:
        lock = ctx.scratch / "embed" / "gather.lock"
        # One worker per machine reads the data, the others use its files.
        with os_errors("writing", f"file://{lock}"), atomic.exclusive(lock, ctx.stop):
            prefix, info = gather_products(data, ctx.workspace, scratch=ctx.scratch, stop=ctx.stop)
    else:
        columns = CatalogueColumns(id=config.id, title=config.title, text=config.text, filter=config.filter)
        files = open_files(config.path, config.format, ctx.stop, "--embed.catalogue.path", ctx.settings.storage)
        if files.skipped:
            ctx.console.info(f"embed: {len(files.skipped)} other file(s) were not read: {names_of(files.skipped)}")
        if all(name == "parquet" for _, name in files.entries):
            return read_footers(files.storage, [stat for stat, _ in files.entries], columns)
        prefix, info = gather_rows(columns, files, ctx.workspace)
    stats = [stat for stat in ctx.workspace.list(prefix) if stat.key.endswith(".parquet")]
    if not stats:
        raise DataError(
            f"the catalogue has no row to embed ({sum(info.unreadable.values())} could not be read)",
            expected="rows with an id and a title",
            next_command="check --embed.catalogue.path (or --data.path) and the filter",
        )
    catalogue = read_footers(ctx.workspace, stats, COLUMNS)
    update = {"root": "", "unreadable": info.unreadable, "unreadable_sample": info.sample}
    return catalogue.model_copy(update=update)


class EmbedPlan(Record):
    """Everything that determines the parts."""

    schema_version: int = 1
    cycle: str
    generation: int = Field(ge=1, description="One more than the generation of the newest complete vectors")
    asked: dict[str, JsonValue] = Field(description="The settings that determine the plan, by name")
    catalogue: Catalogue
    model: ModelRef
    made_by: dict[str, JsonValue] = Field(description="Everything that determines a vector besides its text, by name")
    layout: VectorLayout
    max_tokens: int
    rows_per_part: int
    window_rows: int
    quarantine_rows: int
    previous: EarlierCycle | None = Field(description="The newest complete vectors")
    carry_from: EarlierCycle | None = Field(
        description="The newest vectors from the same model and settings, reused for unchanged rows"
    )

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the plan, stored in every part to detect parts of another plan."""
        return fingerprint(self.model_dump(mode="json"))

    @cached_property
    def shards(self) -> tuple[WorkShard, ...]:
        return self.catalogue.shards(self.rows_per_part)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of every part."""
        made_by = {name: str(value) for name, value in self.made_by.items()}
        layout = {"dtype": self.layout.dtype, "dim": str(self.layout.dim)}
        model = {"model": self.model.name, "checkpoint": self.model.place}
        return made_by | layout | model | {"cycle": self.cycle, "plan": self.fingerprint}


def plan_key(cycle: str) -> str:
    return f"cycles/{cycle}/embed/plan.json"


def pinned_plan(workspace: Storage, cycle: str) -> EmbedPlan | None:
    """Return the plan of a cycle, or None if it has none yet. Raises DataError if the plan cannot be read."""
    kind, producer = "an embedding plan", "this version of trnpipe embed"
    return read_record(
        workspace, plan_key(cycle), EmbedPlan, kind, producer, next_command=_start_over(workspace, cycle)
    )


def pin_plan(workspace: Storage, plan: EmbedPlan) -> EmbedPlan:
    """Store the plan unless another worker has stored one. Return the stored plan."""
    workspace.write_if_absent(plan_key(plan.cycle), plan.model_dump_json(indent=1).encode() + b"\n")
    pinned = pinned_plan(workspace, plan.cycle)
    return pinned if pinned is not None else plan


def _start_over(workspace: Storage, cycle: str) -> str:
    folders = (workspace.uri(f"cycles/{cycle}/embed"), workspace.uri(vectors_prefix(cycle)))
    return f"delete {folders[0]} and {folders[1]} to start over"


# Making the plan: find the catalogue, open the checkpoint, choose the earlier vectors.

_DATA_FIELDS = {"path", "format", "columns", "filter", "synthetic"}


def plan_settings(config: EmbedConfig, data: DataConfig) -> dict[str, JsonValue]:
    """Return the settings that determine the plan, by name, including the data input if no catalogue is set."""
    values: dict[str, JsonValue] = {"embed.checkpoint": config.checkpoint, "embed.precision": config.precision}
    if config.chunks > 1:
        values["embed.chunks"] = config.chunks
    catalogue = config.catalogue.model_dump(mode="json", exclude={"max_bad_fraction"})
    catalogue |= CatalogueConfig.retired  # former settings, kept so that existing plans still match
    values |= {f"embed.catalogue.{name}": value for name, value in catalogue.items()}
    values |= {f"embed.output.{name}": value for name, value in config.output.model_dump(mode="json").items()}
    if config.catalogue.path is None:
        values |= {f"data.{name}": value for name, value in data.model_dump(mode="json", include=_DATA_FIELDS).items()}
        values["data.esci_locale"] = None  # as in the plans of earlier versions
    return values


def vector_identity(config: EmbedConfig, checkpoint: Checkpoint) -> dict[str, JsonValue]:
    """Return everything that determines a vector besides its text, by name. Vectors are reused only if it is equal."""
    state = checkpoint.state
    made_by: dict[str, JsonValue] = {
        "checkpoint_digest": checkpoint.digest,
        "tokenizer": state.tokenizer_fingerprint,
        "pooling": state.model.pooling,
        "precision": config.precision,
        "max_tokens": config.text_limit(state.max_tokens, state.model.max_positions),
        "normalised": True,
    }
    # Omitted for one chunk, to match plans from before the setting existed.
    return made_by | ({"chunks": config.chunks} if config.chunks > 1 else {})


def cycle_plan(settings: Settings, ctx: StageContext) -> tuple[EmbedPlan, Checkpoint | None]:
    """Return the plan of the cycle, made if missing, and the checkpoint if it was opened for that.

    Raises ConfigError if the cycle was started with other settings.
    """
    pinned, checkpoint = pinned_plan(ctx.workspace, ctx.cycle), None
    if pinned is None:
        plan, checkpoint = make_plan(settings, ctx)
        pinned = pin_plan(ctx.workspace, plan)
        checkpoint = checkpoint if pinned.model == plan.model else None
    current = plan_settings(settings.embed, settings.data)
    for name in sorted(pinned.asked.keys() | current.keys()):
        if pinned.asked.get(name) != current.get(name):
            raise ConfigError(
                f"{name} is {current.get(name)!r}, but cycle {ctx.cycle} was started with {pinned.asked.get(name)!r}",
                expected="the settings with which the cycle was started",
                next_command=f"the same settings, another --cycle, or {_start_over(ctx.workspace, ctx.cycle)}",
            )
    return pinned, checkpoint


def make_plan(settings: Settings, ctx: StageContext) -> tuple[EmbedPlan, Checkpoint]:
    config, location = settings.embed, model_location(settings, ctx)
    checkpoint = open_model(location, settings, ctx)
    width, made_by = checkpoint.state.model.encoder.hidden_size, vector_identity(config, checkpoint)
    check_dimensions("embed.output.dimensions", config.output.dimensions, width)
    catalogue = find_catalogue(config.catalogue, settings.data, ctx)
    layout = VectorLayout(
        format=config.output.format,
        dtype=config.output.dtype,
        dim=config.output.dimensions or width,
        id_type=catalogue.id_type,
    )
    earlier = find_earlier(ctx.workspace, ctx.cycle, config.output.carry_over, made_by, layout)
    plan = EmbedPlan(
        cycle=ctx.cycle,
        generation=earlier.generation + 1,
        asked=plan_settings(config, settings.data),
        catalogue=catalogue,
        model=ModelRef(name=settings.model_name, place=location, digest=checkpoint.digest),
        made_by=made_by,
        layout=layout,
        max_tokens=longest_text(settings, checkpoint),
        rows_per_part=config.output.rows_per_part,
        window_rows=WINDOW_ROWS,
        quarantine_rows=QUARANTINE_ROWS,
        previous=earlier.previous,
        carry_from=earlier.carry_from,
    )
    return plan, checkpoint


# The checkpoint to embed with: the production model or the one in the settings, pinned by the plan of the cycle.


def model_location(settings: Settings, ctx: StageContext) -> str:
    """Return the prefix or URI of the checkpoint to embed with. Raises CheckpointError if there is none."""
    if settings.embed.checkpoint:
        configured = settings.embed.checkpoint.rstrip("/")
        return key_in(ctx.workspace, configured) or configured
    promoted = production_prefix(ctx.workspace, settings.model_name)
    if promoted is not None:
        return promoted
    trained = ctx.earlier("train")
    candidate = trained.outputs.get("checkpoint") if trained else None
    raise CheckpointError(
        f"no checkpoint of model {settings.model_name} is promoted in {ctx.workspace.root}",
        expected="a promoted checkpoint, or --embed.checkpoint",
        next_command=f"trnpipe evaluate, or --embed.checkpoint {candidate or 'checkpoints/<cycle>/step-<n>'}",
    )


def open_model(location: str, settings: Settings, ctx: StageContext) -> Checkpoint:
    """Open the checkpoint and verify every byte. Raises CheckpointError if it is missing or damaged."""
    storage, prefix = locate(location, settings, ctx.workspace)
    return open_checkpoint(storage, prefix, ctx.scratch / "embed" / "model")


def open_pinned(model: ModelRef, settings: Settings, ctx: StageContext) -> Checkpoint:
    """Open the checkpoint of the plan. Raises CheckpointError if it was deleted or changed."""
    checkpoint = open_model(model.place, settings, ctx)
    if checkpoint.digest != model.digest:
        raise CheckpointError(
            f"{checkpoint.uri} has digest {checkpoint.digest}",
            expected=f"{model.digest}, with which cycle {ctx.cycle} was started",
            next_command="embed in a new cycle",
        )
    return checkpoint


def catalogue_storage(plan: EmbedPlan, settings: Settings, ctx: StageContext) -> Storage:
    """Open the storage of the catalogue's files."""
    root = plan.catalogue.root
    return open_storage(root, retry=settings.storage, stop=ctx.stop) if root else ctx.workspace


def check_lengths(plan: EmbedPlan, settings: Settings, checkpoint: Checkpoint) -> None:
    """Check that the settings cut texts at the same length as the plan. Raises ConfigError if they do not."""
    max_tokens = longest_text(settings, checkpoint)
    if max_tokens != plan.max_tokens:
        raise ConfigError(
            f"embed.buckets {settings.embed.buckets} cut texts at {max_tokens} tokens, but cycle {plan.cycle} was"
            f" started with {plan.max_tokens}",
            expected="the same length for all vectors of a cycle",
            next_command="the same embed.buckets, or another --cycle",
        )


def longest_text(settings: Settings, checkpoint: Checkpoint) -> int:
    """Return the maximum tokens of a text that the model reads."""
    state = checkpoint.state
    return settings.embed.text_limit(state.max_tokens, state.model.max_positions)
