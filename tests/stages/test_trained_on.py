"""Metrics by what was trained on, from prepare to the table, on offers that are matched with each other."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from pipeline.cli import main
from pipeline.core.fingerprint import hash63
from pipeline.data.trained_items import PARTS
from pipeline.evaluate.report import BaselineReport, EvaluationReport, ModelReport, part_table
from tests.stages.evaluate_case import FLAGS, Case, last_wins, noisy

pytestmark = pytest.mark.stage

WORDS = ("red", "blue", "green", "grey", "black", "white", "small", "large")
VALID, TEST = 0.12, 0.18


def offer(number: int) -> str:
    """Four offers of each of 80 products."""
    product, shop = divmod(number, 4)
    return f"{WORDS[product % 8]} Thing {product} of shop {WORDS[shop]}"


PAIRS = [(a, (a + step) % 320) for a in range(320) for step in (1, 3, 4, 9)]
ROWS = [
    {
        "query": offer(a),
        "title": offer(b).upper(),
        "query_id": f"q{a}",
        "product_id": f"p{b}",
        "label": "yes" if a // 4 == b // 4 else "no",
        "trained_on": "monday" if a % 2 else "tuesday",
    }
    for a, b in PAIRS
]


def score(row: dict[str, str]) -> float:
    """The split of the more held-out item, by a plain reading of what the documentation says."""
    return min(hash63(f"split|{hash63(row[side].lower())}") / 2**63 for side in ("query", "title"))


TRAIN_ROWS = [row for row in ROWS if score(row) >= TEST + VALID]
TEST_ROWS = [row for row in ROWS if score(row) < TEST]
SEEN = {row[side].lower() for row in TRAIN_ROWS for side in ("query", "title")}
OWN = (
    "--data.split-by=both",
    "--data.labels=no,yes",
    f"--data.valid-fraction={VALID}",
    f"--data.test-fraction={TEST}",
    "--data.slices=trained_on",
    "--data.rows-per-chunk=300",
    "--data.buckets=24x24",
    "--evaluate.baselines.boosting=true",
    "--gate.min-slice-queries=30",
    "--gate.slice-drops=f1=0.05",
)
ALL_FLAGS = (*(flag for flag in FLAGS if "boosting" not in flag and "slices" not in flag), *OWN)


@pytest.fixture(scope="module")
def trained() -> Iterator[Path]:
    """A workspace in which cycle c1 is prepared and trained."""
    folder = Path(mkdtemp(prefix="trnpipe-trained-on-"))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = (*ALL_FLAGS, f"--data.path={folder}/rows.jsonl", f"--workspace={folder}/workspace", "--cycle=c1")
    for stage in ("prepare", "train"):
        assert main([stage, *last_wins(given)]) == 0
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def case(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Case:
    shutil.copytree(trained / "workspace", tmp_path / "workspace")
    capsys.readouterr()
    return Case(tmp_path, capsys, (*ALL_FLAGS, f"--data.path={trained}/rows.jsonl"))


def part_of(row: dict[str, str]) -> str:
    query, product = (row[side].lower() in SEEN for side in ("query", "title"))
    return "both" if query and product else "query" if query else "product" if product else "neither"


def sizes(report: EvaluationReport, column: str) -> dict[str, tuple[int, int]]:
    slices = (one for one in report.candidate.slices if one.column == column)
    return {one.value: (one.report.num_rows, one.report.num_queries) for one in slices}


def test_parts_are_those_of_a_plain_loop_and_every_model_has_them(case: Case) -> None:
    told, report = case.run(), case.report()
    expected = Counter(map(part_of, TEST_ROWS))
    assert expected["both"] == 0 and min(expected[part] for part in PARTS[1:]) > 20
    assert report.holdout.rows == len(TEST_ROWS)
    assert report.holdout.parts == {part: expected[part] for part in PARTS}
    # The data has a column of that name, which stays a slice of its own.
    assert set(sizes(report, "trained_on")) == {"monday", "tuesday"}
    queries = {part: {row["query_id"] for row in TEST_ROWS if part_of(row) == part} for part in expected}
    assert sizes(report, "trnpipe.trained_on") == {part: (expected[part], len(queries[part])) for part in expected}
    relevant = [row for row in TEST_ROWS if row["label"] == "yes"]
    seen = {row["query_id"] for row in relevant if row["title"].lower() in SEEN}
    new = {row["query_id"] for row in relevant} - seen
    assert sizes(report, "relevant_products") == {"seen": (0, len(seen)), "new": (0, len(new))}
    # Parts add up to the whole: recall of search is a mean over queries.
    models: list[ModelReport | BaselineReport] = [report.candidate, *report.baselines]
    for report_of in models:
        if report_of.retrieval is None:
            continue
        by_part = {one.value: one.report.values["retrieval_recall@10"] for one in report_of.slices[-2:]}
        mean = (by_part["seen"] * len(seen) + by_part["new"] * len(new)) / (len(seen) + len(new))
        assert report_of.retrieval.values["retrieval_recall@10"] == pytest.approx(mean)
    boosting = next(one for one in report.baselines if one.name == "boosting")
    assert {(one.column, one.value) for one in boosting.slices} == {("trnpipe.trained_on", part) for part in expected}
    assert boosting.metrics is not None
    right = sum(one.report.values["accuracy"] * one.report.num_rows for one in boosting.slices)
    assert right / len(TEST_ROWS) == pytest.approx(boosting.metrics.values["accuracy"])
    head, *rows = part_table(report)
    assert head == ("slice", "metric", "rows", "queries", "candidate", "bm25", "boosting")
    names = [(row[0], row[1]) for row in rows]
    assert ("trnpipe.trained_on=neither", "f1") in names and ("relevant_products=new", "retrieval_ndcg@10") in names
    assert not any("monday" in name for name, _ in names)
    counts = ", ".join(f"{part} {expected[part]:,}" for part in PARTS)
    assert f"rows by which side was trained on, query or product: {counts}" in told
    assert "relevant_products=seen" in told
    assert report.holdout.leaked_by_id == report.holdout.leaked_by_text == 0


def test_a_part_in_which_the_candidate_is_worse_refuses_it(case: Case) -> None:
    case.run()
    bad = case.made("bad", noisy(1.0))
    case.run(f"--evaluate.candidate={bad}", "--gate.drops=ndcg@10=1", "--no-evaluate.baselines.boosting", code=80)
    checks = {check.slice: check for check in case.report().verdict.checks if check.kind == "slice"}
    worse = [name for name, check in checks.items() if check.outcome == "fail" and "trnpipe.trained_on" in name]
    assert worse and all(checks[name].num_queries for name in worse)
    # Too few queries: shown, and not judged.
    case.run(f"--evaluate.candidate={bad}", "--gate.drops=ndcg@10=1", "--gate.min-slice-queries=5000")
    report = case.report()
    assert {check.outcome for check in report.verdict.checks if check.kind == "slice"} == {"skipped"}
    assert part_table(report)[0][-3:] == ("production", "bm25", "boosting")


def test_queries_of_a_catalogue_are_divided_by_the_texts_of_its_items(case: Case, tmp_path: Path) -> None:
    items = [{"product_id": str(number), "title": offer(number), "query": offer(number)} for number in range(320)]
    asked = [*items, {"product_id": "x", "title": "something else entirely", "query": ""}]
    (tmp_path / "catalogue.jsonl").write_text("".join(json.dumps(item) + "\n" for item in asked))
    case.run(f"--evaluate.retrieval.catalogue={tmp_path}/catalogue.jsonl")
    seen = sum(offer(number).lower() in SEEN for number in range(320))
    assert 0 < seen < 320
    assert sizes(case.report(), "relevant_products") == {"seen": (0, seen), "new": (0, 320 - seen)}


def test_without_the_check_of_the_training_data_there_are_no_parts(case: Case) -> None:
    told = case.run("--evaluate.leak=off")
    assert case.report().holdout.parts == {} and part_table(case.report()) == []
    assert "rows by which side" not in told


@pytest.mark.parametrize(("split_by", "code"), [("both", 0), ("query", 65)])
def test_a_model_of_other_splits_is_found_out(case: Case, split_by: str, code: int) -> None:
    """The splits by query share no item by which they were made with the rows of the model; another day's do."""
    again = f"--data.split-by={split_by}"
    case.run(again, stage="prepare", cycle="c2")
    told = case.run(again, f"--evaluate.candidate={case.trained()}", cycle="c2", code=code)
    assert ("test queries" in told and "were trained on" in told) == bool(code)


