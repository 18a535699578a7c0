"""The built-in catalogue: deterministic queries and judged products, so that a fresh machine needs no download.

Why it is not trivial: accessories carry the full name of the product they fit (overlap misleads), substitutes differ
from the wanted product in one number or the brand, and the wanted one may be listed under a synonym or in other units.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random

import pyarrow as pa

from pipeline.data.config import SyntheticConfig

# The vocabulary of the synthetic catalogue: invented brands, real kinds of products, and how people misname them.


@dataclass(frozen=True)
class Attribute:
    """A property with its values; `styles` are the ways a value is written (`{}` is the value)."""

    values: tuple[str, ...]
    styles: tuple[str, ...] = ("{}",)


@dataclass(frozen=True)
class Kind:
    """One kind of product. `names[0]` is the usual name, the rest are synonyms; complements are bought with it."""

    names: tuple[str, ...]
    series: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    complements: tuple[str, ...]
    price: float


_STORAGE = Attribute(("64", "128", "256", "512"), ("{}gb", "{} gb", "{} gigabyte"))
_DISK = Attribute(("256", "512", "1024", "2048"), ("{}gb ssd", "{} gb solid state", "{}gb drive"))
_MEMORY = Attribute(("8", "16", "32", "64"), ("{}gb ram", "{} gb memory"))
_SCREEN = Attribute(("24", "27", "32", "43", "55"), ('{}"', "{} inch", "{}in"))
_LAPTOP = Attribute(("13.3", "14", "15.6", "17.3"), ('{}"', "{} inch", "{}in"))
_LITRES = Attribute(("17", "20", "25", "30"), ("{}l", "{} litre", "{} liters"))
_DRUM = Attribute(("6", "7", "8", "9", "10"), ("{}kg", "{} kg", "{} kilo"))
_SPIN = Attribute(("1200", "1400", "1600"), ("{}rpm", "{} rpm", "{} spin"))
_POWER = Attribute(("600", "700", "800", "1000", "1200"), ("{}w", "{} watt", "{} watts"))
_PIXELS = Attribute(("16", "20", "24", "45"), ("{}mp", "{} megapixel", "{} mpix"))
_COLOUR = Attribute(("black", "white", "silver", "blue", "red", "green"))
_SIZE = Attribute(("38", "39", "40", "41", "42", "43", "44"), ("size {}", "eu {}", "sz {}"))
_VOLTS = Attribute(("12", "18", "20", "36"), ("{}v", "{} volt"))
_CUPS = Attribute(("6", "10", "12"), ("{} cup", "{} cups", "{}-cup"))

KINDS: tuple[Kind, ...] = (
    Kind(("smartphone", "mobile phone", "cell phone"), ("nova", "edge", "pixelon", "mira"), (_STORAGE, _COLOUR),
         ("case", "screen protector", "usb c charger"), 480),
    Kind(("laptop", "notebook", "portable computer"), ("swift", "probook", "zen", "airlite"), (_LAPTOP, _MEMORY, _DISK),
         ("sleeve", "docking station", "power adapter"), 900),
    Kind(("television", "tv", "smart tv"), ("vista", "oled one", "crystal"), (_SCREEN, _COLOUR),
         ("wall mount", "remote control", "soundbar stand"), 620),
    Kind(("monitor", "display", "computer screen"), ("ultra", "proart", "sharp"), (_SCREEN, _COLOUR),
         ("monitor arm", "hdmi cable", "screen cleaning kit"), 260),
    Kind(("microwave", "microwave oven"), ("solo", "combi", "quick"), (_LITRES, _POWER, _COLOUR),
         ("turntable plate", "plate cover", "wall bracket"), 110),
    Kind(("washing machine", "washer", "laundry machine"), ("aqua", "eco", "perfect"), (_DRUM, _SPIN, _COLOUR),
         ("drain hose", "stacking kit", "descaler"), 430),
    Kind(("camera", "digital camera", "compact cam"), ("shot", "lumo", "alpha"), (_PIXELS, _COLOUR),
         ("camera bag", "spare battery", "tripod plate"), 540),
    Kind(("running shoes", "trainers", "jogging sneakers"), ("glide", "pace", "cloud"), (_SIZE, _COLOUR),
         ("insoles", "shoe laces", "shoe cleaner"), 95),
    Kind(("cordless drill", "drill driver", "power drill"), ("impact", "core", "max"), (_VOLTS, _COLOUR),
         ("drill bit set", "battery pack", "carry case"), 130),
    Kind(("vacuum cleaner", "hoover", "vac"), ("cyclone", "silent", "turbo"), (_POWER, _COLOUR),
         ("dust bags", "crevice tool", "hepa filter"), 170),
    Kind(("coffee maker", "coffee machine", "filter brewer"), ("aroma", "barista", "morning"), (_CUPS, _POWER, _COLOUR),
         ("paper filters", "glass carafe", "descaling tablets"), 75),
    Kind(("headphones", "headset", "over ear cans"), ("bass", "studio", "quiet"), (_COLOUR,),
         ("ear pads", "audio cable", "headphone stand"), 120),
)  # fmt: skip

BRANDS: tuple[str, ...] = (
    "Acoma", "Belvor", "Cintra", "Dorvak", "Elmaro", "Fenwick", "Gorlan", "Hestia", "Ikaro", "Jovitel",
    "Kastor", "Lumetra", "Mardek", "Norvane", "Ostrava", "Pelion", "Quintel", "Rovanta", "Solvey", "Tremaine",
)  # fmt: skip
FILLERS: tuple[str, ...] = (
    "new", "2024 model", "official", "boxed", "free delivery", "uk plug", "best price", "sealed",
)  # fmt: skip
WISHES: tuple[str, ...] = ("cheap", "best", "buy", "for home", "deal", "good")


GENERATOR_VERSION = 1
GAINS = {"exact": 1.0, "substitute": 0.1, "complement": 0.01, "irrelevant": 0.0}
_GRADES = ("exact",) * 3 + ("substitute",) * 5 + ("complement",) * 2 + ("irrelevant",) * 2
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
    """One thing that can be wanted: its kind, brand, series, model number and one value per attribute of the kind."""

    kind: Kind
    brand: str
    series: str
    model: str
    values: tuple[str, ...]


def partitions(config: SyntheticConfig) -> list[str]:
    """Names of the dt= partitions, in order."""
    first = date.fromisoformat(config.first_day)
    return [f"dt={first + timedelta(days=day)}" for day in range(config.num_days)]


def generate(config: SyntheticConfig, partition: str) -> Iterator[pa.RecordBatch]:
    """The rows of one day (schema SCHEMA), the same however many days there are."""
    day = partitions(config).index(partition)
    rows: list[dict[str, object]] = []
    for number in range(day * config.num_queries, (day + 1) * config.num_queries):
        rows += _judged_query(config, number)
        if len(rows) >= _QUERIES_PER_BATCH * config.candidates_per_query:
            yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _judged_query(config: SyntheticConfig, number: int) -> list[dict[str, object]]:
    """One query with its candidates. A stream of its own per query: query 7 is the same however many there are."""
    random = Random(f"{config.seed}|query|{number}")
    wanted = _product(random, random.choice(KINDS))
    query = _query(random, wanted)
    rows: list[dict[str, object]] = []
    for place in range(config.candidates_per_query):
        grade = _GRADES[place % len(_GRADES)]
        title, product = _candidate(random, wanted, query, grade)
        if random.random() < _LABEL_NOISE:
            grade = random.choice(tuple(GAINS))
        text = (
            f"{product.brand} {product.kind.names[0]}, {', '.join(_written(random, product))}. {random.choice(FILLERS)}"
        )
        price = product.kind.price * (0.15 if grade == "complement" else 1.0) * random.uniform(0.6, 1.7)
        rows.append(
            {
                "query_id": f"q{number}",
                "query": query,
                "product_id": f"p{number}-{place}",
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


def _candidate(random: Random, wanted: Product, query: str, grade: str) -> tuple[str, Product]:
    """A listing of this grade and the product it is for."""
    if grade == "exact":
        return _title(random, wanted), wanted
    if grade == "complement":
        name = random.choice(wanted.kind.complements)
        subject = f"{wanted.brand} {wanted.series} {wanted.model if random.random() < 0.6 else ''}"
        styles = (
            f"{name} for {subject} {random.choice(wanted.kind.names)}",
            f"{subject} {name} {random.choice(FILLERS)}",
        )
        return " ".join(random.choice(styles).split()), wanted
    if grade == "irrelevant":
        other = _product(random, random.choice([kind for kind in KINDS if kind is not wanted.kind]))
        if random.random() < 0.5:  # the brand alone must not decide
            other = Product(other.kind, wanted.brand, other.series, other.model, other.values)
        return _title(random, other), other
    substitute = _substitute(random, wanted, brand_asked=wanted.brand.lower() in query)
    return _title(random, substitute), substitute


def _substitute(random: Random, wanted: Product, *, brand_asked: bool) -> Product:
    """The same kind of product with another attribute value (a near miss), another model, or another brand.

    Another brand is only a substitute when the query asked for one.
    """
    other = _product(random, wanted.kind)
    case = random.random()
    if case < (0.45 if brand_asked else 0.7):
        place = random.randrange(len(wanted.values))
        choices = [value for value in wanted.kind.attributes[place].values if value != wanted.values[place]]
        values = (*wanted.values[:place], random.choice(choices), *wanted.values[place + 1 :])
        return Product(wanted.kind, wanted.brand, wanted.series, wanted.model, values)
    if case < 0.75 or not brand_asked:
        return Product(wanted.kind, wanted.brand, other.series, other.model, other.values)
    brand = random.choice([brand for brand in BRANDS if brand != wanted.brand])
    return Product(wanted.kind, brand, other.series, other.model, wanted.values)


def _title(random: Random, product: Product) -> str:
    name = product.kind.names[0] if random.random() < 0.55 else random.choice(product.kind.names)
    parts = [product.brand, product.series, product.model, name]
    if random.random() < 0.3:
        parts = [product.brand, name, product.series, product.model]
    parts += _written(random, product)
    if random.random() < 0.4:
        parts.append(random.choice(FILLERS))
    return " ".join(parts)


def _written(random: Random, product: Product) -> list[str]:
    """Attribute values, each in one of its styles."""
    pairs = zip(product.kind.attributes, product.values, strict=True)
    return [random.choice(attribute.styles).format(value) for attribute, value in pairs]


def _query(random: Random, wanted: Product) -> str:
    """What a hurried person types: parts left out, a synonym, a typo.

    The attribute values always appear: an omitted one could not tell a near miss from the wanted product.
    """
    parts = [random.choice(wanted.kind.names)]
    if random.random() < 0.85:
        parts.insert(0, wanted.brand)
    if random.random() < 0.7:
        parts.append(random.choice((wanted.series, wanted.model, f"{wanted.series} {wanted.model}")))
    parts += _written(random, wanted)
    if random.random() < 0.2:
        parts.append(random.choice(WISHES))
    if random.random() < 0.3:
        random.shuffle(parts)
    words = " ".join(parts).lower().split()
    return " ".join(_typo(random, word) if random.random() < _TYPO_SHARE else word for word in words)


def _typo(random: Random, word: str) -> str:
    """One slip in a word of letters: two letters swapped, one dropped, or one doubled. Numbers stay."""
    if len(word) < 4 or not word.isalpha():
        return word
    place = random.randrange(1, len(word) - 1)
    swapped = word[:place] + word[place + 1] + word[place] + word[place + 2 :]
    return random.choice((swapped, word[:place] + word[place + 1 :], word[:place] + word[place] + word[place:]))
