"""A checkpoint as a folder for other tools."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pipeline.convert.record import CARD, FILE, KIND, ExportRecord, Family, Format, ProgramFile, TensorSpec, card
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io import atomic
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, join_key, open_storage, os_errors, place_of
from pipeline.model.config import InputSpec
from pipeline.model.encoder import TextEncoder
from pipeline.model.factory import PREFIX as FACTORY_PREFIX
from pipeline.model.factory import FactoryEncoder
from pipeline.model.hf import CONFIG, FAMILIES, from_bert, from_hf, hf_config
from pipeline.model.ops import choose_forms, unit
from pipeline.model.relevance import RelevanceInputs, RelevanceModel, build_model
from pipeline.registry.checkpoints import Ancestor

# The model as TorchScript programs of static shapes that need no trnpipe, one file for each shape.
#
# Every file holds the weights, as compilers for Inferentia2 (torch_neuronx.trace) take one program of one shape.

TOLERANCE = 1e-5
SHORTEST = 3  # [CLS], a token, [SEP]


class VectorProgram(nn.Module):
    """Texts to unit vectors."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        """int32 [B, T] -> fp32 [B, D]."""
        return unit(self.encoder(tokens))


class ScoreProgram(nn.Module):
    """Pairs to logits over the relevance classes. A kind of feature that the model has none of is no input."""

    def __init__(self, model: RelevanceModel, spec: InputSpec) -> None:
        super().__init__()
        self.model = model
        self.has_numeric, self.has_categorical = bool(spec.numeric), bool(spec.categorical_ids)

    def forward(self, query: Tensor, product: Tensor, *features: Tensor) -> Tensor:
        """query int32 [B, Tq], product int32 [B, Tp], numeric fp32 [B, F], categorical int32 [B, C] -> [B, K]."""
        rest = list(features)
        none = query.new_zeros((query.shape[0], 0))
        numeric = rest.pop(0) if self.has_numeric else none.float()
        categorical = rest.pop(0) if self.has_categorical else none
        outputs = self.model(RelevanceInputs(query, product, numeric, categorical))
        logits: Tensor = outputs.logits
        return logits


@dataclass(frozen=True)
class Shapes:
    """What programs are made for: lengths of texts to embed, buckets of pairs to score."""

    lengths: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    batch_size: int


def parse_shapes(text: str, batch_size: int) -> Shapes:
    """`16,32,16x32`: two lengths and a bucket. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    pairs = sorted({Bucket.parse(part) for part in parts if "x" in part.lower()})
    lengths = sorted({Bucket.parse(part).query_tokens for part in parts if "x" not in part.lower()})
    if not parts:
        raise ConfigError(f"shapes {text!r}", expected="lengths and buckets such as 16,32,16x32")
    return Shapes(tuple(lengths), tuple(pairs), batch_size)


def default_shapes(buckets: Sequence[Bucket], batch_size: int) -> Shapes:
    """The buckets of the data, and the lengths of their products, which are what a catalogue is embedded in."""
    return Shapes(tuple(sorted({bucket.product_tokens for bucket in buckets})), tuple(sorted(buckets)), batch_size)


def check_shapes(shapes: Shapes, max_positions: int) -> None:
    """Raises ConfigError for a text that is too short or too long for the model."""
    sides = [*shapes.lengths, *(side for b in shapes.buckets for side in (b.query_tokens, b.product_tokens))]
    wrong = [side for side in sides if not SHORTEST <= side <= max_positions]
    if wrong:
        raise ConfigError(
            f"a text of {wrong[0]} tokens",
            expected=f"{SHORTEST} to {max_positions}, which the model has positions for",
            next_command="--shapes 16,32,16x32",
        )


