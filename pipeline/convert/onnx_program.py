"""Export a model as ONNX programs with dynamic shapes, and compare their outputs with those of the original model.

`model.onnx` has the inputs and outputs that Optimum, Text Embeddings Inference, Vespa and OpenSearch expect of a text
encoder. `relevance.onnx` computes the logits of pairs.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import onnxscript  # noqa: F401 - torch.onnx imports it, but a missing package should raise the error here
import torch
from torch import Tensor, nn

from pipeline.core.errors import DataError
from pipeline.data.shards import Arrays
from pipeline.model.config import InputSpec
from pipeline.model.ops import choose_forms, l2_normalize
from pipeline.model.relevance import RelevanceInputs, RelevanceModel

FOLDER = "onnx"
ENCODER, PAIRS = f"{FOLDER}/model.onnx", f"{FOLDER}/relevance.onnx"
TOLERANCE = 1e-4
"""Maximum difference of an output, relative to 1 plus its absolute value."""
_OPSET = 18


class EncoderProgram(nn.Module):
    """Computes the hidden states of texts [B, T, H], and their embeddings [B, D] of length one."""

    def __init__(self, model: RelevanceModel) -> None:
        super().__init__()
        self.encoder = model.encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.where(attention_mask.bool(), input_ids, self.encoder.pad_id)
        hidden = self.encoder.hidden_states(tokens)
        return hidden, l2_normalize(self.encoder.pool(hidden, tokens))


class PairProgram(nn.Module):
    """Computes the logits [B, K] of pairs of texts, which are padded with the padding token."""

    def __init__(self, model: RelevanceModel) -> None:
        super().__init__()
        self.model = model

    # Not `*features`, as in Program, because torch.export does not support them.
    def forward(
        self, query_ids: Tensor, product_ids: Tensor, numeric: Tensor | None, categorical: Tensor | None
    ) -> Tensor:
        none = query_ids.new_zeros((query_ids.shape[0], 0))
        numeric = none.float() if numeric is None else numeric
        categorical = none if categorical is None else categorical
        logits: Tensor = self.model(RelevanceInputs(query_ids, product_ids, numeric, categorical)).logits
        return logits


@torch.no_grad()
def write_onnx(folder: Path, model: RelevanceModel, spec: InputSpec, rows: Arrays) -> float:
    """Write both programs and return the largest difference to the original model. Takes ownership of the model.

    `rows` are the pairs to compare on: the arrays `query`, `product`, `numeric` and `categorical` of prepared data.
    Raises DataError if a program computes different outputs.
    """
    choose_forms(model, traced=True, sums_by_matmul=False)  # plain matrix products, which every runtime supports
    model.encodes_together = False  # queries and products may have different lengths
    model.eval().requires_grad_(False)
    (folder / FOLDER).mkdir()
    query, product = (torch.from_numpy(rows[name]).long() for name in ("query", "product"))
    texts = {"input_ids": product, "attention_mask": (product != spec.pad_id).long()}
    pairs = {
        "query_ids": query,
        "product_ids": product,
        "numeric": torch.from_numpy(rows["numeric"]).float() if spec.numeric else None,
        "categorical": torch.from_numpy(rows["categorical"]).long() if spec.categorical_ids else None,
    }
    names = {"input_ids": "tokens", "attention_mask": "tokens", "query_ids": "query_tokens", "product_ids": "tokens"}
    outputs = ("last_hidden_state", "sentence_embedding")
    return max(
        _write(folder / ENCODER, EncoderProgram(model), texts, outputs, names),
        _write(folder / PAIRS, PairProgram(model), pairs, ("logits",), names),
    )


def _write(
    path: Path,
    program: nn.Module,
    inputs: Mapping[str, Tensor | None],
    outputs: Sequence[str],
    lengths: Mapping[str, str],
) -> float:
    """Export a program, and compare it with the original on `inputs`. The program does not have inputs that are None.

    The first dimension of all inputs is dynamic. `lengths` are the names of second dimensions that are dynamic too.
    """
    axes = (
        None if tensor is None else {0: "batch"} | ({1: lengths[name]} if name in lengths else {})
        for name, tensor in inputs.items()
    )
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # torchvision is not installed, which does not matter
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported: Any = torch.onnx.export(
                program.eval(),
                tuple(inputs.values()),
                dynamo=True,
                input_names=[name for name, tensor in inputs.items() if tensor is not None],
                output_names=list(outputs),
                dynamic_shapes=tuple(axes),
                opset_version=_OPSET,
                verbose=False,
            )
    finally:
        logger.setLevel(level)
    exported.save(path)
    return _compare(path, program, inputs, lengths)


def _compare(path: Path, program: nn.Module, inputs: Mapping[str, Tensor | None], lengths: Mapping[str, str]) -> float:
    """Run the file on all rows, on the first row alone, and on shorter texts of one side.

    Returns the largest difference.
    """
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    largest = 0.0
    for count, shorter in ((None, ""), (1, ""), *((None, side) for side in {*lengths.values()})):
        chosen = {name: None if tensor is None else tensor[:count] for name, tensor in inputs.items()}
        for name, tensor in chosen.items():
            if tensor is not None and lengths.get(name) == shorter:
                chosen[name] = tensor[:, : -(-tensor.shape[1] // 2)]
        given = {name: tensor.numpy() for name, tensor in chosen.items() if tensor is not None}
        found = session.run(None, given)
        expected = program(*chosen.values())
        for ours, theirs in zip(_as_sequence(expected), found, strict=True):
            difference = (torch.from_numpy(theirs) - ours).abs() / (1.0 + ours.abs())
            largest = max(largest, float(difference.nan_to_num(nan=torch.inf).max()))
    if not largest <= TOLERANCE:
        raise DataError(
            f"{path.name} differs from the model by {largest:.2g}",
            expected=f"at most {TOLERANCE:g} on each output",
            next_command="use a different version of onnxruntime, or --format torchscript",
        )
    return largest


def _as_sequence(outputs: Tensor | tuple[Tensor, ...]) -> Sequence[Tensor]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs
