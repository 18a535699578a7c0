"""Windows to batches: equal texts once, every token where it belongs, nothing overlaps, little padding."""

from collections.abc import Iterable
from itertools import zip_longest

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.xla import XlaBackend
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import TextTokenizer, Tokens, train_tokenizer
from pipeline.embed.config import EmbedConfig
from pipeline.embed.engine import distinct_texts, flat_batches, pack_rows, row_batches, row_shapes
from tests.embed.models import CLS, SEP, SPEC, texts
from tests.kit.real_data import real_file

SHAPES = row_shapes((24, 80), 160)
ROWS = (16, 40)


def parts(tokens: Tokens) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens.ids, tokens.offsets[1:-1])] if len(tokens.lengths) else []


@given(
    lengths=st.lists(st.integers(1, ROWS[-1]), max_size=200),
    most=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    seed=st.integers(0, 9),
)
def test_every_text_has_a_place_of_its_own(lengths: list[int], most: tuple[int, int], seed: int) -> None:
    """Which rows there are depends on the lengths alone, not on their order."""
    sizes = np.array(lengths, dtype=np.int64)
    packing = pack_rows(sizes, ROWS, most)
    assert len(packing.row) == len(packing.start) == len(packing.slot) == len(sizes)
    assert sorted(packing.bucket, reverse=True) == packing.bucket.tolist()
    shuffled = np.random.default_rng(seed).permutation(sizes)
    other = pack_rows(shuffled, ROWS, most)
    assert packing.bucket.tolist() == other.bucket.tolist()
    for row, kind in enumerate(packing.bucket.tolist()):
        members = np.flatnonzero(packing.row == row)
        assert 1 <= len(members) <= most[kind]
        assert sorted(packing.slot[members]) == list(range(len(members)))
        assert sorted(sizes[members]) == sorted(shuffled[other.row == row])
        taken = np.zeros(ROWS[kind], dtype=np.int64)
        for text in members:
            end = packing.start[text] + sizes[text]
            assert end <= ROWS[kind]
            taken[packing.start[text] : end] += 1
        assert taken.max() == 1
        assert kind == 0 or sizes[members].max() > ROWS[kind - 1]  # no longer than it must be
    assert set(packing.row.tolist()) == set(range(len(packing.bucket)))


def test_short_texts_fill_the_room_beside_long_ones() -> None:
    packing = pack_rows(np.array([30, 5, 5, 16]), ROWS, (8, 8))
    assert packing.bucket.tolist() == [1, 0]
    assert packing.row.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("length", [0, 41])
def test_a_text_that_fits_no_row_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} to|to {length}"):
        pack_rows(np.array([length]), ROWS, (8, 8))


@given(st.lists(st.lists(st.integers(3, 5), max_size=4), max_size=30))
def test_equal_texts_are_taken_once(inner: list[list[int]]) -> None:
    whole = [[CLS, *ids, SEP] for ids in inner]
    ids = np.array([token for text in whole for token in text], dtype=np.int32)
    window = Tokens(ids, np.concatenate([[0], np.cumsum([len(text) for text in whole])]).astype(np.int64))
    distinct, places = distinct_texts(window, 5, SEP)
    found = parts(distinct)
    assert len(found) == len({tuple(text) for text in found})
    assert [found[place] for place in places] == [text if len(text) <= 5 else [*text[:4], SEP] for text in whole]


@given(lengths=st.lists(st.integers(2, 80), max_size=60))
def test_rows_hold_every_token_with_its_place_and_text(lengths: list[int]) -> None:
    tokens = texts(lengths)
    found: dict[int, list[int]] = {}
    for batch in row_batches(tokens, SHAPES, SPEC.pad_id):
        ids, positions, segments = (batch.tensors[name].numpy() for name in ("tokens", "positions", "segments"))
        shape = next(shape for shape in SHAPES if (shape.rows, shape.length) == ids.shape)
        assert (segments > 0).sum() == batch.lengths.sum() and not ids[segments == 0].any()
        for text, place in zip(batch.texts.tolist(), batch.outputs.tolist(), strict=True):
            row, slot = divmod(place, shape.texts)
            inside = segments[row] == slot + 1
            assert positions[row][inside].tolist() == list(range(lengths[text]))
            found[text] = ids[row][inside].tolist()
    assert [found[text] for text in range(len(lengths))] == parts(tokens)


@given(lengths=st.lists(st.integers(2, 80), max_size=100), budget=st.integers(1, 120))
def test_flat_batches_are_whole_texts_within_their_budget_and_a_little_padding(lengths: list[int], budget: int) -> None:
    tokens = texts(lengths)
    batches, whole = list(flat_batches(tokens, budget, SPEC.pad_id)), parts(tokens)
    order = [text for batch in batches for text in batch.texts.tolist()]
    assert sorted(order) == list(range(len(lengths)))
    assert tokens.lengths[order].tolist() == sorted(lengths, reverse=True)
    for batch, following in zip_longest(batches, batches[1:]):
        used = int(batch.lengths.sum())
        assert used <= budget or len(batch.texts) == 1
        assert following is None or used + following.lengths[0] > budget, "not cut too early"
        ids = batch.tensors["ids"].tolist()
        assert ids[:used] == [token for text in batch.texts.tolist() for token in whole[text]] and not any(ids[used:])
        assert batch.num_slots == len(ids) < used + 64 and len(ids) % 64 == 0


def padding_share(lengths: Iterable[np.ndarray[tuple[int], np.dtype[np.int64]]], config: EmbedConfig) -> float:
    """Of windows of texts with these lengths on a device with static shapes; asserts that there are only these."""
    shapes = row_shapes(config.buckets, config.batch_tokens(XlaBackend.default_tokens))
    slots = used = 0
    for window in lengths:
        tokens = Tokens(np.ones(window.sum(), dtype=np.int32), np.concatenate([[0], np.cumsum(window)]))
        for batch in row_batches(tokens, shapes, SPEC.pad_id):
            assert tuple(batch.tensors["tokens"].shape) in {(shape.rows, shape.length) for shape in shapes}
            slots, used = slots + batch.num_slots, used + int(batch.lengths.sum())
        assert used
    return 1 - used / slots


@pytest.mark.parametrize("buckets", [(128, 512), (32, 64, 128), (128,)])
@pytest.mark.parametrize("mean", [6, 18, 60])
def test_padding_of_any_lengths_in_static_shapes_is_small(buckets: tuple[int, ...], mean: int) -> None:
    """Windows of titles, names or paragraphs: their lengths scatter by half of the mean and more."""
    random = np.random.default_rng(mean)
    windows = [random.lognormal(np.log(mean), 0.6, 16_384).astype(np.int64).clip(2, 128) for _ in range(2)]
    assert padding_share(windows, EmbedConfig(buckets=buckets)) < 0.1


def test_padding_of_real_titles_in_static_shapes_is_small() -> None:
    titles = pq.read_table(real_file("pricerunner_offers.parquet"), columns=["title"])["title"].to_pylist()
    tokenizer = TextTokenizer(train_tokenizer(titles[::10], TokenizerConfig(vocab_size=8192)))
    windows = (tokenizer.encode(titles[first : first + 16_384]) for first in range(0, len(titles), 16_384))
    distinct = [distinct_texts(window, 128, tokenizer.sep_id)[0].lengths for window in windows]
    assert padding_share(distinct, EmbedConfig()) < 0.05
