"""A search index of products, which combines their memory-mapped vectors with titles and a BM25 index.

The first search with a set of vectors writes the index to the cache folder, where it is keyed by the digest of the
vectors. vectors/ holds vectors.npy and ids.arrow (see embed/vectors.py), and words/ holds titles.arrow and the BM25
index.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from pipeline.core.arrays import Float32s
from pipeline.core.errors import DataError
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.embed.catalogue import TextRules, read_shard, validate_rows
from pipeline.embed.plan import pinned_plan
from pipeline.embed.vectors import MappedVectors, VectorSet, open_vectors
from pipeline.io.atomic import exclusive, make_dirs, remove_tree, staging_dir
from pipeline.io.commit import check_sizes, commit_dir, read_manifest
from pipeline.io.paths import cache_folder
from pipeline.io.storage import Storage, open_storage, os_errors
from pipeline.retrieval.bm25 import Bm25
from pipeline.retrieval.search import Ranked, search_vectors

_KIND = "words"
_TITLES = "titles.arrow"
BLOCK_ROWS = 4096
"""Number of vectors to convert to fp32 and compare at a time. A block of 384-dimensional vectors takes 6 MB, which is
twice as fast as blocks of four times that size."""
KEPT, UNUSED_S = 4, 86_400.0
"""Number of indexes to keep on this machine (two models of two workspaces), besides those used within the last day."""
DEPTH = 100
"""Minimum number of results from each of the two lists that hybrid search merges."""


class Found(NamedTuple):
    """The top items for a query by vector similarity and by words (BM25)."""

    vectors: Ranked
    words: Ranked


@dataclass(frozen=True)
class ProductIndex:
    """A search index of N products, with their vectors and with the titles and words they were embedded from."""

    mapped: MappedVectors
    titles: pa.ChunkedArray
    words: Bm25

    def __len__(self) -> int:
        return len(self.mapped)

    def search(self, query: str, vector: Float32s, top: int) -> Found:
        """Run an exact search for a query, given its text and its unit vector of shape [D].

        This takes the memory of one block of vectors, plus 8 bytes per product.
        """
        depth = min(max(top, DEPTH), max(1, len(self)))
        vectors = search_vectors(vector[None], self._blocks(), depth)
        scores, items = self.words.search([query], depth)
        return Found(vectors, Ranked(items, scores))

    def products(self, items: Sequence[int]) -> list[tuple[Any, str]]:
        """Return the id and title of each item."""
        return [(self.mapped.ids[item].as_py(), self.titles[item].as_py()) for item in items]

    def _blocks(self) -> Iterator[tuple[int, Float32s]]:
        for first in range(0, len(self), BLOCK_ROWS):
            block = np.array(self.mapped.vectors[first : first + BLOCK_ROWS])
            yield first, torch.from_numpy(block).float().numpy()  # NumPy is five times slower at converting fp16


def open_index(workspace: Storage, vectors: VectorSet, stop: StopSignal) -> ProductIndex:
    """Open the search index of committed vectors. If it doesn't exist on this machine yet, it is built first.

    Raises DataError if the catalogue has changed since it was embedded. Also raises ConfigError and Preempted.
    """
    mapped = open_vectors(workspace.uri(vectors.prefix), stop=stop)
    cache, digest = cache_folder(os.environ), vectors.manifest.digest
    folder = cache / _KIND / digest
    _write_words(workspace, vectors, folder, stop)
    for kind in (_KIND, "vectors"):
        _keep_newest(cache / kind, digest)
    with os_errors("reading", folder.as_uri()):
        titles = pa.ipc.open_file(pa.memory_map(str(folder / _TITLES))).read_all()["title"]
        return ProductIndex(mapped, titles, Bm25(saved=folder))


def _keep_newest(folder: Path, used: str) -> None:
    """Remove indexes that have not been used for a day, except for the newest KEPT.

    Other processes that have already mapped an index can continue to read it.
    """
    with suppress(OSError):  # removed by another process, or owned by another user
        os.utime(folder / used)
        for at, path in sorted(((path.stat().st_mtime, path) for path in folder.iterdir()), reverse=True)[KEPT:]:
            if at < time.time() - UNUSED_S:
                remove_tree(path)


def _write_words(workspace: Storage, vectors: VectorSet, folder: Path, stop: StopSignal) -> None:
    """Write the titles of all products, in the same order as the vectors, and build their BM25 index."""
    with os_errors("writing", folder.as_uri()):
        make_dirs(folder)
    home = open_storage(str(folder.parent), stop=stop)
    with os_errors("writing", folder.as_uri()), exclusive(folder, stop):
        manifest = read_manifest(home, folder.name)
        if manifest is not None and manifest.kind == _KIND:
            with suppress(DataError):  # rebuild the index if one of its files was deleted
                check_sizes(home, folder.name, manifest)
                return
        with staging_dir(folder) as staged:
            schema = pa.schema([("title", pa.string())])
            with pa.OSFile(str(staged / _TITLES), "wb") as file, pa.ipc.new_file(file, schema) as writer:

                def texts() -> Iterator[str]:
                    for titles, joined in _texts(workspace, vectors, stop):
                        writer.write_batch(pa.record_batch([pa.array(titles, pa.string())], schema=schema))
                        yield from joined

                words = Bm25(texts())
            words.save(staged)
            commit_dir(home, staged, folder.name, kind=_KIND, fields={"rows": words.num_items})


def _texts(workspace: Storage, vectors: VectorSet, stop: StopSignal) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the titles and full texts of the products in batches, in the same order as the vectors.

    Raises DataError if the catalogue no longer matches the vectors.
    """
    info = vectors.info
    plan = pinned_plan(workspace, info.cycle)
    if plan is None or plan.fingerprint != info.plan:
        raise _other_catalogue(f"the plan of the vectors of cycle {info.cycle} no longer exists")
    storage = open_storage(plan.catalogue.root, stop=stop) if plan.catalogue.root else workspace
    rules = TextRules(
        tokenizer=b"", max_tokens=plan.max_tokens, id_type=plan.layout.id_type,
        filter=tuple(plan.catalogue.columns.filter.items()),
    )  # fmt: skip
    with progress("reading titles", plan.catalogue.rows, "rows") as advance:
        for shard in plan.shards:
            ids = iter(vectors.columns(shard.index, ["id"])["id"].to_pylist())
            expected = next(ids, None)
            for raw in read_shard(plan.catalogue, storage, shard, plan.window_rows):
                titles, joined, rows = list[str](), list[str](), validate_rows(rules, raw)
                originals = raw.batch()["title"].to_pylist()
                ids_of, numbers = (rows.table[column].to_pylist() for column in ("id", "row"))
                for name, row, text in zip(ids_of, numbers, rows.texts, strict=True):
                    if name != expected:  # only the first row with an id was embedded
                        continue
                    title = originals[row - raw.first_row]
                    titles.append((title or b"").decode().strip() or text)
                    joined.append(text)
                    expected = next(ids, None)
                advance(len(originals))
                yield titles, joined
            if expected is not None:
                raise _other_catalogue(
                    f"part {shard.index} has a vector for {expected!r}, which is not in the catalogue"
                )


def _other_catalogue(problem: str) -> DataError:
    return DataError(
        problem,
        expected="the catalogue as it was embedded",
        next_command="embed the catalogue again in a new cycle",
    )
