"""Retrieval: where queries, items and judgements come from, and a search that ranks share."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.core.errors import DataError, Preempted
from pipeline.core.fingerprint import hash63
from pipeline.core.stop import StopSignal
from pipeline.data.config import TokenizerConfig
from pipeline.data.token_store import TokenSet
from pipeline.data.tokenizer import TextTokenizer, Tokens, train_tokenizer
from pipeline.evaluation.catalogue import open_catalogue
from pipeline.evaluation.config import RetrievalConfig
from pipeline.evaluation.holdout_rows import Holdout
from pipeline.evaluation.order import HoldoutOrder
from pipeline.evaluation.products import distinct_products
from pipeline.evaluation.retrieval import RetrievalTask, search
from pipeline.evaluation.retrieval_sources import from_catalogue, from_products
from pipeline.evaluation.texts import join_tokens
from pipeline.parallel.gang import Gang
from tests.evaluation.gangs import on_ranks
from tests.train.rows import make_rows, token_set_info

Float32s = npt.NDArray[np.float32]


def embed(windows: Iterable[Tokens]) -> Iterator[Float32s]:
    """A vector of each text, from its tokens alone."""
    for window in windows:
        ends = zip(window.offsets, window.offsets[1:], strict=False)
        texts = [window.ids[start:end].tolist() for start, end in ends]
        raw = np.array([[np.sin(sum(text) * (place + 1)) for place in range(4)] for text in texts])
        yield (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def holdout(tmp_path: Path) -> Holdout:
    rows = make_rows(tmp_path, [(13, 6), (4, 9)], first_id=101)
    order = HoldoutOrder(tuple(np.arange(size) for size in rows.sizes))
    return Holdout("test", [TokenSet("tokens/x", token_set_info("flat"))], rows, order, 0)


def texts_of(tokens: Tokens) -> list[tuple[int, ...]]:
    return [tuple(tokens.ids[a:b].tolist()) for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]


def everything(task: RetrievalTask) -> list[tuple[int, ...]]:
    parts = list(task.items(lambda number: True))
    assert [first for first, _ in parts] == np.cumsum([0, *(len(part.lengths) for _, part in parts)])[:-1].tolist()
    return texts_of(join_tokens([part for _, part in parts]))


def test_the_products_of_the_data(holdout: Holdout, tmp_path: Path) -> None:
    more = make_rows(tmp_path, [(13, 6)], first_id=101)  # the same products again, and others
    others = make_rows(tmp_path, [(3, 3)], first_id=501)
    warned: list[str] = []
    config = RetrievalConfig(window_rows=7)
    task = from_products(holdout, [holdout.rows, more, others], config, StopSignal(), warned.append)
    assert isinstance(task, RetrievalTask) and not warned
    items = everything(task)
    assert len(items) == task.num_items == len(set(items))
    every = [
        rows.read(np.full(size, pool), np.arange(size), pool)
        for rows in (holdout.rows, others)
        for pool, size in enumerate(rows.sizes)
    ]
    assert set(items) == {tuple(row[row != 0].tolist()) for part in every for row in part["product"]}
    queries = texts_of(task.queries)
    judged = {
        (int(query), items[item], float(gain))
        for query, item, gain in zip(task.judged.query_id, task.judged.item_id, task.judged.gain, strict=True)
    }
    expected = set()
    for part in every[:2]:
        for query, product, gain in zip(part["query_id"], part["product"], part["gain"], strict=True):
            if gain > 0:
                expected.add((int(query), tuple(product[product != 0].tolist()), float(gain)))
                assert int(query) in task.query_id.tolist()
    assert judged == expected
    assert len(queries) == len(task.query_id)


def test_fewer_queries_and_items(holdout: Holdout) -> None:
    warned: list[str] = []
    config = RetrievalConfig(max_queries=2, max_items=5)
    task = from_products(holdout, [holdout.rows], config, StopSignal(), warned.append)
    assert isinstance(task, RetrievalTask)
    assert len(task.query_id) == 2
    relevant = set(task.judged.item_id.tolist())
    assert task.num_items == max(5, len(relevant)) and -1 not in relevant
    assert "products (evaluate.retrieval.max_items)" in warned[0]


def test_without_gains_there_is_nothing_to_find(holdout: Holdout, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = holdout.blocks

    def ungraded(self: Holdout, fields: Iterable[str]) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
        for arrays in blocks(tuple(fields)):
            yield {**arrays, **({"gain": np.zeros_like(arrays["gain"])} if "gain" in arrays else {})}

    monkeypatch.setattr(Holdout, "blocks", ungraded)
    found = from_products(holdout, [holdout.rows], RetrievalConfig(), StopSignal(), print)
    assert found == "no row of the holdout has a gain, so nothing is relevant to any query"


def test_a_stop_ends_the_look_at_products(holdout: Holdout) -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="distinct products"):
        distinct_products([holdout.rows], np.zeros(0, dtype=np.uint64), 5, stop)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("window_rows", [3, 100])
def test_ranks_find_the_same(holdout: Holdout, world_size: int, window_rows: int) -> None:
    config = RetrievalConfig(window_rows=window_rows)
    task = from_products(holdout, [holdout.rows], config, StopSignal(), print)
    assert isinstance(task, RetrievalTask)
    (queries,) = embed([task.queries])
    (items,) = embed([join_tokens([part for _, part in task.items(lambda number: True)])])
    scores = np.rint(queries.astype(np.float64) * 2**26) @ np.rint(items.astype(np.float64) * 2**26).T
    expected = np.lexsort((np.broadcast_to(np.arange(len(items)), scores.shape), -scores))[:, :4]

    def work(gang: Gang) -> npt.NDArray[np.int64] | str:
        return search(task, embed, 4, gang, StopSignal())

    for found in on_ranks(world_size, work):
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, expected)


def test_vectors_that_are_no_numbers_are_a_reason(holdout: Holdout) -> None:
    task = from_products(holdout, [holdout.rows], RetrievalConfig(window_rows=3), StopSignal(), print)
    assert isinstance(task, RetrievalTask)

    def broken(windows: Iterable[Tokens]) -> Iterator[Float32s]:
        for number, vectors in enumerate(embed(windows)):
            yield vectors * np.float32(np.nan if number == 1 else 1)

    for found in on_ranks(2, lambda gang: search(task, broken, 4, gang, StopSignal())):
        assert isinstance(found, str) and "item vectors hold NaN" in found


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


OFFERS = RetrievalConfig(query="label", query_id="cluster", queries={"split": "test"}, window_rows=2)


def test_a_catalogue_file(catalogue: Path, holdout: Holdout, tokenizer: TextTokenizer) -> None:
    task = from_catalogue(open_catalogue(OFFERS, str(catalogue), StopSignal()), holdout, tokenizer, StopSignal())
    assert task.num_items == 5, "an id counts once"
    assert everything(task) == texts_of(tokenizer.encode(["red shoe", "shoe, red new", "blue hat", "", "green hat"]))
    asked = {hash63("c1"): "shoe red", hash63("c4"): "hat green"}
    assert sorted(asked) == task.query_id.tolist()
    assert texts_of(task.queries) == texts_of(tokenizer.encode([asked[number] for number in sorted(asked)]))
    judged = set(zip(task.judged.query_id.tolist(), task.judged.item_id.tolist(), strict=True))
    assert judged == {(hash63("c1"), 0), (hash63("c1"), 1), (hash63("c4"), 4)}
    odd = list(task.items(lambda number: number == 1))
    assert [(first, len(part.lengths)) for first, part in odd] == [(2, 2)]


def test_queries_told_apart_by_their_text(catalogue: Path, holdout: Holdout, tokenizer: TextTokenizer) -> None:
    config = OFFERS.model_copy(update={"query_id": ""})
    task = from_catalogue(open_catalogue(config, str(catalogue), StopSignal()), holdout, tokenizer, StopSignal())
    shoes = task.judged.item_id[task.judged.query_id == hash63("shoe red")]
    assert shoes.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": "cluster_label"}, "no column 'cluster_label'"),
        ({"text": "description"}, "no column 'description'"),
        ({"queries": {"splitt": "test"}}, "no column 'splitt'"),
        ({"queries": {"split": "valid"}}, "asks no query"),
    ],
)
def test_a_catalogue_that_does_not_fit_is_named(
    catalogue: Path, holdout: Holdout, tokenizer: TextTokenizer, changes: dict[str, object], message: str
) -> None:
    file = open_catalogue(OFFERS.model_copy(update=changes), str(catalogue), StopSignal())
    with pytest.raises(DataError, match=message):
        from_catalogue(file, holdout, tokenizer, StopSignal())


def test_no_catalogue(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist[\s\S]*evaluate\.retrieval\.catalogue"):
        open_catalogue(OFFERS, str(tmp_path / "none.csv"), StopSignal())
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no catalogue"):
        open_catalogue(OFFERS, str(tmp_path / "empty"), StopSignal())
