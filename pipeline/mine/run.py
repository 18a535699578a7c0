"""Mine hard negatives by ranking the products for every training query with a model or BM25.

The arrays of product vectors and of negatives are divided into parts so that several workers can compute and commit
them. The content of a part does not depend on the worker that computes it.
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
from pipeline.core.errors import ConfigError, NumericError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows, text_hashes
from pipeline.data.token_sets import TokenSet, select_partitions
from pipeline.data.tokenizer import Tokens, token_windows
from pipeline.embed.plan import longest_text
from pipeline.io.parts import Part, Parts
from pipeline.io.storage import Storage
from pipeline.mine.config import BM25, ITEMS_PER_QUERY, MineConfig
from pipeline.mine.store import Negatives, NegativeSet, NegativesInfo, commit_negatives
from pipeline.retrieval.bm25 import K1, WORDS_VERSION, B, Bm25
from pipeline.retrieval.products import Products, decode_tokens, distinct_products, to_tokens
from pipeline.retrieval.search import exact_scores, search_vectors
from pipeline.settings import Settings

NONE = -1
COUNTS = ("queries", "negatives", "judged", "above_margin", "nothing_found")
_TEXTS = 65_536  # number of products to decode at a time
_CHUNK_ITEMS = 16_384  # number of products to search at a time. Each chunk is only copied once from the memory map
_WINDOW = 512
_EMBEDDING = "embedding products (finished parts are kept)"
_SEARCHING = "searching for negatives (finished parts are kept)"


@dataclass(frozen=True)
class MiningPlan:
    """The inputs of mining.

    Args:
        sets: The token sets whose products are ranked.
        new: Indices into `sets` of the partitions whose queries need negatives.
        model: The checkpoint that ranks the products, or None to rank them with BM25.
        identity: Everything that the negatives depend on. They are stored under a fingerprint of it.
    """

    sets: list[TokenSet]
    new: tuple[int, ...]
    model: Checkpoint | None
    identity: dict[str, JsonValue]

    @property
    def prefix(self) -> str:
        return f"negatives/{self.sets[0].info.dataset}/{fingerprint(self.identity)}"

    @property
    def source(self) -> str:
        return BM25 if self.model is None else self.model.digest


def plan_mining(
    settings: Settings, sets: list[TokenSet], model: Checkpoint | None, parent: Checkpoint | None
) -> MiningPlan:
    """Determine what to mine for a training run that starts from `parent`.

    Raises ConfigError if the model that ranks the products has a different tokenizer than the data.
    """
    if model is not None and model.state.tokenizer_fingerprint != sets[0].info.tokenizer_fingerprint:
        raise ConfigError(
            f"{model.uri} has tokenizer {model.state.tokenizer_fingerprint}, but the data was tokenised with"
            f" {sets[0].info.tokenizer_fingerprint}",
            expected="a model with the same tokenizer as the prepared data",
            next_command=f"--mine.source {BM25}, or prepare the data with the model's tokenizer",
        )
    selection = select_partitions(
        [token_set.partition for token_set in sets],
        parent_watermark=parent.state.watermark if parent else None,
        parent_partitions=parent.state.partitions if parent else {},
    )
    mines_all = settings.mine.partitions == "all"
    new = [index for index, token_set in enumerate(sets) if mines_all or token_set.partition in selection.new]
    ranked_by: dict[str, JsonValue] = {"k1": K1, "b": B, "words": WORDS_VERSION}
    if model is not None:
        ranked_by = {"precision": settings.embed.precision, "max_tokens": longest_text(settings, model)}
        ranked_by |= {"chunks": settings.embed.chunks} if settings.embed.chunks > 1 else {}
    identity: dict[str, JsonValue] = {
        "token_sets": [token_set.info.fingerprint for token_set in sets],
        "asked": [sets[index].info.partition for index in new],
        "source": BM25 if model is None else model.digest,
        "ranked_by": ranked_by,
        "positive_gain": settings.train.loss.positive_gain,
        "mine": settings.mine.identity(),
    }
    return MiningPlan(sets, tuple(new), model, identity)


@dataclass(frozen=True)
class JudgedItems:
    """The judged items of Q queries, concatenated to a single array.

    The judged items of query q are `items[offsets[q]:offsets[q + 1]]`, in ascending order.
    """

    offsets: Int64s
    items: Int64s
    positive: Bools

    def part(self, start: int, stop: int) -> "JudgedItems":
        first, last = self.offsets[start], self.offsets[stop]
        return JudgedItems(self.offsets[start : stop + 1] - first, self.items[first:last], self.positive[first:last])

    @property
    def query(self) -> Int64s:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def contains(self, items: Int64s) -> Bools:
        """Return whether each of the items [Q, k] is judged for its query."""
        if not len(self.items):
            return np.zeros(items.shape, dtype=np.bool_)
        width = int(max(self.items.max(), items.max(initial=0))) + 1
        judged_keys = self.query * width + self.items
        keys = np.arange(len(items))[:, None] * width + items
        indices = np.minimum(np.searchsorted(judged_keys, keys), len(judged_keys) - 1)
        is_judged: Bools = (judged_keys[indices] == keys) & (items != NONE)
        return is_judged


@dataclass(frozen=True)
class MiningTask:
    """The queries to mine negatives for, and the products to choose them from. Every query has at least one positive.

    `query_id` [Q] is sorted. `query_row` [Q] contains a row of each query, counted over all buckets of `rows`. Reading
    the data needs 28 bytes of memory for each training row. Afterwards, the task takes 32 bytes for each product, 24
    bytes for each query, and 17 bytes for each judged pair.
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
        """Yield the texts of all items. Raises Preempted if a stop is requested."""
        for start in range(0, len(self.products), _TEXTS):
            stop.raise_if_set("reading products")
            yield from decode_tokens(self.products.tokens(start, start + _TEXTS), tokenizer)

    def rows_of(self, items: Int64s) -> Int64s:
        """Convert an array of items to the numbers of rows that contain them. NONE is preserved."""
        _, bucket, row = self.products.location.T
        numbers = first_rows(self.rows.sizes)[bucket] + row
        return np.where(items == NONE, NONE, numbers[items]) if len(numbers) else items


