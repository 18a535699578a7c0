"""Size and time of the page of a large cycle: `python -m bench --only cycle_page`."""

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from bench.results import ROOT, Result, Target, figure, finish
from jobs.cycle.cycle_store import Claim, CycleStore
from jobs.cycle.job_states import AttemptRecord, Closed, JobRecord, JobState
from jobs.cycle.page.publish import data_key, report_key, write_page
from jobs.plan.spec import Dependency, JobPlan, JobSpec, Resources
from jobs.settings import JobsConfig
from pipeline.context import Figure, StageResult, store_result
from pipeline.data.token_sets import PartitionDigest, PrepareDigest, QuarantinedRow
from pipeline.data.token_sets import digest_key as prepared_key
from pipeline.data.trained_items import PARTS
from pipeline.embed.digest import VectorCounts, VerifyCheck, VerifyDigest
from pipeline.embed.digest import digest_key as vectors_key
from pipeline.evaluate.gate.compare import GateCheck, Verdict
from pipeline.evaluate.metrics.labels import NUM_BINS
from pipeline.evaluate.metrics.measure import MetricReport, SliceReport
from pipeline.evaluate.report import (
    SCORE_BINS,
    BaselineReport,
    Bin,
    EvaluationReport,
    Example,
    FoundProduct,
    HoldoutReport,
    ModelDigest,
    ModelReport,
    MovedQuery,
    QueryChanges,
    ScoreDigest,
    store_report,
)
from pipeline.evaluate.report import digest_key as scores_key
from pipeline.health.check import CheckResult, HealthVerdict, NodeReport
from pipeline.health.check import store_report as store_health
from pipeline.io.storage import Storage, open_storage
from pipeline.telemetry.events import EventName

NAME = "cycle_page"
TITLE = "Size, time and memory of the report page of a cycle of 128 nodes and 200,000 steps"
METHOD = """
A workspace is filled with what two such cycles leave: the reports of 128 nodes with 12 checks each, events of 200,000
steps (20 losses and gradient norms a line), a verdict over 200 slices, 2,000 rows in quarantine, 90 days of data, tries
that failed. A new process writes the page of the second (bench.cycle_page.write), beside which the first one's curves
are drawn. Peak memory is that of the process, with Python and its modules.
"""
STAGES = ("prepare", "health", "compile", "train", "evaluate", "embed", "verify", "report")
AFTER = {"compile": ("prepare", "health"), "train": ("compile",), "evaluate": ("train",), "embed": ("evaluate",)}
AFTER |= {"verify": ("embed",), "report": ("verify",)}
CHECKS: tuple[str, ...] = (
    "instance",
    "memory",
    "open files",
    "shared memory",
    "versions",
    "disk",
    "clock",
    "tensor operations",
)
CHECKS += ("all-gather", "all-reduce", "storage", "devices")
T0 = 1_790_000_000.0


def make_cycle(
    storage: Storage,
    cycle: str,
    *,
    began: float = T0,
    parent: str = "",
    nodes: int = 2,
    steps: int = 100,
    slices: int = 3,
    bad_rows: int = 4,
    text: str = "",
) -> tuple[CycleStore, JobPlan, tuple[JobRecord, ...], Closed]:
    """Everything that a finished cycle leaves for its page. `text`: stands wherever a text of others may."""
    store = CycleStore(storage, cycle, lambda: began + 90_000)
    plan = _plan(cycle, nodes)
    records = tuple(_records(began, text))
    closed = Closed(outcome="succeeded", at=began + 40_000, reason=text)
    claim = Claim(plan_id=plan.plan_id, target="batch", claimed_at=began, owner="")
    storage.write_bytes(store.key("claim.json"), claim.model_dump_json().encode())
    storage.write_bytes(store.key("plan.json"), plan.model_dump_json().encode())
    settings = {"model_name": text or "relevance", "train": {"seed": int(began) % 97, "note": text}}
    storage.write_bytes(store.key("settings.json"), json.dumps(settings).encode())
    pin = {"checkpoint": f"checkpoints/{parent}/step-{steps}" if parent else None}
    storage.write_bytes(f"cycles/{cycle}/train/parent.json", json.dumps(pin).encode())
    storage.write_bytes(store.key("post-mortem/train-1-node0.json"), b"{}")
    storage.write_bytes(f"cycles/{cycle}/events.jsonl", b"".join(_events(began, steps, text)))
    for rank in range(nodes):
        store_health(storage, cycle, _node(rank, text))
    _results(storage, cycle, text)
    store_report(storage, _evaluation(cycle, parent, slices, text))
    scores = _scores(cycle, parent, text)
    storage.write_bytes(scores_key(cycle), scores.model_dump_json().encode())
    storage.write_bytes(prepared_key(cycle), _prepared(cycle, bad_rows, text).model_dump_json().encode())
    storage.write_bytes(vectors_key(cycle), _vectors(cycle, parent, text).model_dump_json().encode())
    return store, plan, records, closed


