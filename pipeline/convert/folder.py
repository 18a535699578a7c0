"""Read the files of a model that a different tool has written, from a folder or file on any storage.

Because the source may not be trusted, files have size limits and none of their code is executed.

Note that for a BERT tokenizer, `transformers` determines lower-casing and the handling of accents from
tokenizer_config.json and ignores tokenizer.json (see tokenization_bert.py). In addition, sentence-transformers may be
configured to lower-case texts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, TypeVar

import tokenizers
from pydantic import BaseModel, Field, JsonValue, RootModel

from pipeline.checkpoint.store import KIND as CHECKPOINT
from pipeline.checkpoint.store import Parent, PublishedWeights
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.format import format_bytes
from pipeline.core.manifest import FileRecord, Manifest
from pipeline.core.progress import Advance, progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.commit import check_record, read_manifest, stream_record
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, folder_key, join_key, open_parent, os_errors
from pipeline.model.config import InputSpec, ModelConfig, Pooling
from pipeline.model.hf import Foreign, parse_json
from pipeline.registry.signing import Digests, check_files, read_signature

if TYPE_CHECKING:
    from pipeline.registry.keys import PublicKey

_JSON_BYTES = 4 * 2**20
TOKENIZER_BYTES = 128 * 2**20
_WEIGHT_BYTES = 32 * 2**30  # corresponds to eight billion parameters in fp32

EXPORT, EXPORT_FILE = "export", "trnpipe.json"
"""The manifest kind and the description file of an exported folder."""
SCHEMA_VERSION = 1
Format = Literal["sentence-transformers", "safetensors", "torchscript", "onnx"]

Json = TypeVar("Json", bound=BaseModel)


class ExportRecord(Record):
    """The description of an exported folder, which is stored in EXPORT_FILE and read by an import."""

    retired: ClassVar[dict[str, Any]] = {"programs": []}

    schema_version: int = SCHEMA_VERSION
    format: str = Field(description="A Format, or one of transformers and torch if written by an earlier version")
    checkpoint: Parent = Field(description="The exported checkpoint, which becomes the parent of an imported one")
    model: ModelConfig
    inputs: InputSpec
    max_tokens: int = Field(ge=3, description="Maximum number of tokens of a text, including [CLS] and [SEP]")
    tokenizer_fingerprint: str
    watermark: str
    partitions: dict[str, str]
    also_seen: dict[str, str] = Field({}, description="See the state of a checkpoint")
    trained_head: bool = True
    published: PublishedWeights | None = Field(None, description="See the state of a checkpoint")
    settings_hash: str
    code_version: str
    weights: tuple[str, ...] = Field(description="Files that contain all tensors (empty for a TorchScript program)")
    family: Literal["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "modernbert"] = Field(
        "bert", description="Naming scheme of the encoder's tensors (only earlier versions used that of RoBERTa)"
    )


@dataclass
class ImportSource:
    """A folder or a single file to import. The files of a trnpipe export are verified against its manifest."""

    storage: Storage
    folder: str
    """Prefix of the folder. Empty if the source is a single file."""
    file: str = ""
    """Name of the file if the source is a single file."""
    manifest: Manifest | None = None
    records: dict[str, FileRecord] = field(default_factory=dict)
    """Sizes and checksums of all files that have been read."""
    signed: Digests | None = None
    """SHA-256 of the files by name if they must be signed. Files that are not listed are refused."""

    @property
    def uri(self) -> str:
        return self.where(self.file)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all files that have been read."""
        return fingerprint({name: record.xxh3_128 for name, record in self.records.items()})

    def where(self, name: str) -> str:
        """Return the URI of a file, or that of the folder if `name` is empty."""
        return self.storage.uri(join_key(self.folder, name) if name else self.folder)

    def has(self, name: str) -> bool:
        return self.storage.stat(join_key(self.folder, name)) is not None

    def read(self, name: str, limit_bytes: int = _JSON_BYTES) -> bytes:
        """Read a small file. Raises CheckpointError if it is missing, too large or does not match the manifest."""
        data = self.storage.read_bytes(self._checked_key(name, limit_bytes))
        self._check(name, BytesIO(data))
        return data

    def json(self, name: str, model: type[Json]) -> Json:
        """Read a small JSON file. Raises ConfigError for the first invalid field."""
        return parse_json(self.read(name), model, self.where(name))

    def local(self, name: str, scratch: Path) -> Path:
        """Return the local path of a weights file, after downloading it if necessary. Raises the errors of `read`."""
        key = self._checked_key(name, _WEIGHT_BYTES)
        path = self.storage.local_path(key)
        if path is None:
            path = scratch / name.replace("/", "-")
            self.storage.download(key, path)
        with (
            os_errors("reading", self.where(name)),
            path.open("rb") as file,
            progress(f"reading {name}", path.stat().st_size, "bytes") as advance,
        ):
            self._check(name, file, advance)
        return path

    def _checked_key(self, name: str, limit_bytes: int) -> str:
        key = join_key(self.folder, name)
        stat = self.storage.stat(key)
        if stat is None or stat.size_bytes > limit_bytes:
            raise CheckpointError(
                f"{self.where(name)} {f'has {format_bytes(stat.size_bytes)}' if stat else 'does not exist'}",
                expected=f"a file of at most {format_bytes(limit_bytes)}",
                next_command="copy the complete folder, or import only the weights file",
            )
        return key

    def _check(self, name: str, file: BinaryIO, advance: Advance = lambda count: None) -> None:
        hasher = hashlib.sha256()
        also = (lambda block: None) if self.signed is None else hasher.update
        self.records[name] = record = stream_record(file, self.storage.stop, advance, also)
        if self.signed is not None:
            only = {name: self.signed[name]} if name in self.signed else {}
            check_files(self.storage, self.folder, only, {name: hasher.hexdigest()})
        if self.manifest is not None and name in self.manifest.files:
            try:
                check_record(self.where(name), self.manifest.files[name], record)
            except DataError as error:
                raise CheckpointError(error.seen, expected=error.expected, next_command="export it again") from error


