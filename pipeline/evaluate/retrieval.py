"""Exact search over the embeddings of a model, which compares every query with every item to evaluate retrieval."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.context import StageContext
from pipeline.core.arrays import Bools, Float32s, Float64s, Int64s, UInt64s
from pipeline.core.errors import DataError, NumericError
from pipeline.core.fingerprint import Json, fingerprint, hash63
from pipeline.core.format import shortened
from pipeline.core.record import with_retired
from pipeline.core.shuffle import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.attributes import attribute_pairs, base_of
from pipeline.data.input_files import Files, names_of, open_files
from pipeline.data.rows import FILTER, ColumnPlan, RawBatch, match_columns, product_text, text_characters
from pipeline.data.shards import TokenRows, text_hashes
from pipeline.data.sources import open_source, read_products
from pipeline.data.token_sets import SPLITS, TokenSet, open_rows, spec_of
from pipeline.data.tokenizer import TextTokenizer, Tokens, token_windows
from pipeline.data.validate import filter_mask
from pipeline.embed.catalogue import cut_tokens
from pipeline.embed.config import max_text_tokens
from pipeline.embed.engine import Embed, with_progress
from pipeline.embed.vectors import check_dimensions, shorten_vectors
from pipeline.evaluate.config import RETRIEVAL, MetricsConfig, RetrievalConfig
from pipeline.evaluate.golden import GoldenQuery, items_named, judge_golden, read_golden
from pipeline.evaluate.holdout import Holdout
from pipeline.evaluate.metrics.measure import MetricReport, retrieval_report
from pipeline.evaluate.metrics.ranking import Judgements
from pipeline.evaluate.metrics.scored_rows import PerQuery
from pipeline.evaluate.report import MAX_TEXT, FoundProduct, GoldenReport, MovedQuery
from pipeline.evaluate.score import load_arrays, save_arrays
from pipeline.io.commit import read_manifest
from pipeline.io.requests import RetryPolicy
from pipeline.model.config import Attribute, InputSpec
from pipeline.parallel.process_group import ProcessGroup
from pipeline.retrieval.products import decode_tokens, distinct_products, join_tokens
from pipeline.retrieval.search import Ranked, search_on_ranks
from pipeline.settings import Settings

WINDOW_ROWS = 16_384  # number of items to read and embed at a time
MAX_TUNING = 1000  # maximum number of queries on which to tune the weight of hybrid search
_WINDOW = 512
_BATCH_ROWS = 8192
_SHOWN = 5  # number of search results per query in the digest
NO_QUERY = -1


@dataclass(frozen=True)
class RetrievalQueries:
    """A group of Q queries with their tokens, texts and judgements. The ids [Q] are in ascending order."""

    ids: Int64s
    tokens: Tokens
    texts: list[str]
    judged: Judgements


@dataclass(frozen=True)
class RetrievalTask:
    """The queries and items on which to evaluate retrieval.

    Attributes:
        queries: The queries to judge.
        tuning: Queries of the valid split on which to tune the weight of hybrid search, if there are any.
        num_items: The number of items.
        items: A function that yields windows of items in order, each as the number of its first item and the tokens.
            It takes a function that decides which window numbers to include.
        texts: A function that yields the texts of all items.
        item_of: Maps the number and text of a source row to its item, or to -1 if the row is not among the items.
        golden: Golden queries, which are searched after all others and not included in metrics.
    """

    queries: RetrievalQueries
    tuning: RetrievalQueries | None
    num_items: int
    items: Callable[[Callable[[int], bool]], Iterator[tuple[int, Tokens]]]
    texts: Callable[[], Iterator[list[str]]]
    item_of: Callable[[int, str], int] = lambda row, text: -1
    golden: RetrievalQueries | None = None

    @property
    def query_groups(self) -> list[RetrievalQueries]:
        return [group for group in (self.queries, self.tuning, self.golden) if group]

    def report(self, items: Int64s, metrics: MetricsConfig) -> tuple[PerQuery, MetricReport]:
        """Compute metrics from search results, using only the first Q rows, which belong to the judged queries."""
        return retrieval_report(self.queries.ids, items[: len(self.queries.ids)], self.queries.judged, metrics)


class CatalogueQueries(NamedTuple):
    """The queries of a catalogue file with R rows.

    `texts` and `valid_texts` are the texts of the judged and the tuning queries, by query number. For each row,
    `query_of` [R] is the number of the query that its item is relevant to (or NO_QUERY), and `item_of` [R] is the
    number of the item. If an item has several rows, `is_item` [R] is only True for the first, from which its title and
    text are read.
    """

    texts: dict[int, str]
    valid_texts: dict[int, str]
    query_of: Int64s
    item_of: Int64s
    is_item: Bools


@dataclass(frozen=True)
class JudgedCatalogue:
    """A table of items, where each row has a query that the item is relevant to.

    It is read twice, first for the queries and then for the titles, so that only 33 bytes per row and the evaluated
    queries are kept in memory.
    """

    config: RetrievalConfig
    files: Files
    attributes: tuple[Attribute, ...] = ()

    def with_attributes(self, attributes: Sequence[Attribute], warn: Callable[[str], object]) -> "JudgedCatalogue":
        return replace(self, attributes=self.files.text_attributes(attributes, warn))

    @property
    def content(self) -> str:
        """Return a fingerprint of the file contents."""
        return fingerprint([[file.key, file.content_id] for file in self.files.inputs])

    def queries(self) -> CatalogueQueries:
        """Read the queries and the judgements. An item with several rows is relevant to the queries of all of them.

        Raises DataError if a column is missing, if a row has no id, or if there are no queries.
        """
        config, texts, valid_texts = self.config, dict[int, str](), dict[int, str]()
        items, numbers = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        num_without_id = 0
        for batch in self.batches(("id", "query", "query_id")):
            ids, queries, names = (field_texts(batch, name) for name in ("id", "query", "query_id"))
            pairs = zip(queries, names, strict=True)
            batch_numbers = [hash63(name or query) if query else NO_QUERY for query, name in pairs]
            tuning = filter_mask(batch.columns, config.valid_queries) & bool(config.valid_queries)
            judged = filter_mask(batch.columns, config.queries) if config.queries else ~tuning
            for target, mask in ((texts, judged), (valid_texts, tuning)):
                for number, query, selected in zip(batch_numbers, queries, mask.tolist(), strict=True):
                    if selected and number != NO_QUERY:
                        target.setdefault(number, query)
            num_without_id += ids.count("")
            items.append(np.array([hash63(item) for item in ids], dtype=np.int64))
            numbers.append(np.array(batch_numbers, dtype=np.int64))
        row_items = np.concatenate(items)
        if num_without_id or not texts:
            reason = f"{num_without_id:,} rows have no {config.id!r}" if num_without_id else "no row has a query"
            raise DataError(
                f"{reason} in the catalogue {config.catalogue} of {len(row_items):,} rows",
                expected=f"a {config.id!r} in every row, and rows with a {config.query!r}"
                + (f" among {dict(config.queries)}" if config.queries else ""),
                next_command="check the file, --evaluate.retrieval.id, --evaluate.retrieval.query and"
                " --evaluate.retrieval.queries",
            )
        _, first, inverse = np.unique(row_items, return_index=True, return_inverse=True)
        is_item = np.zeros(len(row_items), dtype=np.bool_)
        is_item[first] = True
        item_of = np.argsort(np.argsort(first))[inverse]  # number items by their first rows
        valid_texts = {number: text for number, text in valid_texts.items() if number not in texts}
        return CatalogueQueries(texts, valid_texts, np.concatenate(numbers), item_of, is_item)

    def windows(self, is_item: Bools, selects: Callable[[int], bool], limit: int) -> Iterator[tuple[int, list[str]]]:
        """Yield windows of items, each as the number of its first item and the texts of all items.

        Texts are truncated to `limit` characters. `selects` decides which window numbers to include.
        """
        texts_read: list[str] = []
        number = row = 0
        for batch in self.batches(("title", "text")):
            titles, texts = field_texts(batch, "title"), field_texts(batch, "text")
            rows = zip(titles, texts, is_item[row : row + len(titles)].tolist(), strict=True)
            row += len(titles)
            texts_read += [product_text(title, text, limit) for title, text, is_first in rows if is_first]
            while len(texts_read) >= WINDOW_ROWS:
                if selects(number):
                    yield number * WINDOW_ROWS, texts_read[:WINDOW_ROWS]
                texts_read, number = texts_read[WINDOW_ROWS:], number + 1
        if texts_read and selects(number):
            yield number * WINDOW_ROWS, texts_read

    def batches(self, fields: Sequence[str]) -> Iterator[RawBatch]:
        config = self.config
        names = ("id", "title", "query", "text", *(["query_id"] if config.query_id else []))
        pairs = [(name, getattr(config, name)) for name in names]
        pairs += [(FILTER + column, column) for column in {**config.queries, **config.valid_queries}]
        pairs += attribute_pairs(self.attributes, (), config.catalogue or "")

        def setting(field: str) -> str:
            if field.startswith(FILTER):
                field = "queries" if field.removeprefix(FILTER) in config.queries else "valid-queries"
            return f"--evaluate.retrieval.{field.replace('_', '-')}"

        def planner(uri: str) -> Callable[[Sequence[str]], ColumnPlan]:
            return lambda columns: match_columns(pairs, columns, uri, setting).only(fields)

        for batch in self.files.read(planner, _BATCH_ROWS, "reading the catalogue"):
            if batch.bad:
                raise DataError(
                    f"row {batch.bad[0].row} of {batch.bad[0].file} is invalid: {batch.bad[0].reason}",
                    expected="no invalid rows, because retrieval is evaluated on all items",
                    next_command="repair the file",
                )
            yield batch


def open_catalogue(
    config: RetrievalConfig, path: str, stop: StopSignal, retry: RetryPolicy | None = None
) -> JudgedCatalogue:
    """Open a catalogue file or folder. Raises DataError if there are no files."""
    return JudgedCatalogue(config, open_files(path, "auto", stop, "--evaluate.retrieval.catalogue", retry))


def field_texts(batch: RawBatch, field: str) -> list[str]:
    """Return a field of all rows with whitespace stripped, or empty strings if the file does not have the column."""
    if field not in batch.columns.schema.names:
        return [""] * len(batch.columns)
    return [(value or b"").decode(errors="replace").strip() for value in batch.columns[field].to_pylist()]


class _GradedRows(NamedTuple):
    """The holdout rows with a gain. `product` [N] is a hash of the product's text."""

    query_id: Int64s
    product: UInt64s
    gain: Float64s

    def select(self, rows: Bools) -> "_GradedRows":
        return _GradedRows(self.query_id[rows], self.product[rows], self.gain[rows])