def _plan(cycle: str, nodes: int) -> JobPlan:
    machine = Resources(vcpus=128, memory_mib=480_000, instance_type="trn1.32xlarge", processes_per_node=32)
    jobs = tuple(
        JobSpec(
            name=stage,
            stage=stage,
            command=("trnpipe", stage),
            resources=machine,
            num_nodes=nodes if stage in ("health", "train") else 0,
            array_size=nodes if stage == "embed" and nodes > 1 else 0,
            timeout_s=86_400,
            depends_on=tuple(Dependency(job=name) for name in AFTER.get(stage, ())),
        )
        for stage in STAGES
    )
    return JobPlan(pipeline="relevance", cycle=cycle, workspace="s3://bucket/relevance", jobs=jobs)


def _records(began: float, text: str) -> Iterator[JobRecord]:
    at = began
    for stage in STAGES:
        length = 30_000.0 if stage == "train" else 500.0
        tries = [AttemptRecord(started_at=at + 10, stopped_at=at + length, exit_code=0)]
        if stage == "train":
            lost = AttemptRecord(
                started_at=at + 10, stopped_at=at + 2000, exit_code=75, reason=text, status_reason=text
            )
            tries = [lost, AttemptRecord(started_at=at + 2100, stopped_at=at + length, exit_code=0)]
        done: dict[str, Any] = {"state": JobState.SUCCEEDED, "created_at": began}
        done |= {"started_at": at + 10, "stopped_at": at + length}
        children: tuple[JobRecord, ...] = ()
        if stage == "embed":
            children = tuple(JobRecord(name=f"embed:{i}", id=str(i), attempts=tuple(tries), **done) for i in range(128))
        yield JobRecord(name=stage, id=stage, status_reason=text, attempts=tuple(tries), children=children, **done)
        at += length


def _events(began: float, steps: int, text: str) -> Iterator[bytes]:
    def line(at: float, event: EventName, **fields: object) -> bytes:
        stamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": stamp, "event": str(event), **fields}).encode() + b"\n"

    yield line(began + 1600, EventName.TRAIN_STARTED, stage="train", step=0, parent=text)
    for step in range(20, steps + 1, 20):
        losses = [round(2 / math.sqrt(one) + 0.1 * math.sin(7 * one), 6) for one in range(step - 19, step + 1)]
        yield line(
            began + 1700 + 28_000 * step / steps,
            EventName.TRAIN_STEPS,
            step=step,
            losses=losses,
            grad_norms=[round(10 * loss, 5) for loss in losses],
            seconds=2.5,
            learning_rate=1e-4 * (1 - step / (steps + 1)),
            samples_per_s=1000 + step % 70,
            data_wait_share=0.01,
            memory_bytes=12_000_000_000 + step,
        )
        if step % 5000 == 0 or step == steps:
            yield line(
                began + 1700 + 28_000 * step / steps,
                EventName.HOLDOUT_EVALUATED,
                step=step,
                split="valid",
                loss=1 / step,
            )
    yield line(began + 1650, EventName.TRAIN_RESUMED, step=20, why=text)
    yield line(began + 1660, EventName.STEP_SKIPPED, step=30, why=text)