def make_task(
    rows: TokenRows, partitions: Sequence[int], *, positive_gain: float, max_items: int, stop: StopSignal
) -> MiningTask:
    """Read the judgements of all training rows, and select the queries in `partitions` that have a positive.

    The judgements of all partitions are taken into account, so that a product that is judged in a different partition
    is never used as a negative. `rows` must be opened with the array `partition`.
    """
    # Read the query, the hash of the product, the gain and the partition of every row.
    types = {"query_id": np.int64, "product": np.uint64, "gain": np.float32, "partition": np.int64}
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [np.zeros(0, dtype=kind)] for name, kind in types.items()}
    with progress("reading judgements", sum(rows.sizes), "rows") as advance:
        for arrays in rows.read_blocks(tuple(types)):
            stop.raise_if_set("reading judgements")
            arrays["product"] = text_hashes(arrays["product"], rows.pad_id)
            for name, values in arrays.items():
                columns[name].append(values)
            advance(len(arrays["gain"]))
    table = {name: np.concatenate(blocks) for name, blocks in columns.items()}
    positive = table["gain"] >= np.float32(positive_gain)
    query_ids = np.unique(table["query_id"][positive])
    query_ids = query_ids[np.isin(query_ids, table["query_id"][np.isin(table["partition"], partitions)])]
    products = distinct_products([rows], np.unique(table["product"][positive]), max_items, stop)
    order = np.argsort(table["query_id"], kind="stable")
    first = order[np.searchsorted(table["query_id"], query_ids, sorter=order)]
    is_selected = np.isin(table["query_id"], query_ids)
    query = np.searchsorted(query_ids, table["query_id"][is_selected])
    items, positive = products.item_numbers(table["product"][is_selected]), positive[is_selected]
    # Remove duplicate pairs. A pair is considered positive if any of its duplicates is positive.
    order = np.lexsort((~positive, items, query))
    query, items, positive = query[order], items[order], positive[order]
    is_first = items != NONE
    is_first[1:] &= (query[1:] != query[:-1]) | (items[1:] != items[:-1])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(query[is_first], minlength=len(query_ids)))]).astype(np.int64)
    return MiningTask(rows, query_ids, first, products, JudgedItems(offsets, items[is_first], positive[is_first]))


# Selection of negatives from the top-ranked products of a query. A product that scores about as high as a positive is
# probably an unjudged positive, so it is skipped. See Moreira et al., "NV-Retriever: Improving text embedding models
# with effective hard-negative mining" (2024), for the definition of the margin.


_NOT_FOUND = np.finfo(np.float64).max
"""If no positive of a query has a word of it, the scores of other products don't tell whether they are positives."""


@dataclass(frozen=True)
class Candidates:
    """The top-ranked items [Q, k] of Q queries and their scores, best first, padded with NONE.

    `best_positive` [Q] is the score of each query's best positive, or _NOT_FOUND if BM25 finds none of them.
    """

    scores: Float64s
    items: Int64s
    best_positive: Float64s


