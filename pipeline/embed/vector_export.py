"""Vectors handed over to another tool: streamed into a folder piece by piece, resumed after a kill, read back.

`handover.json` says what the folder is to become and how many pieces are done; MANIFEST.json takes its place when
every piece was read back. A piece that was broken off is written again from its start, under the same names.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import Field, JsonValue

from pipeline import __version__
from pipeline.core.errors import ConfigError, DataError, first_line
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.core.progress import progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.embed.formats import IDS, MATRIX, Form, Piece, Rows, open_form
from pipeline.embed.vectors import KIND as VECTORS
from pipeline.embed.vectors import ROWS_PER_GROUP, Stored, VectorSet
from pipeline.io.atomic import exclusive, make_dirs, sweep_temps, temp_file, write_bytes_atomic
from pipeline.io.commit import check_sizes, file_record, read_manifest
from pipeline.io.paths import cache_folder, user_path
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import is_temp, open_storage, os_errors, place_of, read_record

KIND = "handover"
STATE = "handover.json"
GROUPS_PER_PIECE = 8
"""Times ROWS_PER_GROUP rows: what is held at a time, and what a kill costs."""


class HandoverState(Record):
    """`handover.json`."""

    asked: dict[str, JsonValue] = Field(description="Form, its options, and the vectors by cycle and digest")
    done: int = Field(0, ge=0, description="Pieces that are written")


def hand_over(vectors: VectorSet, form: Form, folder: Path, stop: StopSignal) -> tuple[Manifest, bool]:
    """All vectors in `form`, in a local folder that is new, empty, or of an earlier try; False where that finished it.

    Memory: one piece, and what the form's library makes of it. Raises ConfigError for a folder of others, DataError
    when what is read back is not what was written, DiskFull, TransientError, Preempted.
    """
    info = vectors.info
    asked: dict[str, JsonValue] = {
        **form.options,
        "form": form.name,
        "cycle": info.cycle,
        "vectors": vectors.manifest.digest,
        "model": info.model.digest,
        "rows": info.rows,
        "dim": info.layout.dim,
    }
    with os_errors("writing", folder.as_uri()):
        make_dirs(folder)
        with exclusive(folder, stop):
            sweep_temps(folder)
            state = _begun(folder, asked)
            if isinstance(state, Manifest):
                return state, False
            pieces = pieces_of(vectors)
            with progress(f"writing {form.name}", info.rows, "rows") as advance:
                for number, piece in enumerate(pieces):
                    if number >= state.done:
                        stop.raise_if_set(f"writing {form.name}")
                        form.write(folder, piece, rows_of(vectors, piece))
                        state = state.model_copy(update={"done": number + 1})
                        write_bytes_atomic(folder / STATE, state.model_dump_json().encode())
                    advance(piece.rows)
            with progress(f"reading {form.name} back", info.rows, "rows") as advance:
                for piece in pieces:
                    stop.raise_if_set(f"reading {form.name} back")
                    try:
                        form.check(folder, piece, rows_of(vectors, piece))
                    except (RuntimeError, ValueError) as error:  # what libraries say of a file they cannot read
                        raise DataError(
                            f"{folder}: piece {piece.number} cannot be read back: {first_line(error)}",
                            expected="what was written there",
                            next_command="delete that folder and run the command again",
                        ) from error
                    advance(piece.rows)
            if form.needs_ids:
                _write_ids(vectors, folder / IDS)
            names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
            files = {name: file_record(folder / name, stop) for name in names if not is_temp(Path(name).name)}
            del files[STATE]
            manifest = Manifest(kind=KIND, created_by=f"trnpipe {__version__}", fields=asked, files=files)
            write_bytes_atomic(folder / MANIFEST_NAME, manifest.to_json())
            (folder / STATE).unlink()
    return manifest, True


def pieces_of(vectors: VectorSet) -> list[Piece]:
    """Ranges of rows, each within one part and not larger than what is held at a time."""
    pieces, first, size = list[Piece](), 0, GROUPS_PER_PIECE * ROWS_PER_GROUP
    for part, info in enumerate(vectors.info.parts):
        for start in range(0, info.rows, size):
            rows = min(size, info.rows - start)
            pieces.append(Piece(len(pieces), part, start, rows, first))
            first += rows
    return pieces


def rows_of(vectors: VectorSet, piece: Piece) -> Iterator[Rows]:
    """The rows of a piece, ROWS_PER_GROUP at a time. Raises DataError."""
    found = 0
    for ids, values in vectors.blocks(piece.part, piece.start, piece.start + piece.rows):
        yield Rows(piece.first + found, ids["id"], values)
        found += len(ids)
    if found != piece.rows:
        raise DataError(
            f"part {piece.part} of {vectors.storage.uri(vectors.prefix)} has {found:,} of {piece.rows:,} rows",
            expected="the part as its manifest tells",
            next_command=f"trnpipe embed verify --cycle {vectors.info.cycle}",
        )


def _begun(folder: Path, asked: dict[str, JsonValue]) -> HandoverState | Manifest:
    """How far an earlier try came, or what it finished.

    Raises ConfigError for a folder of others, DataError for a finished one that has lost a file.
    """
    storage, again = open_storage(str(folder)), "give another folder with --out"
    found = read_manifest(storage, "") or read_record(
        storage, STATE, HandoverState, "the state of a hand-over", "trnpipe export vectors", next_command=again
    )
    wrong = ""
    if found is None:
        others = sorted(path.name for path in folder.iterdir() if not is_temp(path.name))
        wrong, found = f"holds {others[0]}" if others else "", HandoverState(asked=asked)
    earlier = found.asked if isinstance(found, HandoverState) else found.fields
    if earlier != asked or (isinstance(found, Manifest) and found.kind != KIND):
        differs = sorted(name for name in asked.keys() | earlier.keys() if asked.get(name) != earlier.get(name))
        wrong = f"was begun with another {', '.join(differs)}"
    if wrong:
        expected = "a new or empty folder, or one that the same hand-over began"
        raise ConfigError(f"{folder} {wrong}", expected=expected, next_command=again)
    if isinstance(found, Manifest):
        check_sizes(storage, "", found)
        (folder / STATE).unlink(missing_ok=True)  # killed between the two
    elif not found.done:
        write_bytes_atomic(folder / STATE, found.model_dump_json().encode())
    return found


def _write_ids(vectors: VectorSet, path: Path) -> None:
    """The id of each row, in order, as an Arrow file that can be memory-mapped."""
    with temp_file(path) as (file, temp):
        schema = pa.schema([vectors.layout.columns(with_vectors=False).field("id")])
        with pa.ipc.new_file(file, schema) as writer:
            for part in range(len(vectors.info.parts)):
                for batch in vectors.columns(part, ["id"]):
                    writer.write_batch(batch.cast(schema))
        file.flush()
        os.fsync(file.fileno())
        temp.replace(path)


# Vectors for a program: one memory-mapped matrix and the id of each row.


@dataclass(frozen=True)
class MappedVectors:
    """Vectors of one cycle: `vectors` [N, D], fp16 or fp32 and read-only, and `ids` [N] in the same order."""

    ids: pa.ChunkedArray
    vectors: Stored
    cycle: str
    model_digest: str
    vectors_digest: str

    def __len__(self) -> int:
        return len(self.vectors)


def open_vectors(uri: str, cache: str | Path | None = None) -> MappedVectors:
    """The vectors below `<workspace>/embeddings/<cycle>`, or in a folder of `trnpipe export vectors --format npy`.

    Those of a cycle are first written as one matrix into `cache` (default: `vectors` in cache_folder), once for each
    content, and again where a file of it was lost. Raises DataError where there are none, ConfigError for a bad URI.
    """
    stop = StopSignal()
    storage, name = place_of(uri, retry=RetryPolicy(), stop=stop)
    manifest, folder = read_manifest(storage, name), storage.local_path(name)
    if manifest is not None and manifest.kind == VECTORS:
        vectors, here = VectorSet(storage, name, manifest), cache or cache_folder(os.environ) / "vectors"
        made = user_path(str(here)) / manifest.digest
        with os_errors("writing", made.as_uri()), exclusive(made.with_suffix(".lock"), stop):
            _remove_damaged(made)
            hand_over(vectors, open_form("npy", vectors), made, stop)
        manifest, folder = read_manifest(open_storage(str(made)), ""), made
    if manifest is None or manifest.kind != KIND or manifest.fields["form"] != "npy":
        raise DataError(
            f"{storage.uri(name)} holds no finished vectors",
            expected="embeddings/<cycle> of a workspace, or a folder of trnpipe export vectors --format npy",
            next_command="trnpipe export vectors --format npy --out DIR",
        )
    if folder is None:  # its files are mapped
        raise ConfigError(
            f"{storage.uri(name)} is on no disk of this machine",
            expected="embeddings/<cycle> of a workspace, or a folder on a disk",
            next_command=f"aws s3 sync {storage.uri(name)} DIR",
        )
    with os_errors("reading", folder.as_uri()):
        # An empty matrix cannot be mapped.
        matrix = np.load(folder / MATRIX, mmap_mode="r" if manifest.fields["rows"] else None, allow_pickle=False)
        ids = pa.ipc.open_file(pa.memory_map(str(folder / IDS))).read_all()["id"]
    if len(ids) != len(matrix):
        raise DataError(f"{folder} has {len(ids):,} ids of {len(matrix):,} vectors", next_command="delete that folder")
    fields = {one: str(manifest.fields[one]) for one in ("cycle", "model", "vectors")}
    return MappedVectors(ids, matrix, fields["cycle"], fields["model"], fields["vectors"])


def _remove_damaged(made: Path) -> None:
    """A finished folder of which a file was lost, so that it is made again."""
    storage = open_storage(str(made))
    manifest = read_manifest(storage, "") if made.is_dir() else None
    if manifest is not None:
        try:
            check_sizes(storage, "", manifest)
        except DataError:
            shutil.rmtree(made)
