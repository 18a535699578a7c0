from collections import Counter
from pathlib import Path

import pyarrow as pa

from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, SyntheticConfig
from pipeline.data.sources import open_source
from pipeline.data.synthetic import GAINS, SCHEMA, generate, partitions

SMALL = SyntheticConfig(num_queries=20, num_days=3)


def rows(config: SyntheticConfig) -> list[dict[str, object]]:
    return [row for name in partitions(config) for batch in generate(config, name) for row in batch.to_pylist()]


def test_size_grades_and_gains() -> None:
    seen = rows(SMALL)
    assert len(seen) == 60 * 12 and seen == rows(SMALL)
    assert {row["label"]: row["gain"] for row in seen} == GAINS
    shares = Counter(row["label"] for row in seen)
    assert all(shares[label] > 0.1 * len(seen) for label in GAINS)
    assert len({(row["query_id"], row["product_id"]) for row in seen}) == len(seen)
    table = pa.Table.from_batches(generate(SMALL, "dt=2026-01-01"))
    assert table.schema == SCHEMA
    assert all(text for name in ("query", "title", "label") for text in table[name].to_pylist())


def test_a_new_day_has_queries_of_its_own_and_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    one, two = (SMALL.model_copy(update={"num_days": days}) for days in (1, 2))
    before, after = rows(one), rows(two)
    assert after[: len(before)] == before
    assert not {row["query_id"] for row in before} & {row["query_id"] for row in after[len(before) :]}
    first, both = (
        open_source(DataConfig(synthetic=config), scratch=tmp_path, stop=StopSignal()).partitions
        for config in (one, two)
    )
    assert both[:1] == first and both[1].name == "dt=2026-01-02"


def test_overlap_alone_does_not_solve_it() -> None:
    """Accessories name the product they are for: sharing more words does not make a title more relevant."""
    overlap: dict[object, list[float]] = {}
    for row in rows(SMALL):
        query, title = set(str(row["query"]).split()), set(str(row["title"]).lower().split())
        overlap.setdefault(row["label"], []).append(len(query & title) / len(query))
    assert max(overlap["complement"]) > sorted(overlap["exact"])[len(overlap["exact"]) // 2]
