"""The whole model: encoder, interactions, relevance head."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.model import encoder, interactions
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.encoder import TextEncoder
from pipeline.model.interactions import Interactions


class RelevanceInputs(NamedTuple):
    """Tensors of one batch. B samples, Tq and Tp tokens, F numeric and C categorical features."""

    query: Tensor  # int32 [B, Tq]
    product: Tensor  # int32 [B, Tp]
    numeric: Tensor  # float32 [B, F]
    categorical: Tensor  # int32 [B, C]


class RelevanceOutputs(NamedTuple):
    """logits [B, K] over relevance classes, query and product embeddings [B, D]."""

    logits: Tensor
    query: Tensor
    product: Tensor


class RelevanceModel(nn.Module):
    """Scores (query, product) pairs; its embeddings serve retrieval."""

    def __init__(self, config: ModelConfig, spec: InputSpec) -> None:
        super().__init__()
        self.encoder = TextEncoder(config, spec.vocab_size, spec.pad_id)
        self.interactions = Interactions(config, spec)
        self.head = nn.Linear(self.interactions.width, spec.num_classes)

    def forward(self, inputs: RelevanceInputs) -> RelevanceOutputs:
        """One encoder pass when both sides have the same length (half the graph), two otherwise."""
        if inputs.query.shape == inputs.product.shape:
            both = self.encoder(torch.cat([inputs.query, inputs.product], dim=0))
            query, product = both.chunk(2, dim=0)
        else:
            query, product = self.encoder(inputs.query), self.encoder(inputs.product)
        mixed = self.interactions(query, product, inputs.numeric.to(query.dtype), inputs.categorical)
        return RelevanceOutputs(self.head(mixed), query, product)


def build_model(config: ModelConfig, spec: InputSpec, seed: int) -> RelevanceModel:
    """A freshly initialised model on CPU, the same for the same seed and so on every rank."""
    model = RelevanceModel(config, spec)
    generator = torch.Generator().manual_seed(seed)
    encoder.initialise(model.encoder, generator)
    interactions.initialise(model.interactions, generator)
    interactions.initialise(model.head, generator)
    return model
