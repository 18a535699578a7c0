"""Cycle after cycle: what is unchanged is taken over bit by bit, what is gone is gone."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import ConfigError, DataError
from tests.embed.catalogues import Case, expected_vector, products, rows_of, title, write_catalogue

LAYOUTS: list[dict[str, Any]] = [{}, {"dtype": "int8"}, {"format": "npy", "dtype": "fp16", "dim": 8}]


def second_day(tmp_path: Path) -> Path:
    """p0 to p9 are gone, p10 to p14 have another title, p100 to p119 are new, and all is in another order."""
    changed = pa.table({"product_id": [f"p{n}" for n in range(10, 15)], "title": [title(n + 500) for n in range(5)]})
    return write_catalogue(tmp_path / "second", [products(range(119, 14, -1)), changed])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_only_news_is_embedded(tmp_path: Path, layout: dict[str, Any]) -> None:
    case = Case(tmp_path, layout)
    first = case.embed(write_catalogue(tmp_path / "first", [products(range(100))]), "c1")
    plan = case.plan(second_day(tmp_path), "c2")
    embedder = case.work(plan)
    vectors = case.finish(plan)
    counts = vectors.info.counts
    assert sum(embedder.windows) == counts.embedded == 25
    assert (counts.carried, counts.known, vectors.info.deleted) == (85, 90, 10)
    assert (vectors.info.carried_from, vectors.info.previous, vectors.info.generation) == ("c1", "c1", 2)
    before, after = rows_of(first), rows_of(vectors)
    assert set(after) == {f"p{n}" for n in range(10, 120)}
    for number in range(15, 100):
        assert np.array_equal(after[f"p{number}"], before[f"p{number}"])
    dim = layout.get("dim", 16)
    for number in range(5):
        expected = expected_vector(title(number + 500))[:dim]
        np.testing.assert_allclose(after[f"p{number + 10}"], expected / np.linalg.norm(expected), atol=0.01)


def test_a_killed_incremental_cycle_ends_like_a_whole_one(tmp_path: Path) -> None:
    files = []
    for name, workers in (("whole", 1), ("shared", 3)):
        case = Case(tmp_path / name)
        case.embed(write_catalogue(tmp_path / "first", [products(range(100))]), "c1")
        plan = case.plan(second_day(tmp_path), "c2")
        for worker in range(workers):
            case.work(plan, worker, workers)
        case.finish(plan)
        files.append(case.files("c2"))
    assert files[0] == files[1]


def test_nothing_changed_at_all(tmp_path: Path) -> None:
    """Then the device is not asked for anything, however many parts there are."""
    case, catalogue = Case(tmp_path, rows_per_part=7), write_catalogue(tmp_path / "in", [products(range(100))])
    case.embed(catalogue, "c1")
    plan = case.plan(catalogue, "c2")
    assert case.work(plan).windows == []
    vectors = case.finish(plan)
    assert (vectors.info.counts.carried, vectors.info.deleted) == (100, 0)
    assert len(rows_of(vectors)) == 100


def test_another_model_carries_nothing_over(tmp_path: Path) -> None:
    case, catalogue = Case(tmp_path), write_catalogue(tmp_path / "in", [products(range(100))])
    case.embed(catalogue, "c1")
    case.model = "model-2"
    vectors = case.embed(catalogue, "c2")
    assert (vectors.info.counts.embedded, vectors.info.carried_from, vectors.info.deleted) == (100, None, None)
    assert vectors.info.previous == "c1"
    case.model = "model-1"  # rolled back: the newest that fits is not the newest
    assert case.embed(catalogue, "c3").info.carried_from == "c1"


@pytest.mark.parametrize("layout", [{"dtype": "fp16"}, {"dim": 8}])
def test_another_layout_carries_nothing_over(tmp_path: Path, layout: dict[str, Any]) -> None:
    catalogue = write_catalogue(tmp_path / "in", [products(range(40))])
    Case(tmp_path).embed(catalogue, "c1")
    assert Case(tmp_path, layout).embed(catalogue, "c2").info.counts.carried == 0


def test_the_format_may_change(tmp_path: Path) -> None:
    catalogue = write_catalogue(tmp_path / "in", [products(range(40))])
    Case(tmp_path).embed(catalogue, "c1")
    vectors = Case(tmp_path, {"format": "npy"}).embed(catalogue, "c2")
    assert vectors.info.counts.carried == 40
    assert rows_of(vectors).keys() == {f"p{n}" for n in range(40)}


def test_duplicates_do_not_make_deletions(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.embed(write_catalogue(tmp_path / "first", [products(range(100))]), "c1")
    twice = write_catalogue(tmp_path / "second", [products(range(95)), products([3])])
    vectors = case.embed(twice, "c2")
    assert (vectors.info.rows, vectors.info.counts.known, vectors.info.deleted) == (95, 95, 5)


def test_the_cycle_to_carry_over_from_may_be_named(tmp_path: Path) -> None:
    case, catalogue = Case(tmp_path), write_catalogue(tmp_path / "in", [products(range(40))])
    case.embed(catalogue, "c1")
    case.embed(catalogue, "c2")
    named = case.plan(catalogue, "c3", carry_over="c1")
    assert named.carry_from is not None and named.carry_from.cycle == "c1"
    assert named.previous is not None and named.previous.cycle == "c2"
    assert case.plan(catalogue, "c4", carry_over="none").carry_from is None
    with pytest.raises(DataError, match="no finished vectors"):
        case.plan(catalogue, "c5", carry_over="c9")
    case.model = "model-2"
    with pytest.raises(ConfigError, match="checkpoint_digest was model-1, and is model-2 now"):
        case.plan(catalogue, "c5", carry_over="c1")


def test_earlier_vectors_that_change_under_the_plan(tmp_path: Path) -> None:
    case, catalogue = Case(tmp_path), write_catalogue(tmp_path / "in", [products(range(40))])
    case.embed(catalogue, "c1")
    plan = case.plan(catalogue, "c2")
    case.workspace.delete_prefix("embeddings/c1")
    with pytest.raises(DataError, match="no finished vectors"):
        case.work(plan)
    case.workspace.delete_prefix("cycles/c1")
    case.embed(write_catalogue(tmp_path / "other", [products(range(50))]), "c1")
    with pytest.raises(DataError, match="as when this cycle was planned"):
        case.work(plan)