def _graded_rows(holdout: Holdout) -> _GradedRows:
    parts = []
    for arrays in holdout.blocks(("query_id", "product", "gain")):
        product = text_hashes(arrays["product"], holdout.rows.pad_id)
        part = _GradedRows(arrays["query_id"], product, arrays["gain"].astype(np.float64))
        parts.append(part.select(part.gain > 0))
    return _GradedRows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def from_products(
    holdout: Holdout,
    valid: Holdout | str,
    sources: Sequence[TokenRows],
    tokenizer: bytes,
    config: RetrievalConfig,
    stop: StopSignal,
    warn: Callable[[str], None],
) -> RetrievalTask | str:
    """Build a task that searches the distinct products of all `sources` for the queries of the holdout.

    Other queries, which only occur in `valid`, are used for tuning. Returns the reason as a string if no query has a
    relevant product.
    """
    rows = _graded_rows(holdout)
    if not len(rows.query_id):
        return "no test row has a gain, so there are no relevant products"
    judged_ids = some_queries(np.unique(rows.query_id), config.max_queries)
    rows = rows.select(np.isin(rows.query_id, judged_ids))
    products = distinct_products(sources, np.unique(rows.product), config.max_items, stop)
    if len(products) < products.num_distinct:
        num_distinct = products.num_distinct
        warn(f"retrieval only searches {len(products):,} of {num_distinct:,} products (evaluate.retrieval.max_items)")
    items = partial(products.windows, WINDOW_ROWS)

    def texts() -> Iterator[list[str]]:
        return (decode_tokens(window, tokenizer) for _, window in items(lambda number: True))

    def queries(source: Holdout, ids: Int64s, graded: _GradedRows) -> RetrievalQueries:
        (tokens,) = source.tokens_of("query_id", ids, ("query",))
        judged = Judgements(graded.query_id, products.item_numbers(graded.product), graded.gain)
        return RetrievalQueries(ids, tokens, decode_tokens(tokens, tokenizer), judged)

    encoder, largest = TextTokenizer(tokenizer), holdout.rows.buckets[-1]

    def item_of(row: int, text: str) -> int:
        tokens = cut_tokens(encoder.encode([text]), largest.product_tokens, encoder.sep_id)
        return int(products.item_numbers(text_hashes(tokens.ids[None], encoder.pad_id))[0])

    tuning = None
    if not isinstance(valid, str):
        others = _graded_rows(valid)
        others = others.select(products.item_numbers(others.product) >= 0)
        ids = some_queries(np.setdiff1d(others.query_id, judged_ids), MAX_TUNING)
        tuning = queries(valid, ids, others.select(np.isin(others.query_id, ids))) if len(ids) else None
    return RetrievalTask(queries(holdout, judged_ids, rows), tuning, len(products), items, texts, item_of)