def write_programs(
    folder: Path, model: RelevanceModel, spec: InputSpec, shapes: Shapes, step: Callable[[], object]
) -> tuple[ProgramFile, ...]:
    """Trace, save, load again and compare every program. `step` is called after each of them, to stop or beat.

    Takes the model over: its operators are chosen for compilers.
    """
    # Compilers get attention as plain products: what they make of the fused operator is theirs to say.
    choose_forms(model, traced=True, sums_by_matmul=False)
    model.eval().requires_grad_(False)
    vectors, scores = VectorProgram(model.encoder).eval(), ScoreProgram(model, spec).eval()
    files = []
    for length in shapes.lengths:
        inputs = (_tokens(spec, shapes.batch_size, length),)
        name = f"encoder-{length}.pt"
        files.append(_write(folder / name, vectors, inputs, ("tokens",), ("vectors", "texts to unit vectors")))
        step()
    for bucket in shapes.buckets:
        pair, names = _pair(spec, shapes.batch_size, bucket)
        name = f"relevance-{bucket.name}.pt"
        files.append(_write(folder / name, scores, pair, names, ("logits", "pairs to logits over the classes")))
        step()
    return tuple(files)


@torch.no_grad()
def _write(
    path: Path,
    program: nn.Module,
    inputs: tuple[Tensor, ...],
    names: tuple[str, ...],
    output: tuple[str, str],
) -> ProgramFile:
    expected: Tensor = program(*inputs)
    buffer = BytesIO()  # torch reports a full disk as a RuntimeError; files are written here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)  # shapes are meant to be constants
        # Checked below, as it was saved.
        traced = torch.jit.trace(program, inputs, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, buffer)  # type: ignore[no-untyped-call]
        path.write_bytes(buffer.getbuffer())
        found = torch.jit.load(path)(*inputs)  # type: ignore[no-untyped-call]
    difference = float((found - expected).abs().max())
    if not difference <= TOLERANCE:
        raise RuntimeError(f"{path.name} differs by {difference:g} from the model it was made of")
    return ProgramFile(
        file=path.name,
        text=output[1],
        inputs=tuple(_spec(name, tensor) for name, tensor in zip(names, inputs, strict=True)),
        output=_spec(output[0], expected),
    )


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def _tokens(spec: InputSpec, rows: int, length: int) -> Tensor:
    """Random texts, the later ones shorter: every program is traced and compared with padding in it."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, spec.vocab_size, (rows, length), generator=generator, dtype=torch.int32)
    tokens[tokens == spec.pad_id] = spec.vocab_size - 1 if spec.pad_id != spec.vocab_size - 1 else 0
    ends = length - torch.arange(rows, dtype=torch.int32) % (length - 1) - 1
    return torch.where(torch.arange(length) < ends[:, None].clamp(min=1), tokens, spec.pad_id)


def _pair(spec: InputSpec, rows: int, bucket: Bucket) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    inputs = {
        "query": _tokens(spec, rows, bucket.query_tokens),
        "product": _tokens(spec, rows, bucket.product_tokens),
    }
    if spec.numeric:
        inputs["numeric"] = torch.linspace(-3.0, 3.0, rows * len(spec.numeric)).reshape(rows, -1)
    if spec.categorical_ids:
        columns = [torch.arange(rows, dtype=torch.int32) % ids for ids in spec.categorical_ids]
        inputs["categorical"] = torch.stack(columns, dim=1)
    return tuple(inputs.values()), tuple(inputs)


# Where an export goes: written under a hidden name, then shown whole. Nobody's files are overwritten.

CLAIM = ".trnpipe-export"
"""Marks a folder on S3 as ours from before its first file until its manifest is there."""


@contextmanager
def destination(
    text: str, *, retry: RetryPolicy, workspace: Storage, scratch: Path, fields: Mapping[str, JsonValue]
) -> Iterator[Path]:
    """A folder to fill, which takes its place at `text` when the block ends well.

    An earlier export there is replaced; on S3, where nothing can be renamed, it is withdrawn first.
    Raises ConfigError for a folder of others, DiskFull, TransientError, Preempted.
    """
    storage, name = place_of(text, retry=retry, stop=workspace.stop, follow_links=True)
    check_free(storage, name)
    final = storage.local_path(name)
    if final is None:
        folder = scratch / "export"
        folder.mkdir(parents=True)
        yield folder
        check_free(storage, name)  # it may have been written to meanwhile
        claim = join_key(name, CLAIM)
        storage.delete_prefix(name)
        storage.write_bytes(claim, b"an export that is being written, or was broken off\n")
        commit_dir(storage, folder, name, kind=KIND, fields=fields)
        storage.delete([claim])
        return
    with os_errors("writing", storage.uri(name)):
        atomic.make_dirs(final.parent)
        atomic.sweep_temps(final.parent)
        with atomic.temp_dir(final) as home:
            folder = home / "new"
            folder.mkdir()
            yield folder
            commit_dir(open_storage(str(home), stop=workspace.stop), folder, "new", kind=KIND, fields=fields)
            check_free(storage, name)  # it may have been written to meanwhile
            if final.exists():
                final.rename(home / "old")
            folder.rename(final)
            atomic.fsync_path(final.parent)


def check_free(storage: Storage, name: str) -> None:
    """Raises ConfigError unless nothing is there, or an export of ours and nothing beside it."""
    uri = storage.uri(name)
    if storage.stat(name) is not None:
        raise ConfigError(f"{uri} is a file", expected="a folder to export to", next_command="name another with --out")
    found = {stat.key.removeprefix(f"{name}/") for stat in storage.list(name)}
    try:
        manifest = read_manifest(storage, name) if MANIFEST_NAME in found else None
    except DataError:  # of another program, or damaged
        manifest = None
    if manifest is None and CLAIM in found:
        return
    ours = {CLAIM, MANIFEST_NAME, *manifest.files} if manifest is not None and manifest.kind == KIND else set()
    if foreign := sorted(found - ours):
        raise ConfigError(
            f"{uri} holds {foreign[0]}, which trnpipe export did not write",
            expected="a new or empty folder, or an earlier export",
            next_command="name another with --out, or move that file away",
        )


# A folder that `transformers.AutoModel` and `sentence_transformers.SentenceTransformer` open.

WEIGHTS, HEAD = "model.safetensors", "relevance_head.safetensors"
_POOLING = "1_Pooling"


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Plain safetensors. `format` is what transformers asks for. Raises OSError."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
    path.chmod(0o644)  # safetensors lets nobody else read it


def write_tokenizer(folder: Path, tokenizer: TextTokenizer, max_tokens: int, *, has_types: bool = True) -> None:
    """tokenizer.json and what AutoTokenizer needs to read it as it is: no class that would change its lower-casing.

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
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_tokens,
            "model_input_names": ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"],
            "padding_side": "right",
            "truncation_side": "right",
            "clean_up_tokenization_spaces": True,
            **special,
        },
    )


