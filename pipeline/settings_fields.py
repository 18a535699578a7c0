"""What can be set: every leaf of a settings tree with its names in TOML, environment and command line."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ENV_PREFIX = "TRNPIPE_"


@dataclass(frozen=True, eq=False)
class Leaf:
    """One value of the tree. `section` is the model class that holds it."""

    path: tuple[str, ...]
    field: FieldInfo
    section: type[BaseModel]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + "__".join(self.path).upper()

    @property
    def is_bool(self) -> bool:
        return self.field.annotation is bool

    @property
    def optional(self) -> bool:
        return type(None) in _options(self.field.annotation)

    @property
    def container(self) -> type | None:
        """tuple or dict when the value is one, optional or not."""
        origins = [get_origin(option) for option in _options(self.field.annotation)]
        return tuple if tuple in origins else dict if dict in origins else None

    @property
    def takes(self) -> str:
        """Short text of the accepted values, such as `int`, `fp32|bf16` or `str,...`."""
        return "|".join(_type_text(option) for option in _options(self.field.annotation) if option is not type(None))


@cache
def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> dict[str, Leaf]:
    """All leaves below a model by dotted name: its own in the order of declaration, then those of its sections."""
    own = [Leaf((*path, name), field, model) for name, field in model.model_fields.items() if section_of(field) is None]
    result = {leaf.name: leaf for leaf in own}
    for name, field in model.model_fields.items():
        if section := section_of(field):
            result.update(leaves(section, (*path, name)))
    return result


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The nested model of a field, None for a leaf."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known dotted name a user most likely meant: same last word, else the closest spelling."""
    wanted, names = name.replace("-", "_").lower(), list(known)
    same_word = [key for key in names if key.rpartition(".")[2] == wanted.rpartition(".")[2]]
    close = difflib.get_close_matches(wanted, same_word or names, n=1, cutoff=0.0 if same_word else 0.5)
    return close[0] if close else None


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _type_text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(value) for value in args)
    if origin is tuple:
        return (
            "JSON list"
            if isinstance(args[0], type) and issubclass(args[0], BaseModel)
            else f"{_type_text(args[0])},..."
        )
    if origin is dict:
        return "key=value,..."
    return "true|false" if annotation is bool else str(getattr(annotation, "__name__", annotation))
