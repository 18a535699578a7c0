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


def test_the_rows_are_always_the_same() -> None:
    assert rows(SMALL) == rows(SMALL)


def test_size_grades_and_gains() -> None:
    seen = rows(SMALL)
    assert len(seen) == 60 * 12
    assert {row["label"]: row["gain"] for row in seen} == GAINS
    shares = Counter(row["label"] for row in seen)
    assert all(shares[label] > 0.1 * len(seen) for label in GAINS)
    assert len({(row["query_id"], row["product_id"]) for row in seen}) == len(seen)


def test_a_query_lives_on_one_day() -> None:
    days = [
        {row["query_id"] for batch in generate(SMALL, name) for row in batch.to_pylist()} for name in partitions(SMALL)
    ]
    assert partitions(SMALL) == ["dt=2026-01-01", "dt=2026-01-02", "dt=2026-01-03"]
    assert all(days)
    assert sum(map(len, days)) == len(set().union(*days)) == 60


def test_a_new_day_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    one, two = (SMALL.model_copy(update={"num_days": days}) for days in (1, 2))
    assert rows(two)[: len(rows(one))] == rows(one)
    parts = [
        open_source(DataConfig(synthetic=config), scratch=tmp_path, stop=StopSignal()).partitions
        for config in (one, two)
    ]
    assert parts[1][:1] == parts[0]
    assert parts[1][1].name == "dt=2026-01-02"


def test_batches_have_the_schema_and_no_empty_text() -> None:
    table = pa.Table.from_batches(generate(SMALL, "dt=2026-01-01"))
    assert table.schema == SCHEMA
    assert all(text for name in ("query", "title", "label") for text in table[name].to_pylist())


def test_overlap_alone_does_not_solve_it() -> None:
    """Accessories name the product they are for: sharing more words does not make a title more relevant."""
    overlap: dict[object, list[float]] = {}
    for row in rows(SMALL):
        query, title = set(str(row["query"]).split()), set(str(row["title"]).lower().split())
        overlap.setdefault(row["label"], []).append(len(query & title) / len(query))
    some_complements_beat_half_of_exact = (
        max(overlap["complement"]) > sorted(overlap["exact"])[len(overlap["exact"]) // 2]
    )
    assert some_complements_beat_half_of_exact
