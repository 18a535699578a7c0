"""Mining: what ranks the products of a query (vectors of a model, or BM25), and the work of one of several workers.

Work is cut into pieces, each a committed folder: vectors of products, negatives of queries. A piece is the same whoever
makes it, so two that make one at once do no harm, and what is there is not made again.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from pipeline.checkpoint.store import Checkpoint
from pipeline.context import StageContext
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.batch_order import first_rows, locate
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.data.token_sets import TokenSet, select_partitions
from pipeline.data.tokenizer import Tokens, pieces
from pipeline.embed.plan import longest_text
from pipeline.evaluate.bm25 import K1, B, Bm25, best_of
from pipeline.evaluate.exact import UNIT, ExactTopK, exact_scores
from pipeline.evaluate.products import Products, decoded, distinct_products, text_hashes, to_tokens
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest
from pipeline.io.storage import KeyNotFound, Storage, join_key
from pipeline.mine.choose import NONE, Candidates, Counts, JudgedItems, choose_negatives
from pipeline.mine.config import BM25, DECIDES, MineConfig
from pipeline.mine.store import Negatives, NegativeSet, NegativesInfo, commit_negatives, empty_folder
from pipeline.settings import Settings

# What is mined for, and where: the training queries that have a positive, against the distinct training products; and
# which of a query's best products become its negatives.
#
# Memory: 28 bytes for each training row while it is looked through; 32 for each product, 24 for each query and 17 for
# each judged pair after.

_TEXTS = 65_536
"""Made words again at a time."""


@dataclass(frozen=True)
class MiningPlan:
    """What is mined, decided before anything is read. `new`: places in `sets` of the partitions that are asked."""

    sets: list[TokenSet]
    new: tuple[int, ...]
    model: Checkpoint | None
    """Whose vectors rank the products; BM25 does without one."""
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
    """`parent`: where training starts from. Raises ConfigError when the model cannot read the prepared tokens."""
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
    everything = settings.mine.partitions == "all"
    new = [place for place, one in enumerate(sets) if everything or one.partition in selection.new]
    ranked_by: dict[str, JsonValue] = {"k1": K1, "b": B}
    if model is not None:
        ranked_by = {"precision": settings.embed.precision, "max_tokens": longest_text(settings, model)}
        ranked_by |= {"chunks": settings.embed.chunks} if settings.embed.chunks > 1 else {}
    decides: dict[str, JsonValue] = {
        "token_sets": [one.info.fingerprint for one in sets],
        "asked": [sets[place].info.partition for place in new],
        "source": BM25 if model is None else model.digest,
        "ranked_by": ranked_by,
        "positive_gain": settings.train.loss.positive_gain,
        "mine": settings.mine.model_dump(mode="json", include=set(DECIDES)),
    }
    return MiningPlan(sets, tuple(new), model, decides)


@dataclass(frozen=True)
class MiningTask:
    """Q queries and N items. Row numbers count over all buckets of `rows`, smallest bucket first."""

    rows: TokenRows
    query_id: Int64s
    """[Q], ascending."""
    query_row: Int64s
    """[Q], a row that has the query."""
    products: Products
    judged: JudgedItems

    @property
    def num_queries(self) -> int:
        return len(self.query_id)

    @property
    def num_items(self) -> int:
        return len(self.products)

    def queries(self, start: int, stop: int) -> Tokens:
        pools, numbers = locate(self.rows.sizes, self.query_row[start:stop])
        arrays = self.rows.read(pools, numbers, len(self.rows.sizes) - 1, ("query",))
        return to_tokens(arrays["query"], self.rows.pad_id)

    def items(self, start: int, stop: int) -> Tokens:
        return self.products.tokens(start, stop)

    def item_texts(self, tokenizer: bytes, stop: StopSignal) -> Iterator[str]:
        """Of all items, as words again. Raises Preempted."""
        for start in range(0, self.num_items, _TEXTS):
            stop.raise_if_set("reading products")
            yield from decoded(self.items(start, start + _TEXTS), tokenizer)

    def query_texts(self, tokenizer: bytes) -> Callable[[int, int], list[str]]:
        """Of queries from one number up to another, as words again."""
        return lambda start, stop: decoded(self.queries(start, stop), tokenizer)

    def rows_of(self, items: Int64s) -> Int64s:
        """The row numbers that have these items, of any shape; NONE stays."""
        _, bucket, row = self.products.where.T
        numbers = first_rows(self.rows.sizes)[bucket] + row
        return np.where(items == NONE, NONE, numbers[items]) if len(numbers) else items


def make_task(
    rows: TokenRows, partitions: Sequence[int], *, positive_gain: float, max_items: int, stop: StopSignal
) -> MiningTask:
    """`rows`: training rows opened with their partition. `partitions`: those whose queries are asked.

    What is judged in any partition is no negative. Raises Preempted.
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
    table = {name: np.concatenate(found) for name, found in parts.items()}
    positive = table["gain"] >= np.float32(positive_gain)
    asked = np.unique(table["query_id"][positive])
    asked = asked[np.isin(asked, table["query_id"][np.isin(table["partition"], partitions)])]
    products = distinct_products([rows], np.unique(table["product"][positive]), max_items, stop)
    order = np.argsort(table["query_id"], kind="stable")
    first = order[np.searchsorted(table["query_id"], asked, sorter=order)]
    place = np.minimum(np.searchsorted(asked, table["query_id"]), max(0, len(asked) - 1))
    mine = asked[place] == table["query_id"] if len(asked) else np.zeros(len(order), dtype=np.bool_)
    query, items, positive = place[mine], products.numbers_of(table["product"][mine]), positive[mine]
    # Pairs that came several times count once, as positive when one of them is.
    order = np.lexsort((~positive, items, query))
    query, items, positive = query[order], items[order], positive[order]
    new = items != NONE
    new[1:] &= (query[1:] != query[:-1]) | (items[1:] != items[:-1])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(query[new], minlength=len(asked)))]).astype(np.int64)
    return MiningTask(rows, asked, first, products, JudgedItems(offsets, items[new], positive[new]))


