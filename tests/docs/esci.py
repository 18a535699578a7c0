"""A dataset in the layout of Amazon's Shopping Queries, small enough for a test."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LOCALES = ("us", "es", "jp")


def write_esci(folder: Path, num_examples: int = 360) -> None:
    """Both files below `folder`, where the public repository has them."""
    place = folder / "shopping_queries_dataset"
    place.mkdir(parents=True)
    examples = [
        {
            "example_id": number,
            "query": f"query {number // 4} of shop",
            "query_id": number // 4,
            "product_id": f"P{number % 10}",
            "product_locale": LOCALES[number // 4 % 3],
            "esci_label": "ESCI"[number % 4],
            "small_version": number // 4 % 2,
            "large_version": 1,
            "split": "test" if number // 4 % 5 == 0 else "train",
        }
        for number in range(num_examples)
    ]
    products = [
        {
            "product_id": f"P{number}",
            "product_title": f"{locale} title {number}",
            "product_description": None,
            "product_bullet_point": f"point {number}",
            "product_brand": "Brand",
            "product_color": None,
            "product_locale": locale,
        }
        for number in range(10)
        for locale in LOCALES
    ]
    pq.write_table(pa.Table.from_pylist(examples), place / "shopping_queries_dataset_examples.parquet")
    pq.write_table(pa.Table.from_pylist(products), place / "shopping_queries_dataset_products.parquet")
