"""A Hugging Face folder, of sentence-transformers or plain: encoder, pooling and tokenizer as this program uses them.

For a BERT tokenizer, `transformers` takes lower-casing and accents from tokenizer_config.json, whatever tokenizer.json
says (tokenization_bert.py), and sentence-transformers may lower-case on top of both.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import tokenizers
from pydantic import AliasChoices, ConfigDict, Field, JsonValue, RootModel, ValidationError, model_validator

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


class _Honoured(Foreign):
    """A file whose every key is honoured here; others may only say nothing: null, false or empty."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _no_other_key(self) -> Self:
        other = next((f"{key} = {value!r}" for key, value in (self.model_extra or {}).items() if value), "")
        if other:
            raise ValueError(f"{other} has no counterpart in trnpipe")
        return self


class _Pooling(_Honoured):
    """The config.json of a sentence-transformers pooling, over the tokens of the prompt too"""

    embedding_dimension: int | None = None
    word_embedding_dimension: int | None = None
    pooling_mode: str | tuple[str, ...] | None = None
    include_prompt: bool = True
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False

    def mode(self) -> str:
        """The one name, or all of them joined."""
        legacy = tuple(mode for key, mode in LEGACY.items() if getattr(self, key))
        modes = self.pooling_mode or legacy or "mean"
        return modes if isinstance(modes, str) else " + ".join(modes)


class _Processor(_Honoured):
    """How its tokenizer is opened"""

    model_max_length: int | None = Field(None, ge=3)


class _Text(_Honoured):
    """What is called for a text"""

    method: Literal["forward"] = "forward"
    method_output_name: Literal["last_hidden_state"] = "last_hidden_state"


class _Modality(_Honoured):
    """What a model is given"""

    text: _Text = _Text()


class _Sentence(_Honoured):
    """sentence_bert_config.json as sentence-transformers writes it"""

    max_seq_length: int | None = Field(None, ge=3)
    do_lower_case: bool = False
    processor_kwargs: _Processor = Field(
        _Processor(), validation_alias=AliasChoices("processor_kwargs", "tokenizer_args")
    )
    transformer_task: Literal["feature-extraction"] = "feature-extraction"
    modality_config: _Modality = _Modality()
    module_output_name: Literal["token_embeddings"] = "token_embeddings"
    unpad_inputs: bool | None = None


class _Normalize(_Honoured):
    """The config.json of a sentence-transformers Normalize, of the pooled vector"""

    module_input_name: Literal["sentence_embedding"] = "sentence_embedding"
    module_output_name: Literal["sentence_embedding"] = "sentence_embedding"


# The names under which SentenceTransformer.encode_query and encode_document look for a prompt, in their order.
QUERY, PRODUCT = ("query",), ("document", "passage", "corpus")


class _Model(_Honoured):
    """config_sentence_transformers.json as sentence-transformers writes it"""

    versions: JsonValue = Field(None, validation_alias="__version__")
    model_type: Literal["SentenceTransformer"] = "SentenceTransformer"
    prompts: dict[str, str | None] = Field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity_fn_name: Literal["cosine", "dot", "euclidean"] | None = None


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
    model = source.json(MODEL, _Model) if source.has(MODEL) else _Model()
    for module in modules[2:]:
        name = join_key(folder_key(module.path), "config.json")
        if source.has(name):
            source.json(name, _Normalize)
    prompts = {name: text for name, text in model.prompts.items() if text}
    query, product = (next((prompts[name] for name in names if name in prompts), "") for names in (QUERY, PRODUCT))
    others = {name: text for name, text in prompts.items() if text not in (query, product)}
    used = ", ".join(f"{name} {text!r}" for name, text in sorted(others.items()))
    told = [f"sentence-transformers may put further prompts before texts ({used}); trnpipe does not"] if used else []
    if query or product:
        told.append(f"queries begin with {query!r}, products with {product!r}, as its prompts say")
    found = source.json(f"{pooling}config.json", _Pooling)
    always = prompts.get(model.default_prompt_name or "", "")
    if always and not always == query == product:
        raise ConfigError(
            f"{source.where(MODEL)}: default_prompt_name {model.default_prompt_name!r}: {always!r} before every text",
            expected="prompts by the names query and document",
            next_command="set default_prompt_name to null there, and prompts query and document",
        )
    if "Normalize" not in kinds:
        if model.similarity_fn_name not in (None, "cosine"):
            raise ConfigError(
                f"{source.where(MODEL)}: similarity_fn_name {model.similarity_fn_name} without a Normalize module",
                expected="cosine, or that module: vectors have length one in trnpipe",
                next_command="import a model that was trained for cosine similarity",
            )
        told.append("sentence-transformers leaves these vectors at their length; here they have length one")
    where, mode = source.where(f"{pooling}config.json"), found.mode()
    if mode not in POOLINGS:
        raise ConfigError(
            f"{where}: pooling {mode}",
            expected="one of " + ", ".join(POOLINGS),
            next_command="import a model with that pooling",
        )
    if prompts and not found.include_prompt:
        raise ConfigError(
            f"{where}: include_prompt false, with prompts before texts",
            expected="a pooling over all tokens, those of the prompt too",
            next_command="import a model with include_prompt true, or remove its prompts",
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