def choose_negatives(candidates: Candidates, judged: JudgedItems, config: MineConfig) -> tuple[Int64s, dict[str, int]]:
    """Choose negatives from the candidates of each query.

    Returns the negatives [Q, negatives_per_query], best first and padded with NONE, and several counts. `judged` and
    `above_margin` count the candidates that were skipped because they are judged or likely positives. `nothing_found`
    counts the queries without any candidates.
    """
    exists = candidates.items != NONE
    is_judged = judged.contains(candidates.items)
    ceiling = np.full(len(candidates.items), np.inf)  # [Q], the maximum score of a negative
    if config.relative_margin is not None:
        ceiling = candidates.best_positive - config.relative_margin * np.abs(candidates.best_positive)
    above = exists & ~is_judged & (candidates.scores > ceiling[:, None])
    kept = exists & ~is_judged & ~above
    kept &= np.cumsum(kept, axis=1) <= config.negatives_per_query
    negatives = np.full((len(candidates.items), config.negatives_per_query), NONE, dtype=np.int64)
    query, column = np.nonzero(kept)
    negatives[query, (np.cumsum(kept, axis=1) - 1)[query, column]] = candidates.items[query, column]
    counts = (len(negatives), kept, is_judged, above, ~exists.any(axis=1))
    return negatives, {name: int(np.sum(count)) for name, count in zip(COUNTS, counts, strict=True)}


# Arrays that are computed and committed in parts by several workers.


class MinedPart(Part):
    """The record of a committed part. `counts` is empty for parts that contain vectors."""

    counts: dict[str, int] = Field({})


