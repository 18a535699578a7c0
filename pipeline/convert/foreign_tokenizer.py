"""The tokenizer of a Hugging Face folder as `transformers` would use it, as the bytes of one tokenizer.json.

For a BERT tokenizer, `transformers` takes lower-casing and accents from tokenizer_config.json, whatever tokenizer.json
says (tokenization_bert.py), and sentence-transformers may lower-case on top of both.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import models, pre_tokenizers, processors

from pipeline.convert.source import JSON_BYTES, TOKENIZER_BYTES, Source
from pipeline.core.errors import ConfigError, DataError
from pipeline.data.tokenizer import TextTokenizer

TOKENIZER, TOKENIZER_CONFIG, VOCABULARY = "tokenizer.json", "tokenizer_config.json", "vocab.txt"
BERT = ("BertTokenizer", "BertTokenizerFast")
AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PROBE = ("A sample text", "")


class TokenizerJson(BaseModel):
    """tokenizer_config.json as transformers writes it"""

    model_config = ConfigDict(frozen=True, extra="ignore")

    tokenizer_class: str = BERT[0]
    do_lower_case: bool = True
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool = True
    model_max_length: float | None = Field(None, ge=3)
    truncation_side: Literal["right"] = "right"


@dataclass(frozen=True)
class ForeignTokenizer:
    """A tokenizer, the longest text its config allows (None: no limit), and what was changed in it."""

    tokenizer: TextTokenizer
    max_tokens: int | None
    notes: tuple[str, ...]


def read_tokenizer(source: Source, folder: str, *, lowercase: bool) -> ForeignTokenizer:
    """`lowercase`: sentence-transformers lower-cases before the tokenizer. Raises ConfigError, DataError."""
    name = folder + TOKENIZER_CONFIG
    config = source.json(name, TokenizerJson) if source.has(name) else TokenizerJson()
    if config.tokenizer_class not in BERT + AS_IT_IS:
        raise ConfigError(
            f"{source.where(name)}: tokenizer class {config.tokenizer_class}",
            expected="one of " + ", ".join(BERT + AS_IT_IS),
            next_command="import a model with such a tokenizer",
        )
    data, where = _stored(source, folder)
    tokenizer, notes = TextTokenizer(data, where), []
    content: dict[str, Any] = json.loads(data)
    wanted = content.get("normalizer")
    if config.tokenizer_class in BERT:
        _check_bert(data, where)
        wanted = {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.tokenize_chinese_chars,
            "strip_accents": config.strip_accents,
            "lowercase": config.do_lower_case,
        }
    if lowercase and not _lower_cases(wanted):
        before = wanted["normalizers"] if wanted and wanted["type"] == "Sequence" else [wanted] if wanted else []
        wanted = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *before]}
    if wanted != content.get("normalizer"):
        content["normalizer"] = wanted
        notes.append("the normaliser of its tokenizer.json gives way to its other files, as in transformers")
        tokenizer = TextTokenizer(json.dumps(content, ensure_ascii=False).encode(), where)
    if config.tokenizer_class in AS_IT_IS:
        _check_frame(tokenizer, where)
    longest = config.model_max_length
    return ForeignTokenizer(tokenizer, None if longest is None or longest > 2**31 else int(longest), tuple(notes))


def _stored(source: Source, folder: str) -> tuple[bytes, str]:
    """tokenizer.json, or one made of vocab.txt."""
    if source.has(folder + TOKENIZER) or not source.has(folder + VOCABULARY):
        return source.read(folder + TOKENIZER, TOKENIZER_BYTES), source.where(folder + TOKENIZER)
    where = source.where(folder + VOCABULARY)
    try:
        words = source.read(folder + VOCABULARY, 4 * JSON_BYTES).decode().split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {error}", expected="one token a line, UTF-8") from error
    vocabulary = {word.rstrip("\r"): place for place, word in enumerate(words) if word.rstrip("\r")}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106 - a token of text
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [word for word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if word in vocabulary]
    made.add_special_tokens(special)
    if {"[CLS]", "[SEP]"} <= set(special):
        made.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    return made.to_str().encode(), where


def _check_bert(data: bytes, where: str) -> None:
    """`transformers` builds a BERT tokenizer of its own from the vocabulary: the file must hold the same one."""
    parsed = tokenizers.Tokenizer.from_str(data.decode())
    found = [type(part).__name__ for part in (parsed.model, parsed.pre_tokenizer)]
    if found != ["WordPiece", "BertPreTokenizer"]:
        raise ConfigError(
            f"{where}: {' after '.join(found)} in a BERT tokenizer",
            expected="WordPiece after BertPreTokenizer",
            next_command="set tokenizer_class to PreTrainedTokenizerFast in its tokenizer_config.json",
        )


def _lower_cases(normalizer: dict[str, Any] | None) -> bool:
    parts = (normalizer or {}).get("normalizers") or [normalizer or {}]
    return any(part.get("type") == "Lowercase" or part.get("lowercase") for part in parts)


def _check_frame(tokenizer: TextTokenizer, where: str) -> None:
    """The tokens around a text must be ours: [CLS] before it and [SEP] after it."""
    theirs = tokenizers.Tokenizer.from_str(tokenizer.data.decode())
    theirs.no_truncation()
    theirs.no_padding()
    for text in _PROBE:
        found, expected = theirs.encode(text).ids, tokenizer.encode([text]).ids.tolist()
        if found != expected:
            raise ConfigError(
                f"{where} makes {found} of {text!r}",
                expected=f"{expected}: [CLS], the tokens of the text, [SEP]",
                next_command="import a model with such a tokenizer",
            )
