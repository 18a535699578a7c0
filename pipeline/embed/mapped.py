"""Vectors for a program: one memory-mapped matrix and the id of each row."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.core.errors import DataError
from pipeline.core.stop import StopSignal
from pipeline.embed.forms import IDS, MATRIX, open_form
from pipeline.embed.handover import KIND as HANDOVER
from pipeline.embed.handover import hand_over
from pipeline.embed.vectors import KIND, Stored, VectorSet
from pipeline.io.commit import read_manifest
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import open_storage, os_errors, place_of


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
    """The vectors below `<workspace>/embeddings/<cycle>`, or in a folder of `trnpipe export vectors --to npy`.

    Those of a cycle are first written as one matrix into `cache` (default: ~/.cache/trnpipe/vectors), once for each
    content. Raises DataError where there are none, ConfigError for a bad URI.
    """
    stop = StopSignal()
    storage, name = place_of(uri, retry=RetryPolicy(), stop=stop)
    manifest = read_manifest(storage, name)
    if manifest is not None and manifest.kind == KIND:
        vectors = VectorSet(storage, name, manifest)
        folder = Path(cache or Path.home() / ".cache" / "trnpipe" / "vectors").expanduser().absolute() / manifest.digest
        hand_over(vectors, open_form("npy", vectors), folder, stop)
        manifest = read_manifest(open_storage(str(folder)), "")
    else:
        folder = storage.local_path(name) or Path()
    if manifest is None or manifest.kind != HANDOVER or manifest.fields["form"] != "npy":
        raise DataError(
            f"{storage.uri(name)} holds no finished vectors",
            expected="embeddings/<cycle> of a workspace, or a folder of trnpipe export vectors --to npy",
            next_command="trnpipe export vectors --to npy --out DIR",
        )
    with os_errors("reading", folder.as_uri()):
        # An empty matrix cannot be mapped.
        matrix = np.load(folder / MATRIX, mmap_mode="r" if manifest.fields["rows"] else None, allow_pickle=False)
        ids = pa.ipc.open_file(pa.memory_map(str(folder / IDS))).read_all()["id"]
    if len(ids) != len(matrix):
        raise DataError(f"{folder} has {len(ids):,} ids of {len(matrix):,} vectors", next_command="delete that folder")
    fields = {one: str(manifest.fields[one]) for one in ("cycle", "model", "vectors")}
    return MappedVectors(ids, matrix, fields["cycle"], fields["model"], fields["vectors"])
