"""Texts by their tokens: the same whatever they are padded to, different when any token or place differs."""

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.config import TokenizerConfig
from pipeline.data.shards import text_hashes
from pipeline.data.tokenizer import TextTokenizer, pack, train_tokenizer
from pipeline.retrieval.products import decode_tokens, join_tokens, to_tokens

TEXTS = st.lists(st.lists(st.integers(1, 300), max_size=6), min_size=1, max_size=12)


def padded(texts: list[list[int]], width: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
    result = np.zeros((len(texts), width), dtype=np.int32)
    for row, text in enumerate(texts):
        result[row, : len(text)] = text
    return result


@given(TEXTS, st.integers(6, 9))
def test_hashes_tell_texts_apart(texts: list[list[int]], width: int) -> None:
    hashes = text_hashes(padded(texts, width), 0)
    np.testing.assert_array_equal(hashes, text_hashes(padded(texts, 6).astype(np.uint16), 0))
    assert len(set(hashes.tolist())) == len({tuple(text) for text in texts})


@given(TEXTS)
def test_tokens_back_to_back(texts: list[list[int]]) -> None:
    tokens = to_tokens(padded(texts, 6), 0)
    found = [tokens.ids[a:b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]
    assert found == texts
    order = np.arange(len(texts))[::-1].copy()
    again = join_tokens([tokens, tokens], order)
    assert again.lengths.tolist() == [len(texts[row]) for row in order]
    assert len(join_tokens([]).lengths) == 0


def test_words_come_back_from_token_ids() -> None:
    known = ["Logitech MX-500 mouse, 16 GB", "café crème 2.5l", "running shoes running shoes"]
    tokenizer = TextTokenizer(train_tokenizer(known, TokenizerConfig(vocab_size=256)))
    texts = [*known, "unheard mousing cameras", "", "mouse ☂ mouse"]
    tokens = tokenizer.encode(texts)
    assert tokens.lengths.max() > 12, "words are in pieces"

    def stored(length: int) -> list[str]:
        arrays = pack(tokens, np.arange(6), length, pad_id=tokenizer.pad_id, sep_id=tokenizer.sep_id, dtype=np.int32)
        return decode_tokens(to_tokens(arrays, tokenizer.pad_id), tokenizer.data)

    found = stored(40)
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    words[1] = ["cafe", "creme", "2", "5l"]
    assert [re.findall(r"\w+", text) for text in found[:3]] == words[:3]
    assert found[4] == ""
    assert re.findall(r"\w+", found[5]) == ["mouse", "mouse"], "an unknown character is lost, not a word [UNK]"
    assert found[0].startswith(stored(6)[0]) and len(stored(6)[0]) < len(found[0])