def _framed(parsed: tokenizers.Tokenizer, tokenizer: TextTokenizer) -> bytes:
    """The file as it is; when it does not put [CLS] and [SEP] around a text, as this program does, made to."""
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


@dataclass(frozen=True)
class ExportPlan:
    """What is asked for."""

    format: Format
    max_tokens: int
    shapes: Shapes
    """Of programs; not used by the other formats."""
    model_name: str
    ancestors: tuple[Ancestor, ...]
    family: Family = "bert"
    """Whose names the encoder has, of the formats of other libraries (model/hf.py)."""


def check_plan(checkpoint: Checkpoint, plan: ExportPlan) -> None:
    """Raises ConfigError for a family of another encoder, and for texts longer than it has positions for."""
    positions = checkpoint.state.model.max_positions
    architecture = checkpoint.state.model.architecture
    if checkpoint.state.model.factory is not None:
        _check_factory(checkpoint.state, plan)
    elif FAMILIES[plan.family].architecture != architecture:
        fitting = ", ".join(name for name, family in FAMILIES.items() if family.architecture == architecture)
        raise ConfigError(
            f"family {plan.family} of a checkpoint whose encoder is {architecture}",
            expected=f"one of {fitting}",
            next_command="give another --family, or leave it out",
        )
    if not 3 <= plan.max_tokens <= positions:
        raise ConfigError(
            f"texts of {plan.max_tokens} tokens",
            expected=f"3 to {positions}, which the model has positions for",
            next_command="give --max-tokens",
        )
    if plan.format == "torchscript":
        check_shapes(plan.shapes, positions)


