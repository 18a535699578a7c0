"""How query, product and features meet: explicit (products, differences, crosses) and implicit (a deep MLP)."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.config import InputSpec, ModelConfig


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
    """Numeric and categorical features to one vector. Numbers are squashed (sign * log1p): no statistics are kept."""

    def __init__(self, config: ModelConfig, spec: InputSpec) -> None:
        super().__init__()
        self.num_numeric = len(spec.numeric)
        self.embeddings = nn.ModuleList(nn.Embedding(ids, config.categorical_size) for ids in spec.categorical_ids)
        self.width = self.num_numeric + config.categorical_size * len(spec.categorical_ids)

    def forward(self, numeric: Tensor, categorical: Tensor) -> Tensor:
        """numeric [B, F], categorical int [B, C] -> [B, F + C * size]."""
        parts = [torch.sign(numeric) * torch.log1p(torch.abs(numeric))] if self.num_numeric else []
        parts += [table(categorical[:, index]) for index, table in enumerate(self.embeddings)]
        return torch.cat(parts, dim=1) if parts else numeric


class Interactions(nn.Module):
    """Both text embeddings and the features to one vector for the relevance head."""

    def __init__(self, config: ModelConfig, spec: InputSpec) -> None:
        super().__init__()
        size = config.interaction_size
        self.explicit = config.interactions != "implicit"
        self.implicit = config.interactions != "explicit"
        self.query_projection = nn.Linear(config.encoder.hidden_size, size)
        self.product_projection = nn.Linear(config.encoder.hidden_size, size)
        self.features = FeatureEncoder(config, spec)
        joint = 2 * size + self.features.width
        self.width = 0
        if self.explicit:
            self.cross = CrossNetwork(joint, config.cross_layers)
            self.width += joint + 2 * size + 1
        if self.implicit:
            widths = (joint, *config.mlp_sizes)
            self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
            self.width += widths[-1]

    def forward(self, query: Tensor, product: Tensor, numeric: Tensor, categorical: Tensor) -> Tensor:
        """query, product [B, D], numeric [B, F], categorical int [B, C] -> [B, width]."""
        left, right = self.query_projection(query), self.product_projection(product)
        joint = torch.cat([left, right, self.features(numeric, categorical)], dim=1)
        parts = []
        if self.explicit:
            cosine = (F.normalize(query, dim=1) * F.normalize(product, dim=1)).sum(1, keepdim=True)
            parts += [self.cross(joint), left * right, torch.abs(left - right), cosine]
        if self.implicit:
            hidden = joint
            for layer in self.mlp:
                hidden = F.gelu(layer(hidden))
            parts.append(hidden)
        return torch.cat(parts, dim=1)
