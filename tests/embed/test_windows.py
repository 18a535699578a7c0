"""Windows to batches: equal texts once, every token where it belongs."""

from collections.abc import Iterable

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.xla import XlaBackend
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import TextTokenizer, Tokens, train_tokenizer
from pipeline.embed.config import EmbedConfig
from pipeline.embed.engine import distinct_texts, flat_batches, row_batches, row_shapes
from tests.embed.models import CLS, SEP, SPEC, texts
from tests.kit.real_data import real_file

SHAPES = row_shapes((24, 80), 160)


def parts(tokens: Tokens) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens.ids, tokens.offsets[1:-1])] if len(tokens.lengths) else []


@given(st.lists(st.lists(st.integers(3, 5), max_size=4), max_size=30))
def test_equal_texts_are_taken_once(inner: list[list[int]]) -> None:
    whole = [[CLS, *ids, SEP] for ids in inner]
    ids = np.array([token for text in whole for token in text], dtype=np.int32)
    window = Tokens(ids, np.concatenate([[0], np.cumsum([len(text) for text in whole])]).astype(np.int64))
    distinct, places = distinct_texts(window, 5, SEP)
    found = parts(distinct)
    assert len(found) == len({tuple(text) for text in found})
    assert [found[place] for place in places] == [text if len(text) <= 5 else [*text[:4], SEP] for text in whole]


def test_a_text_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="text 1 of a window has no token"):
        distinct_texts(Tokens(np.array([CLS, SEP], dtype=np.int32), np.array([0, 2, 2])), 5, SEP)


@given(lengths=st.lists(st.integers(2, 80), max_size=60))
def test_rows_hold_every_token_with_its_place_and_text(lengths: list[int]) -> None:
    tokens = texts(lengths)
    found: dict[int, list[int]] = {}
    for batch in row_batches(tokens, SHAPES, SPEC.pad_id):
        ids, positions, segments = (batch.tensors[name].numpy() for name in ("tokens", "positions", "segments"))
        shape = next(shape for shape in SHAPES if (shape.rows, shape.length) == ids.shape)
        assert (segments > 0).sum() == batch.lengths.sum() and not ids[segments == 0].any()
        for text, place in zip(batch.texts.tolist(), batch.places.tolist(), strict=True):
            row, slot = divmod(place, shape.texts)
            inside = segments[row] == slot + 1
            assert positions[row][inside].tolist() == list(range(lengths[text]))
            found[text] = ids[row][inside].tolist()
    assert [found[text] for text in range(len(lengths))] == parts(tokens)


def test_flat_batches_are_whole_texts_and_a_little_padding() -> None:
    tokens = texts([80, 3, 20, 20, 70, 2])
    whole = parts(tokens)
    for batch in flat_batches(tokens, 100, SPEC.pad_id):
        ids = batch.tensors["ids"].tolist()
        expected = [token for text in batch.texts.tolist() for token in whole[text]]
        assert ids[: len(expected)] == expected and not any(ids[len(expected) :])
        assert len(ids) % 64 == 0 and len(ids) - len(expected) < 64
        assert batch.num_slots == len(ids)


def padding_share(lengths: Iterable[np.ndarray[tuple[int], np.dtype[np.int64]]], config: EmbedConfig) -> float:
    """Of windows of texts with these lengths on a device with static shapes; asserts that there are only these."""
    shapes = row_shapes(config.buckets, config.batch_tokens(XlaBackend.default_tokens))
    assert len(shapes) <= 6
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
