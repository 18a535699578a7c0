"""What the terminal shows: every metric of both models, what the gate says of it, and the slices that lost most."""

from datetime import UTC, datetime
from typing import Any

from pipeline.evaluate.gate.compare import GateCheck, Verdict
from pipeline.evaluate.metrics.measure import MetricReport, SliceReport
from pipeline.evaluate.report import (
    BaselineReport,
    EvaluationReport,
    HoldoutReport,
    HybridReport,
    ModelReport,
    part_table,
    table_lines,
)

HOLDOUT = {"split": "test", "partitions": ["flat"], "new_partitions": [], "rows": 9, "rows_in_split": 9, "queries": 3}
UNLEAKED = {"leaked_by_id": 0, "leaked_by_text": 0, "leak_checked": True, "unchecked_partitions": []}


def found(missing: dict[str, str] | None = None, **values: float) -> MetricReport:
    named = {name.replace("ndcg", "ndcg@10"): value for name, value in values.items()}
    return MetricReport(values=named, missing=missing or {}, num_rows=9, num_queries=3)


def model(metrics: MetricReport, mrr: float | None = None, **fields: Any) -> ModelReport:
    return ModelReport(
        checkpoint="file:///w/checkpoints/c/step-1",
        digest="0",
        cycle="c",
        step=1,
        scores="cycles/c/evaluate/scores/x",
        metrics=metrics,
        retrieval=None if mrr is None else found(retrieval_mrr=mrr),
        slices=(),
        threshold=None,
        **fields,
    )


def check(name: str, outcome: str, ours: float | None = None, theirs: float | None = None, **fields: Any) -> GateCheck:
    kind, _, rest = name.partition(" ")
    metric, _, where = rest.partition(" ")
    named = {"name": name, "kind": kind, "metric": metric, "slice": where, "reason": f"{rest}: so"}
    return GateCheck.model_validate(named | {"outcome": outcome, "candidate": ours, "incumbent": theirs} | fields)


HYBRIDS = (
    HybridReport(name="rrf", retrieval=found(retrieval_mrr=0.61)),
    HybridReport(name="weighted", weight=0.35, valid_queries=20, retrieval=found(retrieval_mrr=0.62)),
)
NO_THRESHOLD = {"f1": "no threshold"}
CANDIDATE = model(found(NO_THRESHOLD, ndcg=0.8, loss=0.5), 0.25, hybrids=HYBRIDS, ndcg_by_width={8: 0.2})
INCUMBENT = model(found(NO_THRESHOLD, ndcg=0.75, loss=0.4), 0.5)
BASELINES = (
    BaselineReport(name="bm25", retrieval=found(retrieval_mrr=0.4)),
    BaselineReport(name="boosting", metrics=found(ndcg=0.7)),
)


def report(incumbent: ModelReport | None, *checks: GateCheck, **fields: Any) -> EvaluationReport:
    made: dict[str, Any] = {
        "cycle": "c",
        "inputs": {},
        "backend": "cpu",
        "device": "cpu",
        "precision": "fp32",
        "candidate": CANDIDATE,
        "incumbent": incumbent,
        "baselines": BASELINES,
        "holdout": HoldoutReport.model_validate(HOLDOUT | UNLEAKED),
        "verdict": Verdict(
            promote=False,
            checks=checks,
            num_rows=9,
            num_queries=3,
            confidence=0.95,
            slice_confidence=0.99,
            resamples=300,
            seed=1,
        ),
        "warnings": (),
        "seconds": {},
        "settings_hash": "s",
        "code_version": "v",
        "at": datetime.now(UTC),
    }
    return EvaluationReport(**made | fields)


TABLE = """\
  metric         candidate  production  difference        90% interval    bm25  boosting  gate
  ndcg@10           0.8000      0.7500     +0.0500  [+0.0100, +0.0900]       -    0.7000  warn
  loss              0.5000      0.4000     +0.1000                           -         -  fail
  f1                     -           -           -                           -         -
  retrieval_mrr     0.2500      0.5000     -0.2500                      0.4000         -
not computed for candidate: f1: no threshold
not computed for production: f1: no threshold
search with candidate vectors truncated to 8 dimensions: nDCG 0.2000
hybrid search: each model fused with BM25
  metric         candidate  production    bm25  candidate rrf  candidate weighted 0.35
  retrieval_mrr     0.2500      0.5000  0.4000         0.6100                   0.6200
slices with the largest drops (5 of 9 compared)
  slice     metric   candidate  production  difference            interval  queries  gate
  kind=bad  loss        0.6000      0.5000     +0.1000  [+0.0500, +0.1500]       60  fail
  kind=7    ndcg@10     0.8000      0.8700     -0.0700  [-0.1000, +0.1000]    1,007  pass
  kind=6    ndcg@10     0.8000      0.8600     -0.0600  [-0.1000, +0.1000]    1,006  pass
  kind=5    ndcg@10     0.8000      0.8500     -0.0500  [-0.1000, +0.1000]    1,005  pass
  kind=4    ndcg@10     0.8000      0.8400     -0.0400  [-0.1000, +0.1000]    1,004  pass
refuse: 2 failed, 9 checks passed, 1 warning, 1 not applicable (3 queries, 9 rows)
  fail    loss: so
  fail    loss kind=bad: so
  warn    ndcg@10: so
  skipped kind: so
  pass    ndcg@10: so
  pass    8 slice comparisons
"""


