"""Export a checkpoint for other tools, as a sentence-transformers folder, safetensors, TorchScript or ONNX."""

import json
import warnings
from collections.abc import Iterator, Mapping
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
from pipeline.convert.folder import (
    EXPORT,
    EXPORT_FILE,
    LEGACY,
    MODEL,
    MODULES,
    POOLINGS,
    PRODUCT,
    QUERY,
    SENTENCE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ExportRecord,
    Format,
)
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.optional import missing_package
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import join_key, open_parent, os_errors
from pipeline.model.config import InputSpec
from pipeline.model.factory import PREFIX as FACTORY_PREFIX
from pipeline.model.factory import FactoryEncoder
from pipeline.model.hf import CONFIG, FAMILIES, TRAINING_ONLY, from_hf, hf_config
from pipeline.model.ops import choose_forms, l2_normalize
from pipeline.model.relevance import MISSING, RelevanceInputs, RelevanceModel, build_model
from pipeline.registry.checkpoints import Ancestor
from pipeline.registry.records import one_line

WEIGHTS, HEAD, CARD = "model.safetensors", "relevance_head.safetensors", "README.md"
TOLERANCE = 1e-5
_ROWS = 16  # random rows to compare ONNX programs on
SHORTEST = 3  # [CLS], one token and [SEP]
CLAIM = ".trnpipe-export"
"""This file marks the folder of an export in progress. It is deleted after the manifest is written."""
_CLAIM_TEXT = b"an export in progress, or an interrupted one\n"


@dataclass(frozen=True)
class ExportPlan:
    """The parameters of an export."""

    format: Format
    max_tokens: int
    model_name: str
    ancestors: tuple[Ancestor, ...]
    """The lineage of the checkpoint, starting with the checkpoint itself."""
    bucket: Bucket
    """Query and product lengths of a TorchScript program in tokens."""
    batch_size: int
    """Batch size of a TorchScript program."""
    rows: Arrays | None = None
    """Prepared rows to compare ONNX programs on. By default, random tokens are used."""


@contextmanager
def destination(
    text: str, *, retry: RetryPolicy, stop: StopSignal, scratch: Path, fields: Mapping[str, JsonValue]
) -> Iterator[Path]:
    """Yield an empty folder, and commit it to the path or URI `text` if the block succeeds.

    An earlier export at the destination is replaced. Raises ConfigError if the destination contains other files.
    """
    storage, name = open_parent(text, retry=retry, stop=stop, follow_links=True)

    def check_replaceable() -> None:
        existing = {stat.key.removeprefix(f"{name}/") for stat in storage.list(name)}
        try:
            manifest = read_manifest(storage, name) if MANIFEST_NAME in existing else None
        except DataError:  # damaged, or written by a different program
            manifest = None
        exported = {CLAIM, MANIFEST_NAME, *manifest.files} if manifest and manifest.kind == EXPORT else set()
        foreign = set() if manifest is None and CLAIM in existing else existing - exported
        if foreign or storage.stat(name) is not None:
            uri = storage.uri(name)
            raise ConfigError(
                f"{uri} has {min(foreign)}, which trnpipe export did not write" if foreign else f"{uri} is a file",
                expected="a new or empty folder, or an earlier export",
                next_command="set a different folder with --out, or move that file",
            )

    check_replaceable()
    folder, claim = scratch / "export", join_key(name, CLAIM)
    with os_errors("writing", f"file://{folder}"):
        folder.mkdir(parents=True)
        yield folder
    check_replaceable()  # files may have been added in the meantime
    # S3 deletes the other files after the manifest, so from then on, the claim shows that they are ours.
    storage.write_bytes(claim, _CLAIM_TEXT)
    storage.delete_prefix(name)
    storage.write_bytes(claim, _CLAIM_TEXT)
    commit_dir(storage, folder, name, kind=EXPORT, fields=fields)
    storage.delete([claim])