def _node(rank: int, text: str) -> NodeReport:
    results = tuple(
        CheckResult(
            name=name,
            verdict=HealthVerdict.WARN if (rank + i) % 31 == 0 else HealthVerdict.PASS,
            seen=text or f"{name} looks fine on node {rank}",
            expected=text or "as in the table of machines",
            figures={"gb_per_s": 90.0 + rank % 7, "spread": 0.01 * i, "name": text},
            seconds=0.1 * i,
        )
        for i, name in enumerate((*CHECKS[:-1], text or CHECKS[-1]))
    )
    return NodeReport(node_rank=rank, host=text[:60] or f"i-0abc{rank:04d}", results=results)


def _results(storage: Storage, cycle: str, text: str) -> None:
    at = datetime.fromtimestamp(T0, UTC)
    for stage in STAGES[:-2]:
        outputs = {"checkpoint": f"checkpoints/{cycle}/step-1"} if stage == "train" else {}
        figures: dict[str, Figure] = {
            "rows": 3_000_000,
            "promoted": stage == "evaluate",
            "share": 0.25,
            "warning_1": text,
        }
        if stage == "train":
            figures |= {
                "groups_new": 900,
                "groups_replayed": 100,
                "began_from": "published weights /mini (sha256 0a1b)",
            }
        result = StageResult(
            stage=stage, cycle=cycle, status="done", inputs={}, outputs=outputs, figures=figures,
            settings_hash="0" * 32, code_version=text or "1.0", started=at, finished=at,
        )  # fmt: skip
        store_result(storage, result)


def _model(cycle: str, shift: float) -> ModelReport:
    rows = MetricReport(
        values={"ndcg@10": 0.8 + shift, "loss": 0.5 - shift, "ece": 0.021},
        missing={},
        num_rows=90_000,
        num_queries=9000,
    )
    found = MetricReport(values={"retrieval_ndcg@10": 0.7 + shift}, missing={}, num_rows=90_000, num_queries=9000)
    return ModelReport(
        checkpoint=f"s3://bucket/relevance/checkpoints/{cycle}/step-1", digest=f"d-{cycle}", cycle=cycle, step=1,
        scores="x", metrics=rows, retrieval=found, slices=_parts(shift, rows, found), threshold=None,
        temperature=1.8, ece_before=0.064,
    )  # fmt: skip


def _parts(shift: float, *reports: MetricReport) -> tuple[SliceReport, ...]:
    """The metrics by what was trained on, as of rows and of queries."""
    names = (("trained_on", PARTS), ("relevant_products", ("seen", "new")))
    return tuple(
        SliceReport(
            column=column,
            value=value,
            report=report.model_copy(
                update={
                    "values": {name: 0.7 + shift + 0.01 * i for name in report.values},
                    "num_rows": 22_500 if column == "trained_on" else 0,
                }
            ),
        )
        for (column, values), report in zip(names, reports, strict=True)
        for i, value in enumerate(values)
    )


