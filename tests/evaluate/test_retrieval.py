"""Retrieval: where queries, items and judgements come from, and a search that ranks share."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.core.arrays import Float32s
from pipeline.core.errors import DataError, NumericError, Preempted
from pipeline.core.fingerprint import hash63
from pipeline.core.stop import StopSignal
from pipeline.data.config import TokenizerConfig
from pipeline.data.shards import TokenRows
from pipeline.data.tokenizer import TextTokenizer, Tokens, train_tokenizer
from pipeline.embed.catalogue import cut_tokens
from pipeline.embed.vectors import shorten_vectors
from pipeline.evaluate import retrieval
from pipeline.evaluate.config import RetrievalConfig
from pipeline.evaluate.holdout import Holdout
from pipeline.evaluate.retrieval import RetrievalTask, from_catalogue, from_products, open_catalogue, search
from pipeline.model.config import Attribute, InputSpec
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.retrieval.products import distinct_products, join_tokens
from pipeline.retrieval.search import Ranked
from tests.evaluate.holdouts import holdout_of
from tests.evaluate.process_groups import on_ranks
from tests.train.rows import every_row, make_rows


def embed(windows: Iterable[Tokens]) -> Iterator[Float32s]:
    """A vector of each text, from its tokens alone."""
    for window in windows:
        ends = zip(window.offsets, window.offsets[1:], strict=False)
        texts = [window.ids[start:end].tolist() for start, end in ends]
        raw = np.array([[np.sin(sum(text) * (place + 1)) for place in range(4)] for text in texts])
        yield (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def holdout(tmp_path: Path) -> Holdout:
    return holdout_of(make_rows(tmp_path, [(13, 6), (4, 9)], first_id=101))


TOKENIZER = train_tokenizer(["one two three"], TokenizerConfig(vocab_size=256))


def products_task(
    holdout: Holdout,
    sources: Sequence[TokenRows],
    config: RetrievalConfig,
    warn: Callable[[str], None] = print,
    valid: Holdout | str = "no valid rows",
) -> RetrievalTask:
    task = from_products(holdout, valid, sources, TOKENIZER, config, StopSignal(), warn)
    assert isinstance(task, RetrievalTask)
    return task


def texts_of(tokens: Tokens) -> list[tuple[int, ...]]:
    return [tuple(tokens.ids[a:b].tolist()) for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]


def everything(task: RetrievalTask) -> list[tuple[int, ...]]:
    parts = list(task.items(lambda number: True))
    assert [first for first, _ in parts] == np.cumsum([0, *(len(part.lengths) for _, part in parts)])[:-1].tolist()
    return texts_of(join_tokens([part for _, part in parts]))


def test_the_products_of_the_data(holdout: Holdout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = make_rows(tmp_path, [(13, 6)], first_id=101)  # the same products again, and others
    others = make_rows(tmp_path, [(3, 3)], first_id=501)
    warned: list[str] = []
    monkeypatch.setattr(retrieval, "WINDOW_ROWS", 7)
    task = products_task(holdout, [holdout.rows, more, others], RetrievalConfig(), warned.append)
    assert not warned
    items = everything(task)
    assert len(items) == task.num_items == len(set(items))
    tables = [every_row(rows) for rows in (holdout.rows, others)]
    texts = [[tuple(row[row != 0].tolist()) for row in table["product"]] for table in tables]
    assert set(items) == {text for part in texts for text in part}
    told, held = task.queries.judged, tables[0]
    judged = zip(told.query_id.tolist(), told.item_id.tolist(), told.gain.tolist(), strict=True)
    expected = zip(held["query_id"].tolist(), texts[0], held["gain"].tolist(), strict=True)
    assert {(query, items[item], gain) for query, item, gain in judged} == {row for row in expected if row[2] > 0}
    assert set(told.query_id.tolist()) == set(task.queries.ids.tolist())
    assert len(texts_of(task.queries.tokens)) == len(task.queries.ids)


def test_fewer_queries_and_items(holdout: Holdout) -> None:
    warned: list[str] = []
    config = RetrievalConfig(max_queries=2, max_items=5)
    task = products_task(holdout, [holdout.rows], config, warned.append)
    assert len(task.queries.ids) == 2
    relevant = set(task.queries.judged.item_id.tolist())
    assert task.num_items == max(5, len(relevant)) and -1 not in relevant
    assert "products (evaluate.retrieval.max_items)" in warned[0]


def test_valid_queries_are_asked_beside_those_that_are_judged(
    holdout: Holdout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(tmp_path, [(120, 60)], first_id=301)
    shared = make_rows(tmp_path, [(13, 6), (4, 9)], first_id=101)  # the holdout's own queries
    for asking, found_at_all in ((rows, True), (shared, False)):
        valid = holdout_of(asking, "valid")
        task = products_task(holdout, [holdout.rows, rows], RetrievalConfig(), valid=valid)
        alone = products_task(holdout, [holdout.rows, rows], RetrievalConfig())
        assert task.queries.ids.tolist() == alone.queries.ids.tolist() and task.num_items == alone.num_items
        if not found_at_all:
            assert task.tuning is None, "they are judged"
            continue
        assert task.tuning is not None
        assert not set(task.tuning.ids.tolist()) & set(task.queries.ids.tolist())
        assert set(task.tuning.judged.query_id.tolist()) == set(task.tuning.ids.tolist())
        assert task.tuning.judged.item_id.min() >= 0
        assert task.query_groups == [task.queries, task.tuning]
        rare = products_task(holdout, [holdout.rows], RetrievalConfig(), valid=valid).tuning
        assert rare is not None and len(rare.ids) < len(task.tuning.ids), "most products are no items"
        assert rare.judged.item_id.min() >= 0
        monkeypatch.setattr(retrieval, "MAX_TUNING", 2)
        fewer = products_task(holdout, [holdout.rows, rows], RetrievalConfig(), valid=valid).tuning
        assert fewer is not None and len(fewer.ids) == 2


def test_without_gains_there_is_nothing_to_find(holdout: Holdout, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = holdout.blocks

    def ungraded(self: Holdout, fields: Iterable[str]) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
        for arrays in blocks(tuple(fields)):
            yield {**arrays, **({"gain": np.zeros_like(arrays["gain"])} if "gain" in arrays else {})}

    monkeypatch.setattr(Holdout, "blocks", ungraded)
    found = from_products(holdout, "", [holdout.rows], TOKENIZER, RetrievalConfig(), StopSignal(), print)
    assert found == "no test row has a gain, so there are no relevant products"


def test_a_stop_ends_the_look_at_products(holdout: Holdout) -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="distinct products"):
        distinct_products([holdout.rows], np.zeros(0, dtype=np.uint64), 5, stop)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("window_rows", [3, 100])
def test_ranks_find_the_same(
    holdout: Holdout, world_size: int, window_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "WINDOW_ROWS", window_rows)
    task = products_task(holdout, [holdout.rows], RetrievalConfig())
    (queries,) = embed([task.queries.tokens])
    (items,) = embed([join_tokens([part for _, part in task.items(lambda number: True)])])
    scores = np.rint(queries.astype(np.float64) * 2**26) @ np.rint(items.astype(np.float64) * 2**26).T
    expected = np.lexsort((np.broadcast_to(np.arange(len(items)), scores.shape), -scores))[:, :4]

    def work(process_group: ProcessGroup) -> list[Ranked]:
        return search(task, embed, 4, process_group, StopSignal(), widths=(0, 3))

    def narrow(windows: Iterable[Tokens]) -> Iterator[Float32s]:
        return (shorten_vectors(vectors, 3) for vectors in embed(windows))

    (cut,) = search(task, narrow, 4, ProcessGroup(World(), timeout_s=1.0), StopSignal())
    for found, narrower in on_ranks(world_size, work):
        np.testing.assert_array_equal(narrower.items, cut.items)
        np.testing.assert_array_equal(narrower.scores, cut.scores)
        assert not np.array_equal(narrower.items, found.items)
        np.testing.assert_array_equal(found.items, expected)
        np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, expected, axis=1) / 2.0**52)


def test_vectors_that_are_no_numbers_end_the_search_on_all_ranks(
    holdout: Holdout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "WINDOW_ROWS", 3)
    task = products_task(holdout, [holdout.rows], RetrievalConfig())

    def broken(windows: Iterable[Tokens]) -> Iterator[Float32s]:
        for number, vectors in enumerate(embed(windows)):
            yield vectors * np.float32(np.nan if number == 1 else 1)

    def failure(process_group: ProcessGroup) -> str:
        with pytest.raises(NumericError) as caught:
            search(task, broken, 4, process_group, StopSignal())
        return caught.value.seen

    for seen in on_ranks(2, failure):
        assert "item vectors contain NaN" in seen


ROWS = [
    {"product_id": "1", "title": "red shoe", "text": "", "label": "shoe red", "cluster": "c1", "split": "test"},
    {"product_id": "2", "title": "shoe, red", "text": "new", "label": "shoe red", "cluster": "c1", "split": "train"},
    {"product_id": "2", "title": "twice", "text": "", "label": "blue", "cluster": "c2", "split": "test"},
    {"product_id": "3", "title": "blue hat", "text": "", "label": "shoe red", "cluster": "c3", "split": "train"},
    {"product_id": "4", "title": "", "text": "", "label": "", "cluster": "", "split": "test"},
    {"product_id": "5", "title": "green hat", "text": "", "label": "hat green", "cluster": "c4", "split": "test"},
]


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    path = tmp_path / "offers.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    texts = [row[name] for row in ROWS for name in ("title", "label", "text")]
    return TextTokenizer(train_tokenizer(texts, TokenizerConfig(vocab_size=256)))


OFFERS = RetrievalConfig(query="label", query_id="cluster", queries={"split": "test"})
SPEC = InputSpec(vocab_size=256, pad_id=0, labels=("a", "b"), label_gains=(0.0, 1.0))


@pytest.mark.parametrize("prefix", ["", "a "])
def test_a_catalogue_file(
    catalogue: Path, holdout: Holdout, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setattr(retrieval, "WINDOW_ROWS", 2)
    spec = SPEC.model_copy(update={"query_prefix": prefix, "product_prefix": prefix})
    task = from_catalogue(open_catalogue(OFFERS, str(catalogue), StopSignal()), holdout, tokenizer, spec)
    assert task.num_items == 5, "an id counts once"
    titles = ["red shoe", "shoe, red new", "blue hat", "", "green hat"]
    largest = holdout.rows.buckets[-1].product_tokens
    encoded = cut_tokens(tokenizer.encode([prefix + title for title in titles]), largest, tokenizer.sep_id)
    assert everything(task) == texts_of(encoded)
    assert list(task.texts()) == [titles[:2], titles[2:4], titles[4:]], "prefixes are for the encoder alone"
    asked = {hash63("c1"): "shoe red", hash63("c2"): "blue", hash63("c4"): "hat green"}
    assert sorted(asked) == task.queries.ids.tolist()
    assert texts_of(task.queries.tokens) == texts_of(
        tokenizer.encode([prefix + asked[number] for number in sorted(asked)])
    )
    judged = set(zip(task.queries.judged.query_id.tolist(), task.queries.judged.item_id.tolist(), strict=True))
    assert judged == {(hash63("c1"), 0), (hash63("c1"), 1), (hash63("c2"), 1), (hash63("c4"), 4)}, "item 1 twice"
    odd = list(task.items(lambda number: number == 1))
    assert [(first, len(part.lengths)) for first, part in odd] == [(2, 2)]


@pytest.mark.parametrize("chunks", [1, 3])
def test_items_are_read_as_far_as_their_chunks_go(
    tmp_path: Path, holdout: Holdout, tokenizer: TextTokenizer, chunks: int
) -> None:
    """Queries are cut as ever. BM25 is given as much of a text."""
    long = " ".join(["red shoe blue hat"] * 400)
    path = tmp_path / "long.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerow(ROWS[0] | {"title": long, "label": long})
    task = from_catalogue(open_catalogue(OFFERS, str(path), StopSignal()), holdout, tokenizer, SPEC, chunks)
    largest = holdout.rows.buckets[-1]
    ((_, items),) = list(task.items(lambda number: True))
    whole = tokenizer.encode([long]).ids
    assert items.lengths.tolist() == [chunks * (largest.product_tokens - 2) + 2]
    assert np.array_equal(items.ids[:-1], whole[: len(items.ids) - 1])
    assert task.queries.tokens.lengths.tolist() == [largest.query_tokens]
    ((text,),) = list(task.texts())
    assert len(text) == chunks * 16 * largest.product_tokens


def test_attributes_of_a_catalogue_file(catalogue: Path, holdout: Holdout, tokenizer: TextTokenizer) -> None:
    told: list[str] = []
    attributes = (
        Attribute(name="cluster", query="cluster", product="cluster", kind="text"),
        Attribute(name="size", query="", product="size", kind="text"),
        Attribute(name="price", query="", product="price", kind="number"),
    )
    file = open_catalogue(OFFERS, str(catalogue), StopSignal()).with_attributes(attributes, told.append)
    task = from_catalogue(file, holdout, tokenizer, SPEC)
    titles = [text for part in task.texts() for text in part]
    assert titles[0] == "red shoe c1" and len(titles) == 5
    assert "shoe red c1" in task.queries.texts
    assert len(told) == 1 and "no column 'size'" in told[0]


def test_valid_queries_of_a_catalogue(catalogue: Path, holdout: Holdout, tokenizer: TextTokenizer) -> None:
    config = OFFERS.model_copy(update={"valid_queries": {"split": "train|test"}})
    task = from_catalogue(open_catalogue(config, str(catalogue), StopSignal()), holdout, tokenizer, SPEC)
    assert task.tuning is not None
    assert task.tuning.texts == ["shoe red"] and task.tuning.ids.tolist() == [hash63("c3")], "c1 is judged"
    assert task.tuning.judged.item_id.tolist() == [2]
    config = OFFERS.model_copy(update={"valid_queries": {"split": "train"}, "queries": {}})
    task = from_catalogue(open_catalogue(config, str(catalogue), StopSignal()), holdout, tokenizer, SPEC)
    assert task.queries.ids.tolist() == sorted(map(hash63, ("c1", "c2", "c4"))), "all other queries are judged"
    assert task.tuning is not None and task.tuning.ids.tolist() == [hash63("c3")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": "cluster_label"}, "no column 'cluster_label'"),
        ({"text": "description"}, "no column 'description'"),
        ({"queries": {"splitt": "test"}}, "no column 'splitt'"),
        ({"valid_queries": {"splitt": "valid"}}, r"no column 'splitt'[\s\S]*retrieval.valid-queries"),
        ({"id": "text"}, r"5 rows have no 'text' in the catalogue"),
        ({"queries": {"split": "valid"}}, r"no row has a query[\s\S]*among \{'split': 'valid'\}"),
    ],
)
def test_a_catalogue_that_does_not_fit_is_named(
    catalogue: Path, holdout: Holdout, tokenizer: TextTokenizer, changes: dict[str, object], message: str
) -> None:
    file = open_catalogue(OFFERS.model_copy(update=changes), str(catalogue), StopSignal())
    with pytest.raises(DataError, match=message):
        from_catalogue(file, holdout, tokenizer, SPEC)