_CHUNK_ITEMS = 16_384
"""Products that queries are held against at a time: their vectors are in memory once, read from the map."""
_WINDOW = 512
_KEPT = "finished parts are kept"


@dataclass(frozen=True)
class Parts:
    """The pieces of one kind, `vectors` of items or `negatives` of queries: `total` rows, `rows_per_part` in each.

    Args:
        prefix: in the workspace; of this very work, with these sizes of pieces, alone.
        scratch: a local folder of this process alone.
        cache_dir: a local folder for what is read, which processes may share.
    """

    workspace: Storage
    prefix: str
    kind: str
    scratch: Path
    cache_dir: Path
    total: int
    rows_per_part: int

    def __len__(self) -> int:
        return -(-self.total // self.rows_per_part)

    def rows(self, index: int) -> tuple[int, int]:
        """The first row of a piece, and the one behind its last."""
        first = index * self.rows_per_part
        return first, min(self.total, first + self.rows_per_part)

    def done(self) -> set[int]:
        root = join_key(self.prefix, self.kind)
        names = (name for name in self.workspace.list_dirs(root) if name.isdecimal())
        return {int(name) for name in names if read_manifest(self.workspace, join_key(root, name)) is not None}

    def commit(self, index: int, array: npt.NDArray[np.generic], fields: Mapping[str, int] | None = None) -> None:
        """Of several that make a piece at once the first one commits it: another may be reading it already."""
        if read_manifest(self.workspace, self._key(index)) is not None:
            return
        folder = empty_folder(self.scratch / self.kind)
        np.save(folder / "part.npy", array)
        commit_dir(self.workspace, folder, self._key(index), kind=f"mined-{self.kind}", fields=dict(fields or {}))

    def open(self, index: int) -> npt.NDArray[Any]:
        """The rows of a piece, mapped into memory. Raises DataError, TransientError."""
        try:
            folder = fetch_dir(self.workspace, self._key(index), self.cache_dir)
        except KeyNotFound as error:
            raise self._gone(error.seen) from error
        array: npt.NDArray[Any] = np.load(folder / "part.npy", mmap_mode="r")
        start, stop = self.rows(index)
        if len(array) != stop - start:
            raise DataError(
                f"{len(array)} {self.kind} of {start} to {stop}",
                expected="one for each",
                next_command=f"delete {self.workspace.uri(self.prefix)} and mine again",
            )
        return array

    def counts(self, index: int) -> Counts:
        """What was committed beside a piece of negatives. Raises TransientError without it."""
        manifest = read_manifest(self.workspace, self._key(index))
        if manifest is None:
            raise self._gone(f"{self.workspace.uri(self._key(index))}: no such object")
        return Counts(**manifest.fields)  # type: ignore[arg-type]

    def _gone(self, seen: str) -> TransientError:
        return TransientError(
            f"{seen} while another worker committed or deleted it",
            expected="a piece that stays",
            next_command="the same command again: it finds what is done",
        )

    def delete(self) -> None:
        """All of it: what came of the pieces is committed elsewhere."""
        self.workspace.delete_prefix(self.prefix)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _key(self, index: int) -> str:
        return join_key(self.prefix, f"{self.kind}/{index:05d}")


def open_parts(settings: Settings, ctx: StageContext, mining: MiningPlan, task: MiningTask, worker: int) -> list[Parts]:
    """Vectors of products, and negatives of queries."""
    config, name = settings.mine, fingerprint(mining.decides)[:16]
    prefix = f"cycles/{ctx.cycle}/mine/{name}-{config.items_per_part}-{config.queries_per_part}"
    own, shared = (ctx.scratch / "mine" / folder for folder in (f"worker-{worker}", "parts"))
    sizes = {
        "vectors": (task.num_items, config.items_per_part),
        "negatives": (task.num_queries, config.queries_per_part),
    }
    return [Parts(ctx.workspace_after_stop, prefix, kind, own, shared, *size) for kind, size in sizes.items()]


Vectors = Callable[[int, int], Float32s]
"""Unit vectors [n, D] of the items, or queries, from one number up to another: the same each time."""
Search = Callable[[int, int, JudgedItems], Candidates]
"""The best products of the queries from one number up to another, whose judgements are given."""


def vectors_of(texts: Callable[[int, int], Tokens], embed: Callable[[Iterable[Tokens]], Iterator[Float32s]]) -> Vectors:
    """`embed`: windows of texts to their unit vectors [n, D], in order; those of a window depend on it alone."""
    return lambda start, stop: np.concatenate(list(embed(pieces(texts(start, stop), _WINDOW))))


def vector_search(
    parts: Parts, items: Vectors, queries: Vectors, depth: int, stop: StopSignal, worker: int = 0, workers: int = 1
) -> Search:
    """Every query against every item, exactly. `parts`: vectors of the items; those that are missing are made first.

    Memory: vectors of a piece of queries, their `depth` best, and one chunk of items; the items' vectors are mapped.
    Raises Preempted.
    """
    # This worker's share of the pieces, then whatever is missing: no worker waits for another that may be dead, at the
    # price that some pieces are made twice at the end.
    count, done = len(parts), parts.done()
    own = worker * count // workers, (worker + 1) * count // workers
    with progress("vectors of products", parts.total, "products") as advance:
        for index in [*range(own[0], count), *range(own[0])]:
            first_item, end_item = parts.rows(index)
            if index not in done and (own[0] <= index < own[1] or index not in parts.done()):
                stop.raise_if_set(f"embedding products; {_KEPT}")
                parts.commit(index, items(first_item, end_item))
            advance(end_item - first_item)
    maps: dict[int, Float32s] = {}

    def chunks() -> Iterator[tuple[int, Float32s]]:
        for index in range(len(parts)):
            if index not in maps:
                maps[index] = parts.open(index)
            for first in range(0, len(maps[index]), _CHUNK_ITEMS):
                yield parts.rows(index)[0] + first, np.array(maps[index][first : first + _CHUNK_ITEMS])

    def search(start: int, end: int, judged: JudgedItems) -> Candidates:
        asked = queries(start, end)
        top, query_of = ExactTopK(asked, min(depth, parts.total)), judged.query
        best = np.full(len(asked), -np.inf)
        of_positive = np.flatnonzero(judged.positive)
        of_positive = of_positive[np.argsort(judged.items[of_positive], kind="stable")]
        positives = judged.items[of_positive]
        for first, vectors in chunks():
            stop.raise_if_set(f"searching for negatives; {_KEPT}")
            top.add(first, vectors)
            low, high = np.searchsorted(positives, (first, first + len(vectors)))
            here = query_of[of_positive[low:high]]
            np.maximum.at(best, here, exact_scores(asked[here], vectors[positives[low:high] - first]))
        scores, found = top.found()
        return Candidates(scores / UNIT, found, best / UNIT)

    return search


def word_search(items: Iterable[str], queries: Callable[[int, int], list[str]], depth: int, stop: StopSignal) -> Search:
    """By the words that query and product share. Each worker has an index of all items."""
    index = Bm25(items)

    def search(start: int, end: int, judged: JudgedItems) -> Candidates:
        texts = queries(start, end)
        scores = np.zeros((len(texts), depth))
        found = np.full((len(texts), depth), NONE, dtype=np.int64)
        best = np.zeros(len(texts))
        for row, text in enumerate(texts):
            stop.raise_if_set(f"searching for negatives; {_KEPT}")
            every = index.scores(text)
            first = best_of(every, depth)
            scores[row, : len(first)], found[row, : len(first)] = every[first], first
            mine = slice(judged.offsets[row], judged.offsets[row + 1])
            best[row] = every[judged.items[mine][judged.positive[mine]]].max(initial=0.0)
        return Candidates(scores, found, best)

    return search


def mine_share(
    parts: Parts,
    open_search: Callable[[], Search],
    judged: JudgedItems,
    rows_of: Callable[[Int64s], Int64s],
    config: MineConfig,
    *,
    worker: int,
    workers: int,
    stop: StopSignal,
) -> int:
    """Mine for the queries of `worker` of `workers`, a run of pieces; returns how many of all pieces are missing.

    `judged`: of all queries. `rows_of`: items to the numbers they are committed by. What is committed is not done
    again. Raises Preempted, NumericError.
    """
    count = len(parts)
    done = parts.done()
    todo = [index for index in range(worker * count // workers, (worker + 1) * count // workers) if index not in done]
    if todo:
        search = open_search()
        total = sum(stop - start for start, stop in map(parts.rows, todo))
        with progress("searching for negatives", total, "queries") as advance:
            for index in todo:
                stop.raise_if_set(f"searching for negatives; {_KEPT}")
                first, last = parts.rows(index)
                mine = judged.part(first, last)
                items, counts = choose_negatives(search(first, last, mine), mine, config)
                parts.commit(index, rows_of(items), vars(counts))
                advance(last - first)
        done = parts.done()
    return count - len(done)


def all_negatives(parts: Parts, most: int) -> tuple[Int64s, Counts]:
    """The negatives [Q, most] of all queries, and what became of their best products. All pieces must be there."""
    products = [np.zeros((0, most), dtype=np.int64), *(parts.open(index) for index in range(len(parts)))]
    return np.concatenate(products), sum((parts.counts(index) for index in range(len(parts))), Counts())


def commit_all(ctx: StageContext, mining: MiningPlan, task: MiningTask, parts: Parts, most: int) -> NegativeSet:
    """The negatives of all queries, once every piece is there."""
    product, counts = all_negatives(parts, most)
    info = NegativesInfo(
        dataset=mining.sets[0].info.dataset,
        token_sets=tuple(one.info.fingerprint for one in mining.sets),
        rows=task.rows.sizes,
        source=mining.source,
        settings=mining.decides,
        figures={
            "queries": counts.queries,
            "items": task.num_items,
            "negatives": counts.negatives,
            "slots_filled": counts.negatives / max(1, product.size),
            "queries_without": int((product[:, 0] < 0).sum()),
            "judged_skipped": counts.judged,
            "above_margin": counts.above_margin,
            "passed_over": counts.passed_over,
            "nothing_found": counts.nothing_found,
        },
    )
    staged = empty_folder(parts.scratch / "set")
    return commit_negatives(ctx.workspace_after_stop, mining.prefix, Negatives(task.query_id, product), info, staged)
