"""BM25 against its formula, written out for each pair of query and item."""

import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.retrieval.bm25 import K1, B, Bm25, unmatched_warning

TITLES = ["red shoe", "Red red shoe, size 42", "blue hat", "", "shoe", "RED shoe!"]


def reference(query: str, titles: list[str]) -> list[float]:
    """The score of each title."""
    split = [re.findall(r"\w+", title.lower()) for title in titles]
    mean = sum(map(len, split)) / len(split)
    scores = [0.0] * len(titles)
    for word in re.findall(r"\w+", query.lower()):
        holding = sum(word in words for words in split)
        idf = math.log(1 + (len(titles) - holding + 0.5) / (holding + 0.5))
        for item, words in enumerate(split):
            if times := words.count(word):
                scores[item] += idf * times / (times + K1 * (1 - B + B * len(words) / mean))
    return scores


@pytest.mark.parametrize("query", ["red shoe", "shoe", "hat blue blue", "nothing", "", "Shoe 42 RED"])
@pytest.mark.parametrize("k", [1, 2, 6, 9])
def test_scores_and_order_are_those_of_the_formula(query: str, k: int) -> None:
    expected = reference(query, TITLES)
    order = sorted((item for item, score in enumerate(expected) if score > 0), key=lambda item: (-expected[item], item))
    order = [*order[:k], *[-1] * (k - len(order))]
    scores, items = Bm25(TITLES).search([query], k)
    assert items.tolist() == [order]
    assert items.dtype == np.int64 and scores.dtype == np.float64
    np.testing.assert_allclose(scores[0], [expected[item] if item >= 0 else 0.0 for item in order], rtol=1e-12)


words = st.lists(st.sampled_from(["a", "b", "c", "d", "é", "x1"]), max_size=5).map(" ".join)


@given(st.lists(words, min_size=1, max_size=12), words, st.integers(1, 6))
def test_any_catalogue(titles: list[str], query: str, k: int) -> None:
    expected = reference(query, titles) if any(titles) else [0.0] * len(titles)
    scores, items = Bm25(titles).search([query], k)
    found = items[0][items[0] >= 0].tolist()
    assert len(found) == min(k, sum(score > 0 for score in expected))
    np.testing.assert_allclose(scores[0, : len(found)], sorted(expected, reverse=True)[: len(found)], rtol=1e-12)
    np.testing.assert_allclose([expected[item] for item in found], scores[0, : len(found)], rtol=1e-12)
    pairs = list(zip((-scores[0]).tolist(), found, strict=False))
    assert pairs == sorted(pairs)


def test_without_words_nothing_is_found() -> None:
    for texts in ([], ["", "!"]):
        index = Bm25(texts)
        assert index.num_items == len(texts)
        assert index.search(["a", ""], 2)[1].tolist() == [[-1, -1], [-1, -1]]
    assert Bm25(TITLES).search([], 2)[1].shape == (0, 2)


def test_jax_is_not_started_and_stays_importable(tmp_path: Path) -> None:
    """At its first call it would take most of a GPU's memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("print('jax was imported')\n")
    (tmp_path / "jax" / "lax.py").write_text("def top_k(values, k): print('jax was called')\n")
    program = "from pipeline.retrieval.bm25 import Bm25; print(Bm25(['a b', 'c']).num_items); import jax.lax"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert run.stdout.split("\n") == ["2", "jax was imported", ""], run.stderr


@pytest.mark.parametrize(
    ("titles", "query", "best"),
    [
        (["赤い革靴", "ソニー無線イヤホン黒", "黒い帽子"], "無線イヤホン", 1),
        (["红色皮鞋", "索尼蓝牙耳机黑色", "黑色帽子"], "蓝牙 耳机", 1),
        (["รองเท้าแดง", "โซนี่หูฟังไร้สายสีดำ", "หมวกดำ"], "หูฟังไร้สาย", 1),
        (["लाल जूता", "काला हेडफ़ोन", "काली टोपी"], "हेडफ़ोन काला", 1),
        (["ကြက်သွန်", "နားကြပ်အနက်", "ဦးထုပ်"], "နားကြပ်", 1),
    ],
)
def test_titles_without_spaces_or_with_vowel_signs_are_found(titles: list[str], query: str, best: int) -> None:
    _, items = Bm25(titles).search([query], 3)
    assert items[0, 0] == best


@pytest.mark.parametrize(("empty", "said"), [(0, False), (10, False), (11, True), (20, True)])
def test_nothing_found_for_most_queries_is_said(empty: int, said: bool) -> None:
    text = unmatched_warning(empty, 20, "item")
    assert text == (f"{empty} of 20 queries have no word in common with any item" if said else "")


def test_its_library_logs_nothing_below_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    Bm25(TITLES).search(["red"], 2)
    assert not caplog.records
