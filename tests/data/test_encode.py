"""Packing against a loop written the obvious way."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.batch_order import Bucket
from pipeline.data.rows import product_text
from pipeline.data.tokenizer import Tokens, id_dtype, pack, place_pairs, take

PAD, CLS, SEP = 0, 2, 3
TEXTS = st.lists(st.lists(st.integers(5, 60_000), max_size=20), min_size=1, max_size=12)


def tokens_of(texts: list[list[int]]) -> Tokens:
    wrapped = [[CLS, *text, SEP] for text in texts]
    flat = np.array([token for text in wrapped for token in text], dtype=np.int32)
    return Tokens(flat, np.cumsum([0, *map(len, wrapped)]).astype(np.int64))


@given(TEXTS, st.integers(3, 24), st.data())
def test_pack_equals_the_obvious_loop(texts: list[list[int]], length: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=15)), dtype=np.int64)
    packed = pack(tokens_of(texts), index, length, pad_id=PAD, sep_id=SEP, dtype=np.uint16)
    expected = []
    for place in index:
        row = [CLS, *texts[place][: length - 2], SEP]
        expected.append(row + [PAD] * (length - len(row)))
    assert packed.shape == (len(index), length)
    assert packed.dtype == np.uint16
    assert packed.tolist() == expected


@given(TEXTS, TEXTS)
def test_every_pair_fits_its_bucket_or_is_truncated(queries: list[list[int]], products: list[list[int]]) -> None:
    size = min(len(queries), len(products))
    buckets = (Bucket(6, 6), Bucket(6, 12), Bucket(12, 16))
    bucket, truncated, num_tokens = place_pairs(tokens_of(queries[:size]), tokens_of(products[:size]), buckets)
    for row in range(size):
        lengths = (len(queries[row]) + 2, len(products[row]) + 2)
        fitting = [i for i, b in enumerate(buckets) if lengths[0] <= b.query_tokens and lengths[1] <= b.product_tokens]
        assert bucket[row] == (fitting[0] if fitting else 2)
        assert truncated[row] == (not fitting)
        assert num_tokens[row] == min(lengths[0], 12) + min(lengths[1], 16) or fitting


@given(TEXTS, st.data())
def test_take_picks_texts(texts: list[list[int]], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=15))
    taken = take(tokens_of(texts), np.array(index, dtype=np.int64))
    expected = tokens_of([texts[place] for place in index])
    assert taken.ids.tolist() == expected.ids.tolist()
    assert taken.offsets.tolist() == expected.offsets.tolist()


def test_ids_are_small_when_they_can_be() -> None:
    assert id_dtype(65_536) == np.uint16
    assert id_dtype(65_537) == np.int32


def test_product_text_is_cut() -> None:
    assert product_text("a title", "", 100) == "a title"
    assert product_text("a title", "more", 9) == "a title m"
