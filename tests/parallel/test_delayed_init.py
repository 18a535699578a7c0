"""A model that is built without memory has the weights that it would have had."""

import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from pipeline.core.errors import ConfigError
from pipeline.model.relevance import build_model
from pipeline.parallel.delayed_init import Recipe, delayed_init, recipe_of
from pipeline.parallel.parallelize import _recipes
from tests.parallel.test_parallelize import INPUTS, MODEL
from tests.parallel.test_units import bert, llama, vit


class Mixed(nn.Module):
    """All that a constructor may do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.noise = nn.Parameter(torch.randn(3, 8) * 0.1)
        self.register_buffer("random", torch.randn(4))
        self.register_buffer("position_ids", torch.arange(8), persistent=False)
        self.table = nn.Embedding(9, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 9)
        self.head.weight = self.table.weight
        nn.init.trunc_normal_(self.attention.out_proj.weight, std=0.02, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            self.head.bias[2:4].fill_(5.0)
            self.norm.weight.mul_(torch.arange(8.0))


@pytest.mark.parametrize(
    "make", [Mixed, partial(llama, tie_word_embeddings=True), vit, bert, lambda: build_model(MODEL, INPUTS, seed=3)]
)
def test_weights_are_those_of_a_model_built_as_usual(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    real = make()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with delayed_init():
        model = make()
    assert torch.equal(torch.get_rng_state(), after)
    expected = dict(real.named_parameters())
    delayed = dict(model.named_parameters())
    assert delayed.keys() == expected.keys()
    torch.manual_seed(6)  # nothing of what is current counts
    for name, parameter in reversed(delayed.items()):
        assert parameter.is_meta
        recipe = recipe_of(parameter)
        assert not recipe.lost, (name, recipe.lost)
        assert torch.equal(recipe.drawn(), expected[name]), name
    buffers = dict(real.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


class Computed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(600, 600) if how == "orthogonal" else torch.randn(600, 600))
        if how == "orthogonal":
            nn.init.orthogonal_(self.weight)
        if how == "partly":
            with torch.no_grad():
                self.weight[3].fill_(0.0)
        if how == "other name":
            local = nn.Parameter(torch.zeros(4, 3))
            self.weight = local
            nn.init.constant_(local, 7.0)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("orthogonal", "other values on meta"),
        ("early", "before it is"),
        ("partly", "only some of"),
        ("other name", "fill_ changes what it was before"),
    ],
)
def test_values_that_cannot_be_told_are_not_made_up(how: str, match: str) -> None:
    with delayed_init():
        model = Computed(how)
    assert match in recipe_of(model.weight).lost


def test_modules_are_as_before_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), delayed_init():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta
    assert "outside" in recipe_of(nn.Linear(2, 2, device="meta").weight).lost


def test_another_ranks_recipe_draws_its_values() -> None:
    """Also those that a parameter had before it was registered, and those that were copied into it."""

    def made(seed: int) -> dict[str, Recipe]:
        torch.manual_seed(seed)
        with delayed_init():
            model = Mixed()
            model.head.bias.data.copy_(torch.randn(9))
        return {name: recipe_of(parameter) for name, parameter in model.named_parameters()}

    ours, theirs = made(1), made(2)
    assert not torch.equal(ours["noise"].drawn(), theirs["noise"].drawn())
    for name, recipe in ours.items():
        recipe.draw_as(pickle.loads(pickle.dumps(theirs[name].drawn_by())))  # noqa: S301
        assert torch.equal(recipe.drawn(), theirs[name].drawn()), name


def test_a_model_has_its_values_from_one_place() -> None:
    model = nn.Sequential()
    with delayed_init():
        model.append(nn.Linear(2, 2))
    with delayed_init(weights="saved"):
        model.append(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="take their values from None, saved"):
        _recipes(model)
