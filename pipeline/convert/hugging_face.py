"""A Hugging Face folder, of sentence-transformers or plain: encoder, pooling and tokenizer as this program uses them.

For a BERT tokenizer, `transformers` takes lower-casing and accents from tokenizer_config.json, whatever tokenizer.json
says (tokenization_bert.py), and sentence-transformers may lower-case on top of both.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers
from pydantic import ConfigDict, Field, RootModel, ValidationError

from pipeline.convert.source import TOKENIZER_BYTES, Source
from pipeline.core.errors import ConfigError, first_line
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.storage import folder_key
from pipeline.model.config import PRESETS, ModelConfig, Pooling
from pipeline.model.hf_config import EncoderJson, Foreign


def settings_of(found: EncoderJson, base: ModelConfig, source: str, **changes: Any) -> ModelConfig:
    """The model settings whose encoder is that one; what it does not decide is from `base`. Raises ConfigError."""
    size = found.size
    preset = next((name for name, known in PRESETS.items() if known == size), "")
    fields: dict[str, Any] = {
        **base.model_dump(),
        **({"preset": preset, **dict.fromkeys(size.model_dump())} if preset else size.model_dump()),
        **found.fields(),
        "init_from": None,
        **changes,
    }
    try:
        return ModelConfig.model_validate(fields)
    except (ValidationError, ConfigError) as error:
        raise ConfigError(f"{source}: {first_line(error)}", expected="the sizes of an encoder") from error


# What a sentence-transformers folder adds to a Hugging Face one: its modules, the pooling, the longest text.

MODULES, SENTENCE, MODEL = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLINGS: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Name there to the name here."""
# As saved by sentence-transformers before 5.4; its order.
LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class FolderSettings:
    """How a text becomes a vector there."""

    format: Literal["sentence-transformers", "transformers"]
    folder: str
    """Where the Hugging Face files lie in the folder, with a slash at its end; mostly ''."""
    pooling: Pooling
    max_tokens: int | None
    lowercase: bool
    notes: tuple[str, ...]
    query_prefix: str = ""
    product_prefix: str = ""


class _Module(Foreign):
    type: str
    path: str


class _Modules(RootModel[tuple[_Module, ...]]):
    """modules.json as sentence-transformers writes it"""


class _Pooling(Foreign):
    """The config.json of a sentence-transformers pooling"""

    model_config = ConfigDict(frozen=True, extra="allow")

    pooling_mode: str | tuple[str, ...] | None = None


class _Processor(Foreign):
    model_max_length: int | None = Field(None, ge=3)


class _Sentence(Foreign):
    """sentence_bert_config.json as sentence-transformers writes it"""

    max_seq_length: int | None = Field(None, ge=3)
    do_lower_case: bool = False
    processor_kwargs: _Processor = Field(default_factory=_Processor)


# The names under which SentenceTransformer.encode_query and encode_document look for a prompt, in their order.
QUERY, PRODUCT = ("query",), ("document", "passage", "corpus")


class _Model(Foreign):
    """config_sentence_transformers.json as sentence-transformers writes it"""

    prompts: dict[str, str] = Field(default_factory=dict)


