"""The relevance model.

It consists of a text encoder, interactions between the query, the product and features, and a relevance head.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.core.errors import ConfigError
from pipeline.model.config import MPNET_PAD, InputSpec, ModelConfig
from pipeline.model.encoder import BertEncoder, ModernBertEncoder, MPNetEncoder, TextEncoder
from pipeline.model.factory import FactoryEncoder
from pipeline.model.ops import l2_normalize

_ENCODER_STD = 0.02  # as in BERT
_ENCODERS: Mapping[str, Callable[[ModelConfig, int, int], TextEncoder]] = {
    "bert": BertEncoder,
    "mpnet": MPNetEncoder,
    "modernbert": ModernBertEncoder,
}


class RelevanceInputs(NamedTuple):
    """Model inputs for a batch of Q queries with S products each, where S is 1 when scoring pairs.

    Product q S + s belongs to query q. Queries are padded to Tq tokens and products to Tp tokens. Each pair has F
    numeric and C categorical features.
    """

    query: Tensor  # int32 [Q, Tq]
    product: Tensor  # int32 [Q S, Tp]
    numeric: Tensor  # float32 [Q S, F]
    categorical: Tensor  # int32 [Q S, C]


class GroupInputs(NamedTuple):
    """Model inputs for a training batch, where each query is packed with its group of products into one row.

    There are Q rows of T tokens, with S products each. In each row, text 1 is the query and text 2 + s is product s
    (see TextEncoder.rows). Product q S + s belongs to query q. If a product has no tokens, its embedding is zero.
    """

    tokens: Tensor  # int32 [Q, T]
    positions: Tensor  # int32 [Q, T]
    segments: Tensor  # int32 [Q, T]
    numeric: Tensor  # float32 [Q S, F]
    categorical: Tensor  # int32 [Q S, C]


def inputs_of(batch: Mapping[str, Tensor]) -> "RelevanceInputs | GroupInputs":
    """Convert the tensors of a batch to model inputs."""
    kind = GroupInputs if "segments" in batch else RelevanceInputs
    return kind(*(batch[name] for name in kind._fields))


class RelevanceOutputs(NamedTuple):
    """Logits over relevance classes, of shape [Q S, K], and embeddings of queries [Q, D] and products [Q S, D]."""

    logits: Tensor
    query: Tensor
    product: Tensor


class TaughtOutputs(NamedTuple):
    """The outputs of a model that is trained with `add_projection`, and its projected embeddings of size Dt."""

    logits: Tensor
    query: Tensor
    product: Tensor
    projected_query: Tensor
    projected_product: Tensor


# Interactions between query, product and features. Some are explicit (products, differences and crosses), and others
# are learned by a deep MLP.

_CONSTANT = 1e-4  # features with a lower standard deviation are considered constant
_FARTHEST_BIN = 3.0  # the bins cover this many standard deviations on both sides of the mean
_CATEGORICAL_SIZE = 16
"""Embedding width of each categorical feature."""


class CrossNetwork(nn.Module):
    """DCN-v2: x_{l+1} = x_0 * (W x_l + b) + x_l (Wang et al., "DCN V2", WWW 2021, equation 1)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply all cross layers to inputs of shape [B, W]."""
        crossed = inputs
        for layer in self.layers:
            crossed = inputs * layer(crossed) + crossed
        return crossed


MISSING = -3e38
"""Stands for a missing number on devices, which may not compare NaN correctly. It is finite in bf16, too."""


class FeatureEncoder(nn.Module):
    """MLP over numeric and categorical features.

    Numeric features are first squashed with log(1 + x) and then standardized with `scale` and `shift`, which are
    computed from the training split (see `fit`). Both are parameters, so that they are part of every checkpoint and
    export. A number that is MISSING becomes 0, which is the mean, and sets its indicator, if the model has one.

    Numbers that are not lexical features are also given as positions in bins of equal width: 0 below the bin, 1 above
    it, and linear in between (Gorishniy et al., "On Embeddings for Numerical Features", NeurIPS 2022). From these, the
    MLP learns sooner that only some values count, such as prices that are almost equal.
    """

    def __init__(self, config: ModelConfig, spec: InputSpec) -> None:
        super().__init__()
        self.num_numeric, self.num_indicators, self.may_miss = len(spec.numeric), len(spec.missing), spec.may_miss
        self.num_bins = spec.bins
        if self.num_numeric:
            self.scale = nn.Parameter(torch.ones(self.num_numeric))
            self.shift = nn.Parameter(torch.zeros(self.num_numeric))
        self.embeddings = nn.ModuleList(nn.Embedding(ids, _CATEGORICAL_SIZE) for ids in spec.categorical_ids)
        numbers = self.num_numeric + self.num_indicators * (1 + self.num_bins)
        inputs = numbers + _CATEGORICAL_SIZE * len(spec.categorical_ids)
        widths = (inputs, *config.feature_sizes) if inputs else (0,)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.width = widths[-1]

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """Encode numeric features of shape [B, F] and categorical ids of shape [B, C] as a [B, width] tensor."""
        parts: list[Tensor] = []
        if self.may_miss:
            present = 0.5 + 0.5 * torch.sign(numeric - MISSING / 2)  # 0 or 1, and without the f64 of a comparison
            parts = [(_squash(numeric * present) * self.scale + self.shift) * present]
            parts += [1.0 - present[:, : self.num_indicators]] if self.num_indicators else []
            parts += [self._positions(parts[0][:, : self.num_indicators])] if self.num_bins else []
        elif self.num_numeric:
            parts = [_squash(numeric) * self.scale + self.shift]
        parts += [table(categorical[:, index]) for index, table in enumerate(self.embeddings)]
        hidden = torch.cat(parts, dim=1) if parts else numeric
        for layer in self.layers:
            hidden = F.gelu(layer(hidden))
        return hidden

    def _positions(self, standardized: Tensor) -> Tensor:
        """Return the position of each number, [B, N], in each bin, which is from 0 to 1, as a [B, N bins] tensor."""
        starts = torch.arange(self.num_bins, dtype=standardized.dtype, device=standardized.device) - self.num_bins / 2
        offsets = standardized[:, :, None] * (self.num_bins / 2 / _FARTHEST_BIN) - starts
        return (F.relu(offsets) - F.relu(offsets - 1.0)).flatten(1)

    @torch.no_grad()
    def fit(self, numeric: Tensor) -> None:
        """Set scale and shift from N rows of the training split, of shape [N, F], in which NaN is a missing number.

        Constant features become zero.
        """
        if not self.num_numeric:
            return
        squashed = _squash(numeric.double())
        present = ~squashed.isnan()
        squashed = torch.where(present, squashed, squashed.nanmean(0).nan_to_num())
        mean, deviation = squashed.mean(0), squashed.std(0, unbiased=False)
        deviation *= (len(squashed) / present.sum(0).clamp(min=1)).sqrt()
        changes = (deviation > _CONSTANT).double()
        scale = changes / deviation.clamp(min=_CONSTANT)
        self.scale.copy_(scale)
        self.shift.copy_(-mean * scale)


def _squash(numeric: Tensor) -> Tensor:
    return torch.sign(numeric) * torch.log(1.0 + torch.abs(numeric))


_MATCH_SIZE, _MATCH_WEIGHTS = 64, 8
_FAR = 1e4  # larger than any cosine, but doesn't overflow in bf16


class TokenMatch(nn.Module):
    """Late interaction module that computes how well the tokens of each text match the other text.

    For each token, we take the maximum cosine similarity to any token of the other text, as in ColBERT (Khattab and
    Zaharia, SIGIR 2020). These are then summarized by the mean, the minimum, and several weighted means. The weights of
    tokens are learned because, for example, a different number matters more than a different word.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.encoder.hidden_size
        self.projection = nn.Linear(width, _MATCH_SIZE)
        self.weights = nn.Linear(width, _MATCH_WEIGHTS)
        self.layer = nn.Linear(2 * (_MATCH_WEIGHTS + 2), _MATCH_SIZE)
        self.width = _MATCH_SIZE

    def forward(self, query: Tensor, is_query: Tensor, product: Tensor, is_product: Tensor) -> Tensor:
        """Compute match features of shape [B S, width].

        `query`, `product`: hidden states of shape [B, Tq, D] and [B, Tp, D].
        `is_query`, `is_product`: masks of shape [B, Tq] and [B, S, Tp], which are 1 for the tokens of the query and of
        each product, and 0 for all other tokens.
        """
        cosines = torch.matmul(self._directions(query), self._directions(product).transpose(1, 2))[:, None]
        is_query = is_query[:, None]  # [B, 1, Tq]
        in_product = (cosines - (1.0 - is_product[:, :, None]) * _FAR).amax(3) * is_product.amax(2)[..., None]
        in_query = (cosines - (1.0 - is_query[..., None]) * _FAR).amax(2)  # [B, 1, Tp], and in_product [B, S, Tq]
        features = [*self._summary(in_product, is_query, query), *self._summary(in_query, is_product, product)]
        return F.gelu(self.layer(torch.cat(features, dim=2).flatten(0, 1).to(query.dtype)))

    def _directions(self, states: Tensor) -> Tensor:
        projected: Tensor = self.projection(states).float()
        return projected * torch.rsqrt((projected * projected).sum(2, keepdim=True) + 1e-12)

    def _summary(self, best: Tensor, is_token: Tensor, states: Tensor) -> list[Tensor]:
        """Return the weighted means, mean and minimum of the best cosines over tokens, each of shape [B, S, ...].

        `best`: the maximum cosine of each token, of shape [B, S or 1, T].
        """
        best = best * is_token  # all features of a text without tokens are zero
        is_token = is_token.expand_as(best)
        scores = self.weights(states).float()[:, None] - (1.0 - is_token[..., None]) * _FAR  # [B, S, T, W]
        weighted = (torch.softmax(scores, dim=2) * best[..., None]).sum(2)
        mean = best.sum(2) / is_token.sum(2).clamp(min=1.0)
        lowest = (best + (1.0 - is_token) * _FAR).amin(2) * is_token.amax(2)
        return [weighted, mean[..., None], lowest[..., None]]