def write_export(checkpoint: Checkpoint, plan: ExportPlan, folder: Path, stop: StopSignal) -> ExportRecord:
    """Write the files of an export to an empty folder.

    Raises ConfigError if the text lengths exceed the positions of the model, or if the format does not support the
    encoder module.
    """
    state, bucket = checkpoint.state, plan.bucket
    lengths = [plan.max_tokens, *((bucket.query_tokens, bucket.product_tokens) if plan.format == "torchscript" else ())]
    if not SHORTEST <= min(lengths) <= max(lengths) <= state.model.max_positions:
        raise ConfigError(
            f"the model does not support texts of {' and '.join(map(str, lengths))} tokens",
            expected=f"{SHORTEST} to {state.model.max_positions} tokens",
            next_command="set --max-tokens, or --bucket for a TorchScript program",
        )
    tokenizer = TextTokenizer(checkpoint.tokenizer(), f"{checkpoint.uri}/tokenizer.json")
    has_types = state.model.architecture == "bert" and state.model.factory is None
    write_tokenizer(folder, tokenizer, plan.max_tokens, has_types=has_types)
    stop.raise_if_set("exporting a model")
    weights = {name: tensor for name, tensor in checkpoint.weights().items() if not name.startswith(TRAINING_ONLY)}
    weights |= {name: tensor / state.temperature for name, tensor in weights.items() if name.startswith("head.")}
    model = build_model(state.model, state.inputs, seed=0)
    model.load_state_dict(from_hf(weights, model.state_dict(), source=checkpoint.uri))  # verifies names and shapes
    files: tuple[str, ...] = ()
    if plan.format == "onnx":
        files = (WEIGHTS, HEAD)
        _write_sentence_transformers(plan, weights, state, folder, model)
        _write_onnx(folder, model, state.inputs, plan)
    elif plan.format == "torchscript":
        write_program(folder / program_name(plan.bucket), model, state.inputs, plan)
    elif plan.format == "safetensors":
        files = (WEIGHTS,)
        write_weights(folder / WEIGHTS, weights)
    else:
        files = (WEIGHTS, HEAD)
        _write_sentence_transformers(plan, weights, state, folder, model)
    copied = ("model", "inputs", "tokenizer_fingerprint", "watermark", "partitions", "also_seen", "trained_head")
    fields: dict[str, Any] = {name: getattr(state, name) for name in (*copied, "published", "settings_hash")}
    record = ExportRecord(
        **fields,
        format=plan.format,
        checkpoint=Parent(uri=checkpoint.uri, digest=checkpoint.digest, cycle=state.cycle, step=state.step),
        max_tokens=plan.max_tokens,
        code_version=state.code_version,
        weights=files,
        family=state.model.architecture,
    )
    (folder / CARD).write_text(_card(record, plan), encoding="utf-8")
    (folder / EXPORT_FILE).write_bytes(record.to_json())
    return record


def _write_onnx(folder: Path, model: RelevanceModel, spec: InputSpec, plan: ExportPlan) -> None:
    """Write ONNX programs. Raises ConfigError if a package is missing, and DataError if their outputs differ."""
    try:
        from pipeline.convert.onnx_program import write_onnx
    except ImportError as error:
        raise missing_package("onnxruntime", "--format onnx", error, otherwise="--format torchscript") from error
    rows = plan.rows
    if rows is None:
        query, product, *features = sample_inputs(spec, plan.bucket, _ROWS)
        numeric = features[0] if spec.numeric else torch.zeros(_ROWS, 0)
        categorical = features[-1] if spec.categorical_ids else torch.zeros(_ROWS, 0)
        tensors = {"query": query, "product": product, "numeric": numeric, "categorical": categorical}
        rows = {name: tensor.numpy() for name, tensor in tensors.items()}
    write_onnx(folder, model, spec, rows)