def test_the_table() -> None:
    """Slices that refuse come first, then those that lost most; what a slice says is not said of all rows."""
    slices = [
        check(f"slice ndcg@10 kind={n}", "pass", 0.8, 0.8 + n / 100, low=-0.1, high=0.1, num_queries=1000 + n)
        for n in range(8)
    ]
    lines = table_lines(
        report(
            INCUMBENT,
            check("baseline ndcg@10", "warn", 0.8, low=-0.2, high=-0.1),
            check("delta ndcg@10", "pass", 0.8, 0.75, low=0.01, high=0.09),
            check("floor loss", "fail", 0.5, bound=0.45),
            *slices,
            check("slice loss kind=bad", "fail", 0.6, 0.5, low=0.05, high=0.15, num_queries=60),
            check("slice kind", "skipped"),  # its small ones
        )
    )
    assert lines == TABLE.splitlines()


def test_the_calibration_error_stands_beside_that_without_the_temperature() -> None:
    """Not of a model without a temperature, whose report may be of an earlier version."""
    calibrated = model(found(ece=0.021), temperature=1.8, ece_before=0.064)
    lines = table_lines(report(model(found(ece=0.3)), candidate=calibrated))
    assert [line for line in lines if "calibration" in line] == [
        "calibration error of candidate: 0.0210, 0.0640 without temperature 1.8"
    ]


def test_the_figures_of_all_models_by_name() -> None:
    ours = {"ndcg@10": 0.8, "loss": 0.5, "retrieval_mrr": 0.25}
    hybrids = {"hybrid_rrf_retrieval_mrr": 0.61, "hybrid_weighted_retrieval_mrr": 0.62}
    tools = {"bm25_retrieval_mrr": 0.4, "boosting_ndcg@10": 0.7}
    assert report(None).figures() == {**ours, **hybrids, **tools}
    theirs = {"incumbent_ndcg@10": 0.75, "incumbent_loss": 0.4, "incumbent_retrieval_mrr": 0.5}
    unscored = (BaselineReport(name="bm25", missing="why"),)
    assert report(INCUMBENT, baselines=unscored).figures() == {**ours, **theirs, **hybrids}


def test_wider_reports_of_an_earlier_version_are_read() -> None:
    old = CANDIDATE.model_dump(exclude={"ndcg_by_width"}) | {"retrieval_by_width": {8: found().model_dump()}}
    assert ModelReport.model_validate(old).ndcg_by_width == {}


def test_parts_stand_side_by_side_with_what_each_model_has() -> None:
    def parts(columns: dict[str, tuple[str, ...]], **values: float) -> tuple[SliceReport, ...]:
        report = MetricReport(values=values, missing={}, num_rows=1000, num_queries=40)
        searched = report.model_copy(update={"num_rows": 0})
        return tuple(
            SliceReport(column=column, value=value, report=searched if column == "relevant_products" else report)
            for column, names in columns.items()
            for value in names
        )

    rows: dict[str, tuple[str, ...]] = {"brand": ("acme",), "trained_on": ("query", "neither")}
    search: dict[str, tuple[str, ...]] = {"relevant_products": ("seen", "new")}
    found = {"retrieval_recall@10": 0.6, "retrieval_ndcg@10": 0.5, "retrieval_recall@100": 0.7}
    candidate = CANDIDATE.model_copy(
        update={"slices": parts(rows, **{"ndcg@5": 0.9, "ndcg@10": 0.8, "macro_f1": 0.4}) + parts(search, **found)}
    )
    production = INCUMBENT.model_copy(update={"slices": parts({"trained_on": ("neither",)}, **{"ndcg@10": 0.7})})
    bm25 = BASELINES[0].model_copy(update={"slices": parts(search, **found)})
    holdout = HoldoutReport.model_validate(HOLDOUT | UNLEAKED | {"parts": {"query": 1000, "neither": 1000}})
    made = report(production, holdout=holdout, candidate=candidate, baselines=(bm25, BASELINES[1]))
    assert part_table(made) == [
        ("slice", "metric", "rows", "queries", "candidate", "production", "bm25"),
        ("trained_on=query", "macro_f1", "1,000", "40", "0.4000", "-", "-"),
        ("trained_on=query", "ndcg@10", "1,000", "40", "0.8000", "-", "-"),
        ("trained_on=neither", "macro_f1", "1,000", "40", "0.4000", "-", "-"),
        ("trained_on=neither", "ndcg@10", "1,000", "40", "0.8000", "0.7000", "-"),
        *(
            (f"relevant_products={value}", name, "", "40", *figures)
            for value in ("seen", "new")
            for name, figures in (
                ("retrieval_ndcg@10", ("0.5000", "-", "0.5000")),
                ("retrieval_recall@100", ("0.7000", "-", "0.7000")),
            )
        ),
    ]
    lines = table_lines(made)
    assert "rows by which side was trained on, query or product: query 1,000, neither 1,000" in lines
    assert part_table(report(INCUMBENT)) == [] and not any("which side" in line for line in table_lines(report(None)))