def read_folder_settings(source: Source, pooling_of_plain: Pooling) -> FolderSettings:
    """`pooling_of_plain`: of a folder without modules.json. Raises ConfigError naming what has no counterpart here."""
    if not source.has(MODULES):
        notes = (f"pooling {pooling_of_plain}, from model.pooling",)
        return FolderSettings("transformers", "", pooling_of_plain, None, lowercase=False, notes=notes)
    modules = source.json(MODULES, _Modules).root
    kinds = [module.type.rpartition(".")[2] for module in modules]
    ours = all(module.type.startswith("sentence_transformers.") for module in modules)
    if not ours or kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{source.where(MODULES)}: modules {', '.join(module.type for module in modules) or 'none'}",
            expected="Transformer, Pooling and perhaps Normalize, of sentence-transformers",
            next_command="import a model of these modules",
        )
    folder, pooling = (f"{path}/" if (path := folder_key(module.path)) else "" for module in modules[:2])
    sentence = source.json(folder + SENTENCE, _Sentence) if source.has(folder + SENTENCE) else _Sentence()
    prompts = source.json(MODEL, _Model).prompts if source.has(MODEL) else {}
    query, product = (next((prompts[name] for name in names if name in prompts), "") for names in (QUERY, PRODUCT))
    others = {name: text for name, text in prompts.items() if text and text not in (query, product)}
    used = ", ".join(f"{name} {text!r}" for name, text in sorted(others.items()))
    told = [f"sentence-transformers may put further prompts before texts ({used}); trnpipe does not"] if used else []
    if query or product:
        told.append(f"queries begin with {query!r}, products with {product!r}, as its prompts say")
    if "Normalize" not in kinds:
        told.append("sentence-transformers leaves these vectors at their length; here they have length one")
    found = source.json(f"{pooling}config.json", _Pooling)
    extra = found.model_extra or {}
    modes = found.pooling_mode or tuple(mode for key, mode in LEGACY.items() if extra.get(key)) or "mean"
    mode = modes[0] if isinstance(modes, tuple) and len(modes) == 1 else modes
    if not isinstance(mode, str) or mode not in POOLINGS:
        raise ConfigError(
            f"{source.where(f'{pooling}config.json')}: pooling {mode if isinstance(mode, str) else ' + '.join(mode)}",
            expected="one of " + ", ".join(POOLINGS),
            next_command="import a model with that pooling",
        )
    return FolderSettings(
        "sentence-transformers",
        folder,
        POOLINGS[mode],
        sentence.max_seq_length or sentence.processor_kwargs.model_max_length,
        sentence.do_lower_case,
        tuple(told),
        query,
        product,
    )


TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BERT = ("BertTokenizer", "BertTokenizerFast", "MPNetTokenizer", "MPNetTokenizerFast")
_OF_FAMILIES = ("RobertaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer")
AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend", *_OF_FAMILIES, *(f"{name}Fast" for name in _OF_FAMILIES))


class TokenizerJson(Foreign):
    """tokenizer_config.json as transformers writes it"""

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
    where = source.where(folder + TOKENIZER)
    data = source.read(folder + TOKENIZER, TOKENIZER_BYTES)
    tokenizer, notes = TextTokenizer(data, where), []
    content: dict[str, Any] = json.loads(data)
    wanted = content.get("normalizer")
    if config.tokenizer_class in BERT:
        # `transformers` builds a tokenizer of its own from the vocabulary: the file must hold the same one.
        parts = [(content.get(part) or {}).get("type") for part in ("model", "pre_tokenizer")]
        if parts != ["WordPiece", "BertPreTokenizer"]:
            raise ConfigError(
                f"{where}: {parts[0]} after {parts[1]} in a BERT tokenizer",
                expected="WordPiece after BertPreTokenizer",
                next_command="set tokenizer_class to PreTrainedTokenizerFast in its tokenizer_config.json",
            )
        wanted = {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.tokenize_chinese_chars,
            "strip_accents": config.strip_accents,
            "lowercase": config.do_lower_case,
        }
    parts_of_it = (wanted or {}).get("normalizers") or [wanted or {}]
    if lowercase and not any(part.get("type") == "Lowercase" or part.get("lowercase") for part in parts_of_it):
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


def _check_frame(tokenizer: TextTokenizer, where: str) -> None:
    """The tokens around a text must be ours: [CLS] before it and [SEP] after it."""
    theirs = tokenizers.Tokenizer.from_str(tokenizer.data.decode())
    theirs.no_truncation()
    theirs.no_padding()
    for text in ("A sample text", ""):
        found, expected = theirs.encode(text).ids, tokenizer.encode([text]).ids.tolist()
        if found != expected:
            raise ConfigError(
                f"{where} makes {found} of {text!r}",
                expected=f"{expected}: [CLS], the tokens of the text, [SEP]",
                next_command="import a model with such a tokenizer",
            )