class Interactions(nn.Module):
    """Explicit and implicit interactions between both text embeddings and the features."""

    def __init__(self, config: ModelConfig, spec: InputSpec) -> None:
        super().__init__()
        size = config.interaction_size
        self.query_projection = nn.Linear(config.encoder.hidden_size, size)
        self.product_projection = nn.Linear(config.encoder.hidden_size, size)
        self.features = FeatureEncoder(config, spec)
        self.match = TokenMatch(config) if config.token_match else None
        self.width = self.features.width + (self.match.width if self.match else 0)
        joint = 2 * size + self.width
        self.cross = CrossNetwork(joint, config.cross_layers)
        widths = (joint, *config.mlp_sizes)
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.width += joint + 2 * size + 1 + widths[-1]

    def forward(
        self, query: Tensor, product: Tensor, numeric: Tensor, categorical: Tensor, match: Tensor | None = None
    ) -> Tensor:
        """Compute the inputs of the relevance head, of shape [B, width].

        `query`, `product`: embeddings of shape [B, D]. `numeric`: [B, F]. `categorical`: ids of shape [B, C].
        `match`: features from TokenMatch.
        """
        left, right = self.query_projection(query), self.product_projection(product)
        features = self.features(numeric, categorical)
        if match is not None:
            features = torch.cat([features, match], dim=1)
        joint = torch.cat([left, right, features], dim=1)
        cosine = (l2_normalize(query) * l2_normalize(product)).sum(1, keepdim=True)
        explicit = [self.cross(joint), left * right, torch.abs(left - right), cosine]
        hidden = joint
        for layer in self.mlp:
            hidden = F.gelu(layer(hidden))
        return torch.cat([features, *explicit, hidden], dim=1)


