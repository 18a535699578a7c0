"""The forward pass of a model whose weights are flat vectors: one text for training and evaluation, so one graph."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from pipeline.backends import Backend
from pipeline.model.flat import FlatLayout
from pipeline.model.relevance import GroupInputs, RelevanceInputs, RelevanceModel, RelevanceOutputs

Precision = Literal["fp32", "autocast", "bf16"]


def flat_forward(
    model: RelevanceModel,
    layout: FlatLayout,
    flats: Sequence[Tensor],
    batch: Mapping[str, Tensor],
    *,
    backend: Backend,
    precision: Precision,
    head_gradient: float = 1.0,
) -> RelevanceOutputs:
    """Scores and embeddings of one batch on the device. `model` lends its structure, `flats` are the weights."""
    kind = GroupInputs if "segments" in batch else RelevanceInputs
    inputs = kind(*(batch[name] for name in kind._fields))
    if precision == "bf16":
        flats = [flat.bfloat16() for flat in flats]
    elif backend.is_lazy:
        # Views of what is updated in place are replayed for every view; views of a copy, which XLA elides, are not.
        flats = [flat.clone() for flat in flats]
    context = backend.autocast(torch.bfloat16) if precision == "autocast" else nullcontext()
    with context:
        outputs: RelevanceOutputs = torch.func.functional_call(
            model, layout.unpack(flats), (inputs,), {"head_gradient": head_gradient}
        )
    return outputs
