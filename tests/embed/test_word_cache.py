"""Word by word comes to what the tokenizer says of the whole text."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.tokenizer import TextTokenizer, Tokens
from pipeline.embed import texts as module
from pipeline.embed.texts import WordCache, treats_words_alone
from tests.embed.catalogues import title, tokenizer_json

TOKENIZER = TextTokenizer(tokenizer_json())
CACHE = WordCache(TOKENIZER)
# Letters of all kinds, whitespace that is no space, accents apart from their letter, and the names of special tokens.
PIECES = st.one_of(
    st.text(max_size=6),
    st.text("aA1-.,'\u0301\u00e9\u4e2d\t\n\u00a0\u0085\u001c\u200b\u2028\u00df\u0130\u03a3", max_size=6),
    st.sampled_from(["[CLS]", "[SEP]x", "[PAD]", "phone", "model 7", "x" * 120]),
)
TEXTS = st.lists(st.lists(PIECES, max_size=6).map(" ".join), max_size=6)


def same(one: Tokens, other: Tokens) -> bool:
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.offsets, other.offsets)


@settings(deadline=None, max_examples=200)
@given(texts=TEXTS)
def test_the_same_tokens_as_of_whole_texts(texts: list[str]) -> None:
    assert CACHE._by_word
    for _ in range(2):
        assert same(CACHE.encode(texts), TOKENIZER.encode(texts))


@pytest.mark.parametrize(("limit", "value"), [("MAX_WORDS", 20), ("MAX_CHARACTERS", 100)])
def test_it_begins_anew_when_it_knows_too_much(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(module, limit, value)
    cache = WordCache(TOKENIZER)
    for number in range(60):
        texts = [title(number), title(number + 3)]
        assert same(cache.encode(texts), TOKENIZER.encode(texts))
        kept = [word for word in cache._number if not word.startswith(" ")]
        assert len(kept) <= module.MAX_WORDS and sum(map(len, kept)) <= module.MAX_CHARACTERS
    assert "0" not in kept and "59" in kept


def changed(**parts: object) -> bytes:
    return json.dumps({**json.loads(tokenizer_json()), **parts}).encode()


TOKEN = {"id": 9, "content": "black edition", "normalized": True} | dict.fromkeys(
    ("special", "single_word", "lstrip", "rstrip"), False
)


@pytest.mark.parametrize(
    "data",
    [
        changed(pre_tokenizer={"type": "Whitespace"}),
        changed(normalizer=None),
        changed(added_tokens=[*json.loads(tokenizer_json())["added_tokens"], TOKEN]),
    ],
    ids=["splits in another way", "normalises in another way", "a token with a space"],
)
def test_other_tokenizers_are_asked_for_whole_texts(data: bytes) -> None:
    tokenizer = TextTokenizer(data)
    texts = [title(number) for number in range(8)]
    assert treats_words_alone(tokenizer_json()) and not treats_words_alone(data)
    assert same(WordCache(tokenizer).encode(texts), tokenizer.encode(texts))
