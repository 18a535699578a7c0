"""Windows in, vectors out: in order, independent of neighbours, and well-behaved when something goes wrong."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pipeline.backends import open_backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.core.errors import DataError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer, Tokens, take
from pipeline.embed.catalogue import cut_tokens
from pipeline.embed.config import EmbedConfig
from pipeline.embed.engine import EmbedProgram, RowEncoder, open_embedder, row_batches, row_shapes
from pipeline.embed.unpadded import PackedLinear, equal_length_runs, supports_packed_weights
from pipeline.model.hf import to_hf
from pipeline.model.relevance import build_model
from tests.embed.catalogues import title, tokenizer_json
from tests.embed.checkpoints import state_of
from tests.embed.models import CONFIG, MODEL, SEP, SPEC, embedder, encoder, one_by_one, texts, vectors_of

# On both sides of where attention takes another form, alone and several of one length.
MANY = [70, 64, 64, 63, 40, 40, 40, 16, 16, 15, 15, 9, 3, 2, 2, 80, 24, 25, 7, 7, 7]
WINDOWS = [texts(lengths, seed) for seed, lengths in enumerate([[5, 80, 3, 9, 9], [], MANY, [24] * 40, [2], []])]
both = pytest.mark.parametrize("rows", [False, True])


def close(found: object, expected: object, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("engine", ["rows", "flat", "flat without oneDNN"])
def test_each_window_has_unit_vectors_in_the_order_of_its_texts(
    monkeypatch: pytest.MonkeyPatch, pooling: str, precision: str, tolerance: float, engine: str
) -> None:
    if engine == "flat without oneDNN":
        monkeypatch.setattr("pipeline.embed.engine.supports_packed_weights", lambda dtype: False)
    elif engine == "flat" and not supports_packed_weights(torch.bfloat16 if precision == "bf16" else torch.float32):
        pytest.skip("no oneDNN for it here")
    config = EmbedConfig.model_validate({**CONFIG.model_dump(), "precision": precision})
    found = vectors_of(embedder(config=config, rows=engine == "rows", pooling=pooling), *WINDOWS)
    assert [len(vectors) for vectors in found] == [len(window.lengths) for window in WINDOWS]
    for window, vectors in zip(WINDOWS, found, strict=True):
        assert vectors.dtype == np.float32 and vectors.shape[1] == 32
        if len(vectors):
            close(vectors, one_by_one(encoder(pooling), window), tolerance)


@both
def test_a_text_of_two_chunks_is_their_mean_by_tokens(rows: bool) -> None:
    """By hand; a text that fits has the vector it has without chunks."""
    long, short = texts([70], 1), texts([5, 24, 24], 2)
    ids = np.concatenate([short.ids, long.ids, short.ids[5:]])
    window = Tokens(ids, np.array([0, 5, 29, 53, 123, 147, 171], dtype=np.int64))  # two are there twice
    made = embedder(rows=rows, chunk=50)
    (found,) = vectors_of(made, window)
    inner = long.ids[1:-1]
    parts = [np.concatenate([[1], part, [SEP]]).astype(np.int32) for part in (inner[:48], inner[48:])]
    alone = [encoder()(torch.from_numpy(part)[None]) for part in parts]
    mean = (alone[0] * len(parts[0]) + alone[1] * len(parts[1])) / (len(parts[0]) + len(parts[1]))
    close(found[3:4], torch.nn.functional.normalize(mean))
    (without,) = vectors_of(embedder(rows=rows), short)
    close(found[[0, 1, 2, 4, 5]], without[[0, 1, 2, 1, 2]], 1e-6)
    assert (made.figures.texts, made.figures.tokens) == (6, 5 + 24 + 24 + len(parts[0]) + len(parts[1]))


@both
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_order_company_and_shapes_make_no_difference(rows: bool, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(2, 80), min_size=1, max_size=40))
    order = np.array(data.draw(st.permutations(range(len(lengths)))), dtype=np.int64)
    longest = data.draw(st.sampled_from([(80,), (10, 80), (16, 24, 40, 64, 80), (8, 200)]))
    other = EmbedConfig(buckets=longest, tokens_per_batch=data.draw(st.integers(200, 600)))
    cut = data.draw(st.integers(0, len(lengths)))
    tokens = texts(lengths)
    (one,) = vectors_of(embedder(rows=rows), tokens)
    parts = vectors_of(embedder(config=other, rows=rows), take(tokens, order[:cut]), take(tokens, order[cut:]))
    close(np.concatenate(parts), one[order])


def test_a_window_is_the_same_to_the_last_bit_whatever_else_is_embedded_and_by_how_many_threads() -> None:
    (alone,) = vectors_of(embedder(), WINDOWS[0])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = vectors_of(embedder(), WINDOWS[3], *WINDOWS)
    finally:
        torch.set_num_threads(before)
    assert (found[1] == alone).all()


@both
def test_longer_texts_are_cut_as_in_training(rows: bool) -> None:
    long, cut = texts([60]), texts([60])
    cut.ids[29] = cut.ids[59]
    cut = Tokens(cut.ids[:30], np.array([0, 30]))
    (one,), (other,) = (vectors_of(embedder(rows=rows, limit=30), window) for window in (long, cut))
    assert (one == other).all()
    assert np.abs(one - vectors_of(embedder(rows=rows), long)[0]).max() > 1e-3


def test_figures_count_what_was_computed() -> None:
    made = embedder(rows=True)
    vectors_of(made, texts([10, 20, 30]), take(texts([5]), np.zeros(6, dtype=np.int64)))
    figures = made.figures
    assert (figures.texts, figures.tokens) == (9, 65)
    assert figures.tokens + figures.padded_tokens == 2 * 80 + 6 * 24  # the first window in one row, the second in one
    assert figures.padding_share == pytest.approx(1 - 65 / 304)
    assert 0 < figures.idle_s <= figures.seconds


def endless(stop: StopSignal | None = None) -> Iterator[Tokens]:
    for number in range(10_000):
        if number == 3 and stop is not None:
            stop.set("SIGTERM")
        yield texts([10] * 50, number)
    raise AssertionError("nobody stopped")


@both
def test_a_stop_ends_it_between_two_batches(rows: bool) -> None:
    stop = StopSignal()
    with pytest.raises(Preempted, match="SIGTERM while embedding"):
        list(embedder(rows=rows, stop=stop).stream(endless(stop)))


def test_errors_of_the_input_and_of_the_device_surface() -> None:
    def windows() -> Iterator[Tokens]:
        yield texts([5, 6])
        raise DataError("a bad file")

    with pytest.raises(DataError, match="a bad file"):
        list(embedder().stream(windows()))
    bad = texts([5, 6])
    bad.ids[2] = 5000  # no such token
    with pytest.raises(IndexError):
        vectors_of(embedder(), bad)


def test_leaving_early_ends_all_threads_and_gives_them_back() -> None:
    before, threads = torch.get_num_threads(), set(threading.enumerate())
    stream = embedder().stream(endless())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not set(threading.enumerate()) - threads
    assert torch.get_num_threads() == before


def test_a_batch_without_texts_has_no_nan() -> None:
    program = EmbedProgram(encoder(), open_backend("cpu"), CONFIG)
    assert program.shapes == row_shapes((24, 80), 160)
    assert all(program.vectors(shape.dummy()).isfinite().all() for shape in program.shapes)


def test_the_whole_of_it_is_one_graph_for_a_compiler() -> None:
    """As on cuda; captured here without generating code."""
    plain = RowEncoder(encoder())
    compiled = torch.compile(plain, fullgraph=True, dynamic=False, backend="eager")
    (shape, _) = row_shapes(CONFIG.buckets, 160)
    (batch,) = row_batches(texts([24, 7, 7]), (shape,), SPEC.pad_id)
    inputs = (batch.tensors["tokens"], batch.tensors["positions"], batch.tensors["segments"], shape.texts)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), plain(*inputs))


def test_neighbours_of_one_length_are_a_run() -> None:
    assert equal_length_runs([5, 5, 3, 5]) == [(0, 2, 5), (10, 1, 3), (13, 1, 5)]
    assert equal_length_runs([]) == []


@pytest.mark.skipif(not supports_packed_weights(torch.float32), reason="PyTorch without oneDNN")
@pytest.mark.parametrize("rows", [64, 65, 1])
def test_packed_products_are_the_ordinary_ones(rows: int) -> None:
    torch.manual_seed(1)
    layer, values, other = torch.nn.Linear(48, 80), torch.randn(rows, 48), torch.randn(rows, 80)
    packed, plain = (PackedLinear(layer, torch.float32, 64, packed=packed) for packed in (True, False))
    torch.testing.assert_close(packed(values), plain(values))
    torch.testing.assert_close(packed.gelu(values), plain.gelu(values))
    torch.testing.assert_close(packed.plus(values, other), plain.plus(values, other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": (128, 64)}, "expected ascending lengths"),
        ({"buckets": tuple(range(8, 15))}, "at most 6"),
        ({"tokens_per_batch": 64}, r"expected at least 80 \(a row\)"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbedConfig.model_validate({**CONFIG.model_dump(), **changes})


def test_texts_are_read_as_far_as_the_model_has_learnt_to() -> None:
    config = EmbedConfig(buckets=(128, 256))
    assert [config.text_limit(*known) for known in ((64, 512), (None, 100), (400, 512))] == [64, 100, 256]
    chunked = EmbedConfig(buckets=(128, 256), chunks=3)
    assert (chunked.chunk_limit(64, 512), chunked.text_limit(64, 512)) == (64, 3 * 62 + 2)


def test_a_checkpoint_is_opened_with_its_weights_and_read_as_far_as_it_has_learnt(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(tokenizer_json())
    spec = SPEC.model_copy(update={"vocab_size": tokenizer.vocab_size, "pad_id": tokenizer.pad_id})
    model = build_model(MODEL, spec, 5)
    save_file(to_hf(model.state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.data)
    state = state_of(MODEL, spec, tokenizer, max_tokens=6)
    checkpoint = Checkpoint("checkpoints/c/step-1", "file:///c/step-1", tmp_path, "0", state)
    window = tokenizer.encode(["a drill", title(2), title(3)])
    assert window.lengths.max() > 6
    (found,) = open_embedder(checkpoint, open_backend("cpu"), CONFIG).stream([window])
    close(found, one_by_one(model.encoder.eval(), cut_tokens(window, 6, tokenizer.sep_id)).detach())
