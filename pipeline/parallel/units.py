"""Units: the parts of a model that are gathered, computed again and offloaded one at a time, as its layers are."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from pipeline.core.errors import ConfigError

Unit = tuple[str, nn.Module]
"""Its name in the model, and itself."""
UnitRule = Callable[[nn.Module], Sequence[Unit]]


def find_units(model: nn.Module) -> list[Unit]:
    """Members of each ModuleList or Sequential that has two or more with parameters, all of one class.

    Of such lists within each other the outermost counts. What is in no unit stands with the model itself.
    """
    return list(_found(model, ""))


def _found(module: nn.Module, prefix: str) -> Iterator[Unit]:
    members = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    if isinstance(module, nn.ModuleList | nn.Sequential):
        weighty = [(name, child) for name, child in members if next(child.parameters(), None) is not None]
        # A list of lists is never called itself: its members' members are.
        if len(weighty) > 1 and len({type(child) for _, child in weighty}) == 1 and _is_called(weighty[0][1]):
            yield from weighty
            return
    for name, child in members:
        yield from _found(child, f"{name}.")


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def check_units(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raises ConfigError for what sharding would change without a word, or fail on without saying where."""
    for name, unit in units:
        if not _is_called(unit) or unit is model:
            raise ConfigError(
                f"unit {name!r} is {'the model itself' if unit is model else f'a {type(unit).__name__}'}",
                expected="modules within the model that its forward pass calls",
                next_command="return its members from `units`",
            )
    owners: dict[int, tuple[str, str]] = {}
    names = {id(unit): name for name, unit in units}
    dtypes: dict[str, dict[object, str]] = {}
    for name, parameter, owner in _owned(model, "", "", names):
        if parameter.ndim == 0:
            raise ConfigError(
                f"parameter {name!r} is a scalar, which cannot be cut in shards",
                expected="at least one dimension",
                next_command=f"make {name!r} a vector of one element: torch.ones(1), not torch.ones(())",
            )
        first_name, first_owner = owners.setdefault(id(parameter), (name, owner))
        if first_owner != owner:
            raise ConfigError(
                f"{first_name!r} ({_said(first_owner)}) and {name!r} ({_said(owner)}) are one parameter: it would be"
                " two after sharding, with different gradients",
                expected="parameters shared only within one unit, or by what is in no unit",
                next_command="transform(..., units=...) with one unit that holds both, or without these units",
            )
        if parameter.requires_grad:
            dtype_name = dtypes.setdefault(owner, {}).setdefault(parameter.dtype, name)
            if len(dtypes[owner]) > 1:
                (one, one_name), *_ = dtypes[owner].items()
                raise ConfigError(
                    f"{_said(owner)} has parameters of two types: {one_name!r} {one}, {dtype_name!r} {parameter.dtype}",
                    expected="one type in a unit",
                    next_command="model.float() before transform; precision bf16 is a key of the plan",
                )


def _owned(
    module: nn.Module, prefix: str, owner: str, units: Mapping[int, str]
) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Every name of every parameter, with the innermost unit that it is in; "": none."""
    owner = units.get(id(module), owner)
    for name, parameter in module.named_parameters(recurse=False):
        yield f"{prefix}{name}", parameter, owner
    for name, child in module.named_children():
        yield from _owned(child, f"{prefix}{name}.", owner, units)


def _said(owner: str) -> str:
    return f"unit {owner!r}" if owner else "in no unit"
