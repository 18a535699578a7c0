import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.batch_order import Bucket
from pipeline.core.errors import DataError
from pipeline.data.config import TokenizerConfig
from pipeline.data.rows import product_text
from pipeline.data.tokenizer import TextTokenizer, Tokens, fit_pairs, id_dtype, pack, take, train_tokenizer

TEXTS = [f"{brand} kettle {size}l Größe {size * 7} café" for brand in ("acme", "bolt", "coro") for size in range(40)]
CONFIG = TokenizerConfig(vocab_size=300)


@pytest.fixture(scope="module")
def trained() -> TextTokenizer:
    return TextTokenizer(train_tokenizer(TEXTS, CONFIG))


def test_same_texts_same_bytes_in_another_process(trained: TextTokenizer) -> None:
    """The library's own trainer fails this: its hash maps are seeded anew in every process."""
    code = (
        "import sys, json; from pipeline.data.tokenizer import *; texts = json.loads(sys.stdin.read());"
        "sys.stdout.buffer.write(train_tokenizer(texts, TokenizerConfig(vocab_size=300)))"
    )
    for _ in range(2):
        seen = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(TEXTS).encode(), capture_output=True, check=True
        )
        assert seen.stdout == trained.data


def test_texts_are_wrapped_and_known(trained: TextTokenizer) -> None:
    tokens = trained.encode(["acme kettle", "", "acme kettle", "7 café"])
    texts = [tokens.ids[a:b].tolist() for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]
    assert all(text[0] == trained.cls_id and text[-1] == trained.sep_id for text in texts)
    assert texts[0] == texts[2]
    assert texts[1] == [trained.cls_id, trained.sep_id]
    assert trained.unk_id not in tokens.ids
    assert max(tokens.ids) < trained.vocab_size <= 300


def test_a_text_that_spells_out_padding_is_read_without_it(trained: TextTokenizer) -> None:
    texts = ["red shoe", "red [PAD] shoe", "[PAD]", "[PAD]red[PAD][PAD] shoe [PAD]", ""]
    found = trained.encode(texts)
    each = [found.part(place, place + 1).ids.tolist() for place in range(len(texts))]
    assert each[1] == each[3] == each[0] and each[2] == each[4] == [trained.cls_id, trained.sep_id]
    assert trained.pad_id not in found.ids


def test_many_characters_are_cut_to_the_most_frequent() -> None:
    texts = ["".join(chr(0x4E00 + i) for i in range(1500)), "frequent words stay", "frequent words stay here"]
    first = train_tokenizer(texts, TokenizerConfig(vocab_size=2500))
    assert first == train_tokenizer(texts, TokenizerConfig(vocab_size=2500))
    assert "f" in json.loads(first)["model"]["vocab"]


def ids_of(tokenizer: TextTokenizer, *texts: str) -> list[list[int]]:
    return [tokenizer.encode([text]).ids.tolist() for text in texts]


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_model_number_is_the_same_tokens_however_it_is_spaced(trained: TextTokenizer, is_trained: bool) -> None:
    texts = ("kettle ke1724l 5l", "kettle KE 1724 L 5 L", "kettle ke 1724l 5l")
    assert len({tuple(ids) for ids in ids_of(trained, *texts)}) == 3
    config = CONFIG.model_copy(update={"split_digits": True})
    split = TextTokenizer(train_tokenizer(TEXTS, config)) if is_trained else trained.with_split_digits()
    first, *others = ids_of(split, *texts)
    assert all(ids == first for ids in others)
    assert split.unk_id not in first
    assert split.with_split_digits() is split
    if not is_trained:
        assert ids_of(split, "acme kettle café") == ids_of(trained, "acme kettle café")
        assert split.vocab_size == trained.vocab_size and split.fingerprint != trained.fingerprint


