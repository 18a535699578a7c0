"""Delayed initialisation: a model is built without its parameters' memory, and filled after it is spread.

What a constructor does to its parameters in place is written down and done again later, for each parameter with the
random numbers that it had; so the weights are to the bit those of a model that was built as usual, and so is the state
of the generators afterwards. Buffers are real from the start: most are computed once, in the constructor.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_RECIPE, _DELAYED_AS = "trnpipe_recipe", "trnpipe_delayed_as"  # attributes of parameters
_KEPT_BYTES = 2**20
"""Up to this a parameter with values before it is registered (`nn.Parameter(torch.randn(...))`) keeps them."""
_COMPUTED = "{} sets it from other values on meta"
_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_OVERWRITING = (
    "normal_",
    "uniform_",
    "zero_",
    "fill_",
    "copy_",
    "exponential_",
    "random_",
    "bernoulli_",
    "log_normal_",
    "trunc_normal_",
)


@dataclass(frozen=True)
class Step:
    """One operation in place, on a view of a parameter."""

    function: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    words: tuple[Any, ...]
    options: dict[str, Any]
    is_random: bool


@dataclass
class Recipe:
    """How the values of one parameter come about."""

    meta: Tensor
    start: Tensor | None
    """Its values as it was registered (one, where they are all alike); None: not known."""
    weights: Path | str | None
    """The folder that they are read from, instead."""
    steps: list[Step] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    """Of the generator, before each random step."""
    lost: str = ""
    """Why they cannot be told."""

    def drawn_by(self) -> tuple[Any, ...]:
        """What its values depend on beside the operations, which are the same on all ranks. Can be pickled."""
        return self.start, self.states, [(step.words, step.options) for step in self.steps]

    def draw_as(self, other: tuple[Any, ...]) -> None:
        """As another rank's recipe would, by what its `drawn_by` returned."""
        self.start, self.states, given = other
        self.steps = [
            replace(step, words=words, options=options)
            for step, (words, options) in zip(self.steps, given, strict=True)
        ]

    def drawn(self) -> Tensor:
        """The whole parameter, in host memory."""
        values = torch.empty_strided(self.meta.size(), self.meta.stride(), dtype=self.meta.dtype)
        states = iter(self.states)
        with torch.no_grad():
            if self.start is not None:
                values.copy_(self.start)
            for step in self.steps:
                options = step.options
                if step.is_random:
                    generator = torch.Generator()
                    generator.set_state(next(states))
                    options = {**options, "generator": generator}
                step.function(values.as_strided(step.size, step.stride, step.offset), *step.words, **options)
        return values


@contextmanager
def delayed_init(weights: str | Path | None = None) -> Iterator[None]:
    """Modules that are built within have parameters on meta; `transform` fills them, a part on each rank.

    With the values that the constructors would have drawn, or those of `weights`, a folder that `save` wrote: then
    nothing is drawn. A model whose values cannot be told is refused by `transform`, by the name of the parameter.
    """
    recorder = _Recorder(weights)
    register = nn.Module.register_parameter

    def register_delayed(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter if parameter is None or parameter.is_meta else recorder.delayed(parameter))

    truncated: Any = nn.init._no_grad_trunc_normal_  # which draws until all fit, and nothing on meta since torch 2.14

    def truncated_delayed(tensor: Tensor, *words: Any, generator: torch.Generator | None = None) -> Tensor:
        if not tensor.is_meta:
            return cast(Tensor, truncated(tensor, *words, generator=generator))
        args, options = (tensor, *words), {"generator": generator}
        recorder.record(tensor, "trunc_normal_", truncated, args, options, is_random=True)
        return tensor

    nn.Module.register_parameter = register_delayed  # type: ignore[method-assign, assignment]
    nn.init._no_grad_trunc_normal_ = truncated_delayed  # type: ignore[assignment]
    try:
        with recorder, _Skipped(recorder):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.init._no_grad_trunc_normal_ = truncated


