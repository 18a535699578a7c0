"""Mine: search the best products of every training query by the vectors of a model or by BM25, and choose negatives.

The work is cut into parts that several workers commit: vectors of products, and negatives of queries. A part is the
same whoever computes it.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue

from pipeline.checkpoint.store import Checkpoint
from pipeline.context import StageContext
from pipeline.core.arrays import Bools, Float32s, Float64s, Int64s
from pipeline.core.batch_order import first_rows, locate
from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.data.token_sets import TokenSet, select_partitions
from pipeline.data.tokenizer import Tokens, token_windows
from pipeline.embed.plan import longest_text
from pipeline.io.parts import Part, Parts
from pipeline.io.storage import Storage
from pipeline.mine.config import BM25, ITEMS_PER_QUERY, MineConfig
from pipeline.mine.store import Negatives, NegativeSet, NegativesInfo, commit_negatives
from pipeline.retrieval.bm25 import K1, B, Bm25
from pipeline.retrieval.products import Products, decoded, distinct_products, text_hashes, to_tokens
from pipeline.retrieval.search import exact_scores, search_vectors
from pipeline.settings import Settings

NONE = -1
COUNTS = ("queries", "negatives", "judged", "above_margin", "nothing_found")
_TEXTS = 65_536
"""Products decoded at a time."""
_CHUNK_ITEMS = 16_384
"""Products that queries are compared with at a time: their vectors are copied from the memory map once."""
_WINDOW = 512
_KEPT = "finished parts are kept"


@dataclass(frozen=True)
class MiningPlan:
    """What is mined, decided before anything is read. `new`: indices in `sets` of the partitions mined for.

    `model`: the checkpoint whose vectors rank the products, None for BM25.
    """

    sets: list[TokenSet]
    new: tuple[int, ...]
    model: Checkpoint | None
    decides: dict[str, JsonValue]

    @property
    def prefix(self) -> str:
        return f"negatives/{self.sets[0].info.dataset}/{fingerprint(self.decides)}"

    @property
    def source(self) -> str:
        return BM25 if self.model is None else self.model.digest


def plan_mining(
    settings: Settings, sets: list[TokenSet], model: Checkpoint | None, parent: Checkpoint | None
) -> MiningPlan:
    """Plan mining for training from `parent`. Raises ConfigError if the model cannot read the prepared tokens."""
    if model is not None and model.state.tokenizer_fingerprint != sets[0].info.tokenizer_fingerprint:
        raise ConfigError(
            f"the data was tokenised with {sets[0].info.tokenizer_fingerprint}, {model.uri} reads"
            f" {model.state.tokenizer_fingerprint}",
            expected="a model that reads the prepared tokens",
            next_command=f"--mine.source {BM25}, or prepare the data with the model's tokenizer",
        )
    selection = select_partitions(
        [one.partition for one in sets],
        parent_watermark=parent.state.watermark if parent else None,
        parent_partitions=parent.state.partitions if parent else {},
    )
    mines_all = settings.mine.partitions == "all"
    new = [index for index, one in enumerate(sets) if mines_all or one.partition in selection.new]
    ranked_by: dict[str, JsonValue] = {"k1": K1, "b": B}
    if model is not None:
        ranked_by = {"precision": settings.embed.precision, "max_tokens": longest_text(settings, model)}
        ranked_by |= {"chunks": settings.embed.chunks} if settings.embed.chunks > 1 else {}
    decides: dict[str, JsonValue] = {
        "token_sets": [one.info.fingerprint for one in sets],
        "asked": [sets[index].info.partition for index in new],
        "source": BM25 if model is None else model.digest,
        "ranked_by": ranked_by,
        "positive_gain": settings.train.loss.positive_gain,
        "mine": settings.mine.decides(),
    }
    return MiningPlan(sets, tuple(new), model, decides)


@dataclass(frozen=True)
class JudgedItems:
    """Judged items of Q queries back to back, ascending: those of query q are `items[offsets[q]:offsets[q + 1]]`."""

    offsets: Int64s
    items: Int64s
    positive: Bools

    def part(self, start: int, stop: int) -> "JudgedItems":
        first, last = self.offsets[start], self.offsets[stop]
        return JudgedItems(self.offsets[start : stop + 1] - first, self.items[first:last], self.positive[first:last])

    @property
    def query(self) -> Int64s:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def holds(self, items: Int64s) -> Bools:
        """For items [Q, k] of the queries: which are judged."""
        if not len(self.items):
            return np.zeros(items.shape, dtype=np.bool_)
        width = int(max(self.items.max(), items.max(initial=0))) + 1
        known = self.query * width + self.items
        asked = np.arange(len(items))[:, None] * width + items
        places = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        found: Bools = (known[places] == asked) & (items != NONE)
        return found


@dataclass(frozen=True)
class MiningTask:
    """Q queries that have a positive, and the N distinct training products.

    `query_id` [Q] ascending; `query_row` [Q]: a row that has the query. Row numbers count over all buckets of `rows`,
    smallest bucket first. Memory: 28 bytes for each training row while it is read; then 32 for each product, 24 for
    each query and 17 for each judged pair.
    """

    rows: TokenRows
    query_id: Int64s
    query_row: Int64s
    products: Products
    judged: JudgedItems

    def queries(self, start: int, stop: int) -> Tokens:
        pools, numbers = locate(self.rows.sizes, self.query_row[start:stop])
        arrays = self.rows.read(pools, numbers, len(self.rows.sizes) - 1, ("query",))
        return to_tokens(arrays["query"], self.rows.pad_id)

    def item_texts(self, tokenizer: bytes, stop: StopSignal) -> Iterator[str]:
        """Yield the texts of all items. Raises Preempted."""
        for start in range(0, len(self.products), _TEXTS):
            stop.raise_if_set("reading products")
            yield from decoded(self.products.tokens(start, start + _TEXTS), tokenizer)

    def rows_of(self, items: Int64s) -> Int64s:
        """Return the numbers of the rows that have these items, of any shape; NONE stays."""
        _, bucket, row = self.products.where.T
        numbers = first_rows(self.rows.sizes)[bucket] + row
        return np.where(items == NONE, NONE, numbers[items]) if len(numbers) else items


def make_task(
    rows: TokenRows, partitions: Sequence[int], *, positive_gain: float, max_items: int, stop: StopSignal
) -> MiningTask:
    """Read the judgements of training `rows`, opened with their partition, to mine for the queries of `partitions`.

    A product that is judged in any partition is no negative. Raises Preempted.
    """
    # Query, hash of the product, gain and partition of every row, in the order of their numbers.
    types = {"query_id": np.int64, "product": np.uint64, "gain": np.float32, "partition": np.int64}
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [np.zeros(0, dtype=kind)] for name, kind in types.items()}
    with progress("reading judgements", sum(rows.sizes), "rows") as advance:
        for bucket, numbers in rows.blocks():
            stop.raise_if_set("reading judgements")
            arrays = rows.read(np.full(len(numbers), bucket), numbers, bucket, tuple(types))
            arrays["product"] = text_hashes(arrays["product"], rows.pad_id)
            for name, values in arrays.items():
                parts[name].append(values)
            advance(len(numbers))
    table = {name: np.concatenate(blocks) for name, blocks in parts.items()}
    positive = table["gain"] >= np.float32(positive_gain)
    query_ids = np.unique(table["query_id"][positive])
    query_ids = query_ids[np.isin(query_ids, table["query_id"][np.isin(table["partition"], partitions)])]
    products = distinct_products([rows], np.unique(table["product"][positive]), max_items, stop)
    order = np.argsort(table["query_id"], kind="stable")
    first = order[np.searchsorted(table["query_id"], query_ids, sorter=order)]
    of_query = np.isin(table["query_id"], query_ids)
    query = np.searchsorted(query_ids, table["query_id"][of_query])
    items, positive = products.numbers_of(table["product"][of_query]), positive[of_query]
    # A pair that occurs several times counts once, as positive if one of them is.
    order = np.lexsort((~positive, items, query))
    query, items, positive = query[order], items[order], positive[order]
    new = items != NONE
    new[1:] &= (query[1:] != query[:-1]) | (items[1:] != items[:-1])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(query[new], minlength=len(query_ids)))]).astype(np.int64)
    return MiningTask(rows, query_ids, first, products, JudgedItems(offsets, items[new], positive[new]))


# Which of the best products of a query become its negatives. What scores about as high as a positive is likely one
# that nobody has judged: the margins are those of Moreira et al., "NV-Retriever: Improving text embedding models with
# effective hard-negative mining" (2024).


@dataclass(frozen=True)
class Candidates:
    """The best items of Q queries, best first: scores [Q, k] and items [Q, k], NONE after the last one.

    `best_positive` [Q]: the highest score of a positive of the query.
    """

    scores: Float64s
    items: Int64s
    best_positive: Float64s


def choose_negatives(found: Candidates, judged: JudgedItems, config: MineConfig) -> tuple[Int64s, dict[str, int]]:
    """Choose the items [Q, negatives_per_query] of each query, best first, NONE after the last one, and count.

    Counts are of queries and negatives; `judged`, products left out as they are judged; `above_margin`, likely
    positives; `nothing_found`, queries that share no word with any product.
    """
    real = found.items != NONE
    is_judged = judged.holds(found.items)
    ceiling = np.full(len(found.items), np.inf)  # the highest score of a negative, [Q]
    if config.relative_margin is not None:
        ceiling = found.best_positive - config.relative_margin * np.abs(found.best_positive)
    above = real & ~is_judged & (found.scores > ceiling[:, None])
    kept = real & ~is_judged & ~above
    kept &= np.cumsum(kept, axis=1) <= config.negatives_per_query
    negatives = np.full((len(found.items), config.negatives_per_query), NONE, dtype=np.int64)
    query, place = np.nonzero(kept)
    negatives[query, (np.cumsum(kept, axis=1) - 1)[query, place]] = found.items[query, place]
    counts = (len(negatives), kept, is_judged, above, ~real.any(axis=1))
    return negatives, {name: int(np.sum(count)) for name, count in zip(COUNTS, counts, strict=True)}


# Parts that several workers commit.


class MinedPart(Part):
    """The record of a part; `counts` is empty for vectors."""

    counts: dict[str, int] = Field({})


@dataclass(frozen=True)
class Pieces:
    """Parts of one array: `total` rows, `rows_per_part` in each."""

    parts: Parts[MinedPart]
    cache_dir: Path
    total: int
    rows_per_part: int

    def __len__(self) -> int:
        return -(-self.total // self.rows_per_part)

    def rows(self, index: int) -> tuple[int, int]:
        """Return the first row of a part, and the one after its last."""
        first = index * self.rows_per_part
        return first, min(self.total, first + self.rows_per_part)

    def share(self, worker: int, workers: int) -> range:
        """Return the indices of the parts that one of the workers computes."""
        return range(worker * len(self) // workers, (worker + 1) * len(self) // workers)

    def commit(self, index: int, array: npt.NDArray[np.generic], counts: Mapping[str, int] | None = None) -> None:
        """Publish a part. If several workers compute it at once, the first one is kept: it may be read already."""
        data = io.BytesIO()
        np.save(data, array)
        (name,) = self.parts.names(index)
        self.parts.commit(MinedPart(index=index, counts=dict(counts or {})), {name: data.getvalue()})

    def open(self, index: int) -> npt.NDArray[Any]:
        """Map the rows of a part into memory. Raises DataError if it is damaged, TransientError if it is gone."""
        (path,) = self.parts.fetch(index, self.cache_dir)
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        return array


def open_pieces(storage: Storage, prefix: str, cache_dir: Path, task: tuple[int, int], per_part: int) -> list[Pieces]:
    """Open the vectors of products and the negatives of queries below `prefix`, `per_part` queries in a part.

    `task`: how many items and queries there are. `cache_dir`: a local folder that processes may share.
    """
    sizes = {"vectors": (task[0], ITEMS_PER_QUERY * per_part), "negatives": (task[1], per_part)}
    pieces = []
    for kind, (total, rows_per_part) in sizes.items():
        folder = f"{prefix}-{per_part}/{kind}"
        parts = Parts(storage, f"{folder}-done", folder, MinedPart, lambda index: (f"{index:05d}.npy",))
        pieces.append(Pieces(parts, cache_dir, total, rows_per_part))
    return pieces


Vectors = Callable[[int, int], Float32s]
"""Unit vectors [n, D] of the items, or queries, from one number up to another: the same each time."""
Search = Callable[[int, int, JudgedItems], Candidates]
"""The best products of the queries from one number up to another, with their judgements."""


def vectors_of(texts: Callable[[int, int], Tokens], embed: Callable[[Iterable[Tokens]], Iterator[Float32s]]) -> Vectors:
    """Embed texts in windows. `embed`: windows to unit vectors [n, D], in order; a vector depends on its text alone."""
    return lambda start, stop: np.concatenate(list(embed(token_windows(texts(start, stop), _WINDOW))))


def vector_search(
    stored: Pieces, items: Vectors, queries: Vectors, depth: int, stop: StopSignal, worker: int = 0, workers: int = 1
) -> Search:
    """Search every item, exactly, by vectors. Those of the items are computed first where `stored` lacks them.

    Memory: the vectors and the `depth` best items of a part of the queries, and one chunk of items. Raises Preempted.
    """
    # This worker's share of the parts, then all that are missing: no worker waits for another that may be dead, at the
    # price that some parts are computed twice at the end.
    share, done = stored.share(worker, workers), stored.parts.done()
    with progress("vectors of products", stored.total, "products") as advance:
        for index in [*range(share.start, len(stored)), *range(share.start)]:
            first_item, end_item = stored.rows(index)
            if index not in done and (index in share or index not in stored.parts.done()):
                stop.raise_if_set(f"embedding products; {_KEPT}")
                stored.commit(index, items(first_item, end_item))
            advance(end_item - first_item)
    maps: dict[int, Float32s] = {}

    def search(start: int, end: int, judged: JudgedItems) -> Candidates:
        vectors, best = queries(start, end), np.full(end - start, -np.inf)
        order = np.argsort(judged.items, kind="stable")
        order = order[judged.positive[order]]
        positives, query_of = judged.items[order], judged.query[order]

        def chunks() -> Iterator[tuple[int, Float32s]]:
            for index in range(len(stored)):
                if index not in maps:
                    maps[index] = stored.open(index)
                for at in range(0, len(maps[index]), _CHUNK_ITEMS):
                    stop.raise_if_set(f"searching for negatives; {_KEPT}")
                    first, chunk = stored.rows(index)[0] + at, np.array(maps[index][at : at + _CHUNK_ITEMS])
                    pairs = slice(*np.searchsorted(positives, (first, first + len(chunk))))
                    scores = exact_scores(vectors[query_of[pairs]], chunk[positives[pairs] - first])
                    np.maximum.at(best, query_of[pairs], scores)
                    yield first, chunk

        ranked = search_vectors(vectors, chunks(), min(depth, stored.total))
        return Candidates(ranked.scores, ranked.items, best)

    return search


def word_search(items: Iterable[str], queries: Callable[[int, int], list[str]], depth: int, stop: StopSignal) -> Search:
    """Search by the words that query and product share. Each worker has an index of all items."""
    index = Bm25(items)

    def search(start: int, end: int, judged: JudgedItems) -> Candidates:
        best = np.zeros(end - start)

        def find_best_positive(row: int, every: Float64s) -> None:
            stop.raise_if_set(f"searching for negatives; {_KEPT}")
            of_query = slice(judged.offsets[row], judged.offsets[row + 1])
            best[row] = every[judged.items[of_query][judged.positive[of_query]]].max(initial=0.0)

        scores, found = index.search(queries(start, end), depth, find_best_positive)
        return Candidates(scores, found, best)

    return search


def mine_share(
    pieces: Pieces,
    open_search: Callable[[], Search],
    judged: JudgedItems,
    rows_of: Callable[[Int64s], Int64s],
    config: MineConfig,
    *,
    worker: int,
    workers: int,
    stop: StopSignal,
) -> int:
    """Mine for the queries of `worker` of `workers`. Return how many parts of all workers are missing.

    `judged`: of all queries. `rows_of`: items to the numbers they are committed by. Raises Preempted, NumericError.
    """
    done = pieces.parts.done()
    todo = [index for index in pieces.share(worker, workers) if index not in done]
    if todo:
        search = open_search()
        total = sum(stop - start for start, stop in map(pieces.rows, todo))
        with progress("searching for negatives", total, "queries") as advance:
            for index in todo:
                stop.raise_if_set(f"searching for negatives; {_KEPT}")
                first, last = pieces.rows(index)
                part = judged.part(first, last)
                items, counts = choose_negatives(search(first, last, part), part, config)
                pieces.commit(index, rows_of(items), counts)
                advance(last - first)
        done = pieces.parts.done()
    return len(pieces) - len(done)


def all_negatives(pieces: Pieces, most: int) -> tuple[Int64s, dict[str, int]]:
    """Return the negatives [Q, most] of all queries and the sums of their counts. Raises as `Pieces.open`."""
    products = [np.zeros((0, most), dtype=np.int64), *(pieces.open(index) for index in range(len(pieces)))]
    counts = [record.counts for record in pieces.parts.read_all(range(len(pieces)))]
    return np.concatenate(products), {name: sum(part[name] for part in counts) for name in COUNTS}


def commit_all(ctx: StageContext, mining: MiningPlan, task: MiningTask, pieces: Pieces, most: int) -> NegativeSet:
    """Commit the negatives of all queries, once every part is there."""
    product, counts = all_negatives(pieces, most)
    info = NegativesInfo(
        dataset=mining.sets[0].info.dataset,
        token_sets=tuple(one.info.fingerprint for one in mining.sets),
        rows=task.rows.sizes,
        source=mining.source,
        settings=mining.decides,
        figures={
            "queries": counts["queries"],
            "items": len(task.products),
            "negatives": counts["negatives"],
            "slots_filled": counts["negatives"] / max(1, product.size),
            "queries_without": int((product[:, 0] < 0).sum()),
            "judged_skipped": counts["judged"],
            "above_margin": counts["above_margin"],
            "nothing_found": counts["nothing_found"],
        },
    )
    negatives, scratch = Negatives(task.query_id, product), ctx.scratch / "mine"
    return commit_negatives(ctx.workspace_after_stop, mining.prefix, negatives, info, scratch)
