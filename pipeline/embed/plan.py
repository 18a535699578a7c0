"""The plan of a cycle's embedding: what is embedded with which model, decided by the first worker and then fixed.

It is pinned with one conditional write, so that all workers and later attempts do the same work, whatever is promoted
or delivered meanwhile. The work shards follow from it alone.
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
from pipeline.embed.catalogue import Catalogue, CatalogueColumns, WorkShard, look_at
from pipeline.embed.config import CatalogueConfig, EmbedConfig
from pipeline.embed.vectors import ModelRef, VectorLayout, check_dimensions, vectors_prefix
from pipeline.io import atomic
from pipeline.io.commit import commit_files, hash_bytes, read_manifest
from pipeline.io.storage import Storage, join_key, open_storage, os_errors, read_record
from pipeline.registry.checkpoints import key_in, locate, production_prefix
from pipeline.settings import Settings

# The catalogue that the settings name; what cannot be read by row groups is brought into the workspace once.
#
# That is CSV and JSON lines, and, when no catalogue is named, the distinct products of the data input: of rows with the
# same product id the first one counts. Memory: a file's rows, and about 100 bytes for each product.

KIND = "catalogue"
FORMAT_VERSION = 1
FILE_ROWS = 50_000
FILE_BYTES = 4 * 2**20
"""About the size of a file: small enough for local storage to name it by its content."""
WINDOW_ROWS = 16_384
"""Rows that are tokenised at a time, and texts that are sorted by length together."""
QUARANTINE_ROWS = 1000
"""Bad rows that are kept, with reasons."""
_BATCH_ROWS = 4096
_SAMPLE_ROWS = 100
_SCHEMA = pa.schema([("id", pa.large_binary()), ("title", pa.large_binary()), ("text", pa.large_binary())])
COLUMNS = CatalogueColumns(id="id", title="title", text="text")
"""What the columns of a gathered catalogue are called."""


class GatheredInfo(Record):
    """The fields of the manifest. Rows that no reader could make out are in no file."""

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
        seen = set[bytes]()
        for batch in read_products(source, stop):
            found = _as_catalogue(batch, "product_id", config.filter)
            is_first = np.ones(len(found.rows), dtype=np.bool_)
            for row, value in enumerate(found.columns["id"].to_pylist()):
                if value:  # rows without an id are all kept, to be judged
                    is_first[row] = value not in seen
                    seen.add(value)
            columns = found.columns.filter(pa.array(is_first))
            yield replace(found, columns=columns, rows=found.rows[is_first])

    return _gather(workspace, content, products())


def gather_rows(columns: CatalogueColumns, files: Files, workspace: Storage) -> tuple[str, GatheredInfo]:
    """Gather all rows of files. Raises DataError for a file without the columns."""
    content: dict[str, JsonValue] = {
        "format": FORMAT_VERSION,
        "content": [[file.key, file.content_id] for file in files.inputs],
        "columns": columns.model_dump(),
    }
    batches = files.read(lambda uri: partial(columns.plan, file=uri), _BATCH_ROWS, "reading the catalogue")
    return _gather(workspace, content, (_as_catalogue(batch, "id", columns.filter) for batch in batches))


def _as_catalogue(batch: RawBatch, id_field: str, wanted: dict[str, str]) -> RawBatch:
    """Return rows with fields id, title, text. A product without an id gets the hash of its title."""
    columns, rows = batch.columns, batch.rows
    if wanted:
        keep = filter_mask(columns, wanted)
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
    """Write the rows unless they are there, as a committed folder of Parquet files with COLUMNS. Return its prefix.

    Every process writes the same files, which are never replaced.
    """
    prefix = f"catalogues/{fingerprint(content)}"
    if (there := read_manifest(workspace, prefix)) is not None:
        return prefix, GatheredInfo.model_validate(there.fields)
    files: dict[str, FileRecord] = {}
    unreadable, sample = Counter[str](), list[QuarantinedRow]()
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in chain(batches, [None]):
        if held and (
            batch is None
            or sum(map(len, held)) + len(batch.columns) > FILE_ROWS
            or sum(one.nbytes for one in held) + batch.columns.nbytes > FILE_BYTES
        ):
            sink = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_batches(held, _SCHEMA), sink, compression="zstd")
            name, data = f"part-{len(files):05d}.parquet", sink.getvalue().to_pybytes()
            key = join_key(prefix, name)
            if not workspace.write_if_absent(key, data) and workspace.read_bytes(key) != data:
                workspace.write_bytes(key, data)  # of another version
            files[name] = FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))
            held.clear()
        if batch is not None:
            for bad in batch.bad:
                unreadable[bad.reason] += bad.count
            sample += quarantined(batch.bad[: _SAMPLE_ROWS - len(sample)])
            held.append(batch.columns)
            rows += len(batch.columns)
    info = GatheredInfo(rows=rows, unreadable=dict(sorted(unreadable.items())), sample=tuple(sample))
    commit_files(workspace, prefix, kind=KIND, fields=info.model_dump(mode="json"), files=files)
    return prefix, info


def find_catalogue(config: CatalogueConfig, data: DataConfig, ctx: StageContext) -> Catalogue:
    """Find the files to read; what is not Parquet is brought into the workspace first. Raises DataError."""
    if config.path is None:
        lock = ctx.scratch / "embed" / "gather.lock"
        # Of the workers of a machine one reads the data, the others find its files.
        with os_errors("writing", f"file://{lock}"), atomic.exclusive(lock, ctx.stop):
            prefix, info = gather_products(data, ctx.workspace, scratch=ctx.scratch, stop=ctx.stop)
    else:
        columns = CatalogueColumns(id=config.id, title=config.title, text=config.text, filter=config.filter)
        files = open_files(config.path, config.format, ctx.stop, "--embed.catalogue.path", ctx.settings.storage)
        if files.passed_over:
            ctx.console.info(
                f"embed: {len(files.passed_over)} other file(s) were not read: {names_of(files.passed_over)}"
            )
        if all(name == "parquet" for _, name in files.entries):
            return look_at(files.storage, [stat for stat, _ in files.entries], columns)
        prefix, info = gather_rows(columns, files, ctx.workspace)
    stats = [stat for stat in ctx.workspace.list(prefix) if stat.key.endswith(".parquet")]
    if not stats:
        raise DataError(
            f"the catalogue has no row to embed ({sum(info.unreadable.values())} could not be read)",
            expected="rows with an id and a title",
            next_command="check --embed.catalogue.path (or --data.path) and the filter",
        )
    found = look_at(ctx.workspace, stats, COLUMNS)
    update = {"root": "", "unreadable": info.unreadable, "unreadable_sample": info.sample}
    return found.model_copy(update=update)


class EmbedPlan(Record):
    """Everything the parts depend on."""

    schema_version: int = 1
    cycle: str
    generation: int = Field(ge=1, description="One more than that of the newest finished vectors")
    asked: dict[str, JsonValue] = Field(description="The settings that decide the work, by name")
    catalogue: Catalogue
    model: ModelRef
    made_by: dict[str, JsonValue] = Field(description="All that decides a vector, the text aside, by name")
    layout: VectorLayout
    max_tokens: int
    rows_per_part: int
    window_rows: int
    quarantine_rows: int
    previous: EarlierCycle | None = Field(description="The newest finished vectors")
    carry_from: EarlierCycle | None = Field(
        description="The newest made as ours will be: unchanged rows are taken over"
    )

    @cached_property
    def fingerprint(self) -> str:
        """Name of the plan; in every part, so that no part of another plan is taken for one of this."""
        return fingerprint(self.model_dump(mode="json"))

    @cached_property
    def shards(self) -> tuple[WorkShard, ...]:
        return self.catalogue.shards(self.rows_per_part)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of every part."""
        made = {name: str(value) for name, value in self.made_by.items()}
        layout = {"dtype": self.layout.dtype, "dim": str(self.layout.dim)}
        model = {"model": self.model.name, "checkpoint": self.model.place}
        return made | layout | model | {"cycle": self.cycle, "plan": self.fingerprint}