def from_catalogue(
    file: JudgedCatalogue, holdout: Holdout, tokenizer: TextTokenizer, spec: InputSpec, chunks: int = 1
) -> RetrievalTask:
    """Build a task that searches all items of a catalogue file for the queries in the same file.

    Queries are truncated like those in the prepared data. Items may be `chunks` times as long as prepared products.
    """
    config, largest, table = file.config, holdout.rows.buckets[-1], file.queries()
    limit = chunks * text_characters(holdout.rows.buckets)
    max_tokens = max_text_tokens(largest.product_tokens, chunks)

    def items(selects: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]:
        for first, titles in file.windows(table.is_item, selects, limit):
            tokens = tokenizer.encode([spec.product_prefix + title for title in titles])
            yield first, cut_tokens(tokens, max_tokens, tokenizer.sep_id)

    def texts() -> Iterator[list[str]]:
        return (titles for _, titles in file.windows(table.is_item, lambda number: True, limit))

    def queries(texts_of: dict[int, str], max_queries: int) -> RetrievalQueries:
        ids = some_queries(np.array(sorted(texts_of), dtype=np.int64), max_queries)
        texts = [texts_of[number][:limit] for number in ids.tolist()]
        tokens = _query_tokens(texts, tokenizer, spec, holdout)
        rows = np.flatnonzero(np.isin(table.query_of, ids))
        judged = Judgements(table.query_of[rows], table.item_of[rows], np.ones(len(rows)))
        return RetrievalQueries(ids, tokens, texts, judged)

    tuning = queries(table.valid_texts, MAX_TUNING) if table.valid_texts else None
    judged, num_items = queries(table.texts, config.max_queries), int(table.is_item.sum())
    return RetrievalTask(judged, tuning, num_items, items, texts, lambda row, text: int(table.item_of[row]))


