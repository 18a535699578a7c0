"""Where retrieval gets its queries, items and judgements from: the prepared data, or a catalogue file."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pipeline.core.metrics import Judgements
from pipeline.core.order import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.encode import text_characters
from pipeline.data.shards import TokenRows
from pipeline.data.tokenizer import TextTokenizer, Tokens
from pipeline.embedding.texts import cut_tokens
from pipeline.evaluation.catalogue import NO_QUERY, CatalogueFile
from pipeline.evaluation.config import RetrievalConfig
from pipeline.evaluation.holdout_rows import Holdout
from pipeline.evaluation.products import distinct_products
from pipeline.evaluation.retrieval import RetrievalTask
from pipeline.evaluation.texts import join_tokens, text_hashes, to_tokens

Int64s = npt.NDArray[np.int64]


def from_products(
    holdout: Holdout,
    sources: Sequence[TokenRows],
    config: RetrievalConfig,
    stop: StopSignal,
    warn: Callable[[str], None],
) -> RetrievalTask | str:
    """The holdout's queries against the distinct products of all `sources`; or why there is nothing to search for."""
    pad_id = holdout.rows.pad_id
    query_id, product, gain = (np.concatenate(parts) for parts in zip(*_judged(holdout), strict=True))
    judged = gain > 0
    if not judged.any():
        return "no row of the holdout has a gain, so nothing is relevant to any query"
    asked = some_queries(np.unique(query_id[judged]), config.max_queries)
    judged &= np.isin(query_id, asked)
    products = distinct_products(sources, np.unique(product[judged]), config.max_items, stop)
    if len(products) < products.num_distinct:
        warn(f"retrieval: {len(products):,} of {products.num_distinct:,} products (evaluate.retrieval.max_items)")

    def items(mine: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]:
        return products.windows(config.window_rows, mine)

    return RetrievalTask(
        query_id=asked,
        queries=_query_tokens(holdout, asked, pad_id),
        num_items=len(products),
        items=items,
        judged=Judgements(query_id[judged], products.numbers_of(product[judged]), gain[judged].astype(np.float64)),
    )


def from_catalogue(file: CatalogueFile, holdout: Holdout, tokenizer: TextTokenizer, stop: StopSignal) -> RetrievalTask:
    """The queries of a catalogue file against all its items. Texts are cut as those of the prepared data."""
    config, largest = file.config, holdout.rows.buckets[-1]
    found = file.queries(stop)
    asked = some_queries(np.array(sorted(found.texts), dtype=np.int64), config.max_queries)
    limit = text_characters(holdout.rows.buckets)
    texts = [found.texts[number][:limit] for number in asked.tolist()]
    relevant = np.flatnonzero((found.query_of != NO_QUERY) & np.isin(found.query_of, asked))

    def items(mine: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]:
        for first, titles in file.windows(found.is_item, config.window_rows, mine, stop, limit):
            yield first, cut_tokens(tokenizer.encode(titles), largest.product_tokens, tokenizer.sep_id)

    return RetrievalTask(
        query_id=asked,
        queries=cut_tokens(tokenizer.encode(texts), largest.query_tokens, tokenizer.sep_id),
        num_items=len(found.query_of),
        items=items,
        judged=Judgements(found.query_of[relevant], relevant.astype(np.int64), np.ones(len(relevant))),
    )


def some_queries(query_id: Int64s, most: int) -> Int64s:
    """At most `most` of the ids [Q], by a hash of them; ascending."""
    order = np.argsort(mix64(query_id.astype(np.uint64)), kind="stable")
    return np.sort(query_id[order[:most]])


def _judged(holdout: Holdout) -> Iterator[tuple[Int64s, npt.NDArray[np.uint64], npt.NDArray[np.float32]]]:
    for arrays in holdout.blocks(("query_id", "product", "gain")):
        yield arrays["query_id"], text_hashes(arrays["product"], holdout.rows.pad_id), arrays["gain"]


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
