"""The text tokenizer: trained here (WordPiece) or given as a tokenizer.json, with its fixed-shape arrays of ids."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import xxhash
from pydantic import JsonValue
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipeline.core.arrays import Bools, Int32s, Int64s
from pipeline.core.batch_order import Bucket, assign_buckets
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.input_files import InputPartition
from pipeline.data.sources import Source
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import HEAD_BYTES, KeyNotFound, Storage, check_downloaded, open_parent, open_storage
from pipeline.proc.pool import run_tasks

SAMPLE_ROWS = 1_000_000
"""Rows read, spread over the input, to train a tokenizer."""
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TOKENIZER_FILE = "tokenizer.json"
_ALPHABET = 1000
"""Characters kept at most, the most frequent ones, each of them a token."""
_EQUIVALENTS = {
    "[PAD]": ("[PAD]", "<pad>"),
    "[CLS]": ("[CLS]", "<s>", "<bos>"),
    "[SEP]": ("[SEP]", "</s>", "<eos>"),
    "[UNK]": ("[UNK]", "<unk>"),
}
_ENCODE_BLOCK = 8192
_DIGITS = {"type": "Digits", "individual_digits": False}
"""A pre-tokenizer of the library, as tokenizer.json names it."""


def has_vocabulary(folder: str, ours: bytes) -> bool:
    """Return whether a model's folder (URI) has a tokenizer.json with the tokens of `ours`; False if it has none.

    Raises ConfigError if a token has another number there, because the model would read other words.
    """
    storage = open_storage(folder)
    uri = storage.uri(TOKENIZER_FILE)
    try:
        data = storage.read_bytes(TOKENIZER_FILE)
    except KeyNotFound:
        return False
    found, wanted = TextTokenizer(data, uri).vocabulary, TextTokenizer(ours).vocabulary
    if found == wanted:
        return True
    token = min(found.items() ^ wanted.items(), key=lambda one: one[1])[0]
    raise ConfigError(
        f"{uri} has {len(found):,} tokens, the data was tokenised with {len(wanted):,};"
        f" {token!r} is number {found.get(token)} there and {wanted.get(token)} here",
        expected="the tokenizer that belongs to the weights of --model.init-from",
        next_command=f"trnpipe prepare --data.tokenizer.path {uri}",
    )


@dataclass(frozen=True)
class Tokens:
    """Token ids of N texts, special tokens included, back to back: text i is `ids[offsets[i]:offsets[i + 1]]`.

    `ids` int32 [sum of lengths], `offsets` int64 [N + 1].
    """

    ids: Int32s
    offsets: Int64s

    @property
    def lengths(self) -> Int64s:
        return np.diff(self.offsets)

    def part(self, start: int, stop: int) -> "Tokens":
        first, last = self.offsets[start], self.offsets[stop]
        return Tokens(self.ids[first:last], self.offsets[start : stop + 1] - first)


def pieces(tokens: Tokens, size: int) -> Iterator[Tokens]:
    """Yield `size` texts at a time, and one empty piece if there are no texts."""
    count = len(tokens.lengths)
    return (tokens.part(start, min(count, start + size)) for start in range(0, max(1, count), size))


class TextTokenizer:
    """A tokenizer.json with the four special tokens known. Texts become `[CLS] ... [SEP]`.

    Args:
        data: the bytes of a tokenizer.json.
        source: where it came from, for messages.
    Raises DataError if it cannot be parsed or lacks a special token.
    """

    def __init__(self, data: bytes, source: str = "tokenizer.json") -> None:
        check_downloaded(data[:HEAD_BYTES], source, DataError)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises bare Exception for a bad file
            raise DataError(
                f"{source} is not a tokenizer.json: {error}",
                expected="a file saved by Hugging Face tokenizers",
                next_command="set --data.tokenizer.path, or leave it out to train one",
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.data, self.source = data, source
        self.fingerprint = xxhash.xxh3_128_hexdigest(data)
        self.vocabulary = vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        special = {}
        for name, equivalents in _EQUIVALENTS.items():
            found = [vocabulary[token] for token in equivalents if token in vocabulary]
            if not found:
                raise DataError(
                    f"{source} has no {name} token",
                    expected="one of " + ", ".join(equivalents) + " in its vocabulary",
                    next_command="give a BERT-like tokenizer.json, or leave --data.tokenizer.path out to train one",
                )
            special[name] = found[0]
        self.pad_id, self.cls_id, self.sep_id, self.unk_id = special.values()

    @property
    def splits_digits(self) -> bool:
        """Whether words are cut where letters and digits meet."""
        return any(part["type"] == _DIGITS["type"] for part in _pre_tokenizers(json.loads(self.data)))

    def with_split_digits(self) -> "TextTokenizer":
        """Return a tokenizer of the same vocabulary that also cuts words where letters and digits meet.

        Sellers write one model number as tp1724, tp 1724 and TP-1724; as pieces of words these have little in common.
        """
        if self.splits_digits:
            return self
        content = json.loads(self.data)
        parts = _pre_tokenizers(content)
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*parts, _DIGITS]} if parts else _DIGITS
        return TextTokenizer(json.dumps(content, ensure_ascii=False).encode(), self.source)

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of each text, not truncated. Equal texts are tokenised once.

        A padding token that a text spells out is left out, because it marks the end of a text.
        """
        unique = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        distinct = list(unique)
        ids, lengths = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(distinct), _ENCODE_BLOCK):
            block = self._tokenizer.encode_batch_fast(distinct[start : start + _ENCODE_BLOCK], add_special_tokens=False)
            lists = [[self.cls_id, *encoding.ids, self.sep_id] for encoding in block]
            together = np.fromiter(chain.from_iterable(lists), dtype=np.int32)
            if (together == self.pad_id).any():
                lists = [[token for token in tokens if token != self.pad_id] for tokens in lists]
                together = together[together != self.pad_id]
            ids.append(together)
            lengths.append(np.fromiter(map(len, lists), dtype=np.int64, count=len(lists)))
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
        encoded = Tokens(np.concatenate(ids), offsets)
        if len(unique) == len(texts):
            return encoded
        return take(encoded, np.array([unique[text] for text in texts], dtype=np.int64))


