"""Load or train the text tokenizer, and pack token ids into arrays of fixed shape.

The tokenizer is either an existing tokenizer.json or a WordPiece tokenizer that is trained on the input.
"""

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

SAMPLE_ROWS = 1_000_000  # maximum number of rows to train a tokenizer on, evenly spaced over the input
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TOKENIZER_FILE = "tokenizer.json"
_ALPHABET = 1000  # maximum number of characters in a trained vocabulary. The most frequent ones are used
_EQUIVALENTS = {
    "[PAD]": ("[PAD]", "<pad>"),
    "[CLS]": ("[CLS]", "<s>", "<bos>"),
    "[SEP]": ("[SEP]", "</s>", "<eos>"),
    "[UNK]": ("[UNK]", "<unk>"),
}
_ENCODE_BLOCK = 8192
_DIGITS = {"type": "Digits", "individual_digits": False}  # the Digits pre-tokenizer, as serialised in tokenizer.json


def has_vocabulary(folder: str, expected: bytes) -> bool:
    """Return whether a model folder contains a tokenizer.json, and verify that it matches the tokenizer of the data.

    Raises ConfigError if its vocabulary differs from that of the `expected` tokenizer.json. The model would otherwise
    misinterpret the token ids.
    """
    storage = open_storage(folder)
    uri = storage.uri(TOKENIZER_FILE)
    try:
        data = storage.read_bytes(TOKENIZER_FILE)
    except KeyNotFound:
        return False
    model_vocabulary, data_vocabulary = TextTokenizer(data, uri).vocabulary, TextTokenizer(expected).vocabulary
    if model_vocabulary == data_vocabulary:
        return True
    token = min(model_vocabulary.items() ^ data_vocabulary.items(), key=lambda item: item[1])[0]
    raise ConfigError(
        f"{uri} ({len(model_vocabulary):,} tokens) differs from the tokenizer of the data"
        f" ({len(data_vocabulary):,} tokens): {token!r} has id {model_vocabulary.get(token)} instead of"
        f" {data_vocabulary.get(token)}",
        expected="data tokenised with the tokenizer of --model.init-from",
        next_command=f"trnpipe prepare --data.tokenizer.path {uri}",
    )


@dataclass(frozen=True)
class Tokens:
    """The token ids of N texts, including special tokens, concatenated to a single array.

    The tokens of text i are `ids[offsets[i]:offsets[i + 1]]`, where `offsets` is an int64 array of shape [N + 1].
    """

    ids: Int32s
    offsets: Int64s

    @property
    def lengths(self) -> Int64s:
        return np.diff(self.offsets)

    def part(self, start: int, stop: int) -> "Tokens":
        first, last = self.offsets[start], self.offsets[stop]
        return Tokens(self.ids[first:last], self.offsets[start : stop + 1] - first)


def token_windows(tokens: Tokens, size: int) -> Iterator[Tokens]:
    """Split texts into windows of `size` texts. If there are no texts, a single empty window is returned."""
    count = len(tokens.lengths)
    return (tokens.part(start, min(count, start + size)) for start in range(0, max(1, count), size))