def _evaluation(cycle: str, parent: str, slices: int, text: str) -> EvaluationReport:
    def check(kind: str, i: int, **more: object) -> GateCheck:
        shift = 0.02 * math.sin(i)
        outcome = "warn" if shift < -0.015 else "pass"
        fields = {"candidate": 0.8 + shift, "incumbent": 0.8, "low": shift - 0.01, "high": shift + 0.01, "bound": 0.005}
        reason = text or f"ndcg@10 {0.8 + shift:.4f} against 0.8000, {abs(shift):.4f} different, 0.005 is allowed"
        given = {"name": f"{kind} {i}", "kind": kind, "outcome": outcome, "reason": reason, "metric": "ndcg@10"}
        return GateCheck.model_validate(given | fields | {"num_queries": 100 + i} | more)

    checks = [check("delta", i) for i in range(4)]
    checks += [check("slice", i, slice=f"category=value {i} {text}") for i in range(slices)]
    checks += [
        check("baseline", 9, baseline="bm25", baseline_value=0.7, incumbent=None),
        check("floor", 3, low=None, high=None),
    ]
    bm25 = MetricReport(values={"retrieval_ndcg@10": 0.6}, missing={}, num_rows=9, num_queries=9)
    return EvaluationReport(
        cycle=cycle, inputs={}, backend="xla", device="xla", precision="fp32", candidate=_model(cycle, 0.01),
        incumbent=_model(parent, 0.0) if parent else None,
        baselines=(BaselineReport(name="bm25", retrieval=bm25, slices=_parts(-0.1, bm25, bm25)[4:]),),
        holdout=HoldoutReport(
            split="test", partitions=("flat",), new_partitions=(), rows=90_000, rows_in_split=90_000, queries=9000,
            leaked_by_id=0, leaked_by_text=0, leak_checked=True, unchecked_partitions=(), retrieval_queries=9000,
            retrieval_items=1_000_000, parts=dict.fromkeys(PARTS, 22_500),
        ),
        verdict=Verdict(
            promote=True, checks=tuple(checks), num_rows=90_000, num_queries=9000, confidence=0.95,
            slice_confidence=0.999, resamples=2000, seed=1,
        ),
        warnings=(text,) if text else (), seconds={}, settings_hash="0" * 32, code_version="1.0",
        at=datetime.fromtimestamp(T0, UTC),
    )  # fmt: skip


def _scores(cycle: str, parent: str, text: str) -> ScoreDigest:
    labels = ("irrelevant", "complement", "substitute", text or "exact")

    def model(name: str) -> ModelDigest:
        bins = tuple(
            Bin(
                low=i / NUM_BINS,
                high=(i + 1) / NUM_BINS,
                rows=100 * i,
                confidence=(i + 0.5) / NUM_BINS,
                right=i / NUM_BINS,
            )
            for i in range(NUM_BINS)
        )
        table = tuple(tuple(100 * (i == j) + 7 for j in range(4)) for i in range(4))
        counts = tuple(tuple((i * j) % 900 for j in range(SCORE_BINS)) for i in range(4))
        return ModelDigest(digest=f"d-{name}", rows=9000, unusable=0, reliability=bins, confusion=table, scores=counts)

    words = text or "wireless noise cancelling headphones with a long battery life and a case " * 2
    kinds: tuple[tuple[Literal["worst", "lost", "won"], int], ...] = (("worst", 20), ("lost", 20), ("won", 10))
    examples = tuple(
        Example(
            kind=kind, query=words[:160], product=words[:160], label=labels[3], candidate=labels[0],
            candidate_probability=0.01, incumbent=labels[3] if parent else None,
            incumbent_probability=0.9 if parent else None,
        )
        for kind, count in kinds
        for _ in range(count)
    )  # fmt: skip
    found = tuple(FoundProduct(text=words[:160], gain=gain) for gain in (1.0, 0.1, None, 0.0, None))
    moved = [MovedQuery(query=words[:160], before=0.2, now=0.9, found_before=found, found_now=found)] * 10
    moved += [MovedQuery(query=words[:160], before=0.9, now=0.2, found_before=found, found_now=found)] * 10
    return ScoreDigest(
        cycle=cycle, labels=labels, top_gain=1.0, candidate=model(cycle), incumbent=model(parent) if parent else None,
        queries=(QueryChanges(metric="retrieval_ndcg@10", better=10, equal=80, worse=9),), lost=120, won=180,
        examples=examples, moved_by="retrieval_ndcg@10", moved=tuple(moved) if parent else (),
    )  # fmt: skip