def recipe_of(parameter: Tensor) -> Recipe:
    """Of a parameter on meta."""
    unknown = Recipe(parameter, None, None, lost="it was built on meta outside delayed_init, or computed there")
    found: Recipe = getattr(parameter, _RECIPE, unknown)
    if found.start is None and not found.steps and not found.weights and not found.lost:
        found.lost = "it has its values before it is registered in a module, and nothing in place sets them"
    return found


class _Recorder(TorchDispatchMode):
    def __init__(self, weights: str | Path | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._recipes: dict[int, Recipe] = {}
        """By storage, which views share; recipes keep it alive."""
        self._replaced: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
        """By storage, what delayed parameters stand for, as long as somebody else has it."""

    def delayed(self, real: nn.Parameter) -> nn.Parameter:
        """In place of a parameter that is being registered; the same one, where it is in two modules."""
        known: nn.Parameter | None = getattr(real, _DELAYED_AS, None)
        if known is not None:
            return known
        made = nn.Parameter(torch.empty_like(real, device="meta"), real.requires_grad)
        recipe = Recipe(made.detach(), self._start(real.detach()), self._weights)
        setattr(made, _RECIPE, recipe)
        setattr(real, _DELAYED_AS, made)
        self._recipes[_storage(made)] = recipe
        self._replaced[_storage(real)] = real
        return made

    def _start(self, values: Tensor) -> Tensor | None:
        if self._weights is not None or not values.numel():
            return None
        first = values.flatten()[0]
        if bool((values == first).all()):
            return first.clone()
        return values.clone() if values.nbytes <= _KEPT_BYTES else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        for written in _written(func, args, options):
            name = func._schema.name.removeprefix("aten::")
            if written.is_meta:
                is_random = any(argument.name == "generator" for argument in func._schema.arguments)
                self.record(written, name, func, args, options, is_random=is_random)
            elif (real := self._replaced.get(_storage(written))) is not None and self._weights is None:
                recipe_of(getattr(real, _DELAYED_AS)).lost = f"{name} changes what it was before it was registered"
        return func(*args, **options)

    def record(
        self,
        written: Tensor,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        options: dict[str, Any],
        *,
        is_random: bool,
    ) -> None:
        """What an operation does to a parameter on meta; nothing for other tensors."""
        recipe = self._recipe(written)
        if recipe is None:
            return
        target, words = args[0], args[1:]
        computed: list[Tensor] = []
        words, options = tree_map_only(
            Tensor, lambda value: computed.append(value) if value.is_meta else value.clone(), (words, options)
        )
        is_whole = target.numel() == recipe.meta.numel()
        overwrites = is_whole and name in _OVERWRITING
        if computed or _storage(target) != _storage(recipe.meta):
            recipe.lost = _COMPUTED.format(name)
            return
        if overwrites:
            recipe.start, recipe.lost = None, ""
            recipe.steps.clear()
            recipe.states.clear()
        elif recipe.start is None and not recipe.steps and not recipe.lost:
            recipe.lost = f"it has its values before it is registered in a module, and {name} changes only some of them"
        size, stride = target.size(), target.stride()
        if is_random:
            generator = options.pop("generator", None) or torch.default_generator
            recipe.states.append(generator.get_state())
            # Drawn now as well, so that whoever draws next gets what he would have got.
            function(torch.empty_strided(size, stride, dtype=target.dtype), *words, **options, generator=generator)
        recipe.steps.append(Step(function, size, stride, target.storage_offset(), words, options, is_random))

    def lose(self, tensor: Tensor, name: str) -> None:
        if (recipe := self._recipe(tensor)) is not None:
            recipe.lost = _COMPUTED.format(name)

    def _recipe(self, tensor: Tensor) -> Recipe | None:
        return self._recipes.get(_storage(tensor)) if self._weights is None else None


class _Skipped(TorchFunctionMode):
    """Notes the functions of nn.init that do nothing on meta, which torch 2.14 has; it is there that they ask."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        asks = sys._getframe(1)
        if func == _IS_META and found and asks.f_globals.get("__name__") == nn.init.__name__:
            self._recorder.lose(args[0], asks.f_code.co_name)
        return found


def _written(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors that an operation changes."""
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else options.get(argument.name)
            if isinstance(value, Tensor):
                yield value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
