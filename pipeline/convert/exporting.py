"""A checkpoint as a folder for other tools: sentence-transformers, plain safetensors, or a TorchScript program."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import tokenizers
import torch
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import processors
from torch import Tensor, nn
from torch.jit import TracerWarning  # type: ignore[attr-defined]

from pipeline.checkpoint.store import Checkpoint, Parent, TrainState
from pipeline.convert.hugging_face import (
    LEGACY,
    MODEL,
    MODULES,
    POOLINGS,
    PRODUCT,
    QUERY,
    SENTENCE,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from pipeline.convert.source import EXPORT, EXPORT_FILE, ExportRecord, Family, Format
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import join_key, os_errors, place_of
from pipeline.model.config import InputSpec
from pipeline.model.factory import PREFIX as FACTORY_PREFIX
from pipeline.model.factory import FactoryEncoder
from pipeline.model.hf import CONFIG, FAMILIES, from_bert, from_hf, hf_config
from pipeline.model.ops import choose_forms, unit
from pipeline.model.relevance import RelevanceInputs, RelevanceModel, build_model
from pipeline.registry.checkpoints import Ancestor
from pipeline.registry.records import one_line

WEIGHTS, HEAD, CARD = "model.safetensors", "relevance_head.safetensors", "README.md"
TOLERANCE = 1e-5
SHORTEST = 3  # [CLS], a token, [SEP]
_POOLING = "1_Pooling"


@dataclass(frozen=True)
class ExportPlan:
    """What is asked for."""

    format: Format
    max_tokens: int
    model_name: str
    ancestors: tuple[Ancestor, ...]
    """The checkpoint first, the root of its lineage last."""
    family: Family
    """Whose names the encoder gets in a sentence-transformers folder (model/families.py)."""
    bucket: Bucket
    """Of a TorchScript program: tokens of a query and of a product."""
    batch_size: int
    """Of a TorchScript program."""


def check_plan(checkpoint: Checkpoint, plan: ExportPlan) -> None:
    """Raise ConfigError for a family of another encoder, and for texts longer than it has positions for."""
    state = checkpoint.state
    architecture, positions = state.model.architecture, state.model.max_positions
    if state.model.factory is not None and plan.format == "sentence-transformers":
        module = build_model(state.model, state.inputs, seed=0).encoder.module
        if plan.family != architecture or "PreTrainedModel" not in {one.__name__ for one in type(module).__mro__}:
            raise ConfigError(
                f"--format {plan.format} of a {type(module).__name__} that {state.model.factory} builds",
                expected="a model of transformers, which its AutoModel opens, and no --family",
                next_command="--format safetensors, in which names begin with encoder.module., or --format torchscript",
            )
    if state.model.factory is None and FAMILIES[plan.family].architecture != architecture:
        fitting = ", ".join(name for name, family in FAMILIES.items() if family.architecture == architecture)
        raise ConfigError(
            f"family {plan.family} of a checkpoint whose encoder is {architecture}",
            expected=f"one of {fitting}",
            next_command="give another --family, or leave it out",
        )
    sides = (plan.bucket.query_tokens, plan.bucket.product_tokens) if plan.format == "torchscript" else ()
    for tokens in (plan.max_tokens, *sides):
        if not SHORTEST <= tokens <= positions:
            raise ConfigError(
                f"texts of {tokens} tokens",
                expected=f"{SHORTEST} to {positions}, which the model has positions for",
                next_command="--bucket 16x32" if sides else "give --max-tokens",
            )


CLAIM = ".trnpipe-export"
"""Marks a folder as ours from before its first file until its manifest is written."""


@contextmanager
def destination(
    text: str, *, retry: RetryPolicy, stop: StopSignal, scratch: Path, fields: Mapping[str, JsonValue]
) -> Iterator[Path]:
    """Yield an empty folder to fill, which is committed at `text` when the block succeeds.

    An earlier export there is replaced. Raises ConfigError for a folder with other files, DiskFull, TransientError,
    Preempted.
    """
    storage, name = place_of(text, retry=retry, stop=stop, follow_links=True)
    uri, claim = storage.uri(name), join_key(name, CLAIM)

    def check_free() -> None:
        if storage.stat(name) is not None:
            raise ConfigError(
                f"{uri} is a file", expected="a folder to export to", next_command="name another with --out"
            )
        found = {stat.key.removeprefix(f"{name}/") for stat in storage.list(name)}
        try:
            manifest = read_manifest(storage, name) if MANIFEST_NAME in found else None
        except DataError:  # of another program, or damaged
            manifest = None
        is_export = manifest is not None and manifest.kind == EXPORT
        ours = {CLAIM, MANIFEST_NAME, *manifest.files} if manifest is not None and is_export else set()
        foreign = sorted(found - ours)
        if foreign and not (manifest is None and CLAIM in found):
            raise ConfigError(
                f"{uri} holds {foreign[0]}, which trnpipe export did not write",
                expected="a new or empty folder, or an earlier export",
                next_command="name another with --out, or move that file away",
            )

    check_free()
    folder = scratch / "export"
    with os_errors("writing", f"file://{folder}"):
        folder.mkdir(parents=True)
        yield folder
    check_free()  # it may have been written to meanwhile
    storage.delete_prefix(name)
    storage.write_bytes(claim, b"an export that is being written, or was interrupted\n")
    commit_dir(storage, folder, name, kind=EXPORT, fields=fields)
    storage.delete([claim])


def write_export(checkpoint: Checkpoint, plan: ExportPlan, folder: Path, stop: StopSignal) -> ExportRecord:
    """Fill an empty folder. Raises CheckpointError, DataError, OSError, Preempted."""
    state = checkpoint.state
    tokenizer = TextTokenizer(checkpoint.tokenizer(), f"{checkpoint.uri}/tokenizer.json")
    has_types = state.model.architecture == "bert" and state.model.factory is None
    write_tokenizer(folder, tokenizer, plan.max_tokens, has_types=has_types)
    stop.raise_if_set("exporting a model")
    weights = checkpoint.weights()
    model = build_model(state.model, state.inputs, seed=0)
    model.load_state_dict(from_hf(weights, model.state_dict(), source=checkpoint.uri))  # every tensor, in its shape
    files: tuple[str, ...] = ()
    if plan.format == "safetensors":
        files = (WEIGHTS,)
        write_weights(folder / WEIGHTS, weights)
    elif plan.format == "torchscript":
        write_program(folder / program_name(plan.bucket), model, state.inputs, plan)
    else:
        files = (WEIGHTS, HEAD)
        _write_sentence_transformers(plan, weights, state, folder, model)
    record = ExportRecord(
        format=plan.format,
        checkpoint=Parent(uri=checkpoint.uri, digest=checkpoint.digest, cycle=state.cycle, step=state.step),
        model=state.model,
        inputs=state.inputs,
        max_tokens=plan.max_tokens,
        tokenizer_fingerprint=state.tokenizer_fingerprint,
        watermark=state.watermark,
        partitions=state.partitions,
        also_seen=state.also_seen,
        trained_head=state.trained_head,
        published=state.published,
        settings_hash=state.settings_hash,
        code_version=state.code_version,
        weights=files,
        family=plan.family,
    )
    (folder / CARD).write_text(_card(record, plan), encoding="utf-8")
    (folder / EXPORT_FILE).write_bytes(record.model_dump_json(indent=1).encode() + b"\n")
    return record


# Weights, and what transformers and sentence-transformers read beside them.


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write plain safetensors; transformers asks for the field `format`. Raises OSError."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
    path.chmod(0o644)  # safetensors lets nobody else read it


def _write_sentence_transformers(
    plan: ExportPlan, weights: Mapping[str, Tensor], state: TrainState, folder: Path, model: RelevanceModel
) -> None:
    """Write encoder and head apart, config.json and the modules encoder, pooling, unit length.

    The names are those up to release 5.3, which later ones read too. transformers opens the same folder.
    """
    module = model.encoder.module if isinstance(model.encoder, FactoryEncoder) else None
    prefix = FAMILIES[state.model.architecture].prefix if module is None else FACTORY_PREFIX
    encoder = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    write_weights(folder / HEAD, {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)})
    if module is None:
        encoder = from_bert(encoder, plan.family, state.inputs.pad_id)
        (folder / CONFIG).write_text(hf_config(state.model, state.inputs, plan.family))
    else:
        cast(Any, module).config.save_pretrained(folder)  # check_plan has looked at it
    write_weights(folder / WEIGHTS, encoder)
    named = (("Transformer", ""), ("Pooling", _POOLING), ("Normalize", "2_Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(named)
    ]
    _write_json(folder / MODULES, modules)
    _write_json(folder / SENTENCE, {"max_seq_length": plan.max_tokens, "do_lower_case": False})
    (folder / _POOLING).mkdir()
    modes = {key: POOLINGS.get(mode) == state.model.pooling for key, mode in LEGACY.items()}
    _write_json(folder / _POOLING / CONFIG, {"word_embedding_dimension": state.model.encoder.hidden_size, **modes})
    prefixes = ((QUERY[0], state.inputs.query_prefix), (PRODUCT[0], state.inputs.product_prefix))
    prompts = {name: text for name, text in prefixes if text}
    _write_json(folder / MODEL, {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"})


def write_tokenizer(folder: Path, tokenizer: TextTokenizer, max_tokens: int, *, has_types: bool = True) -> None:
    """Write tokenizer.json and what AutoTokenizer needs to read it as it is.

    `has_types`: the encoder takes token types.
    """
    parsed = tokenizers.Tokenizer.from_str(tokenizer.data.decode())
    ids = {"cls": tokenizer.cls_id, "pad": tokenizer.pad_id, "sep": tokenizer.sep_id, "unk": tokenizer.unk_id}
    special = {f"{name}_token": parsed.id_to_token(number) for name, number in ids.items()}
    if parsed.token_to_id("[MASK]") is not None:
        special["mask_token"] = "[MASK]"  # noqa: S105 - a token of text
    (folder / TOKENIZER).write_bytes(_framed(parsed, tokenizer))
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(
        folder / TOKENIZER_CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the only one that leaves lower-casing to the file
            "model_max_length": max_tokens,
            "model_input_names": ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"],
            "padding_side": "right",
            "truncation_side": "right",
            "clean_up_tokenization_spaces": True,
            **special,
        },
    )


def _framed(parsed: tokenizers.Tokenizer, tokenizer: TextTokenizer) -> bytes:
    """Return the file as it is, or with [CLS] and [SEP] around a text if it does not put them there."""
    parsed.no_truncation()
    parsed.no_padding()
    if parsed.encode("a").ids == tokenizer.encode(["a"]).ids.tolist():
        return tokenizer.data
    cls, sep = parsed.id_to_token(tokenizer.cls_id), parsed.id_to_token(tokenizer.sep_id)
    parsed.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
    )
    return parsed.to_str().encode()


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# The model as a TorchScript program of static shapes that needs no trnpipe.


class Program(nn.Module):
    """The model for one bucket: logits of pairs, and unit vectors of queries and products."""

    def __init__(self, model: RelevanceModel, spec: InputSpec) -> None:
        super().__init__()
        self.model = model
        self.has_numeric, self.has_categorical = bool(spec.numeric), bool(spec.categorical_ids)

    def forward(self, query: Tensor, product: Tensor, *features: Tensor) -> Tensor:
        """Return logits [B, K] of query int32 [B, Tq], product int32 [B, Tp], numeric fp32 [B, F], categorical int32
        [B, C]. A kind of feature that the model has none of is no input.
        """
        rest = list(features)
        none = query.new_zeros((query.shape[0], 0))
        numeric = rest.pop(0) if self.has_numeric else none.float()
        categorical = rest.pop(0) if self.has_categorical else none
        logits: Tensor = self.model(RelevanceInputs(query, product, numeric, categorical)).logits
        return logits

    def embed_query(self, tokens: Tensor) -> Tensor:
        """Return fp32 [B, D] of int32 [B, Tq]."""
        return unit(self.model.encoder(tokens))

    def embed_product(self, tokens: Tensor) -> Tensor:
        """Return fp32 [B, D] of int32 [B, Tp]."""
        return unit(self.model.encoder(tokens))


def program_name(bucket: Bucket) -> str:
    return f"relevance-{bucket.name}.pt"


@torch.no_grad()
def write_program(path: Path, model: RelevanceModel, spec: InputSpec, plan: ExportPlan) -> None:
    """Trace, save, load again and compare. The model's operators are chosen for compilers, so it is used up."""
    # Compilers get attention as plain products: how they treat the fused operator is their decision.
    choose_forms(model, traced=True, sums_by_matmul=False)
    program = Program(model.eval().requires_grad_(False), spec).eval()
    query = _sample_tokens(spec, plan.batch_size, plan.bucket.query_tokens)
    product = _sample_tokens(spec, plan.batch_size, plan.bucket.product_tokens)
    features = []
    if spec.numeric:
        count = plan.batch_size * len(spec.numeric)
        features.append(torch.linspace(-3.0, 3.0, count).reshape(plan.batch_size, -1))
    if spec.categorical_ids:
        columns = [torch.arange(plan.batch_size, dtype=torch.int32) % ids for ids in spec.categorical_ids]
        features.append(torch.stack(columns, dim=1))
    inputs = {"forward": (query, product, *features), "embed_query": (query,), "embed_product": (product,)}
    buffer = BytesIO()  # torch reports a full disk as a RuntimeError; the file is written here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)  # shapes are meant to be constants
        traced = torch.jit.trace_module(program, inputs, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, buffer)  # type: ignore[no-untyped-call]
        path.write_bytes(buffer.getbuffer())
        loaded = torch.jit.load(path)  # type: ignore[no-untyped-call]
    for name, tensors in inputs.items():
        difference = float((getattr(loaded, name)(*tensors) - getattr(program, name)(*tensors)).abs().max())
        if not difference <= TOLERANCE:
            raise RuntimeError(f"{name} of {path.name} differs by {difference:g} from the model it was made of")


