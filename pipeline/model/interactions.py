"""How query, product and features meet: explicit (products, differences, crosses) and implicit (a deep MLP)."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.ops import unit

_CONSTANT = 1e-4  # deviation below which a number says nothing
_CATEGORICAL_SIZE = 16
"""Embedding width of each categorical feature."""


class CrossNetwork(nn.Module):
    """DCN-v2: x_{l+1} = x_0 * (W x_l + b) + x_l (Wang et al., "DCN V2", WWW 2021, equation 1)."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, W] -> [B, W]."""
        crossed = inputs
        for layer in self.layers:
            crossed = inputs * layer(crossed) + crossed
        return crossed


class FeatureEncoder(nn.Module):
    """Numeric and categorical features to one vector.

    Numbers are squashed (log(1 + x)), then `scale` and `shift` bring each to mean 0 and deviation 1 over the training
    split (`fit`); they are weights like any other, so they travel with every checkpoint and export.
    """

    def __init__(self, config: ModelConfig, spec: InputSpec) -> None:
        super().__init__()
        self.num_numeric = len(spec.numeric)
        if self.num_numeric:
            self.scale = nn.Parameter(torch.ones(self.num_numeric))
            self.shift = nn.Parameter(torch.zeros(self.num_numeric))
        self.embeddings = nn.ModuleList(nn.Embedding(ids, _CATEGORICAL_SIZE) for ids in spec.categorical_ids)
        inputs = self.num_numeric + _CATEGORICAL_SIZE * len(spec.categorical_ids)
        widths = (inputs, *config.feature_sizes) if inputs else (0,)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.width = widths[-1]

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """numeric [B, F], categorical int [B, C] -> [B, width]."""
        parts = [_squashed(numeric) * self.scale + self.shift] if self.num_numeric else []
        parts += [table(categorical[:, index]) for index, table in enumerate(self.embeddings)]
        hidden = torch.cat(parts, dim=1) if parts else numeric
        for layer in self.layers:
            hidden = F.gelu(layer(hidden))
        return hidden

    @torch.no_grad()
    def fit(self, numeric: Tensor) -> None:
        """Set scale and shift from rows of the training split, fp32 [N, F]; a number that never changes is left out."""
        if not self.num_numeric:
            return
        squashed = _squashed(numeric.double())
        mean, deviation = squashed.mean(0), squashed.std(0, unbiased=False)
        changes = (deviation > _CONSTANT).double()
        scale = changes / deviation.clamp(min=_CONSTANT)
        self.scale.copy_(scale)
        self.shift.copy_(-mean * scale)


def _squashed(numeric: Tensor) -> Tensor:
    return torch.sign(numeric) * torch.log(1.0 + torch.abs(numeric))


_MATCH_SIZE, _MATCH_WEIGHTS = 64, 8
_FAR = 1e4  # over any cosine, and nothing overflows in bf16


class TokenMatch(nn.Module):
    """How well each token of one text is found in the other (late interaction).

    Each token takes its best cosine over the other text's, as in ColBERT (Khattab and Zaharia, SIGIR 2020). Of these
    both texts give the mean, the lowest, and means under weights that are learnt from the token: a number that differs
    tells more than a word that does.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.encoder.hidden_size
        self.projection = nn.Linear(width, _MATCH_SIZE)
        self.weights = nn.Linear(width, _MATCH_WEIGHTS)
        self.layer = nn.Linear(2 * (_MATCH_WEIGHTS + 2), _MATCH_SIZE)
        self.width = _MATCH_SIZE

    def forward(self, query: Tensor, is_query: Tensor, product: Tensor, is_product: Tensor) -> Tensor:
        """States query [B, Tq, D] and product [B, Tp, D], and which of them are tokens of the query [B, Tq] and of each
        of S products [B, S, Tp], 1 or 0 -> [B S, width]."""
        cosines = torch.matmul(self._directions(query), self._directions(product).transpose(1, 2))[:, None]
        asks, answers = is_query[:, None], is_product  # [B, 1, Tq], [B, S, Tp]
        in_product = (cosines - (1.0 - answers[:, :, None]) * _FAR).amax(3) * answers.amax(2)[..., None]  # [B, S, Tq]
        in_query = (cosines - (1.0 - asks[..., None]) * _FAR).amax(2)  # [B, 1, Tp]
        found = [*self._summed(in_product, asks, query), *self._summed(in_query, answers, product)]
        return F.gelu(self.layer(torch.cat(found, dim=2).flatten(0, 1).to(query.dtype)))

    def _directions(self, states: Tensor) -> Tensor:
        found: Tensor = self.projection(states).float()
        return found * torch.rsqrt((found * found).sum(2, keepdim=True) + 1e-12)

    def _summed(self, best: Tensor, is_token: Tensor, states: Tensor) -> list[Tensor]:
        """Of the best cosines [B, S or 1, T]: the learnt means, the mean and the lowest over tokens, [B, S, ...]."""
        best = best * is_token  # a text without tokens has zeros
        is_token = is_token.expand_as(best)
        scores = self.weights(states).float()[:, None] - (1.0 - is_token[..., None]) * _FAR  # [B, S, T, W]
        learnt = (torch.softmax(scores, dim=2) * best[..., None]).sum(2)
        mean = best.sum(2) / is_token.sum(2).clamp(min=1.0)
        lowest = (best + (1.0 - is_token) * _FAR).amin(2) * is_token.amax(2)
        return [learnt, mean[..., None], lowest[..., None]]


class Interactions(nn.Module):
    """Both text embeddings and the features to one vector for the relevance head."""

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
        """query, product [B, D], numeric [B, F], categorical int [B, C], match of `self.match` -> [B, width]."""
        left, right = self.query_projection(query), self.product_projection(product)
        features = self.features(numeric, categorical)
        if match is not None:
            features = torch.cat([features, match], dim=1)
        joint = torch.cat([left, right, features], dim=1)
        cosine = (unit(query) * unit(product)).sum(1, keepdim=True)
        explicit = [self.cross(joint), left * right, torch.abs(left - right), cosine]
        hidden = joint
        for layer in self.mlp:
            hidden = F.gelu(layer(hidden))
        return torch.cat([features, *explicit, hidden], dim=1)


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Normal weights with std 1/sqrt(inputs), zero biases, drawn on CPU.

    Not BERT's 0.02: with 20 numeric inputs that is so small that the text side memorises the training pairs before the
    features are used (WDC cameras, test F1 of match 0.70).
    """
    with torch.no_grad():
        for child in module.modules():
            if isinstance(child, nn.Linear):
                child.weight.normal_(0.0, child.in_features**-0.5, generator=generator)
                child.bias.zero_()
            if isinstance(child, nn.Embedding):
                child.weight.normal_(0.0, 1.0, generator=generator)
