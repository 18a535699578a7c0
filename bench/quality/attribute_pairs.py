"""Write generated pairs of offers whose brand, model number and price are in columns of their own, with gaps.

Titles rarely contain the brand or the model number. Non-matches are mostly siblings that are one model number apart,
and every shop writes the number in its own way: `python -m bench.quality.attribute_pairs pairs.csv`.
"""

import csv
import random
import sys
from collections.abc import Iterator
from pathlib import Path

BRANDS = [
    "Canon",
    "Nikon",
    "Sony",
    "Olympus",
    "Panasonic",
    "Fujifilm",
    "Pentax",
    "Leica",
    "Sigma",
    "Tamron",
    "Tokina",
    "Samsung",
    "GoPro",
    "Kodak",
    "Hama",
]
KINDS = (
    "digital camera",
    "zoom lens",
    "memory card",
    "tripod",
    "flash",
    "battery grip",
    "lens filter",
    "remote control",
)
WORDS = [
    "black",
    "silver",
    "compact",
    "professional",
    "waterproof",
    "lightweight",
    "wireless",
    "kit",
    "bundle",
    "new",
    "refurbished",
    "original",
]
ATTRIBUTES = ("brand", "model_number", "price")
Product = tuple[str, str, str, float]  # brand, kind, model number and price


def products(stream: random.Random, families: int) -> list[Product]:
    """Return families of three products that only differ in model number and price."""
    made = list[Product]()
    for _ in range(families):
        brand, kind, price = stream.choice(BRANDS), stream.choice(KINDS), 10 ** stream.uniform(1, 3.2)
        series, number = "".join(stream.choices("ABDEFGKLMPSTX", k=2)), stream.randint(100, 9000) * 10
        for step in range(3):
            is_long = stream.random() < 0.3
            code = str(stream.randint(9 * 10**8, 10**9 - 1)) if is_long else f"{series}-{number + step}"
            made.append((brand, kind, code, price * stream.uniform(0.8, 1.6)))
    return made


def offer(stream: random.Random, product: Product, missing: float) -> dict[str, str]:
    """Return the title and the attributes that a shop writes, where a price is missing with the given probability."""
    brand, kind, code, price = product
    styles = (code, code.replace("-", ""), code.replace("-", " ").lower(), f"{code[:3]}-{code[3:].strip('-')}")
    words = [kind, *stream.sample(WORDS, 2), *([brand] if stream.random() < 0.3 else [])]
    words += [stream.choice(styles)] if stream.random() < 0.2 else []
    stream.shuffle(words)
    return {
        "title": " ".join(words),
        "brand": stream.choice((brand, brand.upper())) if stream.random() < 0.93 else "",
        "model_number": stream.choice(styles) if stream.random() < 0.85 else "",
        "price": f"{price * stream.uniform(0.93, 1.07):.2f}" if stream.random() >= missing else "",
    }


def pairs(rows: int, seed: int = 1, missing: float = 0.08) -> Iterator[dict[str, str]]:
    """Yield judged pairs: of each query one match, two siblings, and another product."""
    stream = random.Random(seed)
    made = products(stream, 300)
    for _ in range(rows // 4):
        at = stream.randrange(len(made))
        query = offer(stream, made[at], missing)
        siblings = [other for other in range(at // 3 * 3, at // 3 * 3 + 3) if other != at]
        for other in (at, *siblings, stream.randrange(len(made))):
            product = offer(stream, made[other], missing)
            sides = {f"query_{name}": query[name] for name in ATTRIBUTES} | {name: product[name] for name in ATTRIBUTES}
            label = "match" if other == at else "non_match"
            yield {"query": query["title"], "title": product["title"], **sides, "label": label}


def by_hand(row: dict[str, str]) -> dict[str, str]:
    """Return a pair as it had to be written without attributes: longer texts, the ratio of prices, and flags."""
    texts = {
        name: " ".join(filter(None, (row[name], row[f"{prefix}brand"], row[f"{prefix}model_number"])))
        for name, prefix in (("query", "query_"), ("title", ""))
    }
    left, right = row["query_price"], row["price"]
    ratio = f"{float(right) / float(left):.4f}" if left and right else "1"
    prices = {"query_price": left or "0", "price": right or "0", "ratio": ratio}
    flags = {"no_query_price": str(int(not left)), "no_price": str(int(not right))}
    return texts | prices | flags | {"label": row["label"]}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    write(Path(sys.argv[1]), list(pairs(16_000)))
