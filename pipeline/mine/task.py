"""What is mined for, and where: the training queries that have a positive, against the distinct training products; and
which of a query's best products become its negatives.

Memory: 28 bytes for each training row while it is looked through; 32 for each product, 24 for each query and 17 for
each judged pair after.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from pipeline.checkpoint.store import Checkpoint
from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.batching import first_rows, locate
from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.data.tokenizer import Tokens
from pipeline.data.tokens import TokenSet, select_partitions
from pipeline.embed.plan import longest_text
from pipeline.evaluate.bm25 import K1, B
from pipeline.evaluate.products import Products, decoded, distinct_products, text_hashes, to_tokens
from pipeline.mine.config import BM25, DECIDES, MineConfig
from pipeline.settings import Settings

NONE = -1
_TEXTS = 65_536
"""Made words again at a time."""


@dataclass(frozen=True)
class Judged:
    """Judged items of Q queries back to back, ascending: those of query q are `items[offsets[q]:offsets[q + 1]]`."""

    offsets: Int64s
    items: Int64s
    positive: Bools

    def part(self, start: int, stop: int) -> "Judged":
        first, last = self.offsets[start], self.offsets[stop]
        return Judged(self.offsets[start : stop + 1] - first, self.items[first:last], self.positive[first:last])

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
class Mining:
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


def decide(settings: Settings, sets: list[TokenSet], model: Checkpoint | None, parent: Checkpoint | None) -> Mining:
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
    return Mining(sets, tuple(new), model, decides)


@dataclass(frozen=True)
class MiningTask:
    """Q queries and N items. Row numbers count over all buckets of `rows`, smallest bucket first."""

    rows: TokenRows
    query_id: Int64s
    """[Q], ascending."""
    query_row: Int64s
    """[Q], a row that has the query."""
    products: Products
    judged: Judged

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
    return MiningTask(rows, asked, first, products, Judged(offsets, items[new], positive[new]))


# From the best products of each query to its hard negatives. Pure. The margins are those of Moreira et al.,
# "NV-Retriever: Improving text embedding models with effective hard-negative mining" (2024): what scores about as high
# as a positive is likely one that nobody has judged.


@dataclass(frozen=True)
class Candidates:
    """Of Q queries the best items, best first: scores [Q, k] and items [Q, k], NONE where there are fewer.

    `best_positive` [Q]: the highest score of a positive of the query.
    """

    scores: Float64s
    items: Int64s
    best_positive: Float64s


@dataclass(frozen=True)
class Counts:
    """What became of the best products."""

    queries: int = 0
    negatives: int = 0
    judged: int = 0
    """Left out because they are judged."""
    passed_over: int = 0
    """Left out by skip_top."""
    above_margin: int = 0
    """Left out as likely positives."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def choose_negatives(found: Candidates, judged: Judged, config: MineConfig) -> tuple[Int64s, Counts]:
    """Items [Q, negatives_per_query], best first, NONE behind the last."""
    real = found.items != NONE
    is_judged = judged.holds(found.items)
    unjudged = real & ~is_judged
    passed = unjudged & (np.cumsum(unjudged, axis=1) <= config.skip_top)
    ceiling, best = np.full(len(found.items), np.inf), found.best_positive  # the highest score of a negative, [Q]
    if config.relative_margin is not None:
        ceiling = np.minimum(ceiling, best - config.relative_margin * np.abs(best))
    if config.absolute_margin is not None:
        ceiling = np.minimum(ceiling, best - config.absolute_margin)
    above = unjudged & ~passed & (found.scores > ceiling[:, None])
    left = unjudged & ~passed & ~above
    left &= np.cumsum(left, axis=1) <= config.negatives_per_query
    negatives = np.full((len(found.items), config.negatives_per_query), NONE, dtype=np.int64)
    query, place = np.nonzero(left)
    negatives[query, (np.cumsum(left, axis=1) - 1)[query, place]] = found.items[query, place]
    counts = (len(negatives), left, is_judged, passed, above)
    return negatives, Counts(*(int(np.sum(count)) for count in counts))