def _check_factory(state: TrainState, plan: ExportPlan) -> None:
    """Raises ConfigError for the folder of a library that does not know the module of a factory."""
    if plan.format not in ("transformers", "sentence-transformers"):
        return
    module = build_model(state.model, state.inputs, seed=0).encoder.module
    is_theirs = any(one.__name__ == "PreTrainedModel" for one in type(module).__mro__)
    if is_theirs and plan.family == state.model.architecture:
        return
    raise ConfigError(
        f"--format {plan.format}{'' if plan.family == state.model.architecture else f' --family {plan.family}'} of a"
        f" {type(module).__name__} that {state.model.factory} builds",
        expected="a model of transformers, which its AutoModel opens, and no --family",
        next_command="--format safetensors, in which names begin with encoder.module., or --format torchscript",
    )


def write_export(checkpoint: Checkpoint, plan: ExportPlan, folder: Path, stop: StopSignal) -> ExportRecord:
    """Fill an empty folder. Raises CheckpointError, DataError, OSError, Preempted."""
    state = checkpoint.state
    tokenizer = TextTokenizer(checkpoint.tokenizer(), f"{checkpoint.uri}/tokenizer.json")
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
        weights=(),
        family=plan.family,
    )
    has_types = state.model.architecture == "bert" and state.model.factory is None
    write_tokenizer(folder, tokenizer, plan.max_tokens, has_types=has_types)
    stop.raise_if_set("exporting a model")
    weights = checkpoint.weights()
    model = build_model(state.model, state.inputs, seed=0)
    model.load_state_dict(from_hf(weights, model.state_dict(), source=checkpoint.uri))  # every tensor, in its shape
    if plan.format == "torchscript":
        num_programs = len(plan.shapes.lengths) + len(plan.shapes.buckets)
        with progress("exporting programs", num_programs, "programs") as done:

            def step() -> None:
                stop.raise_if_set("exporting a program")
                done(1)

            programs = write_programs(folder, model, state.inputs, plan.shapes, step=step)
        record = record.model_copy(update={"programs": programs})
    else:
        record = record.model_copy(update={"weights": _write_weights_as(plan, weights, state, folder, model)})
    (folder / CARD).write_text(card(record, plan.model_name, plan.ancestors), encoding="utf-8")
    (folder / FILE).write_bytes(record.model_dump_json(indent=1).encode() + b"\n")
    return record


def _write_weights_as(
    plan: ExportPlan, weights: Mapping[str, Tensor], state: TrainState, folder: Path, model: RelevanceModel
) -> tuple[str, ...]:
    """The names of the files that together hold every tensor."""
    if plan.format == "safetensors":
        write_weights(folder / WEIGHTS, weights)
        return (WEIGHTS,)
    if plan.format == "torch":
        buffer = BytesIO()  # torch reports a full disk as a RuntimeError
        torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, buffer)
        (folder / "model.pt").write_bytes(buffer.getbuffer())
        return ("model.pt",)
    module = model.encoder.module if isinstance(model.encoder, FactoryEncoder) else None
    prefix = FAMILIES[state.model.architecture].prefix if module is None else FACTORY_PREFIX
    encoder = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    if module is None:
        encoder = from_bert(encoder, plan.family, state.inputs.pad_id)
    write_weights(folder / WEIGHTS, encoder)
    write_weights(folder / HEAD, {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)})
    if module is None:
        (folder / CONFIG).write_text(hf_config(state.model, state.inputs, plan.family))
    else:
        cast(Any, module).config.save_pretrained(folder)  # check_plan has looked at it
    if plan.format == "sentence-transformers":
        # Its modules: encoder, pooling, unit length. The names up to release 5.3, which later ones read too.
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
        prompts = {name: prefix for name, prefix in prefixes if prefix}
        _write_json(folder / MODEL, {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"})
    return WEIGHTS, HEAD
