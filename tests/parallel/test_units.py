"""Which parts of a model are its units, and what cannot be cut."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.core.errors import ConfigError
from pipeline.model.config import ModelConfig
from pipeline.model.relevance import build_model
from pipeline.parallel.tensor_plan import FusedColwise, interleaved, tensor_styles
from pipeline.parallel.units import check_units, find_units
from tests.train.rows import SPEC

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def blocks(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # 5 s, which ranks that import this file need not spend

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=32, **changes))
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    model: nn.Module = BertForMaskedLM(BertConfig(**SMALL, vocab_size=32))
    return model


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    model: nn.Module = ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4))
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(*(nn.Linear(4, 4) for _ in range(7))), list("0123456")),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
        (nn.Sequential(*blocks(2)), ["0", "1"]),
        (nn.Sequential(nn.Embedding(9, 4), nn.Sequential(*blocks(2)), nn.Linear(4, 2)), ["1.0", "1.1"]),
        (nn.ModuleList([nn.ModuleList(blocks(2)), nn.ModuleList(blocks(2))]), ["0.0", "0.1", "1.0", "1.1"]),
        (nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.LayerNorm(4))), []),
        (nn.ModuleList([nn.Linear(4, 4)]), []),
    ],
)
def test_members_of_lists_of_one_class(model: nn.Module, expected: list[str]) -> None:
    units = find_units(model)
    assert [name for name, _ in units] == expected
    check_units(model, units)


@pytest.mark.parametrize(("make", "first"), [(llama, "model.layers.0"), (bert, "bert.encoder.layer.0"), (vit, None)])
def test_layers_of_hugging_face_models(make: Callable[[], nn.Module], first: str | None) -> None:
    units = find_units(make())
    assert len(units) == 2 and units[0][0] == (first or units[0][0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks(2))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.layers[1][0].weight  # type: ignore[index]


def test_a_tie_is_named_by_both_its_names() -> None:
    model = Tied()
    with pytest.raises(ConfigError, match=r"'layers.1.0.weight' \(unit 'layers.1'\) and 'head.weight' \(in no unit\)"):
        check_units(model, find_units(model))
    check_units(model, [])
    check_units(llama(tie_word_embeddings=True), find_units(llama(tie_word_embeddings=True)))
    inside = nn.Sequential(*blocks(2))
    inside[0].append(nn.Linear(4, 4))  # type: ignore[operator]
    inside[0][2].weight = inside[0][0].weight  # type: ignore[index]
    check_units(inside, find_units(inside))


def test_what_cannot_be_cut_is_named() -> None:
    model = nn.Sequential(*blocks(2))
    model[1].register_parameter("temperature", nn.Parameter(torch.ones(())))
    with pytest.raises(ConfigError, match=r"parameter '1.temperature' is a scalar"):
        check_units(model, find_units(model))
    model = nn.Sequential(*blocks(2))
    model[1][0].bias.data = model[1][0].bias.data.half()  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"unit '1' has parameters of two types: '1.0.weight' .*, '1.0.bias'"):
        check_units(model, find_units(model))
    with pytest.raises(ConfigError, match="unit 'layers' is a ModuleList"):
        check_units(model, [("layers", nn.ModuleList())])
    with pytest.raises(ConfigError, match="unit '' is the model itself"):
        check_units(model, [("", model)])


def test_interleaved_rows_come_back() -> None:
    rows = torch.arange(24).view(12, 2)
    assert interleaved(rows, 3)[:, 0].tolist() == [0, 8, 16, 2, 10, 18, 4, 12, 20, 6, 14, 22]
    assert torch.equal(interleaved(interleaved(rows, 3), 4), rows)


def test_the_plan_of_a_hugging_face_model() -> None:
    styles = dict(tensor_styles(llama(tie_word_embeddings=True), None, 2))
    assert len(styles) == 14 and "model.layers.1.mlp.down_proj" in styles


def modernbert() -> nn.Module:
    return build_model(ModelConfig(preset="tiny", architecture="modernbert"), SPEC, 1)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = self.qkv(values).chunk(3, -1)
        result: Tensor = self.out(query * key + value)
        return result


@pytest.mark.parametrize(
    ("make", "plan", "degree", "match"),
    [
        (Fused, None, 2, "Fused, which has no plan.*\n.*\n.*tensor_plan="),
        (Fused, {"qkv": "colwise", "out": "rowwise"}, 2, "several matrices in one.*\n.*FusedColwise"),
        (Fused, {"qkv": FusedColwise(3), "output": "rowwise"}, 2, "no module of Fused is called 'output'"),
        (Fused, {"qkv": FusedColwise(3)}, 8, "tensor_degree 8 over 4 outputs of 'qkv'"),
        (Fused, {"out": "rowwise"}, 3, "tensor_degree 3 over 4 inputs of 'out'"),
        (Fused, {"out": "rows"}, 2, "'out' is 'rows'.*\n.*colwise, rowwise"),
        (lambda: nn.Sequential(nn.ReLU()), {"0": "colwise"}, 2, "'0' is a ReLU"),
        (llama, None, 4, "tensor_degree 4 over 2 heads .num_attention_heads"),
        (modernbert, None, 2, "a ModernBertEncoder.*\n.*\n.*--train.parallel.tensor-degree 1"),
        (partial(llama, tie_word_embeddings=True), {"lm_head": "colwise"}, 2, "'lm_head.weight' is the same parameter"),
    ],
)
def test_what_cannot_be_split(make: Callable[[], nn.Module], plan: Any, degree: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        tensor_styles(make(), plan, degree)