@pytest.mark.parametrize(
    "words",
    [
        None,
        {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Punctuation"}]},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    ],
)
def test_digits_are_split_behind_whatever_splits_words(trained: TextTokenizer, words: dict[str, object] | None) -> None:
    content = json.loads(trained.data) | {"pre_tokenizer": words}
    split = TextTokenizer(json.dumps(content).encode()).with_split_digits()
    parts = json.loads(split.data)["pre_tokenizer"]
    digits = {"type": "Digits", "individual_digits": False}
    assert parts == digits if words is None else parts["pretokenizers"][-1] == digits
    assert split.with_split_digits() is split


@pytest.mark.parametrize("missing", ["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
def test_a_missing_special_token_is_named(trained: TextTokenizer, missing: str) -> None:
    spoiled = trained.data.replace(json.dumps(missing).encode(), b'"[GONE]"')
    with pytest.raises(DataError, match=missing.strip("[]")):
        TextTokenizer(spoiled, "given.json")


def test_declared_special_tokens_come_before_words_of_the_vocabulary(trained: TextTokenizer) -> None:
    content = json.loads(trained.data)
    names = {"[PAD]": "<pad>", "[CLS]": "<s>", "[SEP]": "</s>"}
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocabulary = content["model"]["vocab"]  # MPNet's has both: <pad> is declared, [PAD] is left over from BERT's
    free = len(vocabulary)
    for number, (old, new) in enumerate(names.items()):
        vocabulary[new], vocabulary[old] = vocabulary[old], free + number
    content["post_processor"] = None
    mpnet = TextTokenizer(json.dumps(content).encode())
    assert (mpnet.pad_id, mpnet.cls_id, mpnet.sep_id) == (trained.pad_id, trained.cls_id, trained.sep_id)


def test_a_file_of_something_else_is_refused() -> None:
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        TextTokenizer(b'{"a": 1}', "given.json")


# From token ids to arrays of a fixed shape, against a loop written the obvious way.

PAD, CLS, SEP = 0, 2, 3
LISTS = st.lists(st.lists(st.integers(5, 60_000), max_size=20), min_size=1, max_size=12)


def tokens_of(texts: list[list[int]]) -> Tokens:
    wrapped = [[CLS, *text, SEP] for text in texts]
    flat = np.array([token for text in wrapped for token in text], dtype=np.int32)
    return Tokens(flat, np.cumsum([0, *map(len, wrapped)]).astype(np.int64))


@given(LISTS, st.integers(3, 24), st.data())
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


@given(LISTS, LISTS)
def test_every_pair_fits_its_bucket_or_is_truncated(queries: list[list[int]], products: list[list[int]]) -> None:
    size = min(len(queries), len(products))
    buckets = (Bucket(6, 6), Bucket(6, 12), Bucket(12, 16))
    bucket, truncated, num_tokens = fit_pairs(tokens_of(queries[:size]), tokens_of(products[:size]), buckets)
    for row in range(size):
        lengths = (len(queries[row]) + 2, len(products[row]) + 2)
        fitting = [i for i, b in enumerate(buckets) if lengths[0] <= b.query_tokens and lengths[1] <= b.product_tokens]
        assert bucket[row] == (fitting[0] if fitting else 2)
        assert truncated[row] == (not fitting)
        assert num_tokens[row] == min(lengths[0], 12) + min(lengths[1], 16) or fitting


@given(LISTS, st.data())
def test_take_picks_texts(texts: list[list[int]], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=15))
    taken = take(tokens_of(texts), np.array(index, dtype=np.int64))
    expected = tokens_of([texts[place] for place in index])
    assert taken.ids.tolist() == expected.ids.tolist()
    assert taken.offsets.tolist() == expected.offsets.tolist()


def test_ids_are_small_when_they_can_be_and_product_text_is_cut() -> None:
    assert (id_dtype(65_536), id_dtype(65_537)) == (np.uint16, np.int32)
    assert (product_text("a title", "", 100), product_text("a title", "more", 9)) == ("a title", "a title m")
