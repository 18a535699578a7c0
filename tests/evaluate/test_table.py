"""What the terminal shows: every metric of both models, what the gate says of it, and the slices that lost most."""

from datetime import UTC, datetime
from typing import Any

from pipeline.evaluate.gate.compare import GateCheck, Verdict
from pipeline.evaluate.metrics.measure import MetricReport
from pipeline.evaluate.report import (
    BaselineReport,
    EvaluationReport,
    HoldoutReport,
    HybridReport,
    ModelReport,
    table_lines,
)

HOLDOUT = HoldoutReport(
    split="test",
    partitions=("flat",),
    new_partitions=(),
    rows=9,
    rows_in_split=9,
    queries=3,
    leaked_by_id=0,
    leaked_by_text=0,
    leak_checked=True,
    unchecked_partitions=(),
)


def model(values: dict[str, float], missing: dict[str, str], retrieval: dict[str, float] | None = None) -> ModelReport:
    found = MetricReport(values=retrieval or {}, missing={}, num_rows=1, num_queries=1)
    return ModelReport(
        checkpoint="file:///w/checkpoints/c/step-1",
        digest="0",
        cycle="c",
        step=1,
        scores="cycles/c/evaluate/scores/x",
        metrics=MetricReport(values=values, missing=missing, num_rows=9, num_queries=3),
        retrieval=found if retrieval else None,
        slices=(),
        threshold=None,
    )


def check(name: str, **fields: Any) -> GateCheck:
    kind, _, rest = name.partition(" ")
    metric, _, where = rest.partition(" ")
    return GateCheck(name=name, kind=kind, metric=metric, slice=where, reason=f"{rest}: so", **fields)  # type: ignore[arg-type]


def report_of(incumbent: ModelReport | None, *checks: GateCheck, promote: bool = True) -> EvaluationReport:
    return EvaluationReport(
        cycle="c",
        inputs={},
        backend="cpu",
        device="cpu",
        precision="fp32",
        candidate=model({"ndcg@10": 0.8, "loss": 0.5}, {"f1": "no threshold"}, {"retrieval_mrr": 0.25}),
        incumbent=incumbent,
        holdout=HOLDOUT,
        verdict=Verdict(
            promote=promote,
            checks=checks,
            num_rows=9,
            num_queries=3,
            confidence=0.95,
            slice_confidence=0.99,
            resamples=300,
            seed=1,
        ),
        warnings=(),
        seconds={},
        settings_hash="s",
        code_version="v",
        at=datetime.now(UTC),
    )


def lines_of(incumbent: ModelReport | None, *checks: GateCheck, promote: bool = True) -> list[str]:
    return table_lines(report_of(incumbent, *checks, promote=promote))


def words(lines: list[str], name: str) -> list[str]:
    return next(line.split() for line in lines if line.split()[:1] == [name])


def test_both_models_side_by_side() -> None:
    incumbent = model({"ndcg@10": 0.75, "loss": 0.4}, {"f1": "no threshold"}, {"retrieval_mrr": 0.5})
    delta = check("delta ndcg@10", outcome="pass", candidate=0.8, incumbent=0.75, low=0.01, high=0.09, bound=0.01)
    floor = check("floor loss", outcome="fail", candidate=0.5, bound=0.45)
    lines = lines_of(incumbent, delta, floor, promote=False)
    assert lines[0].split()[:4] == ["metric", "candidate", "incumbent", "difference"]
    assert "90% interval" in lines[0]
    assert words(lines, "ndcg@10") == ["ndcg@10", "0.8000", "0.7500", "+0.0500", "[+0.0100,", "+0.0900]", "pass"]
    assert words(lines, "loss") == ["loss", "0.5000", "0.4000", "+0.1000", "fail"]
    assert words(lines, "retrieval_mrr") == ["retrieval_mrr", "0.2500", "0.5000", "-0.2500"]
    assert words(lines, "f1") == ["f1", "-", "-", "-"]
    assert "not computed for the candidate: f1: no threshold" in lines
    assert any(line.startswith("refuse: 1 failed, ") for line in lines)
    assert len({line.find("0.") for line in lines[1:3]}) == 1, "columns are aligned"
    assert all(line[:2] == "  " != line[2:4] for line in lines[:4]), "names to the left"


