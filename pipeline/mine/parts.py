"""Mining in pieces: vectors of products and negatives of queries, each piece a committed folder, any worker's.

A piece is the same whoever makes it, so two that make one at once do no harm, and what is there is not made again.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Float32s, Int64s
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest
from pipeline.io.storage import Storage, join_key
from pipeline.mine.select import Counts

Kind = Literal["vectors", "negatives"]


def empty_folder(folder: Path) -> Path:
    """The folder, with nothing in it: what a killed commit left there may be one file with what it has published."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


@dataclass(frozen=True)
class MiningParts:
    """Where the pieces of one mining lie, and how it is cut.

    Args:
        prefix: in the workspace; of this very work, with these sizes of pieces, alone.
        scratch: a local folder of this process alone.
        cache_dir: a local folder for what is read, which processes may share.
    """

    workspace: Storage
    prefix: str
    scratch: Path
    cache_dir: Path
    num_items: int
    num_queries: int
    items_per_part: int
    queries_per_part: int

    @property
    def num_vector_parts(self) -> int:
        return -(-self.num_items // self.items_per_part)

    @property
    def num_query_parts(self) -> int:
        return -(-self.num_queries // self.queries_per_part)

    def items(self, index: int) -> tuple[int, int]:
        """The first item of a piece, and the one behind its last."""
        first = index * self.items_per_part
        return first, min(self.num_items, first + self.items_per_part)

    def queries(self, index: int) -> tuple[int, int]:
        """The first query of a piece, and the one behind its last."""
        first = index * self.queries_per_part
        return first, min(self.num_queries, first + self.queries_per_part)

    def done(self, kind: Kind) -> set[int]:
        """Numbers of the pieces that are committed."""
        root = join_key(self.prefix, kind)
        names = (name for name in self.workspace.list_dirs(root) if name.isdecimal())
        return {int(name) for name in names if read_manifest(self.workspace, join_key(root, name)) is not None}

    def commit_vectors(self, index: int, vectors: Float32s) -> None:
        """vectors [n, D] of the items of a piece."""
        self._commit("vectors", index, vectors, {})

    def commit_negatives(self, index: int, product: Int64s, counts: Counts) -> None:
        """product [q, K] of the queries of a piece."""
        self._commit("negatives", index, product, vars(counts))

    def vectors(self, index: int) -> Float32s:
        """Those of a piece, mapped into memory."""
        vectors: Float32s = self._open("vectors", index)
        return vectors

    def negatives(self, index: int) -> tuple[Int64s, Counts]:
        """Those of a piece."""
        manifest = read_manifest(self.workspace, self._prefix("negatives", index))
        counts = Counts(**manifest.fields) if manifest else Counts()  # type: ignore[arg-type]
        return self._open("negatives", index), counts

    def delete(self) -> None:
        """All pieces: what came of them is committed elsewhere."""
        self.workspace.delete_prefix(self.prefix)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _prefix(self, kind: Kind, index: int) -> str:
        return join_key(self.prefix, f"{kind}/{index:05d}")

    def _commit(self, kind: Kind, index: int, array: npt.NDArray[np.generic], fields: Mapping[str, int]) -> None:
        folder = empty_folder(self.scratch / kind)
        np.save(folder / "part.npy", array)
        commit_dir(self.workspace, folder, self._prefix(kind, index), kind=f"mined-{kind}", fields=dict(fields))

    def _open(self, kind: Kind, index: int) -> npt.NDArray[Any]:
        folder = fetch_dir(self.workspace, self._prefix(kind, index), self.cache_dir)
        array: npt.NDArray[Any] = np.load(folder / "part.npy", mmap_mode="r")
        return array