def _sample_tokens(spec: InputSpec, rows: int, length: int) -> Tensor:
    """Return random texts, the later ones shorter, so that a program is traced and compared with padding in it."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, spec.vocab_size, (rows, length), generator=generator, dtype=torch.int32)
    tokens[tokens == spec.pad_id] = spec.vocab_size - 1 if spec.pad_id != spec.vocab_size - 1 else 0
    ends = length - torch.arange(rows, dtype=torch.int32) % (length - 1) - 1
    return torch.where(torch.arange(length) < ends[:, None].clamp(min=1), tokens, spec.pad_id)


# README.md for people, with the front matter that Hugging Face tools read.


def _card(record: ExportRecord, plan: ExportPlan) -> str:
    spec, source = record.inputs, record.checkpoint
    gains = ", ".join(f"{_text(label)}: {gain:.6g}" for label, gain in zip(spec.labels, spec.label_gains, strict=True))
    numbers, categories = ", ".join(map(_text, spec.numeric)) or "no numbers", len(spec.categorical_ids)
    use = {
        "sentence-transformers": 'vectors = SentenceTransformer("PATH").encode(["red running shoes"])',
        "safetensors": 'weights = safetensors.torch.load_file("PATH/model.safetensors")',
        "torchscript": f'program = torch.jit.load("PATH/{program_name(plan.bucket)}")  # embed_query, embed_product',
    }[plan.format]
    lines = [
        f'---\nlibrary_name: "{"pytorch" if plan.format == "torchscript" else plan.format}"',
        'pipeline_tag: "sentence-similarity"\n---\n',
        f"# {_text(plan.model_name)}\n",
        f"{_encoder(record)}; {record.model.pooling} pooling over real tokens, vectors of length one. A head grades how"
        f" well a product fits a query; a score is the softmax of its logits times the gains ({gains}). It also reads"
        f" {numbers} and {categories} hashed categories.\n",
        f"```python\n{use}\n```\n",
        f"Texts are `[CLS] ... [SEP]` of `tokenizer.json`, cut to {record.max_tokens} tokens; padding {spec.pad_id}.",
        *_program_lines(spec, plan),
        *(["`trnpipe import` of this folder gives the whole model back, bit for bit."] if record.weights else []),
        "\n| metric | value |\n|---|---|",
        *(
            f"| {_text(name)} | {value:.6g} |"
            for one in plan.ancestors[:1]
            for name, value in sorted(one.figures.items())
        ),
        "\n| checkpoint | cycle | step | data to | settings | code | digest |\n|---|---|---|---|---|---|---|",
        *_lineage(plan.ancestors),
        *([f"\nIt began from {_text(record.published.text)}."] if record.published else []),
        *(f"\nThe lineage ends here: {_text(one.note)}." for one in plan.ancestors if one.note),
        f"\nMade from `{one_line(source.uri)}`, step {source.step} of cycle {_text(source.cycle)}, manifest",
        f"sha256 `{source.digest}`, code `{one_line(record.code_version)}`.",
    ]
    return "\n".join(lines) + "\n"


def _encoder(record: ExportRecord) -> str:
    model, size = record.model, record.model.encoder
    if model.factory is not None:
        return f"Text encoder of {_text(model.factory)} for queries and product texts, of width {size.hidden_size}"
    return f"{record.family} text encoder for queries and product texts, {size.num_layers} layers of {size.hidden_size}"


def _program_lines(spec: InputSpec, plan: ExportPlan) -> Iterator[str]:
    """Yield the inputs of a program: shapes are static."""
    if plan.format == "torchscript":
        rows, bucket = plan.batch_size, plan.bucket
        yield f"\nInputs: query int32 [{rows}, {bucket.query_tokens}], product int32 [{rows}, {bucket.product_tokens}]"
        yield f", numeric float32 [{rows}, {len(spec.numeric)}]" if spec.numeric else ""
        yield f", categorical int32 [{rows}, {len(spec.categorical_ids)}]" if spec.categorical_ids else ""


def _lineage(ancestors: Sequence[Ancestor]) -> Iterator[str]:
    for one in ancestors:
        cells = (one.checkpoint, one.cycle, one.step, one.watermark, one.settings_hash, one.code_version, one.digest)
        yield f"| {' | '.join(_text(str(cell)) or '-' for cell in cells)} |"


def _text(value: str) -> str:
    """Return text from data for a table: one line, and nothing that Markdown would read as markup."""
    return "".join(f"\\{char}" if char in "\\|`*<>[]#" else char for char in one_line(value))