def plan_key(cycle: str) -> str:
    return f"cycles/{cycle}/embed/plan.json"


def pinned_plan(workspace: Storage, cycle: str) -> EmbedPlan | None:
    """Return the plan of a cycle, None before there is one. Raises DataError if it cannot be read."""
    again = _start_over(workspace, cycle)
    return read_record(
        workspace, plan_key(cycle), EmbedPlan, "an embedding plan", "this version of trnpipe embed", next_command=again
    )


def pin_plan(workspace: Storage, plan: EmbedPlan) -> EmbedPlan:
    """Store the plan unless another worker was first. Return the one that counts."""
    workspace.write_if_absent(plan_key(plan.cycle), plan.model_dump_json(indent=1).encode() + b"\n")
    pinned = pinned_plan(workspace, plan.cycle)
    return pinned if pinned is not None else plan


def _start_over(workspace: Storage, cycle: str) -> str:
    folders = (workspace.uri(f"cycles/{cycle}/embed"), workspace.uri(vectors_prefix(cycle)))
    return f"delete {folders[0]} and {folders[1]} to start over"


# Making the plan: find the catalogue, look at the checkpoint, choose the earlier vectors.

_DATA_FIELDS = {"path", "format", "columns", "filter", "synthetic"}


def asked_for(config: EmbedConfig, data: DataConfig) -> dict[str, JsonValue]:
    """Return the settings that decide the work, by name; the data input counts if there is no catalogue."""
    asked: dict[str, JsonValue] = {"embed.checkpoint": config.checkpoint, "embed.precision": config.precision}
    if config.chunks > 1:
        asked["embed.chunks"] = config.chunks
    catalogue = config.catalogue.model_dump(mode="json", exclude={"max_bad_fraction"})
    catalogue |= CatalogueConfig.retired  # they were settings: plans stay what they are
    asked |= {f"embed.catalogue.{name}": value for name, value in catalogue.items()}
    asked |= {f"embed.output.{name}": value for name, value in config.output.model_dump(mode="json").items()}
    if config.catalogue.path is None:
        asked |= {f"data.{name}": value for name, value in data.model_dump(mode="json", include=_DATA_FIELDS).items()}
        asked["data.esci_locale"] = None  # as plans of earlier versions have it
    return asked