def open_source(text: str, *, retry: RetryPolicy, stop: StopSignal, keys: "Sequence[PublicKey]" = ()) -> ImportSource:
    """Open the folder or file at a path or URI.

    If there are keys, one of them must have signed all files that are read. The signature of a single file is that of
    its folder. Raises ConfigError if the source does not exist or is a trnpipe checkpoint, and CheckpointError if it
    has no valid signature or a signed file is missing.
    """
    storage, name = open_parent(text, retry=retry, stop=stop)
    if storage.stat(name) is not None:
        return ImportSource(storage, "", file=name, signed=read_signature(storage, "", keys)[1] if keys else None)
    if next(iter(storage.list(name)), None) is None:
        raise ConfigError(
            f"{storage.uri(name)} does not exist",
            expected="a Hugging Face folder, a safetensors file or a torch.save file",
            next_command="check the path",
        )
    try:
        manifest = read_manifest(storage, name)
    except DataError:  # a different program may also write a MANIFEST.json
        manifest = None
    if manifest is not None and manifest.kind == CHECKPOINT:
        raise ConfigError(
            f"{storage.uri(name)} is already a trnpipe checkpoint",
            expected="a model of a different tool, or a folder written by trnpipe export",
            next_command=f"--train.start {storage.uri(name)}",
        )
    signed = read_signature(storage, name, keys)[1] if keys else None
    missing = {file: digest for file, digest in (signed or {}).items() if storage.stat(join_key(name, file)) is None}
    check_files(storage, name, missing, {})
    is_export = manifest is not None and manifest.kind == EXPORT
    return ImportSource(storage, name, manifest=manifest if is_export else None, signed=signed)


# Read the files that sentence-transformers adds to a Hugging Face folder.

