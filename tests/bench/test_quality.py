"""The tables of bench.quality, from made-up parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.quality import changes as tried_changes
from bench.quality import incremental, ours
from bench.quality.changes import TRIED, Change, changes_table
from bench.quality.incremental import DAYS, Arm, Chain, deal_days, shipped_arm
from bench.quality.part import KEPT, Budget, PartResult, is_kept, keep, read_part, read_parts, reads_of_test
from bench.quality.sides import Incomplete, Table, best_peer, sides_of
from bench.quality.table import tables
from bench.quality.tasks import TASKS, write_items
from bench.results import ROOT
from pipeline.settings import resolve

pytestmark = pytest.mark.unit
QUERIES = 40


def part(name: str, value: float, *, task: str = "pricerunner", seed: int = 1, **changes: Any) -> PartResult:
    """A part whose every query has the same nDCG@10, and with every figure that a table asks for."""
    trained = name != "bm25"
    figures = {"ndcg@10": value, "recall@10": value, "recall@100": value, "f1": value}
    if name == "ours":
        figures |= {"accuracy": 0.93, "boosting_accuracy": 0.84, "hybrid_weighted_ndcg@10": 0.85, "boosting_f1": 0.8}
    fields: dict[str, object] = {
        "task": task,
        "part": name,
        "split": "test",
        "seed": seed,
        "steps": 250 if trained else 0,
        "batch": 64 if trained else 0,
        "precision": "autocast" if trained else "",
        "rate": 1e-4 if trained and name != "ours" else 0.0,
        "recipe": ours.recipe() if name == "ours" else "",
        "figures": figures,
        "ndcg_by_query": (value,) * (QUERIES - 1) + (value - 0.01,),
        "train_seconds": 1.0,
    }
    return PartResult.model_validate(fields | changes)


def whole(**changes: Any) -> list[PartResult]:
    """Three seeds of ours and of a peer, another peer, and BM25."""
    own = [part("ours", value, seed=seed, **changes) for seed, value in enumerate((0.83, 0.84, 0.82), start=1)]
    peers = [part("mnrl", value, seed=seed, **changes) for seed, value in enumerate((0.80, 0.81, 0.82), start=1)]
    return [*own, *peers, part("cached_mnrl", 0.79, **changes), part("bm25", 0.73)]


def only(parts: list[PartResult]) -> Table:
    made, missing = tables(parts)
    assert missing == []
    (table,) = made
    return table


def figures_of(table: Table) -> dict[str, tuple[float, float, float]]:
    return {one.name: (one.value, one.low, one.high) for one in table.figures}


def verdicts(table: Table) -> dict[str, bool]:
    found = figures_of(table)
    return {target.figure: target.holds(found[target.figure][0]) for target in table.targets}


def test_ours_and_peers_are_means_over_seeds_with_their_range() -> None:
    table = only(whole())
    found = figures_of(table)
    assert table.bench == "quality_pricerunner_16000"
    assert found["ours_ndcg@10"] == (0.83, 0.82, 0.84)
    assert found["mnrl@0.0001_ndcg@10"] == (0.81, 0.80, 0.82)
    assert found["ahead_of_best_peer"][0] == pytest.approx(0.02)
    assert found["hybrid_ahead"] == pytest.approx((0.02, 0.01, 0.03))
    assert found["bm25_low"][0] == pytest.approx(0.1, abs=1e-6)
    assert verdicts(table) == dict.fromkeys(
        ("ahead_of_best_peer", "ours_ndcg@10", "bm25_low", "hybrid_ahead", "ours_accuracy"), True
    )


@pytest.mark.parametrize(
    ("ours", "failed"),
    [(0.815, {"ours_ndcg@10", "ahead_of_best_peer"}), (0.86, {"hybrid_ahead"}), (0.73, {"bm25_low"})],
)
def test_each_target_can_fail(ours: float, failed: set[str]) -> None:
    found = verdicts(only([part("ours", ours), *whole()[3:]]))
    assert failed <= {name for name, holds in found.items() if not holds}


def test_parts_of_other_budgets_are_other_tables() -> None:
    longer = whole(steps=500)
    made, missing = tables([*whole(), *longer, part("ours", 0.9, steps=750), part("ours", 0.9, precision="fp32")])
    assert [table.bench for table in made] == ["quality_pricerunner_16000", "quality_pricerunner_32000"]
    assert figures_of(made[0])["ours_ndcg@10"] == figures_of(made[1])["ours_ndcg@10"]
    assert missing == [
        "pricerunner, 16,000 pairs: no peer was run on test",
        "pricerunner, 48,000 pairs: no peer was run on test",
    ]
    assert Budget(32000, 128, "fp32").name == "32000_batch_128_fp32"


def test_the_best_peer_is_chosen_on_valid_where_all_were_run_there() -> None:
    test = sides_of([part("mnrl", 0.7), part("cached_mnrl", 0.9)])
    valid = sides_of([part("mnrl", 0.8, split="valid"), part("cached_mnrl", 0.7, split="valid"), part("bm25", 0.95)])
    assert best_peer(test, valid, "ndcg@10") == (
        "mnrl@0.0001",
        "the best peer, mnrl@0.0001, was chosen on valid by ndcg@10 among 2",
    )
    chosen, how = best_peer(test, {"mnrl@0.0001": valid["mnrl@0.0001"]}, "ndcg@10")
    assert chosen == "cached_mnrl@0.0001" and "chosen on test" in how and "favours it" in how
    better = sides_of([part("mnrl", 0.99, split="valid", rate=2e-4)])
    with pytest.raises(Incomplete, match=r"mnrl@0.0002, was not run on test"):
        best_peer(test, {**valid, **better}, "ndcg@10")


def test_the_table_says_how_often_test_was_read() -> None:
    twice = part("cached_mnrl", 0.79, reads=2)
    elsewhere = [
        part("ours", 0.9, variant="cold", reads=4),
        part("ours", 0.9, variant="cold", reads=4, steps=500),
        part("ours", 0.9, split="valid"),
        part("ours", 0.9, task="shoes"),
    ]
    parts = [*whole()[:6], twice, whole()[-1], *elsewhere]
    assert reads_of_test(parts, "pricerunner") == 17
    table = tables(parts)[0][0]
    assert "was read 13 times for this\ntable" in table.method and "and 4 more times by other parts" in table.method
    assert figures_of(table)["ours-cold_ndcg@10"][0] == 0.9


def test_seeds_of_another_recipe_or_other_queries_make_no_table() -> None:
    others = [part("ours", 0.9, seed=seed, recipe="other") for seed in (1, 2)]
    assert "ours was not run on test with the present" in tables([*others, *whole()[3:]])[1][0]
    assert figures_of(only([*whole(), *others]))["ours_ndcg@10"] == (0.83, 0.82, 0.84)
    asked = part("ours", 0.9, seed=4, ndcg_by_query=(0.5,))
    assert "were asked different queries" in tables([*whole(), asked])[1][0]
    bare = part("ours", 0.9, seed=4, figures={"ndcg@10": 0.9})
    assert "has no hybrid_weighted_ndcg@10" in tables([*whole(), bare])[1][0]


def test_pairs_are_held_against_boosting_and_the_best_bi_encoder() -> None:
    ours = [part("ours", value, task="cameras", seed=seed) for seed, value in enumerate((0.84, 0.86), start=1)]
    table = only([*ours, part("contrastive", 0.82, task="cameras"), part("mnrl", 0.86, task="cameras")])
    found = figures_of(table)
    assert table.bench == "quality_cameras_16000"
    assert found["ours_f1"] == (0.85, 0.84, 0.86)
    assert found["ahead_of_boosting"][0] == pytest.approx(0.05)
    assert found["ahead_of_bi_encoder"][0] == pytest.approx(-0.01)
    assert verdicts(table) == {"ahead_of_boosting": True, "ahead_of_bi_encoder": False}


def test_offers_that_were_not_trained_on_are_a_table_with_bounds() -> None:
    figures = {"f1": 0.86, "boosting_f1": 0.8, "ndcg@10": 0.7, "bm25_ndcg@10": 0.5}
    bounds = {"f1_ahead_of_boosting_low": 0.03, "retrieval_ndcg@10_ahead_of_bm25_low": 0.1}
    own = [
        part("ours", 0.7, task="cameras_items", seed=seed, figures=figures | bounds | {"ece": 0.02 * seed})
        for seed in (1, 2)
    ]
    with_lower = own[1].model_copy(update={"figures": own[1].figures | {"f1_ahead_of_boosting_low": -0.01}})
    assert "the published weights were not searched" in tables(own)[1][0]
    table = only([own[0], with_lower, part("ours", 0.4, task="cameras_items", variant="published")])
    found = figures_of(table)
    assert found["ahead_of_boosting"][0] == pytest.approx(0.06) and found["boosting_lowest"][0] == -0.01
    assert found["published_low"][0] == pytest.approx(0.3, abs=1e-6) and found["ours_ece"] == (0.03, 0.02, 0.04)
    assert {name for name, holds in verdicts(table).items() if not holds} == {"boosting_lowest"}


def test_pairs_are_written_once_without_their_split(tmp_path: Path) -> None:
    rows = [
        {"category": "cameras", "tier": tier, "split": split, "query": query, "title": "t", "label": label}
        for tier, split, query, label in (
            ("medium", "train", "a", "match"),
            ("test", "test", "a", "match"),
            ("test", "test", "b", "non_match"),
            ("large", "train", "c", "match"),
        )
    ]
    task = TASKS["cameras_items"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / task.pairs)
    write_items(tmp_path, task, tmp_path / "pairs.parquet")
    written = pq.read_table(tmp_path / "pairs.parquet").to_pylist()
    assert written == [
        {"query": "a", "title": "t", "label": "match"},
        {"query": "b", "title": "t", "label": "non_match"},
    ]
    assert "--data.split-by" in task.data_flags("test") and "--data.filter" not in task.data_flags("valid")


def test_a_part_survives_its_file_and_counts_its_runs(tmp_path: Path) -> None:
    first = part("ours", 1 / 3)
    assert keep(first, tmp_path).reads == 1
    again = keep(part("ours", 2 / 3), tmp_path)
    assert again.reads == 2
    keep(part("ours", 0.5, variant="cold", settings=("--train.loss.temperature", "0.02")), tmp_path)
    kept = {one.side: one for one in read_parts(tmp_path)}
    assert kept.keys() == {"ours", "ours-cold"}
    assert kept["ours"].figures["f1"] == 0.666667 and kept["ours"].ndcg_by_query[0] == 0.6667
    assert kept["ours"].model_copy(update={"figures": {}, "ndcg_by_query": ()}) == again.model_copy(
        update={"figures": {}, "ndcg_by_query": ()}
    )
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"broken.json is no part"):
        read_parts(tmp_path)


def test_a_part_of_another_recipe_is_run_again(tmp_path: Path) -> None:
    first = part("ours", 0.8, recipe="a")
    assert not is_kept(first, tmp_path)
    keep(first, tmp_path)
    assert is_kept(first, tmp_path) and not is_kept(part("ours", 0.8, recipe="b"), tmp_path)


def by_day(arm: str, value: float, **changes: Any) -> PartResult:
    return part("incremental", value, variant=arm, rate=0.0, **changes)


def test_five_days_are_held_against_one_training() -> None:
    shipped, many = shipped_arm().name, shipped_arm(20).name
    runs = [by_day("together", 0.80), by_day(shipped, 0.796, reads=2), by_day("replay-0", 0.77)]
    table = only(runs)
    found = figures_of(table)
    assert found["behind"][0] == pytest.approx(0.004) and found["behind_without_replay"][0] == pytest.approx(0.03)
    assert verdicts(table) == {"behind": True} and "was read 4 times" in table.method
    slow = only([*runs, by_day(many, 0.785)])
    assert verdicts(slow) == {"behind": True, "behind_20_days": False}
    late = by_day(shipped, 0.78, seed=2)
    assert verdicts(only([*runs, late]))["behind"], "seed 2 has no training on all days"
    assert not verdicts(only([*runs, late, by_day("together", 0.80, seed=2)]))["behind"]
    assert tables(runs[1:])[1] == ["pricerunner by day, 16,000 pairs: together was not run on test"]


def test_rows_of_a_query_are_of_one_day_and_days_come_one_by_one(tmp_path: Path) -> None:
    queries = [f"q{number // 3}" for number in range(300)]
    pq.write_table(pa.table({"query_id": queries, "row": list(range(300))}), tmp_path / "rows.parquet")
    deal_days(tmp_path / "rows.parquet", tmp_path / "days", 2)
    assert sorted(one.name for one in (tmp_path / "days").iterdir()) == ["dt=2026-01-01", "dt=2026-01-02"]
    deal_days(tmp_path / "rows.parquet", tmp_path / "days", DAYS)
    days = [pq.read_table(one, partitioning=None) for one in sorted((tmp_path / "days").glob("*/*.parquet"))]
    assert len(days) == DAYS and sorted(row for day in days for row in day["row"].to_pylist()) == list(range(300))
    asked = [set(day["query_id"].to_pylist()) for day in days]
    assert sum(map(len, asked)) == 100 and len(set.union(*asked)) == 100
    assert all(len(one) > 5 for one in asked)


def test_a_chain_goes_on_with_the_day_it_ended_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"query_id": ["a", "b"]}), tmp_path / TASKS["pricerunner"].pairs)
    chain = Chain(Arm(0.2), "pricerunner", tmp_path, tmp_path, "valid", 50, 64, "fp32", "cpu", 1)
    ran: list[dict[str, str]] = []
    done = {"day-1", "day-2"}
    monkeypatch.setattr(incremental, "WORK", tmp_path)
    monkeypatch.setattr(incremental, "load_result", lambda storage, cycle, stage: cycle if cycle in done else None)
    monkeypatch.setattr(ours, "run", lambda flags, more: ran.append(dict(zip(flags[::2], flags[1::2], strict=True))))
    monkeypatch.setattr(ours, "report_of", lambda workspace, cycle: cycle)
    monkeypatch.setattr(ours, "figures_of", lambda report: {"ndcg@10": 0.5} if report == "day-5" else {})
    monkeypatch.setattr(ours, "ndcg_by_query", lambda workspace, scratch, cycle: (0.5,))
    found = chain.run()
    assert found.figures == {"ndcg@10": 0.5} and found.variant == "replay-0.2"
    assert [flags["--cycle"] for flags in ran] == ["day-3", "day-4", "day-5"]
    assert {flags["--train.max-steps"] for flags in ran} == {"10"}
    assert {flags["--train.replay-share"] for flags in ran} == {"0.2"}
    assert [flags.get("--evaluate.max-rows") for flags in ran] == ["1000", "1000", None]
    for flags in ran:
        resolve([Path(flags.pop("--config"))], {}, list(flags.items()))  # every flag is one that trnpipe knows
    with pytest.raises(SystemExit, match="a multiple of 5"):
        replace(chain, steps=51).run()


def test_each_change_is_a_row_beside_what_it_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = (Change("wide", "wider", "base", kept=True), Change("warm", "warmer", "wide"), Change("never", "-", "base"))
    runs = {"base": 0.80, "wide": 0.84, "warm": 0.83}
    parts = [part("ours", value, split="valid", variant=name) for name, value in runs.items()]
    table = changes_table(parts, tried)
    assert table is not None and table.targets == ()
    monkeypatch.setattr("bench.results.RESULTS", tmp_path)
    rows = tried_changes.page(table.finish()).splitlines()[-2:]
    assert rows == [
        "| wider (kept) | pricerunner | +0.040 | +0.040 | +0.000 | +0.040 |",
        "| warmer | pricerunner | -0.010 | -0.010 | +0.000 | -0.010 |",
    ]
    assert changes_table(parts[1:2], tried) is None


def test_every_kept_variant_on_valid_is_a_change_that_is_described() -> None:
    kept = {one.variant for one in read_parts(KEPT) if one.part == "ours" and one.split == "valid" and one.variant}
    described = {name for each in TRIED for name in (each.variant, each.against)}
    assert kept <= described, "say in bench/quality/changes.py what it is"


def test_kept_parts_are_small_and_name_no_machine() -> None:
    for path in sorted(KEPT.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        assert path.stem == read_part(path).name and len(text) < 20_000, path
        assert not any(place in text for place in (str(ROOT), "/home/", "/tmp/")), path