def _query_tokens(texts: Sequence[str], tokenizer: TextTokenizer, spec: InputSpec, holdout: Holdout) -> Tokens:
    """Tokenise queries, and truncate them like those in the prepared data."""
    encoded = tokenizer.encode([spec.query_prefix + text for text in texts])
    return cut_tokens(encoded, holdout.rows.buckets[-1].query_tokens, tokenizer.sep_id)


def some_queries(query_id: Int64s, max_queries: int) -> Int64s:
    """Select at most `max_queries` of the ids [Q] by their hashes, and return them in ascending order."""
    order = np.argsort(mix64(query_id.astype(np.uint64)), kind="stable")
    return np.sort(query_id[order[:max_queries]])


def search(
    task: RetrievalTask,
    embed: Embed,
    k: int,
    process_group: ProcessGroup,
    stop: StopSignal,
    advance: Callable[[int], None] = lambda count: None,
    widths: Sequence[int] = (0,),
) -> list[Ranked]:
    """Find the `k` items with the highest cosine similarity for every query of a task, using all ranks.

    Queries and items are distributed over the ranks, each of which only holds the query vectors and one window of items
    in memory. The search is done once for each of `widths`, which is the number of leading dimensions to use (0 for all
    dimensions). The results are returned on all ranks.

    Raises NumericError if a vector is not finite, and Preempted on a stop signal.
    """
    world, tokens = process_group.world, join_tokens([group.tokens for group in task.query_groups])
    bounds = np.linspace(0, len(tokens.lengths), world.world_size + 1).astype(int)
    local = tokens.part(int(bounds[world.rank]), int(bounds[world.rank + 1]))
    windows = token_windows(local, _WINDOW) if len(local.lengths) else ()
    embedded = list(with_progress(embed(windows), "embedding queries", len(local.lengths))) if windows else []
    query_vectors = np.concatenate([vectors for part in process_group.gather(embedded) for vectors in part])
    firsts: deque[int] = deque()  # first items of the windows that the embedder has read ahead

    def cut(vectors: Float32s) -> list[Float32s]:
        return [shorten_vectors(vectors, width or vectors.shape[1]) for width in widths]

    def items() -> Iterator[Tokens]:
        for first, window in task.items(lambda number: number % world.world_size == world.rank):
            firsts.append(first)
            yield window

    def chunks() -> Iterator[tuple[int, list[Float32s]]]:
        for vectors in embed(items()):
            stop.raise_if_set("searching the catalogue")
            yield firsts.popleft(), cut(vectors)
            advance(len(vectors) * world.world_size)

    return search_on_ranks(process_group, cut(query_vectors), chunks(), k)