# The model.


class RelevanceModel(nn.Module):
    """Model that scores (query, product) pairs and computes the embeddings used for retrieval."""

    def __init__(self, config: ModelConfig, spec: InputSpec, seed: int = 0) -> None:
        """Build the modules. `seed` is only used for a factory, since `build_model` initializes all other weights."""
        super().__init__()
        sizes = spec.vocab_size, spec.pad_id
        self.encoder: TextEncoder
        if config.factory is None:
            self.encoder = _ENCODERS[config.architecture](config, *sizes)
        else:
            self.encoder = FactoryEncoder(config, *sizes, seed)
        self.interactions = Interactions(config, spec)
        self.head = nn.Linear(self.interactions.width, spec.num_classes)
        self.teacher: nn.Linear | None = None
        self.encodes_together = True
        """Whether to encode queries and products of the same length in a single call."""

    @torch.no_grad()
    def add_projection(self, width: int, seed: int) -> None:
        """Add a linear map to vectors of a teacher, which is only used for training."""
        self.teacher = nn.Linear(self.encoder.width, width, bias=False)
        generator = torch.Generator().manual_seed(seed)
        self.teacher.weight.normal_(0.0, self.encoder.width**-0.5, generator=generator)

    def forward(self, inputs: RelevanceInputs | GroupInputs) -> RelevanceOutputs:
        """Compute the logits and embeddings of a batch. With a projection, training returns TaughtOutputs."""
        query, product, match = self._embed(inputs)
        repeated = _repeat(query, product.shape[0])
        mixed = self.interactions(repeated, product, inputs.numeric.to(query.dtype), inputs.categorical, match)
        outputs = RelevanceOutputs(self.head(mixed), query, product)
        if self.teacher is None or not self.training:
            return outputs
        return cast(RelevanceOutputs, TaughtOutputs(*outputs, self.teacher(query), self.teacher(product)))

    def _embed(self, inputs: RelevanceInputs | GroupInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the embeddings of queries, [Q, D], and products, [Q S, D].

        Also returns match features of shape [Q S, M] if token_match is set, and None otherwise.
        """
        match, matched = self.interactions.match, None
        if isinstance(inputs, GroupInputs):
            tokens, positions, segments = inputs.tokens, inputs.positions, inputs.segments
            texts = 1 + inputs.numeric.shape[0] // tokens.shape[0]
            if match is None:
                vectors = self.encoder.rows(tokens, positions, segments, texts)
            else:
                hidden = self.encoder.row_states(tokens, positions, segments)
                vectors = self.encoder.pool_rows(hidden, positions, segments, texts)
                numbers = torch.arange(1, texts + 1, dtype=torch.int32, device=tokens.device)
                members = (segments[:, None, :] == numbers[:, None]).float()  # [Q, 1 + S, T]
                matched = match(hidden, members[:, 0], hidden, members[:, 1:])
            vectors = vectors.to(self.head.weight.dtype)  # cast back to bf16 if the weights are in bf16
            return vectors[:, 0], vectors[:, 1:].flatten(0, 1), matched
        query, product = inputs.query, inputs.product
        if self.encodes_together and query.shape[1] == product.shape[1]:  # this halves the size of the graph
            both = self.encoder.hidden_states(torch.cat([query, product], dim=0))
            states = both[: query.shape[0]], both[query.shape[0] :]
        else:
            states = self.encoder.hidden_states(query), self.encoder.hidden_states(product)
        embedded = [self.encoder.pool(hidden, tokens) for hidden, tokens in zip(states, (query, product), strict=True)]
        if match is not None:
            is_query, is_product = ((tokens != self.encoder.pad_id).float() for tokens in (query, product))
            repeated = (_repeat(values, len(product)) for values in (states[0], is_query))
            matched = match(*repeated, states[1], is_product[:, None])
        return embedded[0], embedded[1], matched


def _repeat(values: Tensor, products: int) -> Tensor:
    """Repeat the values of each query, of shape [Q, ...], once per product to get a tensor of shape [Q S, ...]."""
    slots = products // values.shape[0]
    if slots == 1:
        return values
    return values[:, None].expand(-1, slots, *values.shape[1:]).reshape(products, *values.shape[1:])


def build_model(config: ModelConfig, spec: InputSpec, seed: int) -> RelevanceModel:
    """Build and initialize a model on the CPU. With the same seed, the weights are the same on every rank.

    Raises ConfigError if the architecture doesn't support the tokenizer.
    """
    if config.architecture == "mpnet" and spec.pad_id != MPNET_PAD:
        raise ConfigError(
            f"model.architecture mpnet does not support the tokenizer's pad_id {spec.pad_id}",
            expected=f"pad_id {MPNET_PAD}, which MPNet uses as the offset of positions",
            next_command="--data.tokenizer.path FILE with the tokenizer.json of an MPNet model, or change"
            " --model.architecture",
        )
    model = RelevanceModel(config, spec, seed)
    generator = torch.Generator().manual_seed(seed)
    if config.factory is None:
        _initialise(model.encoder, generator, _ENCODER_STD)
    _initialise(model.interactions, generator)
    _initialise(model.head, generator)
    return model


@torch.no_grad()
def _initialise(module: nn.Module, generator: torch.Generator, std: float | None = None) -> None:
    """Initialize weights from a normal distribution and set biases to zero.

    By default, the standard deviation is 1/sqrt(inputs) for layers and 1 for embedding tables. BERT's 0.02 is too small
    for layers after the encoder. With 20 numeric features, for example, the model memorized the training pairs by their
    texts before it learned to use the features (WDC cameras, test F1 of match 0.70).
    """
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            child.weight.normal_(0.0, std or 1.0, generator=generator)
        elif isinstance(child, nn.Linear):
            child.weight.normal_(0.0, std or child.in_features**-0.5, generator=generator)
            if child.bias is not None:
                child.bias.zero_()
