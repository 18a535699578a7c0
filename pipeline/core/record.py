"""The base of settings and of what is stored as JSON."""

import shlex
from collections.abc import Mapping
from datetime import date
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class Record(BaseModel):
    """Immutable; a field that this version does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    retired: ClassVar[Mapping[str, Any]] = {}
    """Fields of earlier versions, with the only value that a stored record or file may still give them (...: any)."""
    short: ClassVar[tuple[str, ...]] = ()
    """Two fields that the text `a=b` sets in a list of such records among the settings."""

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, value: Any) -> Any:
        return without_retired(cls.retired, value)


def without_retired(retired: Mapping[str, Any], value: Any) -> Any:
    """Return a mapping without its retired fields.

    Raises ValueError if one of them has a value that this version cannot honour.
    """
    if not retired or not isinstance(value, Mapping):
        return value
    for name in retired.keys() & value.keys():
        neutral = retired[name]
        if neutral is not ... and value[name] != neutral and value[name] != _as_text(neutral):
            raise ValueError(f"{name} = {value[name]}: this version has no such setting; it reads {neutral} only")
    return {name: item for name, item in value.items() if name not in retired}


def with_retired(record: Record) -> dict[str, Any]:
    """Return the fields for JSON, retired ones at their neutral values: what is hashed of them stays as it was."""
    found = {name: value for name, value in record.retired.items() if value is not ...}
    for name, value in record.model_dump(mode="json").items():
        inner = getattr(record, name)
        found[name] = with_retired(inner) if isinstance(inner, Record) else value
    return found


def coerce_texts(kind: Any, value: Any, *, inside: bool = False) -> Any:
    """A value in which numbers, booleans and days `inside` a list or mapping of texts are texts, as in the data.

    A text in a list of records is their short form, `a` or `a=b`.
    """
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in (get_args(one)[0] if get_origin(one) is Annotated else one for one in options):
        origin, args = get_origin(option), get_args(option)
        if option is str and inside:
            return _as_text(value)
        if origin is tuple and isinstance(value, list | tuple):
            return [coerce_texts(args[0], item, inside=True) for item in value]
        if origin is dict and isinstance(value, Mapping):
            return {key: coerce_texts(args[1], item, inside=True) for key, item in value.items()}
        if isinstance(option, type) and issubclass(option, Record):
            return _record(option, value)
    return value


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(int(value)) if value == value // 1 else repr(value)
    return value.isoformat() if isinstance(value, date) else value


def _record(model: type[Record], value: Any) -> Any:
    """The fields of a record in a list, from a table or from its short form."""
    if isinstance(value, str) and model.short:
        first, equals, second = value.partition("=")
        words = shlex.split(second) if get_origin(model.model_fields[model.short[1]].annotation) is tuple else second
        value = {model.short[0]: first} | ({model.short[1]: words} if equals else {})
    if not isinstance(value, Mapping):
        return value
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: coerce_texts(kinds.get(name), item, inside=True) for name, item in value.items()}
