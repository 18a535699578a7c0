"""What retrieval searches for, and where: queries, items and judgements of prepared data, or of a catalogue file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Bools, Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint, hash63
from pipeline.core.shuffle import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.rows import FILTER, ColumnPlan, RawBatch, match_columns, product_text, text_characters
from pipeline.data.shards import TokenRows
from pipeline.data.sources import Files, open_files
from pipeline.data.tokenizer import TextTokenizer, Tokens
from pipeline.data.validate import filter_mask
from pipeline.embed.config import whole_limit
from pipeline.embed.texts import cut_tokens
from pipeline.evaluate.config import MetricsConfig, RetrievalConfig
from pipeline.evaluate.holdout import Holdout
from pipeline.evaluate.metrics.measure import MetricReport, retrieval_report
from pipeline.evaluate.metrics.ranking import Judgements
from pipeline.evaluate.metrics.scored import PerQuery
from pipeline.evaluate.products import decoded, distinct_products, join_tokens, text_hashes, to_tokens
from pipeline.model.config import InputSpec


@dataclass(frozen=True)
class Queries:
    """Q queries: ids [Q] ascending, tokens and texts [Q], and what is relevant to them."""

    ids: Int64s
    tokens: Tokens
    texts: list[str]
    judged: Judgements


@dataclass(frozen=True)
class RetrievalTask:
    queries: Queries
    tuning: Queries | str
    """Queries of the valid split, from which the weight of hybrid search is chosen; or why there are none."""
    num_items: int
    items: Callable[[Callable[[int], bool]], Iterator[tuple[int, Tokens]]]
    """In order, some at a time: (number of the first, tokens); only windows whose number passes."""
    texts: Callable[[], Iterator[list[str]]]
    """Of all items in order, some at a time."""

    @property
    def num_queries(self) -> int:
        """Those that are judged."""
        return len(self.queries.ids)

    @property
    def tokens(self) -> Tokens:
        """Of all queries, those for tuning last."""
        more = [] if isinstance(self.tuning, str) else [self.tuning.tokens]
        return join_tokens([self.queries.tokens, *more])

    @property
    def query_texts(self) -> list[str]:
        """In the order of `tokens`."""
        return self.queries.texts if isinstance(self.tuning, str) else [*self.queries.texts, *self.tuning.texts]

    def report(self, items: Int64s, metrics: MetricsConfig) -> tuple[PerQuery, MetricReport]:
        """Figures of items [Q or more, k] found for the judged queries, which come first."""
        return retrieval_report(self.queries.ids, items[: self.num_queries], self.queries.judged, metrics)


# A catalogue file: items, and for each the query it is relevant to.
#
# It is read twice: for the queries, then for the titles, window by window. Memory: 17 bytes a row, and the queries
# asked.

NO_QUERY = -1
_BATCH_ROWS = 8192
_OPTIONAL_TEXT = "text"


@dataclass(frozen=True)
class CatalogueFile:
    config: RetrievalConfig
    files: Files

    @property
    def content(self) -> str:
        """Fingerprint of what they hold."""
        return fingerprint([[file.key, file.content_id] for file in self.files.inputs])

    def queries(self) -> "CatalogueQueries":
        """Which queries there are and what is relevant to them. Raises DataError for missing columns or no query."""
        texts: dict[int, str] = {}
        valid_texts: dict[int, str] = {}
        asking = [(texts, self.config.queries)]
        asking += [(valid_texts, self.config.valid_queries)] if self.config.valid_queries else []
        item_hashes: list[Int64s] = [np.zeros(0, dtype=np.int64)]
        numbers: list[Int64s] = [np.zeros(0, dtype=np.int64)]
        for batch in self._batches(("id", "query", "query_id")):
            ids, queries, names = (_texts(batch, field) for field in ("id", "query", "query_id"))
            asked_for = [
                hash63(name or query) if query else NO_QUERY for query, name in zip(queries, names, strict=True)
            ]
            for known, wanted in asking:
                may = filter_mask(batch.columns, wanted).tolist()
                for number, query, may_ask in zip(asked_for, queries, may, strict=True):
                    if may_ask and number != NO_QUERY:
                        known.setdefault(number, query)
            item_hashes.append(np.array([hash63(item) for item in ids], dtype=np.int64))
            numbers.append(np.array(asked_for, dtype=np.int64))
        every = np.concatenate(item_hashes)
        is_item = np.zeros(len(every), dtype=np.bool_)
        is_item[np.unique(every, return_index=True)[1]] = True
        query_of = np.concatenate(numbers)[is_item]
        there = set(np.unique(query_of).tolist())
        texts = {number: text for number, text in texts.items() if number in there}
        valid_texts = {number: text for number, text in valid_texts.items() if number in there and number not in texts}
        if not texts:
            raise DataError(
                f"the catalogue {self.config.catalogue} asks no query ({len(every):,} items read)",
                expected=f"items with a {self.config.query!r}"
                + (f" among {dict(self.config.queries)}" if self.config.queries else ""),
                next_command="check --evaluate.retrieval.query and --evaluate.retrieval.queries",
            )
        return CatalogueQueries(texts, valid_texts, query_of, is_item)

    def windows(
        self, is_item: Bools, rows: int, mine: Callable[[int], bool], limit: int
    ) -> Iterator[tuple[int, list[str]]]:
        """What the encoder reads of each item, cut to `limit` characters, `rows` items at a time.

        Yields (number of the first item, texts), and only the windows whose number is `mine`.
        """
        held: list[str] = []
        number = row = 0
        for batch in self._batches(("title", "text")):
            titles, texts = _texts(batch, "title"), _texts(batch, "text")
            kept = is_item[row : row + len(titles)].tolist()
            row += len(titles)
            rows_of = zip(titles, texts, kept, strict=True)
            held += [product_text(title, text, limit) for title, text, keep in rows_of if keep]
            while len(held) >= rows:
                if mine(number):
                    yield number * rows, held[:rows]
                held, number = held[rows:], number + 1
        if held and mine(number):
            yield number * rows, held

    def _batches(self, fields: Sequence[str]) -> Iterator[RawBatch]:
        planner = partial(self._plan, fields=fields)
        for batch in self.files.read(lambda uri: partial(planner, uri), _BATCH_ROWS, "reading the catalogue"):
            if batch.bad:
                raise DataError(
                    f"{batch.bad[0].file} has a bad row at {batch.bad[0].row}: {batch.bad[0].reason}",
                    expected="whole rows: retrieval is judged against all items",
                    next_command="repair the file",
                )
            yield batch

    def _plan(self, uri: str, names: Sequence[str], fields: Sequence[str]) -> ColumnPlan:
        config = self.config
        pairs = [("id", config.id), ("title", config.title), ("query", config.query)]
        if config.query_id:
            pairs.append(("query_id", config.query_id))
        if config.text in names or config.text != _OPTIONAL_TEXT:
            pairs.append(("text", config.text))
        pairs += [(FILTER + column, column) for column in {**config.queries, **config.valid_queries}]

        def setting(field: str) -> str:
            name = field.replace("_", "-")
            if field.startswith(FILTER):
                name = "queries" if field.removeprefix(FILTER) in config.queries else "valid-queries"
            return f"--evaluate.retrieval.{name}"

        return match_columns(pairs, names, uri, setting).only(fields)


@dataclass(frozen=True)
class CatalogueQueries:
    """The queries asked, number to text, and the number of the query each of N items is relevant to, or NO_QUERY.

    `valid_texts`: further queries, from which the weight of hybrid search is chosen; none of those asked. `is_item`: of
    every row, whether it is an item; the second row of an id is none.
    """

    texts: dict[int, str]
    valid_texts: dict[int, str]
    query_of: Int64s
    is_item: Bools


def open_catalogue(config: RetrievalConfig, path: str, stop: StopSignal) -> CatalogueFile:
    """Find the files. Raises DataError when there is none."""
    return CatalogueFile(config, open_files(path, config.format, stop, "--evaluate.retrieval.catalogue"))


def _texts(batch: RawBatch, field: str) -> list[str]:
    """Stripped texts of a field, empty ones when the file has no such column; bytes that are not UTF-8 are replaced."""
    if field not in batch.columns.schema.names:
        return [""] * len(batch.columns)
    return [(value or b"").decode("utf-8", "replace").strip() for value in batch.columns[field].to_pylist()]


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
    file: CatalogueFile, holdout: Holdout, tokenizer: TextTokenizer, spec: InputSpec, max_valid: int, chunks: int = 1
) -> RetrievalTask:
    """The queries of a catalogue file against all its items.

    Queries are cut as those of the prepared data, items to `chunks` times as much as products of it.
    """
    config, largest = file.config, holdout.rows.buckets[-1]
    found = file.queries()
    limit = chunks * text_characters(holdout.rows.buckets)
    most_tokens = whole_limit(largest.product_tokens, chunks)

    def items(mine: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]:
        for first, titles in file.windows(found.is_item, config.window_rows, mine, limit):
            tokens = tokenizer.encode([spec.product_prefix + title for title in titles])
            yield first, cut_tokens(tokens, most_tokens, tokenizer.sep_id)

    def texts() -> Iterator[list[str]]:
        return (titles for _, titles in file.windows(found.is_item, config.window_rows, lambda number: True, limit))

    def queries(texts_of: dict[int, str], most: int) -> Queries:
        ids = some_queries(np.array(sorted(texts_of), dtype=np.int64), most)
        texts = [texts_of[number][:limit] for number in ids.tolist()]
        asked = tokenizer.encode([spec.query_prefix + text for text in texts])
        tokens = cut_tokens(asked, largest.query_tokens, tokenizer.sep_id)
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
