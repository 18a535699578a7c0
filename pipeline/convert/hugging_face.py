"""A Hugging Face folder, of sentence-transformers or plain: encoder, pooling and tokenizer as this program uses them.

For a BERT tokenizer, `transformers` takes lower-casing and accents from tokenizer_config.json, whatever tokenizer.json
says (tokenization_bert.py), and sentence-transformers may lower-case on top of both.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers
from pydantic import Field, JsonValue, RootModel, ValidationError

from pipeline.convert.source import TOKENIZER_BYTES, Source
from pipeline.core.errors import ConfigError, first_line
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.storage import folder_key, join_key
from pipeline.model.config import PRESETS, ModelConfig, Pooling
from pipeline.model.hf import EncoderJson, Foreign


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
LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Poolings as saved by sentence-transformers before 5.4, in its order."""
# The names under which SentenceTransformer.encode_query and encode_document look for a prompt, in their order.
QUERY, PRODUCT = ("query",), ("document", "passage", "corpus")

# The keys of its files that are honoured here, with the values they may have (None: any). Others must say nothing.
_Keys = Mapping[str, tuple[JsonValue, ...] | None]
_OF_SENTENCE: _Keys = {
    "max_seq_length": None,
    "do_lower_case": (True, False),
    "processor_kwargs.model_max_length": None,
    "tokenizer_args.model_max_length": None,  # its earlier name
    "transformer_task": ("feature-extraction",),
    "modality_config.text.method": ("forward",),
    "modality_config.text.method_output_name": ("last_hidden_state",),
    "module_output_name": ("token_embeddings",),
    "unpad_inputs": (True, False),
}
_OF_POOLING: _Keys = {
    "embedding_dimension": None,
    "word_embedding_dimension": None,
    "pooling_mode": None,
    "include_prompt": (True, False),
    **dict.fromkeys(LEGACY, (True, False)),
}
_OF_NORMALIZE: _Keys = dict.fromkeys(("module_input_name", "module_output_name"), ("sentence_embedding",))
_OF_MODEL: _Keys = {
    "__version__": None,
    "model_type": ("SentenceTransformer",),
    "prompts": None,
    "default_prompt_name": None,
    "similarity_fn_name": ("cosine", "dot", "euclidean"),
}


@dataclass(frozen=True)
class FolderSettings:
    """How a text becomes a vector there."""

    format: Literal["sentence-transformers", "transformers"]
    folder: str
    """Prefix of the Hugging Face files in the folder, with a slash at its end; mostly ''."""
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


class _Object(RootModel[dict[str, JsonValue]]):
    """A JSON object as sentence-transformers writes it"""


def _read_keys(source: Source, name: str, known: _Keys) -> dict[str, JsonValue]:
    """Return the keys that are set, nested ones joined by dots. Raises ConfigError for what has no counterpart here."""
    found: dict[str, JsonValue] = {}

    def take(key: str, value: JsonValue) -> None:
        if isinstance(value, dict) and key not in known:
            for inner, content in value.items():
                take(f"{key}.{inner}", content)
            return
        allowed = known.get(key, ())
        if value and allowed is not None and value not in allowed:
            raise ConfigError(
                f"{source.where(name)}: {key} = {value!r} has no counterpart in trnpipe",
                expected=f"{' or '.join(map(repr, allowed))}" if allowed else "nothing under that key",
                next_command="correct that file, or name another model",
            )
        found[key] = value

    for key, value in source.json(name, _Object).root.items():
        take(key, value)
    return found


