"""The base class for settings and for records that are stored as JSON."""

import shlex
from collections.abc import Mapping
from datetime import date
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class Record(BaseModel):
    """Base class for immutable models that reject unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    retired: ClassVar[Mapping[str, Any]] = {}
    """Fields that were removed, with the only value that is still accepted for each (or `...` to accept any value).
    This keeps old records and settings files readable."""
    short: ClassVar[tuple[str, ...]] = ()
    """The two fields that are set by the short form `a=b`, if settings contain a list of these records."""

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, value: Any) -> Any:
        return without_retired(cls.retired, value)

    def to_json(self) -> bytes:
        """Return the record as it is stored: indented JSON and a newline."""
        return self.model_dump_json(indent=1).encode() + b"\n"


def without_retired(retired: Mapping[str, Any], value: Any) -> Any:
    """Remove retired fields from a mapping. Raises ValueError if one of them has a value that is no longer accepted."""
    if not retired or not isinstance(value, Mapping):
        return value
    for name in retired.keys() & value.keys():
        neutral = retired[name]
        if neutral is not ... and value[name] != neutral and value[name] != _as_text(neutral):
            raise ValueError(f"{name} = {value[name]}: this setting was removed, only {neutral} is still accepted")
    return {name: item for name, item in value.items() if name not in retired}


def with_retired(record: Record) -> dict[str, Any]:
    """Return the fields for JSON, including retired fields at their accepted values, so that hashes do not change."""
    fields = {name: value for name, value in record.retired.items() if value is not ...}
    for name, value in record.model_dump(mode="json").items():
        inner = getattr(record, name)
        fields[name] = with_retired(inner) if isinstance(inner, Record) else value
    return fields


def coerce_texts(kind: Any, value: Any, *, inside: bool = False) -> Any:
    """Prepare a value from TOML or JSON for validation against the type `kind`.

    In lists and mappings of strings, numbers, booleans and dates are converted to strings. The short form of records is
    expanded. `inside` is set for the elements of a collection.
    """
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in (get_args(option)[0] if get_origin(option) is Annotated else option for option in options):
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
    """Return the fields of a record that is an element of a list, given either a table or the short form `a=b`."""
    if isinstance(value, str) and model.short:
        first, equals, second = value.partition("=")
        is_tuple = get_origin(model.model_fields[model.short[1]].annotation) is tuple
        value = {model.short[0]: first} | (
            {model.short[1]: shlex.split(second) if is_tuple else second} if equals else {}
        )
    if not isinstance(value, Mapping):
        return value
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: coerce_texts(kinds.get(name), item, inside=True) for name, item in value.items()}
