"""Find the columns and kinds of attributes, and append their texts to queries and titles.

The columns of an attribute are read as the fields `attributes.query.<name>` and `attributes.product.<name>`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError
from pipeline.model.config import Attribute

ATTRIBUTE = "attributes."
QUERY, PRODUCT = f"{ATTRIBUTE}query.", f"{ATTRIBUTE}product."
BASES = {QUERY: "query", PRODUCT: "title"}
"""The field that text attributes of each side are appended to."""
QUERY_COLUMNS = ("query_{}", "{}_left", "left_{}")
PRODUCT_COLUMNS = ("{}", "product_{}", "title_{}", "{}_right", "right_{}")


def find_columns(attribute: Attribute, available: Sequence[str]) -> dict[str, str]:
    """Return the columns of an attribute by field. Columns that are not configured are found by their names."""
    columns = {}
    for side, column, names in (
        (QUERY, attribute.query, QUERY_COLUMNS),
        (PRODUCT, attribute.product, PRODUCT_COLUMNS),
    ):
        if column is None:
            column = next((name for name in (n.format(attribute.name) for n in names) if name in available), "")
        if column:
            columns[side + attribute.name] = column
    return columns


def attribute_pairs(attributes: Sequence[Attribute], available: Sequence[str], file: str) -> list[tuple[str, str]]:
    """Return the (field, column) pairs of all attributes. Raises DataError if an attribute has no column at all."""
    pairs = list[tuple[str, str]]()
    for attribute in attributes:
        name, columns = attribute.name, find_columns(attribute, available)
        if not columns:
            tried = (", ".join(n.format(name) for n in names) for names in (QUERY_COLUMNS, PRODUCT_COLUMNS))
            raise DataError(
                f"{file} has no column of attribute {name!r}",
                expected="{} for the query, or {} for the product".format(*tried),
                next_command="set the columns in [[data.attributes]] with name, query and product, or remove it",
            )
        pairs += columns.items()
    return pairs


def catalogue_attributes(
    attributes: Sequence[Attribute], available: Sequence[str], path: str, warn: Callable[[str], object]
) -> tuple[Attribute, ...]:
    """Return the text attributes of a model with only the columns that a catalogue has.

    If a column of the products is missing, `warn` is called with a message.
    """
    texts = [each for each in attributes if each.kind == "text"]
    missing = [each for each in texts if each.product and each.product not in available]
    if missing:
        warn(
            f"{path} has no column {', '.join(repr(each.product) for each in missing)}, so its titles are used without"
            f" {', '.join(each.name for each in missing)}, although the model was trained with it"
        )
    sides = ("query", "product")
    absent = [{side: "" for side in sides if getattr(each, side) not in available} for each in texts]
    return tuple(each.model_copy(update=update) for each, update in zip(texts, absent, strict=True))


def text_fields(attributes: Sequence[Attribute], side: str) -> list[str]:
    """Return the fields of the text attributes of one side (QUERY or PRODUCT), in order."""
    column = "query" if side == QUERY else "product"
    return [side + each.name for each in attributes if each.kind == "text" and getattr(each, column) != ""]


def with_attributes(text: str, values: Iterable[str]) -> str:
    """Append the values of text attributes to a text, separated by spaces. An empty text stays empty."""
    return " ".join([text, *filter(None, values)]) if text else text


_ORIGINAL = "original."


def original_field(columns: pa.RecordBatch, base: str) -> str:
    """Return the field with the query or title without attributes."""
    return _ORIGINAL + base if _ORIGINAL + base in columns.schema.names else base


def append_attributes(columns: pa.RecordBatch) -> pa.RecordBatch:
    """Append the attributes of each row of a table without judgements to its query and title.

    All attributes in `columns` must be texts. The query and title without attributes are kept as `original.<field>`.
    """
    for side, base in BASES.items():
        names = [name for name in columns.schema.names if name.startswith(side)]
        if not names or base not in columns.schema.names:
            continue
        texts = ([_stripped(value) for value in columns[name].to_pylist()] for name in (base, *names))
        joined = [
            with_attributes(text, values).encode("utf-8", "surrogateescape")
            for text, *values in zip(*texts, strict=True)
        ]
        index = columns.schema.get_field_index(base)
        columns = columns.append_column(_ORIGINAL + base, columns[base]).drop_columns(names)
        columns = columns.set_column(
            index, columns.schema.field(index).with_type(pa.large_binary()), pa.array(joined, pa.large_binary())
        )
    return columns


def _stripped(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "surrogateescape").strip()


# The kind of an attribute.

_NUMBERS = 0.95  # minimum fraction of numbers among the values of a number
_CODE_DIGITS, _LONG_CODE_DIGITS = 5, 8


@dataclass
class ValueStats:
    """Counts of the values of a column that are present. `lengths` counts whole numbers by their number of digits."""

    present: int = 0
    numbers: int = 0
    codes: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, text: str, count: int = 1) -> None:
        if not (text := text.strip()):
            return
        self.present += count
        with suppress(ValueError):
            self.numbers += count * (isfinite(float(text)) and "_" not in text)  # readers reject underscores, too
        if text.isascii() and text.isdigit():
            self.lengths[len(text)] += count
            self.codes += count * (len(text) >= _LONG_CODE_DIGITS or (len(text) > 1 and text[0] == "0"))

    @property
    def kind(self) -> Literal["text", "number"]:
        """The kind of an attribute: a number if nearly all values are numbers, unless they look like codes.

        Most codes are long, begin with 0, or are whole numbers of five or more digits that all have the same length.
        """
        has_one_length = any(n >= _CODE_DIGITS and rows >= _NUMBERS * self.present for n, rows in self.lengths.items())
        is_code = has_one_length or self.codes > self.numbers / 2
        return "number" if self.numbers >= _NUMBERS * self.present > 0 and not is_code else "text"


@dataclass
class AttributeSurvey:
    """The columns of attributes by field, and statistics of their values by name, read from the whole input."""

    columns: dict[str, str] | None = None
    stats: dict[str, ValueStats] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch, file: str) -> None:
        """Add rows of a file. Raises DataError if its attributes have other columns than those of earlier files."""
        fields = [each for each in batch.schema if each.name.startswith(ATTRIBUTE)]
        columns = {each.name: (each.metadata or {})[b"column"].decode() for each in fields}
        self.columns = columns if self.columns is None else self.columns
        if different := sorted(
            f"{self.columns.get(n) or columns[n]!r}" for n in dict(columns.items() ^ self.columns.items())
        ):
            raise DataError(
                f"the columns of attributes in {file} differ from those in earlier files: {', '.join(different)}",
                expected="the same columns in every file",
                next_command="add the columns, or set the columns in [[data.attributes]] with name, query and product",
            )
        for each in fields:
            stats = self.stats.setdefault(each.name.split(".", 2)[2], ValueStats())
            for entry in pc.value_counts(batch[each.name]).to_pylist():
                stats.add(_stripped(entry["values"]), entry["counts"])

    def resolve(self, attributes: Sequence[Attribute]) -> tuple[Attribute, ...]:
        """Return the attributes with their columns and kinds."""
        columns = self.columns or {}
        return tuple(
            Attribute(
                name=each.name,
                query=columns.get(QUERY + each.name, ""),
                product=columns.get(PRODUCT + each.name, ""),
                kind=each.kind or self.stats.get(each.name, ValueStats()).kind,
            )
            for each in attributes
        )


def like_parent(attributes: Sequence[Attribute], parent: Sequence[Attribute]) -> tuple[Attribute, ...]:
    """Return the attributes with everything that is not configured taken from the parent model."""
    earlier = {each.name: each.model_dump() for each in parent}
    return tuple(
        Attribute.model_validate(earlier.get(each.name, {}) | each.model_dump(exclude_none=True)) for each in attributes
    )


def are_resolved(attributes: Sequence[Attribute]) -> bool:
    return all(None not in (each.query, each.product, each.kind) for each in attributes)
