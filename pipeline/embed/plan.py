"""The embedding plan of a cycle, which pins the catalogue and the model.

The first worker makes the plan and stores it with a conditional write. This ensures that all workers and all later
attempts do the same work, even if a different model is promoted or the catalogue changes in the meantime. The work
shards depend only on the plan.
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

from pipeline.checkpoint.store import Checkpoint
from pipeline.context import StageContext
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.core.fingerprint import fingerprint, hash63
from pipeline.core.manifest import FileRecord
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.input_files import Files, names_of, open_files
from pipeline.data.rows import RawBatch
from pipeline.data.sources import open_source, read_products
from pipeline.data.token_sets import QuarantinedRow
from pipeline.data.validate import filter_mask
from pipeline.embed.carry_over import EarlierCycle, find_earlier
from pipeline.embed.catalogue import Catalogue, CatalogueColumns, WorkShard, read_footers
from pipeline.embed.config import CatalogueConfig, EmbedConfig
from pipeline.embed.vectors import ModelRef, VectorLayout, check_dimensions, vectors_prefix
from pipeline.io import atomic
from pipeline.io.commit import commit_files, hash_bytes, read_manifest
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, join_key, open_storage, os_errors, read_record
from pipeline.registry.checkpoints import key_in, locate, production_prefix
from pipeline.registry.records import read_pointer
from pipeline.registry.signing import open_signed
from pipeline.settings import Settings

# Find the catalogue. If it is not in Parquet format, it is converted once and stored in the workspace.
#
# This applies to CSV and JSON lines. It also applies if no catalogue is configured, in which case the catalogue
# consists of the distinct products of the data input, using the first row of each product id. Conversion takes memory
# for the rows of one file, and about 100 bytes per product.

KIND = "catalogue"
FORMAT_VERSION = 1
FILE_ROWS = 50_000
FILE_BYTES = 4 * 2**20
"""Approximate size of a file. It is small enough that local storage computes its etag from the content."""
WINDOW_ROWS = 16_384
"""Number of rows to tokenise together, and number of texts to sort by length and batch together."""
QUARANTINE_ROWS = 1000
"""Maximum number of bad rows to keep together with their reasons."""
_BATCH_ROWS = 4096
_SAMPLE_ROWS = 100
_SCHEMA = pa.schema([("id", pa.large_binary()), ("title", pa.large_binary()), ("text", pa.large_binary())])
_COLUMN_NAMES = {"id", "title", "text", "filter"}
COLUMNS = CatalogueColumns(id="id", title="title", text="text")
"""Column names of a converted catalogue."""


class GatheredInfo(Record):
    """The manifest fields of a converted catalogue. Rows that could not be read are only counted."""

    rows: int
    unreadable: dict[str, int]
    sample: tuple[QuarantinedRow, ...]


def gather_products(
    config: DataConfig, workspace: Storage, *, scratch: Path, stop: StopSignal, retry: RetryPolicy | None = None
) -> tuple[str, GatheredInfo]:
    """Write the distinct products of the data input as a catalogue. Raises DataError if the input is unusable.

    Returns the prefix of the catalogue and its manifest fields.
    """
    source = open_source(config, scratch=scratch, stop=stop, retry=retry)
    content: dict[str, JsonValue] = {
        "format": FORMAT_VERSION,
        "content": [partition.content_id for partition in source.partitions],
        "columns": config.columns.model_dump(include={"product_id", "title", "text"}),
        "filter": dict(config.filter),
        "esci_locale": None,
        **({"attributes": [each.model_dump() for each in config.attributes]} if config.attributes else {}),
    }

    def products() -> Iterator[RawBatch]:
        observed = set[bytes]()
        for batch in read_products(source, stop):
            rows = _as_catalogue(batch, "product_id", config.filter)
            is_first = np.ones(len(rows.rows), dtype=np.bool_)
            for row, (value, *texts) in enumerate(zip(*(column.to_pylist() for column in rows.columns), strict=True)):
                if value and any(text and text.strip() for text in texts):  # all other rows are counted as bad later
                    is_first[row] = value not in observed
                    observed.add(value)
            yield replace(rows, columns=rows.columns.filter(pa.array(is_first)), rows=rows.rows[is_first])

    return _gather(workspace, content, products())


def gather_rows(columns: CatalogueColumns, files: Files, workspace: Storage) -> tuple[str, GatheredInfo]:
    """Write all rows of the given files as a catalogue. Raises DataError if a file lacks a column.

    Returns the prefix of the catalogue and its manifest fields.
    """
    content: dict[str, JsonValue] = {
        "format": FORMAT_VERSION,
        "content": [[file.key, file.content_id] for file in files.inputs],
        "columns": columns.model_dump(),
    }
    versions = [file.version for file in files.inputs]
    batches = files.read(lambda uri: partial(columns.plan, file=uri), _BATCH_ROWS, "reading the catalogue", versions)
    return _gather(workspace, content, (_as_catalogue(batch, "id", columns.filter) for batch in batches))


def _as_catalogue(batch: RawBatch, id_field: str, row_filter: dict[str, str]) -> RawBatch:
    """Return rows with the fields id, title and text. If there is no id column, the hash of the title is used."""
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
    """Write the rows to a committed folder of Parquet files, unless it already exists, and return its prefix."""
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
                workspace.write_bytes(key, data)  # replace a file that was written by a different version
            files[name] = FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))
            buffered.clear()
        if batch is not None:
            for bad in batch.bad:
                unreadable[bad.reason] += bad.count
            sample += batch.bad[: _SAMPLE_ROWS - len(sample)]
            buffered.append(batch.columns)
            rows += len(batch.columns)
    info = GatheredInfo(rows=rows, unreadable=dict(sorted(unreadable.items())), sample=tuple(sample))
    commit_files(workspace, prefix, kind=KIND, fields=info.model_dump(mode="json"), files=files)
    return prefix, info


def find_catalogue(config: CatalogueConfig, data: DataConfig, ctx: StageContext) -> Catalogue:
    """Find the files of the catalogue and convert them to Parquet if necessary.

    `data` has the attributes of the model, which are left out with a warning if the files do not have their columns.
    Raises DataError if the catalogue cannot be read or has no rows.
    """
    if config.path is None:
        lock = ctx.scratch / "embed" / "gather.lock"
        # Only one worker per machine reads the data. The others wait and then use its files.
        with os_errors("writing", f"file://{lock}"), atomic.exclusive(lock, ctx.stop):
            prefix, info = gather_products(
                data, ctx.workspace, scratch=ctx.scratch, stop=ctx.stop, retry=ctx.settings.storage
            )
    else:
        files = open_files(config.path, config.format, ctx.stop, "--embed.catalogue.path", ctx.settings.storage)
        attributes = files.text_attributes(data.attributes, ctx.console.warn)
        columns = CatalogueColumns(**config.model_dump(include=_COLUMN_NAMES), attributes=attributes)
        if files.skipped:
            ctx.console.info(f"embed: {len(files.skipped)} other file(s) were not read: {names_of(files.skipped)}")
        if all(name == "parquet" for _, name in files.entries):
            return read_footers(files.storage, [stat for stat, _ in files.entries], columns)
        prefix, info = gather_rows(columns, files, ctx.workspace)
    stats = [stat for stat in ctx.workspace.list(prefix) if stat.key.endswith(".parquet")]
    if not stats:
        raise DataError(
            f"the catalogue has no rows to embed ({sum(info.unreadable.values())} rows could not be read)",
            expected="rows with an id and a title",
            next_command="check --embed.catalogue.path (or --data.path) and the filter",
        )
    catalogue = read_footers(ctx.workspace, stats, COLUMNS)
    update = {"root": "", "unreadable": info.unreadable, "unreadable_sample": info.sample}
    return catalogue.model_copy(update=update)


class EmbedPlan(Record):
    """Everything that determines the output parts of a cycle."""

    schema_version: int = 1
    cycle: str
    generation: int = Field(ge=1, description="One more than the generation of the newest complete vectors")
    asked: dict[str, JsonValue] = Field(description="The settings that determine the plan, by name")
    catalogue: Catalogue
    model: ModelRef
    made_by: dict[str, JsonValue] = Field(description="All inputs that affect a vector, except for its text, by name")
    layout: VectorLayout
    max_tokens: int
    rows_per_part: int
    window_rows: int
    quarantine_rows: int
    previous: EarlierCycle | None = Field(description="The cycle with the newest complete vectors")
    carry_from: EarlierCycle | None = Field(
        description="The cycle with the same model and settings whose vectors are reused for unchanged rows"
    )

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the plan. It is stored in every part, so that parts of a different plan are detected."""
        return fingerprint(self.model_dump(mode="json"))

    @cached_property
    def shards(self) -> tuple[WorkShard, ...]:
        return self.catalogue.shards(self.rows_per_part)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata to store in every part."""
        made_by = {name: str(value) for name, value in self.made_by.items()}
        layout = {"dtype": self.layout.dtype, "dim": str(self.layout.dim)}
        model = {"model": self.model.name, "checkpoint": self.model.place}
        return made_by | layout | model | {"cycle": self.cycle, "plan": self.fingerprint}


def plan_key(cycle: str) -> str:
    return f"cycles/{cycle}/embed/plan.json"


def pinned_plan(workspace: Storage, cycle: str) -> EmbedPlan | None:
    """Return the stored plan of a cycle, or None if there is none yet. Raises DataError if it cannot be read."""
    kind, producer = "an embedding plan", "this version of trnpipe embed"
    return read_record(
        workspace, plan_key(cycle), EmbedPlan, kind, producer, next_command=_start_over(workspace, cycle)
    )


def pin_plan(workspace: Storage, plan: EmbedPlan) -> EmbedPlan:
    """Store the plan unless another worker was faster, and return the plan that is stored."""
    workspace.write_if_absent(plan_key(plan.cycle), plan.to_json())
    pinned = pinned_plan(workspace, plan.cycle)
    return pinned if pinned is not None else plan


def _start_over(workspace: Storage, cycle: str) -> str:
    folders = (workspace.uri(f"cycles/{cycle}/embed"), workspace.uri(vectors_prefix(cycle)))
    return f"delete {folders[0]} and {folders[1]} to start over"


# Make the plan: find the catalogue, open the checkpoint, and find the earlier vectors.

_DATA_FIELDS = {"path", "format", "columns", "filter", "synthetic"}


def plan_settings(config: EmbedConfig, data: DataConfig) -> dict[str, JsonValue]:
    """Return the settings that determine the plan, by name.

    These include the settings of the data input if no catalogue is configured.
    """
    values: dict[str, JsonValue] = {"embed.checkpoint": config.checkpoint, "embed.precision": config.precision}
    if config.chunks > 1:
        values["embed.chunks"] = config.chunks
    catalogue = config.catalogue.model_dump(mode="json", exclude={"max_bad_fraction"})
    catalogue |= CatalogueConfig.retired  # include retired settings, so that existing plans still match
    values |= {f"embed.catalogue.{name}": value for name, value in catalogue.items()}
    values |= {f"embed.output.{name}": value for name, value in config.output.model_dump(mode="json").items()}
    if config.catalogue.path is None:
        values |= {f"data.{name}": value for name, value in data.model_dump(mode="json", include=_DATA_FIELDS).items()}
        values["data.esci_locale"] = None  # plans of earlier versions have this value
    return values


def vector_identity(config: EmbedConfig, checkpoint: Checkpoint) -> dict[str, JsonValue]:
    """Return all inputs that affect a vector, except for its text, by name.

    Vectors of an earlier cycle are reused only if these values are equal.
    """
    state = checkpoint.state
    made_by: dict[str, JsonValue] = {
        "checkpoint_digest": checkpoint.digest,
        "tokenizer": state.tokenizer_fingerprint,
        "pooling": state.model.pooling,
        "precision": config.precision,
        "max_tokens": config.text_limit(state.max_tokens, state.model.max_positions),
        "normalised": True,
    }
    # Omit the default of one chunk, to match plans that were made before the setting was introduced.
    return made_by | ({"chunks": config.chunks} if config.chunks > 1 else {})


def cycle_plan(settings: Settings, ctx: StageContext) -> tuple[EmbedPlan, Checkpoint | None]:
    """Return the plan of the cycle, and make it if there is none yet.

    The second value is the checkpoint if it was opened to make the plan, and None otherwise. Raises ConfigError if the
    cycle was started with different settings.
    """
    pinned, checkpoint = pinned_plan(ctx.workspace, ctx.cycle), None
    if pinned is None:
        plan, checkpoint = make_plan(settings, ctx)
        pinned = pin_plan(ctx.workspace, plan)
        checkpoint = checkpoint if pinned.model == plan.model else None
    current = plan_settings(settings.embed, settings.data) | {"model_name": settings.model_name}
    asked = pinned.asked | {"model_name": pinned.model.name}
    for name in sorted(asked.keys() | current.keys()):
        if asked.get(name) != current.get(name):
            raise ConfigError(
                f"{name} is {current.get(name)!r}, but cycle {ctx.cycle} was started with {asked.get(name)!r}",
                expected="the same settings that the cycle was started with",
                next_command=f"the same settings, a different --cycle, or {_start_over(ctx.workspace, ctx.cycle)}",
            )
    return pinned, checkpoint


def make_plan(settings: Settings, ctx: StageContext) -> tuple[EmbedPlan, Checkpoint]:
    config, location = settings.embed, model_location(settings, ctx)
    digest = ""  # of the content that was promoted
    if not settings.embed.checkpoint:
        pointer = read_pointer(ctx.workspace, settings.model_name)
        digest = pointer[0].digest if pointer and pointer[0].checkpoint == location else ""
    checkpoint = open_model(location, settings, ctx, digest)
    width, made_by = checkpoint.state.model.encoder.hidden_size, vector_identity(config, checkpoint)
    check_dimensions("embed.output.dimensions", config.output.dimensions, width)
    data = settings.data.model_copy(update={"attributes": checkpoint.state.inputs.attributes})
    catalogue = find_catalogue(config.catalogue, data, ctx)
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


# Open the checkpoint to embed with, which is the configured one or the production model. The plan pins this choice.


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


def open_model(location: str, settings: Settings, ctx: StageContext, digest: str = "") -> Checkpoint:
    """Open the checkpoint and verify its checksums and signature. Raises CheckpointError if it is refused."""
    storage, prefix = locate(location, settings, ctx.workspace)
    return open_signed(storage, prefix, ctx.scratch / "embed" / "model", settings, digest=digest)


def open_pinned(model: ModelRef, settings: Settings, ctx: StageContext) -> Checkpoint:
    """Open the checkpoint of the plan. Raises CheckpointError if it has been deleted or changed."""
    checkpoint = open_model(model.place, settings, ctx)
    if checkpoint.digest != model.digest:
        raise CheckpointError(
            f"{checkpoint.uri} has digest {checkpoint.digest}",
            expected=f"{model.digest}, the checkpoint that cycle {ctx.cycle} was started with",
            next_command="embed in a new cycle",
        )
    return checkpoint


def catalogue_storage(plan: EmbedPlan, settings: Settings, ctx: StageContext) -> Storage:
    """Open the storage that contains the files of the catalogue."""
    root = plan.catalogue.root
    return open_storage(root, retry=settings.storage, stop=ctx.stop) if root else ctx.workspace


def check_lengths(plan: EmbedPlan, settings: Settings, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if the settings truncate texts at a different length than the plan."""
    max_tokens = longest_text(settings, checkpoint)
    if max_tokens != plan.max_tokens:
        raise ConfigError(
            f"embed.buckets {settings.embed.buckets} truncate texts at {max_tokens} tokens, but cycle {plan.cycle} was"
            f" started with {plan.max_tokens}",
            expected="the same length for all vectors of a cycle",
            next_command="the same embed.buckets, or a different --cycle",
        )


def longest_text(settings: Settings, checkpoint: Checkpoint) -> int:
    """Return the maximum number of tokens of a text that the model reads."""
    state = checkpoint.state
    return settings.embed.text_limit(state.max_tokens, state.model.max_positions)
