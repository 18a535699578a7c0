"""A Hugging Face folder, of sentence-transformers or plain: pooling, prompts and tokenizer as this program uses them.

For a BERT tokenizer, `transformers` takes lower-casing and accents from tokenizer_config.json, whatever tokenizer.json
says (tokenization_bert.py), and sentence-transformers may lower-case on top of both.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers
from pydantic import Field, JsonValue, RootModel

from pipeline.convert.source import TOKENIZER_BYTES, Source
from pipeline.core.errors import ConfigError
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.storage import folder_key
from pipeline.model.config import Pooling
from pipeline.model.hf import Foreign

MODULES, SENTENCE, MODEL = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLINGS: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Name in sentence-transformers to the name here."""
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

_LENGTHS = ("max_seq_length", "processor_kwargs.model_max_length", "tokenizer_args.model_max_length")
# Keys that are read here, or that change no vector. What has no counterpart must say nothing.
_READ = frozenset(
    {*_LENGTHS, "do_lower_case", "unpad_inputs", "embedding_dimension", "word_embedding_dimension", "pooling_mode"}
    | {*LEGACY, "include_prompt", "__version__", "prompts", "default_prompt_name", "similarity_fn_name"}
)
_ONLY: Mapping[str, str] = {
    "transformer_task": "feature-extraction",
    "modality_config.text.method": "forward",
    "modality_config.text.method_output_name": "last_hidden_state",
    "module_output_name": "token_embeddings",
    "model_type": "SentenceTransformer",
}


@dataclass(frozen=True)
class FolderSettings:
    """How a text becomes a vector there."""

    format: Literal["sentence-transformers", "transformers"]
    pooling: Pooling
    folder: str = ""
    """Prefix of the Hugging Face files in the folder, with a slash at its end; mostly ''."""
    max_tokens: int | None = None
    lowercase: bool = False
    notes: tuple[str, ...] = ()
    query_prefix: str = ""
    product_prefix: str = ""


class _Module(Foreign):
    type: str
    path: str


class _Modules(RootModel[tuple[_Module, ...]]):
    """modules.json as sentence-transformers writes it"""


class _Object(RootModel[dict[str, JsonValue]]):
    """A JSON object as sentence-transformers writes it"""


def _refused(where: str, seen: str, expected: str) -> ConfigError:
    return ConfigError(f"{where}: {seen}", expected=expected, next_command="correct that file, or import another model")


def _read_keys(source: Source, name: str) -> dict[str, JsonValue]:
    """Return the keys that are set, nested ones joined by dots. Raises ConfigError for what has no counterpart here."""
    found: dict[str, JsonValue] = {}
    left = list(source.json(name, _Object).root.items())
    while left:
        key, value = left.pop()
        if isinstance(value, dict) and key not in _READ:
            left += [(f"{key}.{inner}", content) for inner, content in value.items()]
        elif value and key not in _READ and value != _ONLY.get(key):
            expected = repr(_ONLY[key]) if key in _ONLY else "nothing under that key"
            raise _refused(source.where(name), f"{key} = {value!r} has no counterpart in trnpipe", expected)
        else:
            found[key] = value
    return found


def read_folder_settings(source: Source, pooling_of_plain: Pooling) -> FolderSettings:
    """Read what sentence-transformers adds to a Hugging Face folder; without modules.json, return `pooling_of_plain`.

    Raises ConfigError naming what has no counterpart here.
    """
    if not source.has(MODULES):
        return FolderSettings("transformers", pooling_of_plain, notes=(f"pooling {pooling_of_plain}, model.pooling",))
    modules = source.json(MODULES, _Modules).root
    types = [module.type for module in modules]
    kinds = [type_.rpartition(".")[2] for type_ in types if type_.startswith("sentence_transformers.")]
    if len(kinds) != len(types) or kinds not in (
        ["Transformer", "Pooling"],
        ["Transformer", "Pooling", "Normalize"],
    ):
        raise _refused(
            source.where(MODULES),
            f"modules {', '.join(types) or 'none'}",
            "Transformer, Pooling and perhaps Normalize, of sentence-transformers",
        )
    folder, pooling = (f"{path}/" if (path := folder_key(module.path)) else "" for module in modules[:2])
    sentence = _read_keys(source, folder + SENTENCE) if source.has(folder + SENTENCE) else {}
    model = _read_keys(source, MODEL) if source.has(MODEL) else {}
    found = _read_keys(source, f"{pooling}config.json")

    where = source.where(f"{pooling}config.json")
    modes = found.get("pooling_mode") or [mode for key, mode in LEGACY.items() if found.get(key)] or "mean"
    mode = " + ".join(map(str, modes)) if isinstance(modes, list) else str(modes)
    if mode not in POOLINGS:
        raise _refused(where, f"pooling {mode}", f"one of {', '.join(POOLINGS)}")
    query, product, notes = _prompts(source.where(MODEL), model)
    if (query or product) and found.get("include_prompt") is False:
        raise _refused(where, "include_prompt false, with prompts before texts", "a pooling over all tokens")
    similarity, is_normalized = model.get("similarity_fn_name"), "Normalize" in kinds
    # Vectors have length one in trnpipe, so that the three rank alike.
    if similarity not in (None, "cosine", *(("dot", "euclidean") if is_normalized else ())):
        seen = f"similarity_fn_name {similarity} {'with' if is_normalized else 'without'} a Normalize module"
        raise _refused(source.where(MODEL), seen, "cosine")
    if not is_normalized:
        notes += ("sentence-transformers leaves these vectors at their length; here they have length one",)
    max_tokens = next((value for value in map(sentence.get, _LENGTHS) if value), None)
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 3):
        raise _refused(source.where(folder + SENTENCE), f"max_seq_length {max_tokens!r}", "3 or more")
    lowercase = bool(sentence.get("do_lower_case"))
    return FolderSettings("sentence-transformers", POOLINGS[mode], folder, max_tokens, lowercase, notes, query, product)


