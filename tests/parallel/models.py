"""Small models, and what a model that is spread over ranks holds, as one process would have it."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.backends import open_host
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.parallel.config import Plan
from pipeline.parallel.mesh import Mesh, open_mesh
from pipeline.parallel.parallelize import Unit, find_units
from pipeline.parallel.tensors import full_cpu_tensor, fused_parts

MODEL = ModelConfig(
    preset="tiny",
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    intermediate_size=64,
    max_positions=64,
    interaction_size=16,
    mlp_sizes=(32, 16),
    feature_sizes=(8, 8),
)
INPUTS = InputSpec(
    vocab_size=103,
    pad_id=0,
    labels=("a", "b", "c"),
    label_gains=(1.0, 0.1, 0.0),
    numeric=("n",),
    categorical_ids=(7,),
)
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
}


def opened(plan: Mapping[str, Any]) -> Mesh:
    return open_mesh(Plan.read(plan), open_host(), timeout_s=60)


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, in host memory. All ranks call it."""
    parts = fused_parts(model)
    state = model.state_dict(keep_vars=True)
    return {name: full_cpu_tensor(tensor, parts.get(name, 1)) for name, tensor in state.items()}


def encoder_layers(model: nn.Module) -> list[Unit]:
    return [(name, unit) for name, unit in find_units(model) if name.startswith("encoder.")]


def dense(seed: int, *widths: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths or (8, 8, 8, 4))))


def blocks(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks(2))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.layers[1][0].weight  # type: ignore[index]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = self.qkv(values).chunk(3, -1)
        result: Tensor = self.out(query * key + value)
        return result


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # 5 s, which ranks that import this file need not spend

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**SMALL, **changes))
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    model: nn.Module = BertForMaskedLM(BertConfig(**SMALL))
    return model