MODULES, SENTENCE, MODEL = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLINGS: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
"""Pooling modes in trnpipe by their names in sentence-transformers."""
LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Pooling modes by their configuration keys in sentence-transformers before 5.4, in the same order."""
# The prompt names that SentenceTransformer.encode_query and encode_document use, in order of precedence.
QUERY, PRODUCT = ("query",), ("document", "passage", "corpus")

_LENGTHS = ("max_seq_length", "processor_kwargs.model_max_length", "tokenizer_args.model_max_length")
# These keys are either read here or do not affect vectors. All other keys must be empty or have the value in _ONLY.
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
    """Settings that the other tool uses to compute the vector of a text."""

    format: Literal["sentence-transformers", "transformers"]
    pooling: Pooling
    folder: str = ""
    """Prefix of the Hugging Face files in the folder, including a trailing slash. It is usually empty."""
    max_tokens: int | None = None
    lowercase: bool = False
    query_prefix: str = ""
    product_prefix: str = ""
    notes: tuple[str, ...] = ()


class _Module(Foreign):
    type: str
    path: str


class _Modules(RootModel[tuple[_Module, ...]]):
    """The modules.json of sentence-transformers."""


class _Object(RootModel[dict[str, JsonValue]]):
    """A JSON object of sentence-transformers."""


def _unsupported(
    where: str, seen: str, expected: str, next_command: str = "correct the file, or import a different model"
) -> ConfigError:
    return ConfigError(f"{where}: {seen}", expected=expected, next_command=next_command)


def _read_keys(source: ImportSource, name: str) -> dict[str, Any]:
    """Read a JSON object and join nested keys by dots. Raises ConfigError if it has an unsupported key."""
    values: dict[str, JsonValue] = {}
    pending = list(source.json(name, _Object).root.items())
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict) and key not in _READ:
            pending += [(f"{key}.{inner}", content) for inner, content in value.items()]
        elif value and key not in _READ and value != _ONLY.get(key):
            expected = repr(_ONLY[key]) if key in _ONLY else "no value for that key"
            raise _unsupported(source.where(name), f"{key} = {value!r} has no counterpart in trnpipe", expected)
        else:
            values[key] = value
    return values


def read_folder_settings(source: ImportSource, default_pooling: Pooling) -> FolderSettings:
    """Read the sentence-transformers settings of a Hugging Face folder.

    Folders without a modules.json get default settings. Raises ConfigError for the first unsupported setting.
    """
    if not source.has(MODULES):
        return FolderSettings(
            "transformers", default_pooling, notes=(f"using the pooling of model.pooling, {default_pooling}",)
        )
    modules = source.json(MODULES, _Modules).root
    kinds = [module.type.removeprefix("sentence_transformers.").rpartition(".")[2] for module in modules]
    is_standard = all(module.type.startswith("sentence_transformers.") for module in modules)
    if not is_standard or kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        seen = f"modules {', '.join(module.type for module in modules) or 'none'}"
        expected = "Transformer, Pooling and optionally Normalize of sentence-transformers"
        next_command = f"--model.init-from {source.where('').rstrip('/')}, which reads the encoder alone"
        raise _unsupported(source.where(MODULES), seen, expected, next_command)
    folder, pooling = (f"{path}/" if (path := folder_key(module.path)) else "" for module in modules[:2])
    sentence = _read_keys(source, folder + SENTENCE) if source.has(folder + SENTENCE) else {}
    model = _read_keys(source, MODEL) if source.has(MODEL) else {}
    pooling_config = _read_keys(source, f"{pooling}config.json")

    where = source.where(f"{pooling}config.json")
    modes = pooling_config.get("pooling_mode") or [m for key, m in LEGACY.items() if pooling_config.get(key)] or "mean"
    mode = " + ".join(map(str, modes)) if isinstance(modes, list) else str(modes)
    if mode not in POOLINGS:
        raise _unsupported(where, f"pooling {mode}", f"one of {', '.join(POOLINGS)}")
    query, product, notes = _prompts(source.where(MODEL), model)
    if (query or product) and pooling_config.get("include_prompt") is False:
        raise _unsupported(where, "include_prompt is false, but texts have prompts", "pooling over all tokens")
    similarity, is_normalized = model.get("similarity_fn_name"), "Normalize" in kinds
    # All three functions result in the same ranking if vectors have length one, which is always the case in trnpipe.
    if similarity not in (None, "cosine", *(("dot", "euclidean") if is_normalized else ())):
        seen = f"similarity_fn_name {similarity} {'with' if is_normalized else 'without'} a Normalize module"
        raise _unsupported(source.where(MODEL), seen, "cosine")
    if not is_normalized:
        notes += ("vectors are normalised in trnpipe, but not in sentence-transformers",)
    max_tokens = next((value for value in map(sentence.get, _LENGTHS) if value), None)
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 3):
        raise _unsupported(source.where(folder + SENTENCE), f"max_seq_length {max_tokens!r}", "3 or more")
    lowercase = bool(sentence.get("do_lower_case"))
    return FolderSettings("sentence-transformers", POOLINGS[mode], folder, max_tokens, lowercase, query, product, notes)


def _prompts(where: str, model: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """Return (query prompt, product prompt, notes). Raises ConfigError if there is a default prompt for all texts."""
    values = model.get("prompts") or {}
    if not isinstance(values, dict) or not all(isinstance(text, str) for text in values.values() if text):
        raise _unsupported(where, f"prompts {values!r}", "texts by name")
    prompts = {name: text for name, text in values.items() if text}
    query, product = (next((prompts[name] for name in names if name in prompts), "") for names in (QUERY, PRODUCT))
    notes = []
    if others := sorted(f"{name} {text!r}" for name, text in prompts.items() if text not in (query, product)):
        notes.append(f"the following prompts are not used: {', '.join(others)}")
    if query or product:
        notes.append(f"using {query!r} as the prompt of queries and {product!r} as that of products")
    default = prompts.get(str(model.get("default_prompt_name")), "")
    if default and not default == query == product:
        seen = f"default_prompt_name prepends {default!r} to every text"
        raise _unsupported(where, seen, "default_prompt_name null, and prompts named query and document")
    return query, product, tuple(notes)


TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BERT = ("BertTokenizer", "BertTokenizerFast", "MPNetTokenizer", "MPNetTokenizerFast")
_OF_FAMILIES = ("RobertaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer")
AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend", *_OF_FAMILIES, *(f"{name}Fast" for name in _OF_FAMILIES))


class _Added(Foreign):
    content: str


class TokenizerJson(Foreign):
    """The tokenizer_config.json of transformers."""

    tokenizer_class: str = BERT[0]
    do_lower_case: bool = True
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool = True
    model_max_length: float | None = Field(None, ge=3)
    added_tokens_decoder: dict[str, _Added] = Field(default_factory=dict)
    add_prefix_space: bool | None = None
    truncation_side: Literal["right"] = "right"


def read_tokenizer(
    source: ImportSource, folder: str, *, lowercase: bool
) -> tuple[TextTokenizer, int | None, list[str]]:
    """Return the tokenizer, its configured maximum number of tokens (or None), and notes about changes to it.

    Set `lowercase` if sentence-transformers lower-cases texts before they are tokenised. Raises ConfigError or
    DataError if the tokenizer is not supported.
    """
    name, where = source.where(folder + TOKENIZER_CONFIG), source.where(folder + TOKENIZER)
    has_config = source.has(folder + TOKENIZER_CONFIG)
    config = source.json(folder + TOKENIZER_CONFIG, TokenizerJson) if has_config else TokenizerJson()
    if config.tokenizer_class not in BERT + AS_IT_IS:
        raise _unsupported(name, f"tokenizer class {config.tokenizer_class}", f"one of {', '.join(BERT + AS_IT_IS)}")
    data = source.read(folder + TOKENIZER, TOKENIZER_BYTES)
    tokenizer, notes = TextTokenizer(data, where), []
    content: dict[str, Any] = json.loads(data)
    original = tokenizers.Tokenizer.from_str(data.decode())
    for number, added in config.added_tokens_decoder.items():
        if str(original.token_to_id(added.content)) != number:
            seen = f"added_tokens_decoder has {added.content!r} as {number}, but {where} does not"
            raise _unsupported(name, seen, "a tokenizer.json that contains all added tokens")
    space = (content.get("pre_tokenizer") or {}).get("add_prefix_space")
    if None not in (space, config.add_prefix_space) and space != config.add_prefix_space:
        seen = f"add_prefix_space is {config.add_prefix_space}, but {space} in {where}"
        raise _unsupported(name, seen, "the same value in both")
    normalizer = content.get("normalizer")
    if config.tokenizer_class in BERT:
        # `transformers` ignores everything in this file except the vocabulary, and builds the standard BERT tokenizer.
        # Therefore, the file must describe the same tokenizer.
        model, pre_tokenizer = ((content.get(part) or {}).get("type") for part in ("model", "pre_tokenizer"))
        if (model, pre_tokenizer) != ("WordPiece", "BertPreTokenizer"):
            seen = f"{model} after {pre_tokenizer} in a BERT tokenizer"
            expected = "WordPiece after BertPreTokenizer, or tokenizer_class PreTrainedTokenizerFast"
            raise _unsupported(where, seen, expected)
        normalizer = {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": config.tokenize_chinese_chars,
            "strip_accents": config.strip_accents,
            "lowercase": config.do_lower_case,
        }
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    if lowercase and not any(step.get("type") == "Lowercase" or step.get("lowercase") for step in steps):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *steps]}
    if normalizer != content.get("normalizer"):
        content["normalizer"] = normalizer
        notes.append("as in transformers, the normaliser of tokenizer.json is overridden by the other tokenizer files")
        tokenizer = TextTokenizer(json.dumps(content, ensure_ascii=False).encode(), where)
    if config.tokenizer_class in AS_IT_IS:
        original.no_truncation()
        original.no_padding()
        # Compare texts that do not depend on lower-casing.
        for text in ("a sample text", ""):
            ids, expected_ids = original.encode(text).ids, tokenizer.encode([text]).ids.tolist()
            if ids != expected_ids:
                raise _unsupported(where, f"encodes {text!r} as {ids}", f"{expected_ids}: [CLS], the tokens, [SEP]")
    max_tokens = config.model_max_length
    return tokenizer, None if max_tokens is None or max_tokens > 2**31 else int(max_tokens), notes