def _prepared(cycle: str, bad_rows: int, text: str) -> PrepareDigest:
    days = [f"2026-{1 + day // 28:02d}-{1 + day % 28:02d}" for day in range(90)]
    partitions = tuple(
        PartitionDigest(
            partition=f"dt={name}", watermark=name,
            rows={"train": 30_000 + day, "valid": 1000, "test": 1000},
            labels={split: (10_000, 8000, 7000, 5000 + day) for split in ("train", "valid", "test")},
            bucket_rows=(10_000, 20_000, 2000), bad=bad_rows, filtered=0, blank=1, truncated=12, tokens=900_000,
            without_category={text or "brand": 1600 if day < len(days) - 1 else 8000},
        )
        for day, name in enumerate(days)
    )  # fmt: skip
    samples = tuple(
        QuarantinedRow(file=text or "part-0.csv", row=i, reason=text or f"reason {i % 40}", content=text or "x" * 200)
        for i in range(min(bad_rows, 200))
    )
    reasons = {text or f"reason {i}": bad_rows for i in range(40)}
    return PrepareDigest(
        cycle=cycle, labels=("irrelevant", "complement", "substitute", text or "exact"),
        buckets=("16x16", "16x64", "32x128"), partitions=partitions, reasons=reasons, samples=samples,
    )  # fmt: skip


def _vectors(cycle: str, parent: str, text: str) -> VerifyDigest:
    return VerifyDigest(
        cycle=cycle, passed=True, model_digest=f"d-{cycle}", vectors_digest="v", previous=parent or None,
        rows=1_000_000,
        counts=VectorCounts(embedded=900_000, carried=100_000, new=10, gone=5),
        recompute_min_cosine=0.9999,
        checks=(VerifyCheck(name="files", outcome="pass", seen=text or "5 files, 1.2 MiB"),),
    )  # fmt: skip


def write(root: str) -> None:
    """Write both pages of `make_two`'s workspace, the large one timed, and print its figures as JSON."""
    storage = open_storage(root)
    first, second = (CycleStore(storage, name, lambda: T0 + 400_000) for name in ("first", "second"))
    made: dict[str, float] = {}
    for store, began in ((first, T0), (second, T0 + 100_000)):
        plan = store.plan()
        if plan is None:
            raise ValueError(f"{root} holds no cycle {store.cycle}")
        started = time.monotonic()
        closed = Closed(outcome="succeeded", at=began + 40_000)
        write_page(store, plan, tuple(_records(began, "")), JobsConfig(), closed)
        made["seconds"] = time.monotonic() - started
    made["html"] = len(storage.read_bytes(report_key("second")))
    made["json"] = len(storage.read_bytes(data_key("second")))
    made["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(made))


def make_two(storage: Storage, *, nodes: int, steps: int, slices: int, bad_rows: int) -> None:
    for name, parent, began in (("first", "", T0), ("second", "first", T0 + 100_000)):
        make_cycle(
            storage, name, began=began, parent=parent, nodes=nodes, steps=steps, slices=slices, bad_rows=bad_rows
        )  # fmt: skip


def run(*, quick: bool) -> Result:
    """Fill a workspace, then write the page in new processes."""
    size = {"nodes": 8, "steps": 2000, "slices": 20, "bad_rows": 50} if quick else {"nodes": 128, "steps": 200_000}
    size = {"slices": 200, "bad_rows": 2000} | size
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_two(open_storage(folder), **size)
        for _ in range(1 if quick else 5):
            code = f"from bench.cycle_page import write; write({folder!r})"
            out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
            found.append(json.loads(out.stdout))
    texts: Sequence[tuple[str, str, str, float]] = (
        ("html", "kB", "the page", 1e-3),
        ("seconds", "s", "time to read everything and write page, JSON and index", 1.0),
        ("peak_mib", "MiB", "peak memory of the process", 1.0),
        ("json", "kB", "the same data as JSON", 1e-3),
    )
    figures = [figure(name, [one[name] * scale for one in found], unit, text) for name, unit, text, scale in texts]
    target = Target(figure="html", comparison="<=", value=300)
    further = (
        Target(figure="seconds", comparison="<=", value=5),
        Target(figure="peak_mib", comparison="<=", value=500),
    )
    return finish(
        NAME, TITLE, METHOD, figures, quick=quick, target=target, further=further, settings=dict(size)
    )  # fmt: skip


if __name__ == "__main__":
    run(quick="--quick" in sys.argv)
