"""The verdict on a cycle, as it stands at the end of `submit`."""

from typing import Any

import pytest

from jobs.cycle.costs import CycleLedger
from jobs.cycle.verdict import verdict_lines
from pipeline.embed.digest import VectorCounts, VerifyDigest
from pipeline.evaluate.gate.compare import GateCheck, Verdict
from pipeline.evaluate.metrics.measure import MetricReport
from pipeline.evaluate.report import BaselineReport, EvaluationReport, ModelReport


def made(kind: Any, **fields: Any) -> Any:
    """Return a record with some of its fields."""
    return kind.model_construct(**fields)


VERIFIED = made(VerifyDigest, passed=True, rows=36_000)


def ledger(outcome: str = "succeeded", deadline: str = "met") -> CycleLedger:
    times = {"began_at": 0.0, "ended_at": 1446.0, "deadline": deadline}
    found: CycleLedger = made(CycleLedger, cycle="second", outcome=outcome, entries=(), **times)
    return found


def report(values: dict[str, float]) -> MetricReport:
    return MetricReport(values=values, missing={}, num_rows=1, num_queries=1)


def model(values: dict[str, float]) -> Any:
    return made(ModelReport, metrics=report(values), retrieval=None)


def check(**fields: Any) -> GateCheck:
    return GateCheck(name="check", reason="a reason", **{"outcome": "pass", "kind": "delta"} | fields)


DELTA = {"metric": "ndcg@10", "candidate": 0.98, "incumbent": 0.952, "low": 0.017, "high": 0.039}


def evaluation(*checks: GateCheck, promote: bool = True, first: bool = False, **verdict: Any) -> Any:
    bm25 = BaselineReport(name="bm25", retrieval=report({"retrieval_ndcg@10": 0.567}))
    return made(
        EvaluationReport,
        candidate=model({"ndcg@10": 0.98, "retrieval_ndcg@10": 0.74}),
        incumbent=None if first else model({"ndcg@10": 0.952, "retrieval_ndcg@10": 0.709}),
        baselines=(bm25,),
        verdict=made(Verdict, promote=promote, checks=checks, **verdict),
    )


def test_promoted() -> None:
    lines = verdict_lines(ledger(), evaluation(check(**DELTA)), {"promoted": True}, VERIFIED, "local")
    assert lines == [
        "cycle second: promoted in 24m06s, local: no charge",
        "                  candidate  production   BM25",
        "  nDCG@10             0.980       0.952      - +0.028 [+0.017, +0.039]",
        "  search nDCG@10      0.740       0.709  0.567",
        "  36,000 vectors embedded and verified",
    ]


def test_production_and_two_baselines_fit_80_columns() -> None:
    search = DELTA | {"metric": "retrieval_ndcg@10", "candidate": 0.74, "incumbent": 0.709}
    failed = check(**search | {"outcome": "fail", "low": -0.07, "high": -0.04})
    judged = evaluation(check(**DELTA), failed, promote=False)
    boosting = BaselineReport(name="boosting", metrics=report({"ndcg@10": 0.938}))
    judged = judged.model_copy(update={"baselines": (*judged.baselines, boosting)})
    lines = verdict_lines(ledger("refused", "missed"), judged, {}, VERIFIED, "local")
    assert lines[1].split() == ["candidate", "production", "boosting", "BM25"]
    assert len(lines) == 5 and max(map(len, lines)) <= 80, lines


def test_refused_names_its_reasons_in_numbers() -> None:
    few = {"candidate": 0.958, "low": -0.0132, "high": 0.027, "needed_queries": 179, "num_queries": 125}
    checks = (
        check(**DELTA | {"outcome": "fail", "bound": 0.01} | few),
        check(**DELTA | {"outcome": "fail", "bound": 0.01, "candidate": 0.9, "low": -0.07, "high": -0.04}),
        check(outcome="fail", kind="baseline", metric="macro_f1", baseline="boosting", candidate=0.8).model_copy(
            update={"baseline_value": 0.9, "low": -0.2, "high": -0.05}
        ),
        check(outcome="fail", kind="floor"),
        check(outcome="fail", slice="brand=x"),
    )  # fmt: skip
    lines = verdict_lines(ledger("refused"), evaluation(*checks, promote=False), {}, VERIFIED, "batch")
    assert lines[0] == "cycle second: refused in 24m06s, $0.00"
    assert lines[-6:] == [
        "  refused: nDCG@10 0.958, production 0.952, +0.006 [-0.013, +0.027]: could be",
        "    0.013 worse, 0.010 allowed; about 179 test queries are needed, there are 125",
        "  refused: nDCG@10 0.900, production 0.952, -0.052 [-0.070, -0.040]: at least",
        "    0.040 worse, 0.010 allowed",
        "  refused: macro F1 0.800, boosting 0.900, -0.100 [-0.200, -0.050]",
        "  refused: and 2 more",
    ]


@pytest.mark.parametrize(
    ("outcome", "figures", "expected"),
    [
        ("succeeded", {"promoted": True, "without_comparison": True}, "promoted WITHOUT a comparison"),
        ("succeeded", {"promoted": True, "forced": True}, "promoted by force"),
        ("succeeded", {}, "succeeded"),
        ("failed", {"promoted": True}, "failed"),
        ("cancelled", {}, "cancelled"),
    ],
)
def test_the_verdict_in_words(outcome: str, figures: dict[str, Any], expected: str) -> None:
    lines = verdict_lines(ledger(outcome), evaluation(first=True), figures, None, "local")
    assert lines[0] == f"cycle second: {expected} in 24m06s, local: no charge"
    assert lines[1].split() == ["candidate", "BM25"]


def test_without_new_data_it_is_said_that_nothing_changed() -> None:
    figures: dict[str, Any] = {"promoted": False, "nothing_new": True, "since": "first"}
    kept = made(VerifyDigest, passed=True, rows=9, counts=VectorCounts(embedded=0, carried=9, new=0, gone=0))
    lines = verdict_lines(ledger(), None, figures, kept, "local")
    assert lines == [
        "cycle second: nothing new since cycle first in 24m06s, local: no charge",
        "  production and vectors are unchanged; to train again: --train.start scratch",
    ]
    grown = kept.model_copy(update={"counts": VectorCounts(embedded=2, carried=7, new=2, gone=0)})
    lines = verdict_lines(ledger(), None, figures | {"since": None}, grown, "local")
    assert lines[0].startswith("cycle second: nothing new in") and "vectors" not in lines[1] and "9 vectors" in lines[2]


def test_a_cycle_that_was_not_evaluated_has_one_line() -> None:
    lines = verdict_lines(ledger("failed", "missed"), None, {}, None, "local")
    assert lines == ["cycle second: failed in 24m06s, deadline MISSED, local: no charge"]