class TextTokenizer:
    """A wrapper of a tokenizer.json that encodes texts as `[CLS] ... [SEP]` and exposes the ids of special tokens.

    `source` describes the origin of the file for use in messages. Raises DataError if it cannot be parsed, or if it
    does not have the required special tokens.
    """

    def __init__(self, data: bytes, source: str = "tokenizer.json") -> None:
        check_downloaded(data[:HEAD_BYTES], source, DataError)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises a bare Exception if the file is invalid
            raise DataError(
                f"{source} is not a tokenizer.json: {error}",
                expected="a file saved by Hugging Face tokenizers",
                next_command="correct --data.tokenizer.path, or remove it to train a tokenizer",
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.data, self.source = data, source
        self.fingerprint = xxhash.xxh3_128_hexdigest(data)
        self.vocabulary = vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        declared = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        special = {}
        for name, equivalents in _EQUIVALENTS.items():
            # MPNet's vocabulary still contains BERT's [PAD] and [CLS] as ordinary tokens.
            preferred = sorted(equivalents, key=lambda token: token not in declared)
            ids = [vocabulary[token] for token in preferred if token in vocabulary]
            if not ids:
                raise DataError(
                    f"{source} has no {name} token",
                    expected=f"one of {', '.join(equivalents)} in its vocabulary",
                    next_command="use a BERT-like tokenizer.json, or remove --data.tokenizer.path to train a tokenizer",
                )
            special[name] = ids[0]
        self.pad_id, self.cls_id, self.sep_id, self.unk_id = special.values()

    @property
    def splits_digits(self) -> bool:
        """Return whether words are split between letters and digits."""
        return any(step["type"] == _DIGITS["type"] for step in _pre_tokenizers(json.loads(self.data)))

    def with_split_digits(self) -> "TextTokenizer":
        """Return a tokenizer with the same vocabulary that also splits words between letters and digits.

        Sellers write the same model number as tp1724, tp 1724 or TP-1724. Without splitting, these variants have few
        tokens in common.
        """
        if self.splits_digits:
            return self
        content = json.loads(self.data)
        steps = _pre_tokenizers(content)
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, _DIGITS]} if steps else _DIGITS
        return TextTokenizer(json.dumps(content, ensure_ascii=False).encode(), self.source)

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Tokenise texts without truncating them. Duplicate texts are only tokenised once.

        If a text literally contains the padding token, that token is removed, because the first padding token marks the
        end of a text.
        """
        unique = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        distinct = list(unique)
        ids, lengths = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(distinct), _ENCODE_BLOCK):
            block = self._tokenizer.encode_batch_fast(distinct[start : start + _ENCODE_BLOCK], add_special_tokens=False)
            lists = [[self.cls_id, *encoding.ids, self.sep_id] for encoding in block]
            block_ids = np.fromiter(chain.from_iterable(lists), dtype=np.int32)
            if (block_ids == self.pad_id).any():
                lists = [[token for token in tokens if token != self.pad_id] for tokens in lists]
                block_ids = block_ids[block_ids != self.pad_id]
            ids.append(block_ids)
            lengths.append(np.fromiter(map(len, lists), dtype=np.int64, count=len(lists)))
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
        encoded = Tokens(np.concatenate(ids), offsets)
        if len(unique) == len(texts):
            return encoded
        return take(encoded, np.array([unique[text] for text in texts], dtype=np.int64))


def _pre_tokenizers(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    pre_tokenizer = content.get("pre_tokenizer")
    return [] if pre_tokenizer is None else list(pre_tokenizer.get("pretokenizers", [pre_tokenizer]))


def take(tokens: Tokens, index: Int64s) -> Tokens:
    """Select the texts with the indices `index` [M], in the given order."""
    lengths = tokens.lengths[index]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    shift = np.repeat(tokens.offsets[index] - offsets[:-1], lengths)
    return Tokens(tokens.ids[np.arange(offsets[-1]) + shift], offsets)


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> bytes:
    """Train a BERT-style WordPiece tokenizer and return its tokenizer.json.

    The result is deterministic. By default it would not be, because the library numbers the `##x` tokens of single
    characters in the order of a randomly seeded hash map, and breaks ties between merges by these numbers. To work
    around this, the tokens are passed as "special tokens", which fixes their numbers. The resulting vocabulary is then
    copied to a new tokenizer in which they are not special.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    unique = list(dict.fromkeys(texts))
    tokenizer = _wordpiece({}, config)
    # If there are too many characters, only keep the most frequent ones. Ties are broken by code point.
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
    result = _wordpiece({token: index for index, (token, _) in enumerate(vocabulary)}, config)
    result.add_special_tokens(list(SPECIAL_TOKENS))
    special_id = SPECIAL_TOKENS.index
    result.post_processor = processors.BertProcessing(("[SEP]", special_id("[SEP]")), ("[CLS]", special_id("[CLS]")))
    result.decoder = decoders.WordPiece()
    return result.to_str().encode()


def _wordpiece(vocabulary: dict[str, int], config: TokenizerConfig) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS[1]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = bert = pre_tokenizers.BertPreTokenizer()
    if config.split_digits:  # as in `with_split_digits`, but before the vocabulary is trained
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([bert, pre_tokenizers.Digits(individual_digits=False)])
    return tokenizer


# Packing of token ids into arrays of fixed shape. All functions are vectorised over rows.


def id_dtype(vocab_size: int) -> npt.DTypeLike:
    """Return the smallest dtype (uint16 or int32) that can represent all token ids."""
    return np.uint16 if vocab_size <= 65_536 else np.int32