@dataclass(frozen=True)
class ArrayParts:
    """An array of `total` rows that is stored in parts of `rows_per_part` rows each."""

    store: Parts[MinedPart]
    cache_dir: Path
    total: int
    rows_per_part: int

    def __len__(self) -> int:
        return -(-self.total // self.rows_per_part)

    def rows(self, index: int) -> tuple[int, int]:
        """Return the range of rows [start, stop) that a part contains."""
        first = index * self.rows_per_part
        return first, min(self.total, first + self.rows_per_part)

    def worker_slice(self, worker: int, workers: int) -> range:
        """Return the indices of the parts that are assigned to `worker`."""
        return range(worker * len(self) // workers, (worker + 1) * len(self) // workers)

    def commit(self, index: int, array: npt.NDArray[np.generic], counts: Mapping[str, int] | None = None) -> None:
        """Commit a part. If another worker has already committed it, the existing version is kept."""
        data = io.BytesIO()
        np.save(data, array)
        (name,) = self.store.names(index)
        self.store.commit(MinedPart(index=index, counts=dict(counts or {})), {name: data.getvalue()})

    def open(self, index: int) -> npt.NDArray[Any]:
        """Memory-map a part. Raises DataError if it is damaged, and TransientError if it has been deleted."""
        (path,) = self.store.fetch(index, self.cache_dir)
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r")
        return array


def open_parts(
    storage: Storage, prefix: str, cache_dir: Path, size: tuple[int, int], per_part: int
) -> list[ArrayParts]:
    """Open the arrays of product vectors and negatives below `prefix`, whose parts may not all exist yet.

    Args:
        cache_dir: A local folder for downloaded parts, which may be shared by several processes.
        size: Number of items, and number of queries.
        per_part: Number of queries per part.
    """
    sizes = {"vectors": (size[0], ITEMS_PER_QUERY * per_part), "negatives": (size[1], per_part)}
    arrays = []
    for kind, (total, rows_per_part) in sizes.items():
        folder = f"{prefix}-{per_part}/{kind}"
        store = Parts(storage, f"{folder}-done", folder, MinedPart, lambda index: (f"{index:05d}.npy",))
        arrays.append(ArrayParts(store, cache_dir, total, rows_per_part))
    return arrays


Vectors = Callable[[int, int], Float32s]  # returns unit vectors for the items or queries from `start` to `stop`
Search = Callable[[int, int, JudgedItems], Candidates]  # ranks products for the queries from `start` to `stop`


def vectors_of(texts: Callable[[int, int], Tokens], embed: Callable[[Iterable[Tokens]], Iterator[Float32s]]) -> Vectors:
    """Return a function that embeds texts in windows.

    The vector of a text must not depend on the other texts in its window.
    """
    return lambda start, stop: np.concatenate(list(embed(token_windows(texts(start, stop), _WINDOW))))


def vector_search(
    parts: ArrayParts, items: Vectors, queries: Vectors, depth: int, stop: StopSignal, worker: int = 0, workers: int = 1
) -> Search:
    """Compute all item vectors that are missing in `parts`, and return an exact nearest-neighbour search.

    The search only keeps the vectors and top-ranked items for one part of the queries, and one chunk of items, in
    memory.
    """
    # First compute the parts that are assigned to this worker, and then all other parts that are still missing. Workers
    # never wait for each other, because the other worker may have died. As a result, a few parts may be computed twice.
    own, done = parts.worker_slice(worker, workers), parts.store.done()
    with progress("vectors of products", parts.total, "products") as advance:
        for index in [*range(own.start, len(parts)), *range(own.start)]:
            first_item, end_item = parts.rows(index)
            if index not in done and (index in own or index not in parts.store.done()):
                stop.raise_if_set(_EMBEDDING)
                vectors = items(first_item, end_item)
                if not np.isfinite(vectors).all():  # committed parts are not computed again
                    raise NumericError(
                        f"vectors of products {first_item:,} to {end_item - 1:,} contain NaN or infinity",
                        next_command="trnpipe mine again, on another machine if this one fails trnpipe health",
                    )
                parts.commit(index, vectors)
            advance(end_item - first_item)
    maps: dict[int, Float32s] = {}

    def search(start: int, end: int, judged: JudgedItems) -> Candidates:
        vectors, best = queries(start, end), np.full(end - start, -np.inf)
        order = np.argsort(judged.items, kind="stable")
        order = order[judged.positive[order]]
        positives, query_of = judged.items[order], judged.query[order]

        def chunks() -> Iterator[tuple[int, Float32s]]:
            for index in range(len(parts)):
                if index not in maps:
                    maps[index] = parts.open(index)
                for offset in range(0, len(maps[index]), _CHUNK_ITEMS):
                    stop.raise_if_set(_SEARCHING)
                    first, chunk = parts.rows(index)[0] + offset, np.array(maps[index][offset : offset + _CHUNK_ITEMS])
                    pairs = slice(*np.searchsorted(positives, (first, first + len(chunk))))
                    scores = exact_scores(vectors[query_of[pairs]], chunk[positives[pairs] - first])
                    np.maximum.at(best, query_of[pairs], scores)
                    yield first, chunk

        ranked = search_vectors(vectors, chunks(), min(depth, parts.total))
        return Candidates(ranked.scores, ranked.items, best)

    return search


def word_search(items: Iterable[str], queries: Callable[[int, int], list[str]], depth: int, stop: StopSignal) -> Search:
    """Index all items for BM25 and return a function that searches them. Every worker has to build the full index."""
    index = Bm25(items)

    def search(start: int, end: int, judged: JudgedItems) -> Candidates:
        best = np.zeros(end - start)

        def find_best_positive(row: int, item_scores: Float64s) -> None:
            stop.raise_if_set(_SEARCHING)
            of_query = slice(judged.offsets[row], judged.offsets[row + 1])
            best[row] = item_scores[judged.items[of_query][judged.positive[of_query]]].max(initial=0.0) or _NOT_FOUND

        scores, ranked = index.search(queries(start, end), depth, find_best_positive)
        return Candidates(scores, ranked, best)

    return search


def mine_worker_slice(
    negatives: ArrayParts,
    open_search: Callable[[], Search],
    judged: JudgedItems,
    rows_of: Callable[[Int64s], Int64s],
    config: MineConfig,
    *,
    worker: int,
    workers: int,
    stop: StopSignal,
) -> int:
    """Mine negatives for the queries that are assigned to a worker.

    Returns the number of parts that no worker has committed yet. `judged` maps each query to its judged items, and
    `rows_of` maps items to row numbers. Raises NumericError if a vector is not finite.
    """
    done = negatives.store.done()
    todo = [index for index in negatives.worker_slice(worker, workers) if index not in done]
    if todo:
        search = open_search()
        total = sum(stop - start for start, stop in map(negatives.rows, todo))
        with progress("searching for negatives", total, "queries") as advance:
            for index in todo:
                stop.raise_if_set(_SEARCHING)
                first, last = negatives.rows(index)
                part = judged.part(first, last)
                items, counts = choose_negatives(search(first, last, part), part, config)
                negatives.commit(index, rows_of(items), counts)
                advance(last - first)
        done = negatives.store.done()
    return len(negatives) - len(done)


def read_negatives(parts: ArrayParts, per_query: int) -> tuple[Int64s, dict[str, int]]:
    """Load the negatives [Q, per_query] of all queries from their parts, and sum up the counts.

    See `ArrayParts.open` for errors.
    """
    products = [np.zeros((0, per_query), dtype=np.int64), *(parts.open(index) for index in range(len(parts)))]
    counts = [record.counts for record in parts.store.read_all(range(len(parts)))]
    return np.concatenate(products), {name: sum(part[name] for part in counts) for name in COUNTS}


def commit_all(
    ctx: StageContext, mining: MiningPlan, task: MiningTask, parts: ArrayParts, per_query: int
) -> NegativeSet:
    """Commit the negatives of all queries as a single set. All parts must have been committed before."""
    product, counts = read_negatives(parts, per_query)
    info = NegativesInfo(
        dataset=mining.sets[0].info.dataset,
        token_sets=tuple(token_set.info.fingerprint for token_set in mining.sets),
        rows=task.rows.sizes,
        source=mining.source,
        settings=mining.identity,
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
