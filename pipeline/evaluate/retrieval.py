"""Search with a model's embeddings, every query against every item, exactly; what it found is kept in the cycle."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.context import StageContext
from pipeline.core.arrays import Bools, Float32s, Int64s, UInt64s
from pipeline.core.errors import DataError, NumericError
from pipeline.core.fingerprint import Json, fingerprint, hash63
from pipeline.core.shuffle import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.input_files import Files, open_files
from pipeline.data.rows import FILTER, ColumnPlan, RawBatch, match_columns, product_text, text_characters
from pipeline.data.shards import TokenRows
from pipeline.data.token_sets import SPLITS, TokenSet, open_rows, spec_of
from pipeline.data.tokenizer import TextTokenizer, Tokens, pieces
from pipeline.data.validate import filter_mask
from pipeline.embed.config import whole_limit
from pipeline.embed.engine import with_progress
from pipeline.embed.texts import cut_tokens
from pipeline.embed.vectors import check_dimensions, shorten_vectors
from pipeline.evaluate.config import RETRIEVAL, MetricsConfig, RetrievalConfig
from pipeline.evaluate.holdout import Holdout
from pipeline.evaluate.metrics.measure import MetricReport, retrieval_report
from pipeline.evaluate.metrics.ranking import Judgements
from pipeline.evaluate.metrics.scored_rows import PerQuery
from pipeline.evaluate.scores import load_arrays, save_arrays
from pipeline.io.commit import read_manifest
from pipeline.model.config import InputSpec
from pipeline.parallel.gang import Gang
from pipeline.retrieval.products import decoded, distinct_products, join_tokens, text_hashes
from pipeline.retrieval.search import Ranked, search_on_ranks
from pipeline.settings import Settings

# What retrieval searches for, and where: queries, items and judgements of prepared data, or of a catalogue file.


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
    def tokens(self) -> Tokens:
        """Of all queries, those for tuning last."""
        more = [] if isinstance(self.tuning, str) else [self.tuning.tokens]
        return join_tokens([self.queries.tokens, *more])

    def report(self, items: Int64s, metrics: MetricsConfig) -> tuple[PerQuery, MetricReport]:
        """Figures of items [Q or more, k] found for the judged queries, which come first."""
        return retrieval_report(self.queries.ids, items[: len(self.queries.ids)], self.queries.judged, metrics)


# A catalogue file: items, and in each row a query that its item is relevant to.
#
# It is read twice: for the queries, then for the titles, window by window. Memory: 33 bytes a row, and the queries
# asked.

NO_QUERY = -1
_BATCH_ROWS = 8192


@dataclass(frozen=True)
class CatalogueFile:
    config: RetrievalConfig
    files: Files

    @property
    def content(self) -> str:
        """Fingerprint of what they hold."""
        return fingerprint([[file.key, file.content_id] for file in self.files.inputs])

    def queries(self) -> "CatalogueQueries":
        """Return the queries and what is relevant to them. An item with several rows is relevant to the query of each.

        Raises DataError for missing columns, rows without an id, or no query.
        """
        texts: dict[int, str] = {}
        valid_texts: dict[int, str] = {}
        asking = [(texts, self.config.queries)]
        asking += [(valid_texts, self.config.valid_queries)] if self.config.valid_queries else []
        item_hashes: list[Int64s] = [np.zeros(0, dtype=np.int64)]
        numbers: list[Int64s] = [np.zeros(0, dtype=np.int64)]
        num_nameless = 0
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
            num_nameless += ids.count("")
            item_hashes.append(np.array([hash63(item) for item in ids], dtype=np.int64))
            numbers.append(np.array(asked_for, dtype=np.int64))
        every = np.concatenate(item_hashes)
        if num_nameless:
            raise DataError(
                f"{num_nameless:,} of {len(every):,} rows of the catalogue {self.config.catalogue} have no"
                f" {self.config.id!r}",
                expected="an id in every row: retrieval is judged against all items",
                next_command="repair the file, or name another column with --evaluate.retrieval.id",
            )
        _, first, of_row = np.unique(every, return_index=True, return_inverse=True)
        is_item = np.zeros(len(every), dtype=np.bool_)
        is_item[first] = True
        item_of = np.argsort(np.argsort(first))[of_row]  # items are numbered by their first rows
        valid_texts = {number: text for number, text in valid_texts.items() if number not in texts}
        if not texts:
            raise DataError(
                f"the catalogue {self.config.catalogue} asks no query ({len(every):,} items read)",
                expected=f"items with a {self.config.query!r}"
                + (f" among {dict(self.config.queries)}" if self.config.queries else ""),
                next_command="check --evaluate.retrieval.query and --evaluate.retrieval.queries",
            )
        return CatalogueQueries(texts, valid_texts, np.concatenate(numbers), item_of, is_item)

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
        pairs.append(("text", config.text))
        pairs += [(FILTER + column, column) for column in {**config.queries, **config.valid_queries}]

        def setting(field: str) -> str:
            name = field.replace("_", "-")
            if field.startswith(FILTER):
                name = "queries" if field.removeprefix(FILTER) in config.queries else "valid-queries"
            return f"--evaluate.retrieval.{name}"

        return match_columns(pairs, names, uri, setting).only(fields)


class CatalogueQueries(NamedTuple):
    """The queries asked, number to text, and what each of the R rows of the file says of them.

    `valid_texts`: further queries, from which the weight of hybrid search is chosen; none of those asked. `query_of`
    [R]: the number of the query that the row's item is relevant to, or NO_QUERY. `item_of` [R]: the number of the item.
    `is_item` [R]: whether the row is the first one of its item, whose title and text count.
    """

    texts: dict[int, str]
    valid_texts: dict[int, str]
    query_of: Int64s
    item_of: Int64s
    is_item: Bools

    @property
    def num_items(self) -> int:
        return int(self.is_item.sum())


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
        (tokens,) = asking.tokens_of("query_id", ids, ("query",))
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
        encoded = tokenizer.encode([spec.query_prefix + text for text in texts])
        tokens = cut_tokens(encoded, largest.query_tokens, tokenizer.sep_id)
        rows = np.flatnonzero(np.isin(found.query_of, ids))
        judged = Judgements(found.query_of[rows], found.item_of[rows], np.ones(len(rows)))
        return Queries(ids, tokens, texts, judged)

    tuning: Queries | str = ASK_NONE if not max_valid else NO_VALID if config.valid_queries else NO_VALID_SETTING
    if found.valid_texts and max_valid:
        tuning = queries(found.valid_texts, max_valid)
    return RetrievalTask(queries(found.texts, config.max_queries), tuning, found.num_items, items, texts)


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


_WINDOW = 512


Embed = Callable[[Iterable[Tokens]], Iterator[Float32s]]
"""Windows of texts to their unit vectors [n, D], in order."""


def search(
    task: RetrievalTask,
    embed: Embed,
    k: int,
    gang: Gang,
    stop: StopSignal,
    advance: Callable[[int], None] = lambda count: None,
    widths: Sequence[int] = (0,),
) -> list[Ranked] | str:
    """The `k` best items of every query of the task, with their cosines; or why there is no answer.

    One list for each of `widths`: leading dimensions of the vectors that are held against each other, 0: all. Ranks
    share queries and items; all get the answer. Memory: the queries' vectors in every width and one window of items.
    Raises Preempted.
    """
    world, tokens = gang.world, task.tokens
    bounds = np.linspace(0, len(tokens.lengths), world.world_size + 1).astype(int)
    own = tokens.part(int(bounds[world.rank]), int(bounds[world.rank + 1]))  # every rank embeds its part
    windows = pieces(own, _WINDOW) if len(own.lengths) else ()
    embedded = list(with_progress(embed(windows), "embedding queries", len(own.lengths))) if windows else []
    whole = np.concatenate([vectors for part in gang.gather(embedded) for vectors in part])
    queries = [shorten_vectors(whole, width or whole.shape[1]) for width in widths]
    firsts: deque[int] = deque()  # the embedder reads ahead, so the numbers wait for their vectors

    def items() -> Iterator[Tokens]:
        for first, window in task.items(lambda number: number % world.world_size == world.rank):
            firsts.append(first)
            yield window

    def chunks() -> Iterator[tuple[int, list[Float32s]]]:
        for vectors in embed(items()):
            stop.raise_if_set("searching the catalogue")
            yield firsts.popleft(), [shorten_vectors(vectors, width or vectors.shape[1]) for width in widths]
            advance(len(vectors) * world.world_size)

    try:
        return search_on_ranks(gang, queries, chunks(), k)
    except NumericError as error:
        return error.seen


KIND = "retrieval"


@dataclass(frozen=True)
class RetrievalResult:
    """Retrieval with one model; `per_query` and `ranked` are None when there is no answer, and `report` says why."""

    per_query: PerQuery | None
    report: MetricReport
    ranked: Ranked | None
    by_width: dict[int, MetricReport] = field(default_factory=dict)
    """With vectors cut to other widths than those that are judged."""


@dataclass
class ModelSearch:
    """Searches with one model after the other, for the same queries in the same items.

    What is judged are the vectors as they are embedded: cut to embed.output.dimensions.
    """

    settings: Settings
    ctx: StageContext
    backend: Backend
    gang: Gang
    sets: list[TokenSet]
    holdout: Holdout
    valid: Holdout | str
    """Whose queries may be asked to choose the weight of hybrid search; or why there are none."""
    tokenizer: bytes
    warn: Callable[[str], None]

    def run(self, role: str, checkpoint: Checkpoint, embed: Embed) -> RetrievalResult | None:
        """On all ranks; None when retrieval is not to be evaluated. Raises DataError, Preempted."""
        config, ctx = self.settings.evaluate, self.ctx
        if not config.retrieval.enabled:
            return None
        task = self.task
        if isinstance(task, str):
            return self._without(task)
        widths = self._widths(checkpoint)
        key = self._key(checkpoint)
        if self.gang.gather(ctx.world.is_main and read_manifest(ctx.workspace, key) is not None)[0]:
            return self.load(task, key, widths[1:])
        with ctx.console.progress(f"{role}, search", task.num_items, "items") as advance:
            found = search(task, embed, max(self.metrics.retrieval_at), self.gang, ctx.stop, advance, widths)
        if isinstance(found, str):
            return self._without(found)
        return self.save(
            task, key, found[0], {width: one.items for width, one in zip(widths[1:], found[1:], strict=True)}
        )

    def _widths(self, checkpoint: Checkpoint) -> list[int]:
        """Of the vectors: as they are embedded, then those that are only looked at. Raises ConfigError."""
        width, config = checkpoint.state.model.encoder.hidden_size, self.settings.evaluate.retrieval
        check_dimensions("embed.output.dimensions", self.settings.embed.output.dimensions, width)
        for one in config.dimensions:
            check_dimensions("evaluate.retrieval.dimensions", one, width)
        return [self.settings.embed.output.dimensions, *config.dimensions]

    def save(
        self, task: RetrievalTask, key: str, ranked: Ranked, by_width: Mapping[int, Int64s] | None = None
    ) -> RetrievalResult:
        """What lists are worth; rank 0 commits them, with the figures of each query for whoever compares models."""
        narrower = by_width or {}
        per_query, report = task.report(ranked.items, self.metrics)
        if self.ctx.world.is_main:
            lists = {"items": ranked.items, "scores": ranked.scores}
            lists |= {f"items_of_{width}": items for width, items in narrower.items()}
            figures = {"query_id": per_query.query_id, **per_query.values}
            save_arrays(self.ctx.workspace, key, KIND, {**lists, **figures}, self.ctx.scratch)
        others = {width: task.report(items, self.metrics)[1] for width, items in narrower.items()}
        return RetrievalResult(per_query, report, ranked, others)

    def load(self, task: RetrievalTask, key: str, widths: Sequence[int] = ()) -> RetrievalResult:
        arrays, _ = load_arrays(self.ctx.workspace, key, KIND, self.ctx.scratch / KIND)
        per_query, report = task.report(arrays["items"], self.metrics)
        others = {width: task.report(arrays[f"items_of_{width}"], self.metrics)[1] for width in widths}
        return RetrievalResult(per_query, report, Ranked(arrays["items"], arrays["scores"]), others)

    @cached_property
    def metrics(self) -> MetricsConfig:
        """Those that are reported and those that the gate judges."""
        return self.settings.gate.with_ranks(self.settings.evaluate.metrics)

    @cached_property
    def task(self) -> RetrievalTask | str:
        """Queries, items and judgements, or why there are none."""
        config, ctx = self.settings.evaluate, self.ctx
        max_valid = config.baselines.valid_queries
        if self._catalogue is not None:
            spec = spec_of(self.sets[0].info)
            tokenizer, chunks = TextTokenizer(self.tokenizer), self.settings.embed.chunks
            return from_catalogue(self._catalogue, self.holdout, tokenizer, spec, max_valid, chunks=chunks)
        sources = [open_rows(ctx.workspace, self.sets, split, ctx.scratch / "tokens") for split in SPLITS]
        return from_products(
            self.holdout, self.valid, sources, self.tokenizer, config.retrieval, max_valid, ctx.stop, self.warn
        )

    @cached_property
    def decides(self) -> dict[str, Json]:
        """All that decides queries, items, lists and figures."""
        config = self.settings.evaluate
        return {
            "data": [token_set.info.fingerprint for token_set in self.sets],
            "holdout": self.holdout.name,
            "valid": self.valid if isinstance(self.valid, str) else self.valid.name,
            "valid_queries": config.baselines.valid_queries,
            "catalogue": self._catalogue.content if self._catalogue else "",
            "retrieval": config.retrieval.model_dump(mode="json", exclude={"window_rows", "catalogue", "dimensions"}),
            "metrics": self.metrics.model_dump(mode="json", include={"retrieval_at", "relevant_gain"}),
            # Nothing without chunks, as before there were any.
            **({"chunks": self.settings.embed.chunks} if self._catalogue and self.settings.embed.chunks > 1 else {}),
            # Earlier versions asked the query of the first row of an item alone.
            **({"asked": "every row"} if self._catalogue else {}),
        }

    @cached_property
    def _catalogue(self) -> CatalogueFile | None:
        config = self.settings.evaluate.retrieval
        return open_catalogue(config, config.catalogue, self.ctx.stop) if config.catalogue else None

    def _without(self, reason: str) -> RetrievalResult:
        words = ("recall", "ndcg", "success")
        names = [f"{RETRIEVAL}{word}@{k}" for k in self.metrics.retrieval_at for word in words]
        missing = dict.fromkeys([*names, f"{RETRIEVAL}mrr"], reason)
        return RetrievalResult(None, MetricReport(values={}, missing=missing, num_rows=0, num_queries=0), None)

    def _key(self, checkpoint: Checkpoint) -> str:
        config, state = self.settings.embed, checkpoint.state
        embed: dict[str, Json] = {"precision": config.precision}
        if config.chunks > 1:
            embed["chunks"] = config.chunks
        if limit := config.row_limit(state.max_tokens, state.model.max_positions):
            embed["row_tokens"] = limit
        widths: list[Json] = [*self._widths(checkpoint)]
        decides = fingerprint({**self.decides, "embed": embed, "widths": widths, "device": self.backend.device_name()})
        return f"cycles/{self.ctx.cycle}/evaluate/retrieval/{checkpoint.digest[:16]}-{decides[:8]}"
