"""Generate the built-in catalogue, which makes it possible to run the pipeline without downloading a dataset.

The catalogue consists of queries and judged products and is fully deterministic. The task is not trivial: Titles of
accessories contain the full name of the product that they fit, which makes word overlap misleading. Substitutes differ
from the requested product in a single number or in the brand. The requested product itself may be listed under a
synonym, or with different units.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa

from pipeline.data.config import SyntheticConfig


@dataclass(frozen=True)
class SyntheticAttribute:
    """A product attribute, with its possible values and the format strings in which a value may be written."""

    values: Sequence[str]
    styles: Sequence[str]


@dataclass(frozen=True)
class Kind:
    """A kind of product. The first name is the most common one, and the others are synonyms."""

    names: Sequence[str]
    series: Sequence[str]
    attributes: Sequence[SyntheticAttribute]
    complements: Sequence[str]
    price: float


def _kind(table: dict[str, Any]) -> Kind:
    attributes = [_TABLES["attributes"][name] for name in table["attributes"]]
    return Kind(**table | {"attributes": [SyntheticAttribute(**attribute) for attribute in attributes]})


_TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
"""The vocabulary of fictitious brands, and of real kinds of products with their synonyms."""
KINDS = [_kind(table) for table in _TABLES["kinds"]]
BRANDS: Sequence[str] = _TABLES["brands"]
FILLERS: Sequence[str] = _TABLES["fillers"]
WISHES: Sequence[str] = _TABLES["wishes"]

GENERATOR_VERSION = 1
SEED = 17
FIRST_DAY = date(2026, 1, 1)
GAINS = {"exact": 1.0, "substitute": 0.1, "complement": 0.01, "irrelevant": 0.0}
GRADES = ("exact",) * 3 + ("substitute",) * 5 + ("complement",) * 2 + ("irrelevant",) * 2
_TYPO_SHARE = 0.08
_LABEL_NOISE = 0.02
_QUERIES_PER_BATCH = 256

SCHEMA = pa.schema(
    [
        ("query_id", pa.string()),
        ("query", pa.string()),
        ("product_id", pa.string()),
        ("title", pa.string()),
        ("text", pa.string()),
        ("brand", pa.string()),
        ("price", pa.float64()),
        ("label", pa.string()),
        ("gain", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Product:
    """A product with a value for each attribute of its kind."""

    kind: Kind
    brand: str
    series: str
    model: str
    values: tuple[str, ...]


def partitions(config: SyntheticConfig) -> list[str]:
    """Return the names of the dt= partitions, in order."""
    return [f"dt={FIRST_DAY + timedelta(days=day)}" for day in range(config.num_days)]


def generate(config: SyntheticConfig, partition: str) -> Iterator[pa.RecordBatch]:
    """Generate the rows of one day, with the schema SCHEMA. The rows of a day do not depend on `num_days`."""
    day = partitions(config).index(partition)
    rows: list[dict[str, object]] = []
    for number in range(day * config.num_queries, (day + 1) * config.num_queries):
        rows += _judged_query(number)
        if len(rows) >= _QUERIES_PER_BATCH * len(GRADES):
            yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _judged_query(number: int) -> list[dict[str, object]]:
    """Generate the rows of one query. Each query has its own random stream, so that it does not depend on others."""
    random = Random(f"{SEED}|query|{number}")
    target = _product(random, random.choice(KINDS))
    query = _query(random, target)
    rows: list[dict[str, object]] = []
    for index, grade in enumerate(GRADES):
        title, product = _candidate(random, target, query, grade)
        if random.random() < _LABEL_NOISE:
            grade = random.choice(tuple(GAINS))
        text = (
            f"{product.brand} {product.kind.names[0]}, {', '.join(_styled(random, product))}. {random.choice(FILLERS)}"
        )
        price = product.kind.price * (0.15 if grade == "complement" else 1.0) * random.uniform(0.6, 1.7)
        rows.append(
            {
                "query_id": f"q{number}",
                "query": query,
                "product_id": f"p{number}-{index}",
                "title": title,
                "text": text,
                "brand": product.brand,
                "price": round(price, 2),
                "label": grade,
                "gain": GAINS[grade],
            }
        )
    return rows


def _product(random: Random, kind: Kind) -> Product:
    model = f"{random.choice('abcdefghkmprstx')}{random.choice('abcdefghkmprstx')}{random.randint(10, 999)}"
    values = tuple(random.choice(attribute.values) for attribute in kind.attributes)
    return Product(kind, random.choice(BRANDS), random.choice(kind.series), model, values)


def _candidate(random: Random, target: Product, query: str, grade: str) -> tuple[str, Product]:
    """Generate a listing with the given grade. Returns its title and product."""
    if grade == "exact":
        return _title(random, target), target
    if grade == "complement":
        name = random.choice(target.kind.complements)
        subject = f"{target.brand} {target.series} {target.model if random.random() < 0.6 else ''}"
        styles = (
            f"{name} for {subject} {random.choice(target.kind.names)}",
            f"{subject} {name} {random.choice(FILLERS)}",
        )
        return " ".join(random.choice(styles).split()), target
    if grade == "irrelevant":
        other = _product(random, random.choice([kind for kind in KINDS if kind is not target.kind]))
        if random.random() < 0.5:  # ensure that products cannot be classified by their brand
            other = Product(other.kind, target.brand, other.series, other.model, other.values)
        return _title(random, other), other
    substitute = _substitute(random, target, query_has_brand=target.brand.lower() in query)
    return _title(random, substitute), substitute


def _substitute(random: Random, target: Product, *, query_has_brand: bool) -> Product:
    """Generate a product of the same kind that has a different attribute value (a near miss), model, or brand.

    A different brand only makes a product a substitute if the query asks for a brand.
    """
    other = _product(random, target.kind)
    case = random.random()
    if case < (0.45 if query_has_brand else 0.7):
        index = random.randrange(len(target.values))
        choices = [value for value in target.kind.attributes[index].values if value != target.values[index]]
        values = (*target.values[:index], random.choice(choices), *target.values[index + 1 :])
        return Product(target.kind, target.brand, target.series, target.model, values)
    if case < 0.75 or not query_has_brand:
        return Product(target.kind, target.brand, other.series, other.model, other.values)
    brand = random.choice([brand for brand in BRANDS if brand != target.brand])
    return Product(target.kind, brand, other.series, other.model, target.values)


def _title(random: Random, product: Product) -> str:
    name = product.kind.names[0] if random.random() < 0.55 else random.choice(product.kind.names)
    parts = [product.brand, product.series, product.model, name]
    if random.random() < 0.3:
        parts = [product.brand, name, product.series, product.model]
    parts += _styled(random, product)
    if random.random() < 0.4:
        parts.append(random.choice(FILLERS))
    return " ".join(parts)


def _styled(random: Random, product: Product) -> list[str]:
    """Format each attribute value in a random style."""
    pairs = zip(product.kind.attributes, product.values, strict=True)
    return [random.choice(attribute.styles).format(value) for attribute, value in pairs]


def _query(random: Random, target: Product) -> str:
    """Generate a query as a user might type it, with omissions, synonyms and typos.

    The query always contains all attribute values, since it would otherwise be impossible to distinguish a near miss
    from an exact match.
    """
    parts = [random.choice(target.kind.names)]
    if random.random() < 0.85:
        parts.insert(0, target.brand)
    if random.random() < 0.7:
        parts.append(random.choice((target.series, target.model, f"{target.series} {target.model}")))
    parts += _styled(random, target)
    if random.random() < 0.2:
        parts.append(random.choice(WISHES))
    if random.random() < 0.3:
        random.shuffle(parts)
    words = " ".join(parts).lower().split()
    return " ".join(_typo(random, word) if random.random() < _TYPO_SHARE else word for word in words)


def _typo(random: Random, word: str) -> str:
    """Swap, drop or double a letter of a word. Short words and words with digits are returned unchanged."""
    if len(word) < 4 or not word.isalpha():
        return word
    index = random.randrange(1, len(word) - 1)
    swapped = word[:index] + word[index + 1] + word[index] + word[index + 2 :]
    return random.choice((swapped, word[:index] + word[index + 1 :], word[:index] + word[index] + word[index:]))