def _pre_tokenizers(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the pre-tokenizers of a tokenizer.json in order."""
    words = content.get("pre_tokenizer")
    return [] if words is None else list(words.get("pretokenizers", [words]))


def take(tokens: Tokens, index: Int64s) -> Tokens:
    """Return texts by number, in the order of `index` [M]."""
    lengths = tokens.lengths[index]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    shift = np.repeat(tokens.offsets[index] - offsets[:-1], lengths)
    return Tokens(tokens.ids[np.arange(offsets[-1]) + shift], offsets)


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> bytes:
    """Train a BERT-style WordPiece and return its tokenizer.json; the same texts give the same bytes.

    The library numbers the `##x` pieces of single characters in the order of a randomly seeded hash map, and breaks
    ties between merges by these numbers. Passing them as "special tokens" pins the numbers. The resulting vocabulary is
    put into a new tokenizer in which they are not special.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    unique = list(dict.fromkeys(texts))
    tokenizer = _wordpiece({}, config)
    # The characters to keep, sorted: all, or the most frequent when there are too many (ties by code point).
    characters = sorted(set().union(*unique))
    if len(characters) > _ALPHABET:
        counts = Counter[str]()
        for text in unique:
            counts.update(text)
        characters = sorted(characters, key=lambda character: (-counts[character], character))[:_ALPHABET]
    normal = {part for character in characters for part in tokenizer.normalizer.normalize_str(character)}
    alphabet = sorted(character for character in normal if not character.isspace())
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *alphabet, *("##" + character for character in alphabet)],
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(unique, trainer)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    result = _wordpiece({token: place for place, (token, _) in enumerate(vocabulary)}, config)
    result.add_special_tokens(list(SPECIAL_TOKENS))
    place = SPECIAL_TOKENS.index
    result.post_processor = processors.BertProcessing(("[SEP]", place("[SEP]")), ("[CLS]", place("[CLS]")))
    result.decoder = decoders.WordPiece()
    return result.to_str().encode()


def _wordpiece(vocabulary: dict[str, int], config: TokenizerConfig) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS[1]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = words = pre_tokenizers.BertPreTokenizer()
    if config.split_digits:  # as `with_split_digits`, before the vocabulary is trained
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.Digits(individual_digits=False)])
    return tokenizer


# From token ids to fixed-shape arrays: buckets, truncation, padding. Vectorised; no loop over rows.


def id_dtype(vocab_size: int) -> npt.DTypeLike:
    """Return uint16 if every id fits, else int32."""
    return np.uint16 if vocab_size <= 65_536 else np.int32