def pack(
    tokens: Tokens, index: Int64s, length: int, *, pad_id: int, sep_id: int, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """Pack the n texts with the given indices into an array of shape [n, length].

    Texts are padded or truncated to `length`. The last token of a truncated text is replaced by [SEP].
    """
    lengths = np.minimum(tokens.lengths[index], length)
    positions = np.arange(length)
    is_token = positions < lengths[:, None]
    packed = np.full((len(index), length), pad_id, dtype=dtype)
    packed[is_token] = tokens.ids[(tokens.offsets[index][:, None] + positions)[is_token]]
    rows = np.flatnonzero(lengths)
    packed[rows, lengths[rows] - 1] = sep_id
    return packed


def fit_pairs(query: Tokens, product: Tokens, buckets: Sequence[Bucket]) -> tuple[Int64s, Bools, Int64s]:
    """Assign N pairs of texts to buckets.

    Returns, for each pair, the bucket, whether either text is truncated, and the number of tokens after truncation.
    """
    bucket = assign_buckets(query.lengths, product.lengths, buckets)
    query_size = np.array([shape.query_tokens for shape in buckets])[bucket]
    product_size = np.array([shape.product_tokens for shape in buckets])[bucket]
    truncated = (query.lengths > query_size) | (product.lengths > product_size)
    return bucket, truncated, np.minimum(query.lengths, query_size) + np.minimum(product.lengths, product_size)


# Selection and storage of the tokenizer. In order of precedence, this is the configured tokenizer, that of the parent
# model, one that is stored in the workspace, or a newly trained one.


def given_tokenizer(config: DataConfig, parent: bytes | None, stop: StopSignal) -> TextTokenizer | None:
    """Load the configured tokenizer, or that of the parent model if none is configured.

    Returns None if there is neither. Raises ConfigError if the configured file does not exist, and DataError if it is
    not a valid tokenizer.json.
    """
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
            next_command="correct --data.tokenizer.path, or remove it to train a tokenizer",
        ) from error
    return TextTokenizer(data, path)


def find_tokenizer(config: DataConfig, source: Source, workspace: Storage) -> TextTokenizer | None:
    """Look up a tokenizer in the workspace that was trained with the same settings on the same data.

    All partitions that it was trained on must still be part of the input and must not have changed. If there are
    several such tokenizers, the one that was trained on the most partitions is returned. Reusing it ensures that the
    vocabulary does not change when new days are added, and that old partitions do not have to be tokenised again.
    """
    root = f"tokens/{config.name}/tokenizers"
    existing = {partition.name: partition.content_id for partition in source.partitions}
    best, best_size = None, 0
    for name in workspace.list_dirs(root):
        manifest = read_manifest(workspace, f"{root}/{name}")
        if manifest is None or manifest.fields.get("training") != _training(config):
            continue
        trained_on = manifest.fields.get("partitions")
        if isinstance(trained_on, dict) and trained_on.items() <= existing.items() and len(trained_on) > best_size:
            best, best_size = f"{root}/{name}/{TOKENIZER_FILE}", len(trained_on)
    return TextTokenizer(workspace.read_bytes(best), workspace.uri(best)) if best else None


def train_in_worker(config: DataConfig, texts: list[str], stop: StopSignal) -> TextTokenizer:
    """Train a tokenizer in a subprocess, because the library cannot be interrupted and does not report progress."""
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
    """Commit a tokenizer to the workspace unless it is already stored. Returns its prefix.

    If the tokenizer was trained by this run, `trained_on` contains the partitions it was trained on.
    """
    prefix = f"tokens/{config.name}/tokenizers/{tokenizer.fingerprint}"
    if read_manifest(workspace, prefix) is None:
        folder = scratch / "tokenizer" / tokenizer.fingerprint
        # Always write a new file, because an existing one may be hard-linked to a file that has been committed.
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
    """Return the settings that a trained vocabulary depends on. They are stored in the manifest of the tokenizer."""
    return {
        "vocab_size": config.tokenizer.vocab_size,
        "train_rows": SAMPLE_ROWS,
        "lowercase": True,
        **({"split_digits": True} if config.tokenizer.split_digits else {}),
        **({"attributes": [attribute.name for attribute in config.attributes]} if config.attributes else {}),
        "columns": config.columns.model_dump(mode="json"),
        "filter": dict(config.filter),
        "esci_locale": None,
        "buckets": list(config.buckets),
    }