@pytest.mark.parametrize(("num_new", "words"), [(60, "is selected on the 60 of 100"), (40, "warning: only 40 of 100")])
def test_the_best_step_is_chosen_on_unseen_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_new: int, words: str
) -> None:
    """Of 100 validation rows, each of another query; those that are not new have a query and a product of train."""
    rows = [dict(ROWS[4 * a + k], query_id=f"q{a}", split="train") for a in range(200) for k in range(3)]
    for a in range(100):
        old = a >= num_new
        row = {"query": offer(a) if old else f"another query {a}", "title": offer(a + 1), "label": ("no", "yes")[a % 2]}
        rows.append(row | {"query_id": f"q{a if old else 1000 + a}", "product_id": f"p{a + 1}", "split": "valid"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"trained_on": "x"} | row) + "\n" for row in rows))
    case = Case(tmp_path, capsys, (*ALL_FLAGS, f"--data.path={tmp_path}/rows.jsonl", "--data.split-by=query"))
    case.run(stage="prepare")
    told = case.run("--train.metric-rows=unseen", "--train.max-steps=4", "--train.evaluate-every=2", stage="train")
    assert words in told
    lines = [json.loads(line) for line in case.storage.read_bytes("cycles/c1/events.jsonl").splitlines()]
    scored = [line["rows"] for line in lines if line["event"] == "holdout_evaluated"]
    assert scored == [num_new if num_new >= 50 else 100] * 2 + [100], "the candidate is scored on all rows"