# Write the weights and the other files that transformers and sentence-transformers need.


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, including the metadata field `format` that transformers requires. Raises OSError."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # raised if the disk is full
        raise OSError(str(error)) from error
    path.chmod(0o644)  # safetensors creates files that only their owner can read


def _write_sentence_transformers(
    plan: ExportPlan, weights: Mapping[str, Tensor], state: TrainState, folder: Path, model: RelevanceModel
) -> None:
    """Write a folder for transformers and sentence-transformers.

    The names are those of sentence-transformers 5.3, which later releases also support.
    """
    config, prefix = state.model, FACTORY_PREFIX
    if not isinstance(model.encoder, FactoryEncoder):
        prefix = FAMILIES[config.architecture].prefix
        (folder / CONFIG).write_text(hf_config(config, state.inputs))
    elif hasattr(getattr(model.encoder.module, "config", None), "save_pretrained"):
        cast(Any, model.encoder.module).config.save_pretrained(folder)
    else:
        raise ConfigError(
            f"--format {plan.format} does not support the {type(model.encoder.module).__name__} of {config.factory}",
            expected="a model that the AutoModel class of transformers can load",
            next_command="--format safetensors (names begin with encoder.module.), or --format torchscript",
        )
    encoder = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    write_weights(folder / WEIGHTS, encoder)
    write_weights(folder / HEAD, {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)})
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(paths.items())
    ]
    _write_json(folder / MODULES, modules)
    _write_json(folder / SENTENCE, {"max_seq_length": plan.max_tokens, "do_lower_case": False})
    modes = {key: POOLINGS.get(mode) == config.pooling for key, mode in LEGACY.items()}
    (folder / "1_Pooling").mkdir()
    _write_json(folder / "1_Pooling" / CONFIG, {"word_embedding_dimension": config.encoder.hidden_size, **modes})
    prefixes = {QUERY[0]: state.inputs.query_prefix, PRODUCT[0]: state.inputs.product_prefix}
    prompts = {name: text for name, text in prefixes.items() if text}
    _write_json(folder / MODEL, {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"})


def write_tokenizer(folder: Path, tokenizer: TextTokenizer, max_tokens: int, *, has_types: bool = True) -> None:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer.

    The tokenizer is modified to add [CLS] and [SEP] to each text, unless it already does so.
    """
    parsed, data = tokenizers.Tokenizer.from_str(tokenizer.data.decode()), tokenizer.data
    ids = {"cls": tokenizer.cls_id, "pad": tokenizer.pad_id, "sep": tokenizer.sep_id, "unk": tokenizer.unk_id}
    special = {f"{name}_token": parsed.id_to_token(number) for name, number in ids.items()}
    if parsed.token_to_id("[MASK]") is not None:
        special["mask_token"] = "[MASK]"  # noqa: S105 - a token of text
    parsed.no_truncation()
    parsed.no_padding()
    if parsed.encode("a").ids != tokenizer.encode(["a"]).ids.tolist():
        cls, sep = special["cls_token"], special["sep_token"]
        parsed.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
        )
        data = parsed.to_str().encode()
    (folder / TOKENIZER).write_bytes(data)
    _write_json(
        folder / TOKENIZER_CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # other classes override the lower-casing of tokenizer.json
            "model_max_length": max_tokens,
            "model_input_names": ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"],
            "padding_side": "right",
            "truncation_side": "right",
            "clean_up_tokenization_spaces": True,
            **special,
        },
    )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Export the model as a TorchScript program with static shapes, which runs without trnpipe.


class Program(nn.Module):
    """Wraps a model to expose the logits of pairs, and the embeddings of queries and products with a length of one."""

    def __init__(self, model: RelevanceModel, spec: InputSpec) -> None:
        super().__init__()
        self.model = model
        self.has_numeric, self.has_categorical = bool(spec.numeric), bool(spec.categorical_ids)

    def forward(self, query: Tensor, product: Tensor, *features: Tensor) -> Tensor:
        """Compute the logits [B, K] of pairs of query [B, Tq] and product [B, Tp] tokens.

        `features` are the numeric (fp32 [B, F]) and categorical (int32 [B, C]) features. Either of them is omitted if
        the model does not have such features.
        """
        none = query.new_zeros((query.shape[0], 0))
        numeric = features[0] if self.has_numeric else none.float()
        categorical = features[-1] if self.has_categorical else none
        logits: Tensor = self.model(RelevanceInputs(query, product, numeric, categorical)).logits
        return logits

    def embed_query(self, tokens: Tensor) -> Tensor:
        """Embed query tokens (int32 [B, Tq]). Returns fp32 [B, D]."""
        return l2_normalize(self.model.encoder(tokens))

    def embed_product(self, tokens: Tensor) -> Tensor:
        """Embed product tokens (int32 [B, Tp]). Returns fp32 [B, D]."""
        return l2_normalize(self.model.encoder(tokens))


def sample_inputs(spec: InputSpec, bucket: Bucket, rows: int) -> list[Tensor]:
    """Return random queries and products of decreasing length, which covers padding, followed by the features."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for length in (bucket.query_tokens, bucket.product_tokens):
        ids = torch.randint(0, spec.vocab_size, (rows, length), generator=generator, dtype=torch.int32)
        ends = length - 1 - torch.arange(rows)[:, None] % (length - 1)
        inputs.append(torch.where(torch.arange(length) < ends.clamp(min=1), ids, spec.pad_id))
    if spec.numeric:
        inputs.append(torch.randn((rows, len(spec.numeric)), generator=generator))
    if spec.categorical_ids:
        inputs.append(torch.zeros((rows, len(spec.categorical_ids)), dtype=torch.int32))
    return inputs


def program_name(bucket: Bucket) -> str:
    return f"relevance-{bucket.name}.pt"


@torch.no_grad()
def write_program(path: Path, model: RelevanceModel, spec: InputSpec, plan: ExportPlan) -> None:
    """Trace and save a program, then load it again and verify its outputs. Takes ownership of the model."""
    # Trace attention as plain matrix products, because not every compiler supports the fused operator.
    choose_forms(model, traced=True, sums_by_matmul=False)
    program = Program(model.eval().requires_grad_(False), spec).eval()
    query, product, *features = sample_inputs(spec, plan.bucket, plan.batch_size)
    inputs = {"forward": (query, product, *features), "embed_query": (query,), "embed_product": (product,)}
    buffer = BytesIO()  # if the disk is full, torch.jit.save to a file would raise RuntimeError instead of OSError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)  # tracing shapes as constants is intended
        traced = torch.jit.trace_module(program, inputs, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, buffer)  # type: ignore[no-untyped-call]
        path.write_bytes(buffer.getbuffer())
        loaded = torch.jit.load(path)  # type: ignore[no-untyped-call]
    for name, tensors in inputs.items():
        difference = float((getattr(loaded, name)(*tensors) - getattr(program, name)(*tensors)).abs().max())
        if not difference <= TOLERANCE:
            raise RuntimeError(f"{name} of {path.name} differs from the original model by {difference:g}")


# Write README.md, including the front matter for Hugging Face tools.


_POOLER = "When loading the model, you can ignore a warning about `pooler.dense`, because no pooler is used.\n"
_FIRST = ("ndcg@10", "retrieval_ndcg@10", "retrieval_recall@10", "macro_f1", "accuracy")
"""Metrics to list before all others in the model card."""


def _card(record: ExportRecord, plan: ExportPlan) -> str:
    spec, model, rows = record.inputs, record.model, plan.batch_size
    inputs = f"query int32 [{rows}, {plan.bucket.query_tokens}], product int32 [{rows}, {plan.bucket.product_tokens}]"
    inputs += f", numeric float32 [{rows}, {len(spec.numeric)}]" if spec.numeric else ""
    inputs += f", categorical int32 [{rows}, {len(spec.categorical_ids)}]" if spec.categorical_ids else ""
    library, use = {
        "sentence-transformers": (
            plan.format,
            "from sentence_transformers import SentenceTransformer\n\n"
            'vectors = SentenceTransformer("PATH").encode(["red running shoes"])',
        ),
        "safetensors": (
            plan.format,
            'import safetensors.torch\n\nweights = safetensors.torch.load_file("PATH/model.safetensors")',
        ),
        "onnx": (
            "onnx",
            "import numpy as np\nimport onnxruntime\nimport tokenizers\n\n"
            'ids = np.array([tokenizers.Tokenizer.from_file("PATH/tokenizer.json").encode("red running shoes").ids])\n'
            'session = onnxruntime.InferenceSession("PATH/onnx/model.onnx")\n'
            '_, vectors = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})\n'
            f"# PATH/onnx/relevance.onnx computes logits from {_onnx_inputs(spec)}",
        ),
        "torchscript": (
            "pytorch",
            f'import torch\n\nprogram = torch.jit.load("PATH/{program_name(plan.bucket)}")\n# program({inputs}),'
            " program.embed_query(query), program.embed_product(product)",
        ),
    }[plan.format]
    gains = ", ".join(f"{_text(label)}: {gain:.6g}" for label, gain in zip(spec.labels, spec.label_gains, strict=True))
    features = f"{', '.join(map(_text, spec.numeric)) or 'no numbers'} and {len(spec.categorical_ids)} categories"
    features += f" (a missing number is {MISSING:g})" if spec.may_miss else ""
    texts = ", ".join(_text(each.name) for each in spec.attributes if each.kind == "text")
    features += f". The texts of {texts} are appended to queries and products" if texts else ""
    figures = plan.ancestors[0].figures if plan.ancestors else {}
    names = [*(name for name in _FIRST if name in figures), *sorted(figures.keys() - {*_FIRST})]
    lines = [
        f'---\nlibrary_name: "{library}"\npipeline_tag: "sentence-similarity"\n---\n',
        f"# {_text(plan.model_name)}\n",
        f"This model consists of a text encoder ({_text(model.factory or model.architecture)}, width"
        f" {model.encoder.hidden_size}, {model.pooling} pooling, vectors of length one) for queries and products, and a"
        " head that grades how relevant a product is to a query. The grade is the sum of the gains"
        f" ({gains}), weighted by the softmax of the logits. Additional features: {features}.\n",
        f"```python\n{use}\n```\n",
        *([_POOLER] if plan.format == "sentence-transformers" else []),
        f"Tokenise texts with `tokenizer.json`, which adds `[CLS]` and `[SEP]`, and truncate them to"
        f" {record.max_tokens} tokens. The padding id is {spec.pad_id}.",
        *(["Importing this folder with `trnpipe import` restores exactly the same model."] if record.weights else []),
        "",
        *(f"- {_text(name)}: {figures[name]:.6g}" for name in names),
        f"\nThis model was exported from `{one_line(record.checkpoint.uri)}` with digest"
        f" `{record.checkpoint.digest}`. Its lineage is:\n",
    ]
    for node in plan.ancestors:
        parts = [node.checkpoint, f"data to {node.watermark or '-'}", f"digest {node.digest}", node.note]
        lines.append(f"- {', '.join(_text(part) for part in parts if part)}")
    lines += [f"- {_text(record.published.text)}"] if record.published else []
    return "\n".join(lines) + "\n"


def _onnx_inputs(spec: InputSpec) -> str:
    names = ["query_ids", "product_ids", *(["numeric"] if spec.numeric else [])]
    return ", ".join([*names, *(["categorical"] if spec.categorical_ids else [])])


def _text(value: str) -> str:
    """Return a text as a single line with escaped Markdown markup."""
    return "".join(f"\\{char}" if char in "\\|`*<>[]#" else char for char in one_line(value))