def made_with(config: EmbedConfig, checkpoint: Checkpoint) -> dict[str, JsonValue]:
    """Return all that decides a vector, the text aside, by name: only vectors with the same are taken over."""
    state = checkpoint.state
    made_by: dict[str, JsonValue] = {
        "checkpoint_digest": checkpoint.digest,
        "tokenizer": state.tokenizer_fingerprint,
        "pooling": state.model.pooling,
        "precision": config.precision,
        "max_tokens": config.text_limit(state.max_tokens, state.model.max_positions),
        "normalised": True,
    }
    # Without chunks, as before there were any.
    return made_by | ({"chunks": config.chunks} if config.chunks > 1 else {})


def cycle_plan(settings: Settings, ctx: StageContext) -> tuple[EmbedPlan, Checkpoint | None]:
    """Return the plan of the cycle, made if there is none; and the checkpoint if it was opened for that.

    Raises ConfigError if the cycle was begun with other settings, TrnpipeError.
    """
    pinned, checkpoint = pinned_plan(ctx.workspace, ctx.cycle), None
    if pinned is None:
        made, checkpoint = make_plan(settings, ctx)
        pinned = pin_plan(ctx.workspace, made)
        checkpoint = checkpoint if pinned.model == made.model else None
    asked = asked_for(settings.embed, settings.data)
    for name in sorted(pinned.asked.keys() | asked.keys()):
        if pinned.asked.get(name) != asked.get(name):
            raise ConfigError(
                f"{name} is {asked.get(name)!r}; cycle {ctx.cycle} was begun with {pinned.asked.get(name)!r}",
                expected="the settings with which the cycle was begun",
                next_command=f"the same settings, another --cycle, or {_start_over(ctx.workspace, ctx.cycle)}",
            )
    return pinned, checkpoint


