"""Where retrieval gets its queries, items and judgements from: the prepared data, or a catalogue file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.order import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.encode import text_characters
from pipeline.data.shards import TokenRows
from pipeline.data.tokenizer import TextTokenizer, Tokens
from pipeline.embed.texts import cut_tokens
from pipeline.evaluate.catalogue import NO_QUERY, CatalogueFile
from pipeline.evaluate.config import RetrievalConfig
from pipeline.evaluate.holdout_rows import Holdout
from pipeline.evaluate.metrics.retrieval import Judgements
from pipeline.evaluate.products import distinct_products
from pipeline.evaluate.retrieval import Queries, RetrievalTask
from pipeline.evaluate.texts import decoded, join_tokens, text_hashes, to_tokens

NO_VALID = "the valid split has no query with a relevant item"
ASK_NONE = "evaluate.baselines.valid_queries is 0"
NO_VALID_SETTING = "evaluate.retrieval.valid_queries names no queries of the catalogue"


def from_products(
    holdout: Holdout,
    valid: Holdout | str,
    sources: Sequence[TokenRows],
    tokenizer: bytes,
    config: RetrievalConfig,
    max_valid: int,
    stop: StopSignal,
    warn: Callable[[str], None],
) -> RetrievalTask | str:
    """The holdout's queries against the distinct products of all `sources`; or why there is nothing to search for.

    At most `max_valid` queries of `valid` are asked beside them; a query that is judged is none of these.
    """
    rows = _GradedRows.of(holdout)
    if not len(rows.query_id):
        return "no row of the holdout has a gain, so nothing is relevant to any query"
    asked = some_queries(np.unique(rows.query_id), config.max_queries)
    rows = rows.select(np.isin(rows.query_id, asked))
    products = distinct_products(sources, np.unique(rows.product), config.max_items, stop)
    if len(products) < products.num_distinct:
        warn(f"retrieval: {len(products):,} of {products.num_distinct:,} products (evaluate.retrieval.max_items)")

    def items(mine: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]:
        return products.windows(config.window_rows, mine)

    def texts() -> Iterator[list[str]]:
        return (decoded(window, tokenizer) for _, window in items(lambda number: True))

    def queries(asking: Holdout, ids: Int64s, graded: "_GradedRows") -> Queries:
        tokens = _query_tokens(asking, ids, asking.rows.pad_id)
        judged = Judgements(graded.query_id, products.numbers_of(graded.product), graded.gain)
        return Queries(ids, tokens, decoded(tokens, tokenizer), judged)

    tuning: Queries | str = valid if isinstance(valid, str) else NO_VALID if max_valid else ASK_NONE
    if max_valid and not isinstance(valid, str):
        others = _GradedRows.of(valid)
        others = others.select(products.numbers_of(others.product) >= 0)
        ids = some_queries(np.setdiff1d(others.query_id, asked), max_valid)
        if len(ids):
            tuning = queries(valid, ids, others.select(np.isin(others.query_id, ids)))
    return RetrievalTask(queries(holdout, asked, rows), tuning, len(products), items, texts)


def from_catalogue(
    file: CatalogueFile, holdout: Holdout, tokenizer: TextTokenizer, max_valid: int, stop: StopSignal
) -> RetrievalTask:
    """The queries of a catalogue file against all its items. Texts are cut as those of the prepared data."""
    config, largest = file.config, holdout.rows.buckets[-1]
    found = file.queries(stop)
    limit = text_characters(holdout.rows.buckets)

    def items(mine: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]:
        for first, titles in file.windows(found.is_item, config.window_rows, mine, stop, limit):
            yield first, cut_tokens(tokenizer.encode(titles), largest.product_tokens, tokenizer.sep_id)

    def texts() -> Iterator[list[str]]:
        return (
            titles for _, titles in file.windows(found.is_item, config.window_rows, lambda number: True, stop, limit)
        )

    def queries(texts_of: dict[int, str], most: int) -> Queries:
        ids = some_queries(np.array(sorted(texts_of), dtype=np.int64), most)
        texts = [texts_of[number][:limit] for number in ids.tolist()]
        tokens = cut_tokens(tokenizer.encode(texts), largest.query_tokens, tokenizer.sep_id)
        relevant = np.flatnonzero((found.query_of != NO_QUERY) & np.isin(found.query_of, ids)).astype(np.int64)
        return Queries(ids, tokens, texts, Judgements(found.query_of[relevant], relevant, np.ones(len(relevant))))

    tuning: Queries | str = ASK_NONE if not max_valid else NO_VALID if config.valid_queries else NO_VALID_SETTING
    if found.valid_texts and max_valid:
        tuning = queries(found.valid_texts, max_valid)
    return RetrievalTask(queries(found.texts, config.max_queries), tuning, len(found.query_of), items, texts)


def some_queries(query_id: Int64s, most: int) -> Int64s:
    """At most `most` of the ids [Q], by a hash of them; ascending."""
    order = np.argsort(mix64(query_id.astype(np.uint64)), kind="stable")
    return np.sort(query_id[order[:most]])


@dataclass(frozen=True)
class _GradedRows:
    """Rows of a holdout that have a gain: query_id, hash of the product's text, gain, each [N]."""

    query_id: Int64s
    product: UInt64s
    gain: npt.NDArray[np.float64]

    @classmethod
    def of(cls, holdout: Holdout) -> "_GradedRows":
        parts = []
        for arrays in holdout.blocks(("query_id", "product", "gain")):
            has = arrays["gain"] > 0
            product = text_hashes(arrays["product"][has], holdout.rows.pad_id)
            parts.append((arrays["query_id"][has], product, arrays["gain"][has].astype(np.float64)))
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def select(self, rows: npt.NDArray[np.bool_]) -> "_GradedRows":
        return _GradedRows(self.query_id[rows], self.product[rows], self.gain[rows])


def _query_tokens(holdout: Holdout, asked: Int64s, pad_id: int) -> Tokens:
    """The query of each id in `asked` [Q]: of its first row."""
    left = set(asked.tolist())
    ids: list[Int64s] = []
    parts: list[Tokens] = []
    for arrays in holdout.blocks(("query_id", "query")):
        found, first = np.unique(arrays["query_id"], return_index=True)
        new = np.isin(found, np.fromiter(left, dtype=np.int64, count=len(left)))
        left -= set(found[new].tolist())
        ids.append(found[new])
        parts.append(to_tokens(arrays["query"][first[new]], pad_id))
    return join_tokens(parts, np.argsort(np.concatenate(ids)))