KIND = "retrieval"


@dataclass(frozen=True)
class RetrievalResult:
    """The retrieval results of a model.

    If retrieval is impossible, `per_query` and `ranked` are None, and `report` has the reason. `by_width` has the nDCG
    of truncated vectors, by their number of dimensions.
    """

    per_query: PerQuery | None
    report: MetricReport
    ranked: Ranked | None
    by_width: dict[int, float] = field(default_factory=dict)


def moved_queries(
    task: RetrievalTask, candidate: RetrievalResult, production: RetrievalResult, metric: str, limit: int
) -> list[MovedQuery]:
    """Return the queries that gained most and those that lost most in a metric, at most `limit` of each.

    Every query is returned with the top search results of both models. To look up their texts, the texts of all items
    are read once.
    """
    if not limit or candidate.ranked is None or production.ranked is None:
        return []
    if candidate.per_query is None or production.per_query is None:
        return []
    lists = production.ranked.items, candidate.ranked.items
    figures = production.per_query.values, candidate.per_query.values
    if any(metric not in values for values in figures):
        return []
    before, now = (values[metric] for values in figures)
    order = np.argsort(now - before, kind="stable")
    won = [row for row in order[::-1].tolist() if now[row] > before[row]][:limit]
    lost = [row for row in order.tolist() if now[row] < before[row]][:limit]
    rows, ids, judged = np.array([*won, *lost], dtype=np.int64), task.queries.ids, task.queries.judged
    selected, gains = np.flatnonzero(np.isin(judged.query_id, ids[rows])), dict[tuple[int, int], float]()
    columns = (column[selected].tolist() for column in (judged.query_id, judged.item_id, judged.gain))
    for query, item, gain in zip(*columns, strict=True):
        gains[query, item] = max(gain, gains.get((query, item), 0.0))
    shown = {item for items in lists for item in items[rows, :_SHOWN].ravel().tolist()}
    titles = {n: shortened(text, MAX_TEXT) for n, text in enumerate(chain.from_iterable(task.texts())) if n in shown}

    def first(items: Int64s, row: int) -> tuple[FoundProduct, ...]:
        results = [item for item in items[row, :_SHOWN].tolist() if item >= 0]
        return tuple(FoundProduct(text=titles[item], gain=gains.get((int(ids[row]), item))) for item in results)

    return [
        MovedQuery(
            query=shortened(task.queries.texts[row], MAX_TEXT),
            before=round(float(before[row]), 4),
            now=round(float(now[row]), 4),
            found_before=first(lists[0], row),
            found_now=first(lists[1], row),
        )
        for row in rows.tolist()
    ]