def make_plan(settings: Settings, ctx: StageContext) -> tuple[EmbedPlan, Checkpoint]:
    config, place = settings.embed, model_place(settings, ctx)
    checkpoint = open_model(place, settings, ctx)
    width, made_by = checkpoint.state.model.encoder.hidden_size, made_with(config, checkpoint)
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
        asked=asked_for(config, settings.data),
        catalogue=catalogue,
        model=ModelRef(name=settings.model_name, place=place, digest=checkpoint.digest),
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


# The checkpoint that embeds: the promoted one, or the one named in the settings; pinned by the plan of the cycle.


def model_place(settings: Settings, ctx: StageContext) -> str:
    """Return the prefix in the workspace, or URI, of the checkpoint that embeds. Raises CheckpointError without one."""
    if settings.embed.checkpoint:
        named = settings.embed.checkpoint.rstrip("/")
        return key_in(ctx.workspace, named) or named
    promoted = production_prefix(ctx.workspace, settings.model_name)
    if promoted is not None:
        return promoted
    trained = ctx.earlier("train")
    candidate = trained.outputs.get("checkpoint") if trained else None
    raise CheckpointError(
        f"no checkpoint of model {settings.model_name} is promoted in {ctx.workspace.root}",
        expected="a promoted checkpoint, or one that is named",
        next_command=f"trnpipe evaluate, or --embed.checkpoint {candidate or 'checkpoints/<cycle>/step-<n>'}",
    )


def open_model(place: str, settings: Settings, ctx: StageContext) -> Checkpoint:
    """Open the checkpoint, every byte verified. Raises CheckpointError."""
    storage, prefix = locate(place, settings, ctx.workspace)
    return open_checkpoint(storage, prefix, ctx.scratch / "embed" / "model")


def open_pinned(model: ModelRef, settings: Settings, ctx: StageContext) -> Checkpoint:
    """Open the checkpoint of the plan. Raises CheckpointError if it is gone or has changed."""
    checkpoint = open_model(model.place, settings, ctx)
    if checkpoint.digest != model.digest:
        raise CheckpointError(
            f"{checkpoint.uri} has digest {checkpoint.digest}",
            expected=f"{model.digest}, with which cycle {ctx.cycle} was begun",
            next_command="embed in a new cycle",
        )
    return checkpoint


def catalogue_storage(plan: EmbedPlan, settings: Settings, ctx: StageContext) -> Storage:
    """Open the storage of the catalogue's files."""
    root = plan.catalogue.root
    return open_storage(root, retry=settings.storage, stop=ctx.stop) if root else ctx.workspace


def check_lengths(plan: EmbedPlan, settings: Settings, checkpoint: Checkpoint) -> None:
    """Raise ConfigError if today's settings cut texts elsewhere than those with which the plan was made."""
    found = longest_text(settings, checkpoint)
    if found != plan.max_tokens:
        raise ConfigError(
            f"embed.buckets {settings.embed.buckets} cut texts at {found} tokens; cycle {plan.cycle} was begun with"
            f" {plan.max_tokens}",
            expected="one length for all vectors of a cycle",
            next_command="the same embed.buckets, or another --cycle",
        )


def longest_text(settings: Settings, checkpoint: Checkpoint) -> int:
    """Return the tokens of a text that the model reads."""
    state = checkpoint.state
    return settings.embed.text_limit(state.max_tokens, state.model.max_positions)