def pack(
    tokens: Tokens, index: Int64s, length: int, *, pad_id: int, sep_id: int, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """Return texts `index` [n] as an array [n, length], cut (the last token is then [SEP]) or padded."""
    lengths = np.minimum(tokens.lengths[index], length)
    places = np.arange(length)
    inside = places < lengths[:, None]
    packed = np.full((len(index), length), pad_id, dtype=dtype)
    packed[inside] = tokens.ids[(tokens.offsets[index][:, None] + places)[inside]]
    rows = np.flatnonzero(lengths)
    packed[rows, lengths[rows] - 1] = sep_id
    return packed


def place_pairs(query: Tokens, product: Tokens, buckets: Sequence[Bucket]) -> tuple[Int64s, Bools, Int64s]:
    """Return of N pairs the bucket [N], whether a side is truncated [N], and the tokens [N] after truncation."""
    bucket = assign_buckets(query.lengths, product.lengths, buckets)
    query_size = np.array([shape.query_tokens for shape in buckets])[bucket]
    product_size = np.array([shape.product_tokens for shape in buckets])[bucket]
    truncated = (query.lengths > query_size) | (product.lengths > product_size)
    return bucket, truncated, np.minimum(query.lengths, query_size) + np.minimum(product.lengths, product_size)


# Which tokenizer to use: given, found in the workspace, or trained; and where it is kept.


def given_tokenizer(config: DataConfig, parent: bytes | None, stop: StopSignal) -> TextTokenizer | None:
    """Return the tokenizer named in the settings, else the parent model's. Raises DataError, ConfigError."""
    if config.tokenizer.path is None:
        return None if parent is None else TextTokenizer(parent, "the parent model's tokenizer")
    path = config.tokenizer.path
    try:
        storage, name = open_parent(path, retry=RetryPolicy(), stop=stop)
        data = storage.read_bytes(name)
    except KeyNotFound as error:
        raise ConfigError(
            f"tokenizer {path} does not exist",
            expected="the URI of a tokenizer.json",
            next_command="correct --data.tokenizer.path, or leave it out to train one",
        ) from error
    return TextTokenizer(data, path)


def find_tokenizer(config: DataConfig, source: Source, workspace: Storage) -> TextTokenizer | None:
    """Return a tokenizer trained earlier with these settings on partitions that are all still there, unchanged.

    New days do not change the vocabulary then, and old partitions are not tokenised again. If there are several, the
    one trained on most partitions is taken.
    """
    root = f"tokens/{config.name}/tokenizers"
    present = {partition.name: partition.content_id for partition in source.partitions}
    best, best_size = None, 0
    for name in workspace.list_dirs(root):
        manifest = read_manifest(workspace, f"{root}/{name}")
        if manifest is None or manifest.fields.get("training") != _training(config):
            continue
        trained_on = manifest.fields.get("partitions")
        if isinstance(trained_on, dict) and trained_on.items() <= present.items() and len(trained_on) > best_size:
            best, best_size = f"{root}/{name}/{TOKENIZER_FILE}", len(trained_on)
    return TextTokenizer(workspace.read_bytes(best), workspace.uri(best)) if best else None


def train_in_worker(config: DataConfig, texts: list[str], stop: StopSignal) -> TextTokenizer:
    """Train in another process, because the library cannot be interrupted. It reports no progress."""
    with progress("training the tokenizer", None, "texts") as advance:
        advance(len(texts))
        (data,) = run_tasks(
            _train,
            config.tokenizer,
            iter([texts]),
            num_workers=1,
            stop=stop,
            doing="training the tokenizer",
            waiting=lambda: advance(0),
        )
    return TextTokenizer(data, "the tokenizer just trained")


def _train(config: TokenizerConfig, texts: list[str]) -> bytes:
    return train_tokenizer(texts, config)


def store_tokenizer(
    config: DataConfig,
    trained_on: Sequence[InputPartition] | None,
    workspace: Storage,
    tokenizer: TextTokenizer,
    scratch: Path,
) -> str:
    """Commit a tokenizer unless it is there, and return its prefix. `trained_on`: None if it was given."""
    prefix = f"tokens/{config.name}/tokenizers/{tokenizer.fingerprint}"
    if read_manifest(workspace, prefix) is None:
        folder = scratch / "tokenizer" / tokenizer.fingerprint
        # A new file, because the old one may be a hard link of what an earlier commit has published.
        write_bytes_atomic(folder / TOKENIZER_FILE, tokenizer.data)
        fields: dict[str, JsonValue] = {
            "training": None if trained_on is None else _training(config),
            "partitions": {partition.name: partition.content_id for partition in trained_on or ()},
            "vocab_size": tokenizer.vocab_size,
            "pad_id": tokenizer.pad_id,
        }
        commit_dir(workspace, folder, prefix, kind="tokenizer", fields=fields)
    return prefix


def _training(config: DataConfig) -> JsonValue:
    """Return what a trained vocabulary depends on besides the data, in the form that stored tokenizers have."""
    return {
        "vocab_size": config.tokenizer.vocab_size,
        "train_rows": SAMPLE_ROWS,
        "lowercase": True,
        **({"split_digits": True} if config.tokenizer.split_digits else {}),
        "columns": config.columns.model_dump(mode="json"),
        "filter": dict(config.filter),
        "esci_locale": None,
        "buckets": list(config.buckets),
    }
