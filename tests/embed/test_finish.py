"""The end of a cycle: ids in several parts, too many bad rows, several workers at once, and what earlier ones left."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import DataError, TransientError
from pipeline.embed import parts as parts_module
from pipeline.embed.catalogue import DUPLICATE_ID, EMPTY_TEXT
from pipeline.embed.parts import part_store, records_prefix
from pipeline.embed.vectors import find_vectors
from pipeline.io.commit import verify_dir
from tests.embed.catalogues import Case, HashEmbedder, expected_vector, products, rows_of, title, write_catalogue
from tests.kit.killing import killed_at


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def with_repeats(tmp_path: Path) -> Path:
    """p0 to p99; then p5, p40 and p99 again with other titles, and p110 twice in one part."""
    again = pa.table({"product_id": ["p5", "p40", "p99", "p110", "p110"], "title": [title(n) for n in range(200, 205)]})
    return write_catalogue(tmp_path / "in", [products(range(100)), again, products(range(100, 105))])


@pytest.mark.parametrize("layout", [{}, {"format": "npy", "dtype": "int8"}], ids=str)
def test_of_equal_ids_the_first_in_the_catalogue_stays(tmp_path: Path, layout: dict[str, Any]) -> None:
    case = Case(tmp_path, layout)
    vectors = case.embed(with_repeats(tmp_path))
    found = rows_of(vectors)
    assert set(found) == {f"p{n}" for n in [*range(105), 110]}
    for number in (5, 40, 99):
        np.testing.assert_allclose(found[f"p{number}"], expected_vector(title(number)), atol=0.02)
    np.testing.assert_allclose(found["p110"], expected_vector(title(203)), atol=0.02)
    assert vectors.info.reasons == {DUPLICATE_ID: 4}
    assert (vectors.info.counts.read, vectors.info.counts.bad, vectors.info.rows) == (110, 4, 106)
    lines = [json.loads(line) for line in case.files()["quarantine.jsonl"].splitlines()]
    assert sorted(line["content"]["id"] for line in lines) == ["p110", "p40", "p5", "p99"]
    verify_dir(case.workspace, "embeddings/c1", deep=True)
    assert find_vectors(case.workspace, "c1").info == vectors.info
    assert set(case.files()) == {*vectors.manifest.files, "MANIFEST.json"}, "what was replaced is gone"


def test_it_may_be_killed_at_any_write_and_run_again(tmp_path: Path) -> None:
    whole, case, catalogue = Case(tmp_path / "whole"), Case(tmp_path / "case"), with_repeats(tmp_path)
    whole.embed(catalogue)
    plan = case.plan(catalogue)
    case.work(plan)
    number = 1
    while killed_at(number, lambda: case.finish(plan)) < 0:
        number += 1
    assert number > 5
    assert case.files() == whole.files()


def test_workers_that_finish_at_the_same_time(tmp_path: Path) -> None:
    case, catalogue = Case(tmp_path), with_repeats(tmp_path)
    plan = case.plan(catalogue)
    case.work(plan)
    with ThreadPoolExecutor(3) as pool:
        scratches = [tmp_path / f"machine-{number}" for number in range(3)]
        results = list(pool.map(lambda scratch: case.finish(plan, scratch=scratch), scratches))
    assert len({result.manifest.digest for result in results}) == 1
    verify_dir(case.workspace, "embeddings/c1", deep=True)
    assert len(rows_of(find_vectors(case.workspace, "c1"))) == 106


def test_one_that_is_overtaken_while_it_reads_takes_what_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, catalogue = Case(tmp_path), with_repeats(tmp_path)
    plan = case.plan(catalogue)
    case.work(plan)
    find, published = parts_module.find_duplicates, []

    def overtaken(*args: Any, **more: Any) -> Any:
        found = find(*args, **more)
        monkeypatch.setattr(parts_module, "find_duplicates", find)
        published.append(case.finish(plan))
        return found

    monkeypatch.setattr(parts_module, "find_duplicates", overtaken)
    assert case.finish(plan).manifest == published[0].manifest
    verify_dir(case.workspace, "embeddings/c1", deep=True)


@pytest.mark.parametrize("how", ["none", "another plan", "another kind"])
def test_what_others_left_is_not_taken_for_what_this_plan_has_published(tmp_path: Path, how: str) -> None:
    """A record is gone, and the vectors that are there are not those of this plan."""
    case, catalogue = Case(tmp_path), with_repeats(tmp_path)
    plan = case.plan(catalogue)
    case.work(plan)
    manifest = case.finish(plan).manifest
    case.workspace.delete(["embeddings/c1/MANIFEST.json", f"{records_prefix(plan)}/00000.json"])
    other: dict[str, dict[str, Any]] = {
        "another plan": {"fields": manifest.fields | {"plan": "other"}},
        "another kind": {"kind": "tokens"},
    }
    if how in other:
        data = manifest.model_copy(update=other[how]).to_json()
        case.workspace.write_bytes("embeddings/c1/MANIFEST.json", data)
    with pytest.raises(TransientError, match=r"00000\.json"):
        case.finish(plan)
    case.workspace.write_bytes("embeddings/c1/MANIFEST.json", manifest.to_json())
    assert case.finish(plan).manifest == manifest


def titled(titles: list[str | None]) -> pa.Table:
    return pa.table({"product_id": [f"p{n}" for n in range(len(titles))], "title": pa.array(titles, pa.string())})


@pytest.mark.parametrize(
    ("tables", "reason", "bad", "limit"),
    [
        ([titled([None] * 6 + ["phone"] * 94)], EMPTY_TEXT, 6, 0.05),
        ([titled([""] * 100)], EMPTY_TEXT, 100, 1.0),  # without a good row it is refused whatever is allowed
        ([products(range(50)), products(range(50))], DUPLICATE_ID, None, 0.05),
    ],
)
def test_too_many_bad_rows_refuse_the_catalogue(
    case: Case, tmp_path: Path, tables: list[pa.Table], reason: str, bad: int | None, limit: float
) -> None:
    plan = case.plan(write_catalogue(tmp_path / "in", tables))
    case.work(plan)
    with pytest.raises(DataError, match=rf"of 100 rows of the catalogue are bad: {reason}(.|\n)*refused.jsonl"):
        case.finish(plan, max_bad_fraction=limit)
    lines = case.workspace.read_bytes("cycles/c1/embed/refused.jsonl").splitlines()
    assert bad in (None, len(lines))
    with pytest.raises(DataError, match="no complete vectors"):
        find_vectors(case.workspace, "c1")
    if bad == 6:
        assert case.finish(plan, max_bad_fraction=0.06).info.rows == 94, "a raised limit needs no new work"


def test_parts_of_another_plan_are_not_taken(case: Case, tmp_path: Path) -> None:
    """Somebody deletes the records of a cycle and begins it again with another catalogue."""
    first = case.plan(write_catalogue(tmp_path / "in", [products(range(60))]))
    case.work(first)
    case.workspace.delete_prefix("cycles/c1")
    second = case.plan(write_catalogue(tmp_path / "other", [products(range(20, 60))]))
    assert part_store(case.workspace, second).done() == set()
    case.work(second)
    assert set(rows_of(case.finish(second))) == {f"p{n}" for n in range(20, 60)}
    verify_dir(case.workspace, "embeddings/c1", deep=True)


@pytest.mark.parametrize("layout", [{}, {"format": "npy"}], ids=str)
def test_a_worker_thought_dead_does_no_harm(tmp_path: Path, layout: dict[str, Any]) -> None:
    """It comes back on other hardware, with vectors a little different, after its part was done by another."""
    case = Case(tmp_path, layout)
    plan = case.plan(write_catalogue(tmp_path / "in", [products(range(60))]))
    case.work(plan)
    before = case.files()
    case.workspace.delete_prefix(records_prefix(plan))  # as if it had looked before any part was done
    case.work(plan, embedder=HashEmbedder(sign=-1.0))
    assert case.files() == before, "the first file under a name stays"
    case.finish(plan)
    verify_dir(case.workspace, "embeddings/c1", deep=True)


@pytest.mark.parametrize(
    ("layout", "lost"),
    [
        ({}, "embeddings/c1/part-00000.parquet"),  # taken away after its record was written
        ({"format": "npy"}, "embeddings/c1/part-00000.npy"),
        ({"format": "npy"}, "embeddings/c1/part-00000.ids.parquet"),  # then nothing says whose the matrix is
    ],
)
def test_a_part_that_is_made_again_elsewhere_has_its_own_record(
    tmp_path: Path, layout: dict[str, Any], lost: str
) -> None:
    case, catalogue = Case(tmp_path, layout), write_catalogue(tmp_path / "in", [products(range(60))])
    plan = case.plan(catalogue)
    case.work(plan)
    case.workspace.delete([lost])
    assert 0 not in part_store(case.workspace, plan).done()
    case.work(plan, embedder=HashEmbedder(sign=-1.0))
    found = rows_of(case.finish(plan))
    verify_dir(case.workspace, "embeddings/c1", deep=True)
    np.testing.assert_allclose(found["p0"], -expected_vector(title(0)), atol=0.02)
    np.testing.assert_allclose(found["p59"], expected_vector(title(59)), atol=0.02)


def test_bad_rows_are_counted_and_the_first_ones_kept(case: Case, tmp_path: Path) -> None:
    """However many parts there are: what is kept of them all is what a part may keep."""
    table = titled([None if number % 10 == 0 else title(number) for number in range(100)])
    catalogue = write_catalogue(tmp_path / "in", [table, products([1, 2, 3])])
    plan = case.plan(catalogue).model_copy(update={"quarantine_rows": 7})
    case.work(plan)
    info = case.finish(plan, max_bad_fraction=0.5).info
    assert info.reasons == {EMPTY_TEXT: 10, DUPLICATE_ID: 3}
    lines = [json.loads(line)["row"] for line in case.files()["quarantine.jsonl"].splitlines()]
    assert lines == [0, 10, 20, 30, 40, 50, 60]