def _prompts(where: str, model: Mapping[str, JsonValue]) -> tuple[str, str, tuple[str, ...]]:
    """Return the prompts of queries and of products, and notes. Raises ConfigError for one before every text."""
    given = model.get("prompts") or {}
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values() if text):
        raise _refused(where, f"prompts {given!r}", "texts by name")
    prompts = {name: str(text) for name, text in given.items() if text}
    query, product = (next((prompts[name] for name in names if name in prompts), "") for names in (QUERY, PRODUCT))
    notes = []
    if others := sorted(f"{name} {text!r}" for name, text in prompts.items() if text not in (query, product)):
        notes.append(f"sentence-transformers may put further prompts before texts ({', '.join(others)}); not trnpipe")
    if query or product:
        notes.append(f"queries begin with {query!r}, products with {product!r}, as its prompts say")
    always = prompts.get(str(model.get("default_prompt_name")), "")
    if always and not always == query == product:
        seen = f"default_prompt_name puts {always!r} before every text"
        raise _refused(where, seen, "default_prompt_name null, and prompts named query and document")
    return query, product, tuple(notes)


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


def read_tokenizer(source: Source, folder: str, *, lowercase: bool) -> tuple[TextTokenizer, int | None, list[str]]:
    """Return the tokenizer, the longest text its config allows (None: no limit), and what was changed in it.

    `lowercase`: sentence-transformers lower-cases before the tokenizer. Raises ConfigError, DataError.
    """
    name, where = source.where(folder + TOKENIZER_CONFIG), source.where(folder + TOKENIZER)
    has_config = source.has(folder + TOKENIZER_CONFIG)
    config = source.json(folder + TOKENIZER_CONFIG, TokenizerJson) if has_config else TokenizerJson()
    if config.tokenizer_class not in BERT + AS_IT_IS:
        raise _refused(name, f"tokenizer class {config.tokenizer_class}", f"one of {', '.join(BERT + AS_IT_IS)}")
    data = source.read(folder + TOKENIZER, TOKENIZER_BYTES)
    tokenizer, notes = TextTokenizer(data, where), []
    content: dict[str, Any] = json.loads(data)
    theirs = tokenizers.Tokenizer.from_str(data.decode())
    for number, added in config.added_tokens_decoder.items():
        if str(theirs.token_to_id(added.content)) != number:
            seen = f"added_tokens_decoder has {added.content!r} as {number}, and {where} does not"
            raise _refused(name, seen, "a tokenizer.json with all of its tokens")
    space = (content.get("pre_tokenizer") or {}).get("add_prefix_space")
    if None not in (space, config.add_prefix_space) and space != config.add_prefix_space:
        raise _refused(name, f"add_prefix_space {config.add_prefix_space}, and {where} has {space}", "the same in both")
    wanted = content.get("normalizer")
    if config.tokenizer_class in BERT:
        # `transformers` builds a tokenizer of its own from the vocabulary: the file must hold the same one.
        parts = [(content.get(part) or {}).get("type") for part in ("model", "pre_tokenizer")]
        if parts != ["WordPiece", "BertPreTokenizer"]:
            seen = f"{parts[0]} after {parts[1]} in a BERT tokenizer"
            raise _refused(where, seen, "WordPiece after BertPreTokenizer, or tokenizer_class PreTrainedTokenizerFast")
        wanted = {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.tokenize_chinese_chars,
            "strip_accents": config.strip_accents,
            "lowercase": config.do_lower_case,
        }
    steps = wanted["normalizers"] if wanted and wanted["type"] == "Sequence" else [wanted] if wanted else []
    if lowercase and not any(step.get("type") == "Lowercase" or step.get("lowercase") for step in steps):
        wanted = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *steps]}
    if wanted != content.get("normalizer"):
        content["normalizer"] = wanted
        notes.append("the normaliser of its tokenizer.json gives way to its other files, as in transformers")
        tokenizer = TextTokenizer(json.dumps(content, ensure_ascii=False).encode(), where)
    if config.tokenizer_class in AS_IT_IS:
        theirs.no_truncation()
        theirs.no_padding()
        # Lower-casing has nothing to do with the tokens around a text.
        for text in ("a sample text", ""):
            found, expected = theirs.encode(text).ids, tokenizer.encode([text]).ids.tolist()
            if found != expected:
                raise _refused(where, f"makes {found} of {text!r}", f"{expected}: [CLS], the tokens, [SEP]")
    longest = config.model_max_length
    return tokenizer, None if longest is None or longest > 2**31 else int(longest), notes
