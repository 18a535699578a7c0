"""The model as TorchScript programs of static shapes that need no trnpipe, one file for each shape.

Every file holds the weights, as compilers for Inferentia2 (torch_neuronx.trace) take one program of one shape.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning  # type: ignore[attr-defined]

from pipeline.convert.record import ProgramFile, TensorSpec
from pipeline.core.batching import Bucket
from pipeline.core.errors import ConfigError
from pipeline.model.config import InputSpec
from pipeline.model.encoder import TextEncoder
from pipeline.model.ops import choose_forms, unit
from pipeline.model.relevance import RelevanceInputs, RelevanceModel

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
