"""Cycle after cycle: what is unchanged is taken over bit by bit, what is gone is gone."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import DataError
from pipeline.core.format import natural_key
from pipeline.data.config import DataConfig
from pipeline.embed.carry_over import find_earlier
from pipeline.embed.config import EmbedConfig
from pipeline.embed.plan import plan_settings, vector_identity
from pipeline.embed.vectors import VectorLayout, find_vectors
from pipeline.model.config import ModelConfig
from tests.embed.catalogues import Case, expected_vector, products, rows_of, title, write_catalogue
from tests.kit.fields import check_named, without_effect
from tests.train.rows import checkpoint_of

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
    case, catalogue = Case(tmp_path), write_catalogue(tmp_path / "in", [products(range(40))])
    case.embed(catalogue, "c1")
    case.model = "model-2"
    info = case.embed(catalogue, "c2").info
    assert (info.counts.embedded, info.carried_from, info.deleted, info.previous) == (40, None, None, "c1")
    case.model = "model-1"  # rolled back: the newest that fits is not the newest
    assert case.embed(catalogue, "c3").info.carried_from == "c1"


def test_duplicates_do_not_make_deletions(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.embed(write_catalogue(tmp_path / "first", [products(range(100))]), "c1")
    twice = write_catalogue(tmp_path / "second", [products(range(95)), products([3])])
    vectors = case.embed(twice, "c2")
    assert (vectors.info.rows, vectors.info.counts.known, vectors.info.deleted) == (95, 95, 5)


def test_earlier_vectors_that_change_under_the_plan(tmp_path: Path) -> None:
    case, catalogue = Case(tmp_path), write_catalogue(tmp_path / "in", [products(range(40))])
    case.embed(catalogue, "c1")
    plan = case.plan(catalogue, "c2")
    case.workspace.delete_prefix("embeddings/c1")
    with pytest.raises(DataError, match="no complete vectors"):
        case.work(plan)
    case.workspace.delete_prefix("cycles/c1")
    case.embed(write_catalogue(tmp_path / "other", [products(range(50))]), "c1")
    with pytest.raises(DataError, match="as when this cycle was planned"):
        case.work(plan)


CHECKPOINT = checkpoint_of(max_tokens=300, model=ModelConfig(preset="tiny"))
NO_PART_OF_A_VECTOR = {
    "tokens_per_batch": "how many texts are computed together",
    "compiled": "how it is computed",
    "checkpoint": "its digest counts",
    "workers": "who does it",
    "worker": "who does it",
    "catalogue": "a row is carried over by the hashes of its id and text",
    "output": "the layout is compared beside it, see below",
}


def test_every_setting_is_part_of_what_made_a_vector_or_named_as_none() -> None:
    config = EmbedConfig(chunks=2)
    found = without_effect(config, lambda one: vector_identity(one, CHECKPOINT), buckets=(64, 128), precision="bf16")
    check_named(found, NO_PART_OF_A_VECTOR)


MADE_BY, LAYOUT = (
    vector_identity(EmbedConfig(chunks=2), CHECKPOINT),
    VectorLayout(format="parquet", dtype="fp32", dim=16, id_type="string"),
)


@pytest.mark.parametrize("name", [*MADE_BY, "dtype", "dim", "id_type"])
def test_vectors_that_differ_in_anything_are_not_taken_over(tmp_path: Path, name: str) -> None:
    """Whatever the name, also one that only one side has: a later version may know more."""
    case = Case(tmp_path)
    vectors = case.embed(write_catalogue(tmp_path / "in", [products(range(4))]), "c1")
    info = vectors.info.model_copy(update={"made_by": MADE_BY})
    manifest = vectors.manifest.model_copy(update={"fields": info.model_dump(mode="json")})
    case.workspace.write_bytes("embeddings/c1/MANIFEST.json", manifest.to_json())
    assert find_earlier(case.workspace, "c2", "auto", MADE_BY, LAYOUT).carry_from is not None
    without = {key: value for key, value in MADE_BY.items() if key != name}
    for made_by in (MADE_BY | {name: "other"}, without):
        layout = LAYOUT
        if name not in MADE_BY:
            made_by, layout = MADE_BY, LAYOUT.model_copy(update={name: {"dtype": "fp16", "dim": 8}.get(name, "int64")})
        assert find_earlier(case.workspace, "c2", "auto", made_by, layout).carry_from is None
    assert find_earlier(case.workspace, "c2", "none", MADE_BY, LAYOUT).carry_from is None


def test_what_a_cycle_was_begun_with_are_all_settings_that_decide_its_work() -> None:
    outside = {
        "buckets": "the length of a text is compared with the plan's",
        "tokens_per_batch": "how many texts are computed together",
        "compiled": "how it is computed",
        "workers": "who does it",
        "worker": "who does it",
        "catalogue.max_bad_fraction": "refuses, and changes no row",
    }
    check_named(without_effect(EmbedConfig(chunks=2), lambda one: plan_settings(one, DataConfig())), outside)
    of_judgements = set(DataConfig.model_fields) - {"path", "format", "columns", "filter", "synthetic"}
    check_named(without_effect(DataConfig(), lambda one: plan_settings(EmbedConfig(), one)), of_judgements)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("names", [("b", "a"), ("cycle-9", "cycle-10"), ("weekly-8", "2026-01-01")])
def test_the_newest_vectors_have_the_highest_generation_whatever_their_cycle_is_called(
    tmp_path: Path, names: tuple[str, str], at_once: bool
) -> None:
    """Of vectors that were planned at the same time the later name counts."""
    case, catalogue = Case(tmp_path), write_catalogue(tmp_path / "in", [products(range(4))])
    plans = [case.plan(catalogue, name) for name in names] if at_once else []
    for name in names:
        case.embed(catalogue, name)
    plan, newest = case.plan(catalogue, "next"), max(names, key=natural_key) if plans else names[1]
    assert plan.generation == (2 if at_once else 3)
    assert plan.previous is not None and plan.carry_from is not None
    assert plan.previous.cycle == plan.carry_from.cycle == newest


def test_what_is_no_earlier_vectors_is_passed_over(tmp_path: Path) -> None:
    """The cycle's own, an unfinished folder, one of another kind and one of another version."""
    case, catalogue = Case(tmp_path), write_catalogue(tmp_path / "in", [products(range(4))])
    vectors = case.embed(catalogue, "c1")
    other_kind = vectors.manifest.model_copy(update={"kind": "tokens"})
    other_version = vectors.manifest.model_copy(update={"fields": {"rows": 4}})
    for name, manifest in (("c2", other_kind), ("c3", other_version)):
        case.workspace.write_bytes(f"embeddings/{name}/MANIFEST.json", manifest.to_json())
    case.workspace.write_bytes("embeddings/c4/part-00000.parquet", b"half")
    own = find_earlier(case.workspace, "c1", "auto", vectors.info.made_by, vectors.layout)
    assert (own.previous, own.carry_from, own.generation) == (None, None, 0)
    later = find_earlier(case.workspace, "c5", "auto", vectors.info.made_by, vectors.layout)
    assert later.previous is not None and (later.previous.cycle, later.generation) == ("c1", 1)
    for name in ("c2", "c4"):
        with pytest.raises(DataError, match="has no complete vectors"):
            find_vectors(case.workspace, name)