def test_the_slices_that_refuse_come_first_then_those_that_lost_most() -> None:
    slices = [
        check(
            f"slice ndcg@10 kind={n}",
            outcome="pass",
            candidate=0.8,
            incumbent=0.8 + n / 100,
            low=-0.1,
            high=0.1,
            num_queries=1000 + n,
        )
        for n in range(8)
    ]
    slices.append(
        check("slice loss kind=bad", outcome="fail", candidate=0.6, incumbent=0.5, low=0.05, high=0.15, num_queries=60)
    )
    slices.append(check("slice kind", outcome="skipped"))  # its small ones
    slices.append(check("delta ndcg@10", outcome="pass", candidate=0.8, incumbent=0.8, low=-0.1, high=0.1))
    lines = lines_of(model({"ndcg@10": 0.8}, {}), *slices, promote=False)
    start = lines.index("slices: 5 of 9 compared, those that lost most")
    shown = [line.split()[0] for line in lines[start + 2 : start + 7]]
    assert shown == ["kind=bad", "kind=7", "kind=6", "kind=5", "kind=4"]
    assert "+0.1000" in lines[start + 2] and "-0.0700" in lines[start + 3]
    assert "1,007" in lines[start + 3]
    assert words(lines, "loss") == ["loss", "0.5000", "-", "-"], "what a slice says is not said of all rows"


def found(**values: float) -> MetricReport:
    return MetricReport(
        values={f"retrieval_{name}": value for name, value in values.items()}, missing={}, num_rows=1, num_queries=1
    )


def test_baselines_stand_beside_the_models_and_hybrids_below() -> None:
    theirs = check("delta ndcg@10", outcome="pass", candidate=0.8, incumbent=0.75, low=0.01, high=0.09)
    tool = check("baseline ndcg@10", outcome="warn", candidate=0.8, low=-0.2, high=-0.1)
    report = report_of(model({"ndcg@10": 0.75}, {}, {"retrieval_mrr": 0.5}), tool, theirs)
    rows = MetricReport(values={"ndcg@10": 0.7}, missing={}, num_rows=9, num_queries=3)
    hybrids = (
        HybridReport(name="rrf", retrieval=found(mrr=0.61)),
        HybridReport(name="weighted", weight=0.35, valid_queries=20, retrieval=found(mrr=0.62)),
    )
    baselines = (
        BaselineReport(name="bm25", retrieval=found(mrr=0.4)),
        BaselineReport(name="boosting", metrics=rows),
    )
    candidate = report.candidate.model_copy(update={"hybrids": hybrids})
    lines = table_lines(report.model_copy(update={"candidate": candidate, "baselines": baselines}))
    assert lines[0].split()[-3:] == ["bm25", "boosting", "gate"]
    assert words(lines, "ndcg@10")[4:] == ["[+0.0100,", "+0.0900]", "-", "0.7000", "warn"], (
        "the interval is the incumbent's"
    )
    assert words(lines, "retrieval_mrr")[1:] == ["0.2500", "0.5000", "-0.2500", "0.4000", "-"]
    start = lines.index("hybrid search: each model fused with BM25")
    assert "candidate weighted 0.35" in lines[start + 1]
    assert lines[start + 2].split() == ["retrieval_mrr", "0.2500", "0.5000", "0.4000", "0.6100", "0.6200"]


def test_the_figures_of_all_models_by_name() -> None:
    ours = {"ndcg@10": 0.8, "loss": 0.5, "retrieval_mrr": 0.25}
    assert report_of(None).figures() == ours
    hybrids = (HybridReport(name="rrf", retrieval=found(mrr=0.61)), HybridReport(name="weighted", missing="why"))
    rows = MetricReport(values={"loss": 0.7}, missing={}, num_rows=9, num_queries=3)
    both = BaselineReport(name="boosting", metrics=rows, retrieval=found(mrr=0.4))
    report = report_of(model({"loss": 0.4}, {}))
    candidate = report.candidate.model_copy(update={"hybrids": hybrids})
    baselines = (both, BaselineReport(name="bm25", missing="why"))
    assert report.model_copy(update={"candidate": candidate, "baselines": baselines}).figures() == {
        **ours,
        "incumbent_loss": 0.4,
        "hybrid_rrf_retrieval_mrr": 0.61,
        "boosting_loss": 0.7,
        "boosting_retrieval_mrr": 0.4,
    }
