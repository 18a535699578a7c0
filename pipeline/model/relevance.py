"""The whole model: encoder, interactions, relevance head."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.core.errors import ConfigError
from pipeline.model import encoder, interactions
from pipeline.model.config import MPNET_PAD, InputSpec, ModelConfig
from pipeline.model.encoder import BertEncoder, ModernBertEncoder, MPNetEncoder, TextEncoder
from pipeline.model.factory import FactoryEncoder
from pipeline.model.interactions import Interactions

_ENCODERS: Mapping[str, Callable[[ModelConfig, int, int], TextEncoder]] = {
    "bert": BertEncoder,
    "mpnet": MPNetEncoder,
    "modernbert": ModernBertEncoder,
}


class RelevanceInputs(NamedTuple):
    """Tensors of one batch. Q queries with S products each (S is 1 where pairs are scored), Tq and Tp tokens.

    Product number q S + s belongs to query q. F numeric and C categorical features describe the pairs.
    """

    query: Tensor  # int32 [Q, Tq]
    product: Tensor  # int32 [Q S, Tp]
    numeric: Tensor  # float32 [Q S, F]
    categorical: Tensor  # int32 [Q S, C]


class GroupInputs(NamedTuple):
    """Tensors of one batch of training: Q queries, each in one row of T tokens with the S products of its group.

    Text 1 of a row is the query, text 1 + s its product s, see TextEncoder.rows. Product number q S + s belongs to
    query q. A product without tokens has an embedding of zeros.
    """

    tokens: Tensor  # int32 [Q, T]
    positions: Tensor  # int32 [Q, T]
    segments: Tensor  # int32 [Q, T]
    numeric: Tensor  # float32 [Q S, F]
    categorical: Tensor  # int32 [Q S, C]


def inputs_of(batch: Mapping[str, Tensor]) -> "RelevanceInputs | GroupInputs":
    """What the model is given of the tensors of a batch."""
    kind = GroupInputs if "segments" in batch else RelevanceInputs
    return kind(*(batch[name] for name in kind._fields))


class RelevanceOutputs(NamedTuple):
    """logits [Q S, K] over relevance classes, embeddings of queries [Q, D] and products [Q S, D]."""

    logits: Tensor
    query: Tensor
    product: Tensor


class RelevanceModel(nn.Module):
    """Scores (query, product) pairs; its embeddings serve retrieval."""

    def __init__(self, config: ModelConfig, spec: InputSpec, seed: int = 0) -> None:
        """`seed`: of what a factory draws. What is of this package is initialised later."""
        super().__init__()
        sizes = spec.vocab_size, spec.pad_id
        self.encoder: TextEncoder
        if config.factory is None:
            self.encoder = _ENCODERS[config.architecture](config, *sizes)
        else:
            self.encoder = FactoryEncoder(config, *sizes, seed)
        self.interactions = Interactions(config, spec)
        self.head = nn.Linear(self.interactions.width, spec.num_classes)

    def forward(self, inputs: RelevanceInputs | GroupInputs) -> RelevanceOutputs:
        """Compute embeddings and scores."""
        query, product, match = self._embedded(inputs)
        asking = _for_each(query, product.shape[0])
        mixed = self.interactions(asking, product, inputs.numeric.to(query.dtype), inputs.categorical, match)
        return RelevanceOutputs(self.head(mixed), query, product)

    def _embedded(self, inputs: RelevanceInputs | GroupInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return embeddings of queries [Q, D] and products [Q S, D], and with token_match how tokens match [Q S, M]."""
        match, matched = self.interactions.match, None
        if isinstance(inputs, GroupInputs):
            tokens, positions, segments = inputs.tokens, inputs.positions, inputs.segments
            texts = 1 + inputs.numeric.shape[0] // tokens.shape[0]
            if match is None:
                found = self.encoder.rows(tokens, positions, segments, texts)
            else:
                hidden = self.encoder.row_states(tokens, positions, segments)
                found = self.encoder.pool_rows(hidden, positions, segments, texts)
                numbers = torch.arange(1, texts + 1, dtype=torch.int32, device=tokens.device)
                members = (segments[:, None, :] == numbers[:, None]).float()  # [Q, 1 + S, T]
                matched = match(hidden, members[:, 0], hidden, members[:, 1:])
            found = found.to(self.head.weight.dtype)  # bf16, where weights are
            return found[:, 0], found[:, 1:].flatten(0, 1), matched
        query, product = inputs.query, inputs.product
        if query.shape[1] == product.shape[1]:  # one encoder pass is half the graph
            both = self.encoder.hidden_states(torch.cat([query, product], dim=0))
            states = both[: query.shape[0]], both[query.shape[0] :]
        else:
            states = self.encoder.hidden_states(query), self.encoder.hidden_states(product)
        embedded = [self.encoder.pool(hidden, tokens) for hidden, tokens in zip(states, (query, product), strict=True)]
        if match is not None:
            is_query, is_product = ((tokens != self.encoder.pad_id).float() for tokens in (query, product))
            asking = (_for_each(one, len(product)) for one in (states[0], is_query))
            matched = match(*asking, states[1], is_product[:, None])
        return embedded[0], embedded[1], matched


def _for_each(values: Tensor, products: int) -> Tensor:
    """What queries have [Q, ...], for each of their products [Q S, ...]."""
    slots = products // values.shape[0]
    if slots == 1:
        return values
    return values[:, None].expand(-1, slots, *values.shape[1:]).reshape(products, *values.shape[1:])


def build_model(config: ModelConfig, spec: InputSpec, seed: int) -> RelevanceModel:
    """A freshly initialised model on CPU, the same for the same seed and so on every rank.

    Raises ConfigError for an architecture that needs another tokenizer.
    """
    if config.architecture == "mpnet" and spec.pad_id != MPNET_PAD:
        raise ConfigError(
            f"model.architecture mpnet with the tokenizer's pad_id {spec.pad_id}",
            expected=f"{MPNET_PAD}, from which an MPNet counts positions",
            next_command="--data.tokenizer.path FILE, the tokenizer.json of an MPNet, or another --model.architecture",
        )
    model = RelevanceModel(config, spec, seed)
    generator = torch.Generator().manual_seed(seed)
    if config.factory is None:
        encoder.initialise(model.encoder, generator)
    interactions.initialise(model.interactions, generator)
    interactions.initialise(model.head, generator)
    return model
