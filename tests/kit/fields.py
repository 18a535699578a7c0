"""Every setting of a model in turn with another value: for lists of settings that are kept by hand."""

import warnings
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel

Config = TypeVar("Config", bound=BaseModel)


def variants(config: Config, **given: Any) -> Iterator[tuple[str, Config]]:
    """Name, with dots, and the settings with another value there: of `given`, else one of the same type, unchecked."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel) and name not in given:
            below = {key.removeprefix(f"{name}__"): one for key, one in given.items()}
            for inner, changed in variants(value, **below):
                yield f"{name}.{inner}", config.model_copy(update={name: changed})
        else:
            yield name, config.model_copy(update={name: given.get(name, _other(value))})


def without_effect(config: Config, outcome: Callable[[Config], object], **given: Any) -> set[str]:
    """Names of the settings that leave the outcome as it is."""
    with warnings.catch_warnings(category=UserWarning):
        warnings.simplefilter("ignore")  # pydantic's about types
        before = outcome(config)
        return {name for name, changed in variants(config, **given) if outcome(changed) == before}


def check_named(found: Collection[str], named: Collection[str]) -> None:
    """What has no effect is what is named as such, or below it."""
    tops = {name for name in found if not any(name.startswith(f"{one}.") for one in named)}
    below = {one for one in named if any(name.startswith(f"{one}.") for name in found)}
    assert tops | below == set(named)


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.25
        case str():
            return f"{value}x"
        case tuple():
            return (*value, *(value[-1:] or ("x",)))
        case dict():
            return {**value, "x": "y"}
        case datetime():
            return datetime(2030, 1, 1, tzinfo=UTC)
        case None:
            return 1
    raise TypeError(type(value))
