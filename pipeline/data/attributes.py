"""Find the columns and kinds of attributes.

The columns of an attribute are read as the fields `attributes.<kind>.<side>.<name>`. Texts are appended to the query or
the title when a row is read (see `to_fields`), so that they are part of these texts everywhere.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError
from pipeline.model.config import Attribute

Kind = Literal["text", "number"]
ATTRIBUTES = "attributes."
SIDES = {"query": "query", "product": "title"}
"""Maps sides to the fields that text attributes are appended to."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "query": ("query_{}", "{}_left", "left_{}"),
    "product": ("{}", "product_{}", "title_{}", "{}_right", "right_{}"),
}
"""Names of the columns of an attribute, by side."""


def field_of(attribute: Attribute, side: str) -> str:
    return f"{ATTRIBUTES}{attribute.kind or 'unknown'}.{side}.{attribute.name}"


def base_of(field: str) -> str | None:
    """Return the field that a text attribute is appended to, or None for any other field."""
    return next((base for side, base in SIDES.items() if field.startswith(f"{ATTRIBUTES}text.{side}.")), None)


def find_columns(attribute: Attribute, available: Sequence[str]) -> dict[str, str]:
    """Return the columns of an attribute by side. Columns that are not configured are found by their names."""
    columns = {"query": attribute.query, "product": attribute.product}
    for side, names in COLUMNS.items():
        if columns[side] is None:
            columns[side] = next((n for n in (name.format(attribute.name) for name in names) if n in available), None)
    return {side: column for side, column in columns.items() if column}


def attribute_pairs(attributes: Sequence[Attribute], available: Sequence[str], file: str) -> Iterator[tuple[str, str]]:
    """Yield the (field, column) pairs of attributes. Raises DataError if an attribute does not have any column."""
    for attribute in attributes:
        columns = find_columns(attribute, available)
        if not columns:
            query, product = (", ".join(name.format(attribute.name) for name in names) for names in COLUMNS.values())
            raise DataError(
                f"{file} has no column of attribute {attribute.name!r}",
                expected=f"{query} for queries, or {product} for products",
                next_command="set name, query and product in [[data.attributes]], or remove the attribute",
            )
        yield from ((field_of(attribute, side), column) for side, column in columns.items())


# The kind of an attribute.

MISSING_NUMBER = r"(?i)^\s*([+-]?nan)?\s*$"
"""Texts that count as a missing number."""
_NUMBERS = 0.95  # minimum fraction of numbers among the values of a number
_CODE_DIGITS, _LONG_CODE_DIGITS = 5, 8


@dataclass
class ValueStats:
    """Counts of the values of an attribute. `lengths` counts whole numbers by their number of digits."""

    present: int = 0
    numbers: int = 0
    codes: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, text: str, count: int) -> None:
        if re.match(MISSING_NUMBER, text):
            return
        text = text.strip()
        self.present += count
        with suppress(ValueError):
            self.numbers += count * (isfinite(float(text)) and "_" not in text)  # readers reject underscores, too
        if text.isascii() and text.isdigit():
            self.lengths[len(text)] += count
            self.codes += count * (len(text) >= _LONG_CODE_DIGITS or (len(text) > 1 and text[0] == "0"))

    @property
    def kind(self) -> Kind:
        """The kind of an attribute: a number if nearly all values are numbers, unless they look like codes.

        Most codes are long, begin with 0, or are whole numbers of five or more digits that all have the same length.
        """
        has_one_length = any(n >= _CODE_DIGITS and rows >= _NUMBERS * self.present for n, rows in self.lengths.items())
        is_code = has_one_length or self.codes > self.numbers / 2
        return "number" if self.numbers >= _NUMBERS * self.present > 0 and not is_code else "text"


@dataclass
class AttributeSurvey:
    """The columns of attributes by name and side, and statistics of their values by name."""

    columns: dict[str, dict[str, str]] = field(default_factory=dict)
    stats: dict[str, ValueStats] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch) -> None:
        for column in [column for column in batch.schema if column.name.startswith(ATTRIBUTES)]:
            side, name = column.name.split(".", 3)[2:]
            self.columns.setdefault(name, {}).setdefault(side, column.metadata[b"column"].decode())
            stats = self.stats.setdefault(name, ValueStats())
            for entry in pc.value_counts(batch[column.name]).to_pylist():
                stats.add((entry["values"] or b"").decode(errors="replace"), entry["counts"])

    def resolve(self, attributes: Sequence[Attribute]) -> tuple[Attribute, ...]:
        """Return attributes with their columns and kinds."""
        stats = defaultdict(ValueStats, self.stats)
        return tuple(with_columns(each, self.columns.get(each.name, {}), stats[each.name].kind) for each in attributes)


def with_columns(attribute: Attribute, columns: Mapping[str, str], kind: Kind) -> Attribute:
    """Return an attribute with only the given columns, by side. If it is not configured, its kind is `kind`."""
    fields = {**dict.fromkeys(SIDES, ""), **columns, "kind": attribute.kind or kind}
    return attribute.model_copy(update=fields)


def like_parent(attributes: Sequence[Attribute], parent: Sequence[Attribute]) -> tuple[Attribute, ...]:
    """Return attributes with the columns and kinds of the parent model, unless they are configured."""
    fields = {each.name: each.model_dump() for each in parent}
    return tuple(
        Attribute.model_validate(fields.get(each.name, {}) | each.model_dump(exclude_none=True)) for each in attributes
    )