@dataclass
class ModelSearch:
    """Evaluates retrieval with one model after the other, on the same queries and items.

    The gate judges vectors that are truncated to embed.output.dimensions, because this is how they are served. `valid`
    is the holdout with the queries on which hybrid search is tuned, or the reason why there is none.
    """

    settings: Settings
    ctx: StageContext
    backend: Backend
    process_group: ProcessGroup
    sets: list[TokenSet]
    holdout: Holdout
    valid: Holdout | str
    tokenizer: bytes
    warn: Callable[[str], None]

    def run(self, role: str, checkpoint: Checkpoint, embed: Embed) -> RetrievalResult | None:
        """Evaluate retrieval with a model on all ranks, or load the results if they have been stored before.

        Returns None if retrieval is disabled. Raises DataError if stored results are damaged, and Preempted on a stop
        signal.
        """
        ctx, task = self.ctx, self.task if self.settings.evaluate.retrieval.enabled else None
        if task is None:
            return None
        if isinstance(task, str):
            return self._missing(task)
        widths, key = self._widths(checkpoint), self._key(checkpoint)
        if self.process_group.gather(ctx.world.is_main and read_manifest(ctx.workspace, key) is not None)[0]:
            return self.load(task, key)
        try:
            with ctx.console.progress(f"{role}, search", task.num_items, "items") as advance:
                lists = search(
                    task, embed, max(self.metrics.retrieval_at), self.process_group, ctx.stop, advance, widths
                )
        except NumericError as error:
            return self._missing(error.seen)
        figures = (task.report(ranked.items, self.metrics)[1].values.get(self.ndcg) for ranked in lists[1:])
        by_width = {width: ndcg for width, ndcg in zip(widths[1:], figures, strict=True) if ndcg is not None}
        return self.save(task, key, lists[0], by_width)

    def save(
        self, task: RetrievalTask, key: str, ranked: Ranked, by_width: dict[int, float] | None = None
    ) -> RetrievalResult:
        """Compute the metrics of search results. Rank 0 also stores the results with the metrics of each query."""
        per_query, report = task.report(ranked.items, self.metrics)
        if self.ctx.world.is_main:
            arrays = {"items": ranked.items, "scores": ranked.scores, "query_id": per_query.query_id}
            fields = {f"{self.ndcg} in {width}": figure for width, figure in (by_width or {}).items()}
            save_arrays(self.ctx.workspace, key, KIND, {**arrays, **per_query.values}, self.ctx.scratch, fields)
        return RetrievalResult(per_query, report, ranked, by_width or {})

    def load(self, task: RetrievalTask, key: str) -> RetrievalResult:
        arrays, fields = load_arrays(self.ctx.workspace, key, KIND, self.ctx.scratch / KIND)
        per_query, report = task.report(arrays["items"], self.metrics)
        by_width = {int(name.rpartition(" in ")[2]): float(str(figure)) for name, figure in fields.items()}
        return RetrievalResult(per_query, report, Ranked(arrays["items"], arrays["scores"]), by_width)

    @cached_property
    def metrics(self) -> MetricsConfig:
        """The metrics to compute, including all ranks k that the gate needs."""
        return self.settings.gate.with_ranks(self.settings.evaluate.metrics)

    @property
    def ndcg(self) -> str:
        """The metric by which widths and weights are compared, which is nDCG@10 or at the closest smaller rank.

        If there are only larger ranks, the smallest of them is used.
        """
        ranks = self.metrics.retrieval_at
        return f"{RETRIEVAL}ndcg@{max((k for k in ranks if k <= 10), default=min(ranks))}"

    @cached_property
    def task(self) -> RetrievalTask | str:
        """The queries, items and judgements, or the reason why retrieval cannot be evaluated."""
        config, ctx = self.settings.evaluate.retrieval, self.ctx
        spec, tokenizer = spec_of(self.sets[0].info), TextTokenizer(self.tokenizer)
        task: RetrievalTask | str
        if self._catalogue is not None:
            task = from_catalogue(self._catalogue, self.holdout, tokenizer, spec, self.settings.embed.chunks)
        else:
            sources = [open_rows(ctx.workspace, self.sets, split, ctx.scratch / "tokens") for split in SPLITS]
            task = from_products(self.holdout, self.valid, sources, self.tokenizer, config, ctx.stop, self.warn)
        if isinstance(task, str) or not self.golden:
            return task
        buckets, no_ids = self.holdout.rows.buckets, np.zeros(0, dtype=np.int64)
        texts = [query.query[: text_characters(buckets)] for query in self.golden]
        tokens = _query_tokens(texts, tokenizer, spec, self.holdout)
        judged = Judgements(no_ids, no_ids, np.zeros(0))
        return replace(task, golden=RetrievalQueries(np.arange(len(texts)), tokens, texts, judged))

    @cached_property
    def golden(self) -> tuple[GoldenQuery, ...]:
        return read_golden(self.settings, self.ctx.stop)

    def judge_golden(
        self, candidate: RetrievalResult | None, production: RetrievalResult | None
    ) -> GoldenReport | None:
        """Judge the search results of both models on the golden queries, if there are any.

        Raises DataError if the input data, in which their products are looked up, cannot be read.
        """
        if not self.golden:
            return None
        results, num = (candidate, production), len(self.golden)
        lists, other_lists = (each.ranked.items[-num:] if each and each.ranked else None for each in results)
        task = self.task if candidate else "evaluate.retrieval.enabled is false"
        if isinstance(task, str) or lists is None:
            return GoldenReport(missing=task if isinstance(task, str) else "search with the candidate failed")
        names = (name for query in self.golden for name in query.names)
        items = items_named(names, self._product_rows(), task.item_of)
        report = judge_golden(self.golden, items, lists, other_lists)
        if report.unknown:
            count, unknown = len(report.unknown), names_of(report.unknown)
            self.warn(
                f"{count:,} product(s) of golden queries are not among the {task.num_items:,} searched items: {unknown}"
            )
        return report

    def _product_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the id, the title and the text to tokenise for each source row of the items."""
        prefix, limit = spec_of(self.sets[0].info).product_prefix, text_characters(self.holdout.rows.buckets)
        if self._catalogue is not None:
            batches, name = self._catalogue.batches(("id", "title")), "id"
        else:
            data = self.settings.data.model_copy(update={"attributes": self.sets[0].info.attributes})
            retry = self.settings.storage
            source = open_source(data, scratch=self.ctx.scratch, stop=self.ctx.stop, retry=retry)
            batches, name = read_products(source, self.ctx.stop), "product_id"
        for batch in batches:
            columns = name, "title", "text", *(n for n in batch.columns.schema.names if base_of(n) == "title")
            for item, title, text, *values in zip(*(field_texts(batch, column) for column in columns), strict=True):
                original = title.removesuffix(" " + " ".join(filter(None, values)))  # without attributes
                yield item, original, prefix + product_text(title, text, limit)

    @cached_property
    def inputs(self) -> dict[str, Json]:
        """Everything that search results depend on except the model, from which their keys are derived."""
        retrieval = with_retired(self.settings.evaluate.retrieval)
        del retrieval["catalogue"], retrieval["dimensions"]
        return {
            "data": [token_set.info.fingerprint for token_set in self.sets],
            "holdout": self.holdout.name,
            "valid": self.valid if isinstance(self.valid, str) else self.valid.name,
            "valid_queries": MAX_TUNING,
            "catalogue": self._catalogue.content if self._catalogue else "",
            "retrieval": retrieval,
            "metrics": self.metrics.model_dump(mode="json", include={"retrieval_at", "relevant_gain"}),
            **({"chunks": self.settings.embed.chunks} if self._catalogue and self.settings.embed.chunks > 1 else {}),
            **({"golden": [query.query for query in self.golden]} if self.golden else {}),
            # Earlier versions only used the query in the first row of an item.
            **({"asked": "every row"} if self._catalogue else {}),
        }

    @cached_property
    def _catalogue(self) -> JudgedCatalogue | None:
        config = self.settings.evaluate.retrieval
        if not config.catalogue:
            return None
        catalogue = open_catalogue(config, config.catalogue, self.ctx.stop, self.settings.storage)
        return catalogue.with_attributes(self.sets[0].info.attributes, self.warn)

    def _widths(self, checkpoint: Checkpoint) -> list[int]:
        """Return the number of dimensions to serve, followed by the additional ones to evaluate.

        Raises ConfigError if the model has fewer dimensions.
        """
        width, config = checkpoint.state.model.encoder.hidden_size, self.settings.evaluate.retrieval
        check_dimensions("embed.output.dimensions", self.settings.embed.output.dimensions, width)
        for dimensions in config.dimensions:
            check_dimensions("evaluate.retrieval.dimensions", dimensions, width)
        return [self.settings.embed.output.dimensions, *config.dimensions]

    def _missing(self, reason: str) -> RetrievalResult:
        ranks, families = self.metrics.retrieval_at, ("recall", "ndcg", "success")
        names = [*(f"{RETRIEVAL}{family}@{k}" for k in ranks for family in families), f"{RETRIEVAL}mrr"]
        missing = dict.fromkeys(names, reason)
        return RetrievalResult(None, MetricReport(values={}, missing=missing, num_rows=0, num_queries=0), None)

    def _key(self, checkpoint: Checkpoint) -> str:
        config, state = self.settings.embed, checkpoint.state
        embed: dict[str, Json] = {"precision": config.precision}
        if config.chunks > 1:
            embed["chunks"] = config.chunks
        if limit := config.row_limit(state.max_tokens, state.model.max_positions):
            embed["row_tokens"] = limit
        widths: list[Json] = [*self._widths(checkpoint)]
        inputs = fingerprint({**self.inputs, "embed": embed, "widths": widths, "device": self.backend.device_name()})
        return f"cycles/{self.ctx.cycle}/evaluate/retrieval/{checkpoint.digest[:16]}-{inputs[:8]}"