def read_folder_settings(source: Source, pooling_of_plain: Pooling) -> FolderSettings:
    """`pooling_of_plain`: of a folder without modules.json. Raises ConfigError naming what has no counterpart here."""
    if not source.has(MODULES):
        note = f"pooling {pooling_of_plain}, from model.pooling"
        return FolderSettings("transformers", "", pooling_of_plain, None, lowercase=False, notes=(note,))
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
    sentence = _read_keys(source, folder + SENTENCE, _OF_SENTENCE) if source.has(folder + SENTENCE) else {}
    model = _read_keys(source, MODEL, _OF_MODEL) if source.has(MODEL) else {}
    for module in modules[2:]:
        name = join_key(folder_key(module.path), "config.json")
        if source.has(name):
            _read_keys(source, name, _OF_NORMALIZE)
    if "Normalize" not in kinds and model.get("similarity_fn_name") not in (None, "cosine"):
        raise ConfigError(
            f"{source.where(MODEL)}: similarity_fn_name {model['similarity_fn_name']} without a Normalize module",
            expected="cosine, or that module: vectors have length one in trnpipe",
            next_command="import a model that was trained for cosine similarity",
        )
    found = _read_keys(source, f"{pooling}config.json", _OF_POOLING)
    where, mode = source.where(f"{pooling}config.json"), _pooling_mode(found)
    if mode not in POOLINGS:
        raise ConfigError(
            f"{where}: pooling {mode}",
            expected="one of " + ", ".join(POOLINGS),
            next_command="import a model with that pooling",
        )
    query, product, has_prompts, notes = _prompts(source, model)
    if has_prompts and found.get("include_prompt") is False:
        raise ConfigError(
            f"{where}: include_prompt false, with prompts before texts",
            expected="a pooling over all tokens, those of the prompt too",
            next_command="import a model with include_prompt true, or remove its prompts",
        )
    if "Normalize" not in kinds:
        notes += ("sentence-transformers leaves these vectors at their length; here they have length one",)
    longest = (
        sentence.get(key)
        for key in ("max_seq_length", "processor_kwargs.model_max_length", "tokenizer_args.model_max_length")
    )
    max_tokens = next((value for value in longest if value), None)
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 3):
        raise ConfigError(f"{source.where(folder + SENTENCE)}: max_seq_length {max_tokens!r}", expected="3 or more")
    return FolderSettings(
        "sentence-transformers",
        folder,
        POOLINGS[mode],
        max_tokens,
        bool(sentence.get("do_lower_case")),
        notes,
        query,
        product,
    )


def _pooling_mode(found: Mapping[str, JsonValue]) -> str:
    """Return the one name, or all of them joined."""
    modes = found.get("pooling_mode") or [mode for key, mode in LEGACY.items() if found.get(key)] or "mean"
    return " + ".join(map(str, modes)) if isinstance(modes, list) else str(modes)


def _prompts(source: Source, model: Mapping[str, JsonValue]) -> tuple[str, str, bool, tuple[str, ...]]:
    """Return the prompts of queries and of products, whether there are any, and notes.

    Raises ConfigError for one before every text.
    """
    given = model.get("prompts") or {}
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values() if text):
        raise ConfigError(f"{source.where(MODEL)}: prompts {given!r}", expected="texts by name")
    prompts = {name: str(text) for name, text in given.items() if text}
    query, product = (next((prompts[name] for name in names if name in prompts), "") for names in (QUERY, PRODUCT))
    others = sorted((name, text) for name, text in prompts.items() if text not in (query, product))
    used = ", ".join(f"{name} {text!r}" for name, text in others)
    notes = [f"sentence-transformers may put further prompts before texts ({used}); trnpipe does not"] if used else []
    if query or product:
        notes.append(f"queries begin with {query!r}, products with {product!r}, as its prompts say")
    always = prompts.get(str(model.get("default_prompt_name")), "")
    if always and not always == query == product:
        raise ConfigError(
            f"{source.where(MODEL)}: default_prompt_name puts {always!r} before every text",
            expected="prompts by the names query and document",
            next_command="set default_prompt_name to null there, and prompts query and document",
        )
    return query, product, bool(prompts), tuple(notes)


TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BERT = ("BertTokenizer", "BertTokenizerFast", "MPNetTokenizer", "MPNetTokenizerFast")
_OF_FAMILIES = ("RobertaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer")
AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend", *_OF_FAMILIES, *(f"{name}Fast" for name in _OF_FAMILIES))


class _Added(Foreign):
    content: str


class TokenizerJson(Foreign):
    """tokenizer_config.json as transformers writes it"""

    tokenizer_class: str = BERT[0]
    do_lower_case: bool = True
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool = True
    model_max_length: float | None = Field(None, ge=3)
    added_tokens_decoder: dict[str, _Added] = Field(default_factory=dict)
    add_prefix_space: bool | None = None
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
    _check_added(config, content, source.where(name), where)
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


def _check_added(config: TokenizerJson, content: Mapping[str, Any], name: str, where: str) -> None:
    """Raise ConfigError for what transformers would add to the tokenizer.json from the file beside it."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    for number, added in config.added_tokens_decoder.items():
        if str(tokenizer.token_to_id(added.content)) != number:
            raise ConfigError(
                f"{name}: added_tokens_decoder has {added.content!r} as {number}, and {where} does not",
                expected="a tokenizer.json with all of its tokens",
                next_command="save both again: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            )
    space = (content.get("pre_tokenizer") or {}).get("add_prefix_space")
    if None not in (space, config.add_prefix_space) and space != config.add_prefix_space:
        raise ConfigError(
            f"{name}: add_prefix_space {config.add_prefix_space}, and {where} has {space}",
            expected="the same in both",
            next_command="save both again: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )


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
