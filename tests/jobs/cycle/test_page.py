"""The page of a cycle: whole, self-contained, and safe against what texts hold."""

from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

from jobs.cycle.attempt_time import Moment
from jobs.cycle.report import CycleReport, gather, losses_of, page
from jobs.cycle.store import CycleStore
from pipeline.evaluate.gate.compare import GateCheck, Verdict
from pipeline.evaluate.report import EvaluationReport
from pipeline.io.storage import open_storage
from pipeline.telemetry.events import EventName
from tests.evaluate.test_table import HOLDOUT, model
from tests.jobs.cycle.test_cost_lines import GOOD
from tests.jobs.cycle.test_ledger import attempt, record

EVIL = '<script>alert("x")</script>&"\''
RECORDS = (
    record("prepare", attempt(10, 70)),
    record("train", attempt(80, 200, 75, reason=EVIL), attempt(200, 800), status_reason=EVIL),
)
REPORT = CycleReport(
    ledger=GOOD,
    records=RECORDS,
    evaluation=None,
    figures={"embed": {"rows": 12_000, "size_bytes": None, EVIL: EVIL, "complete": True, "share": 0.123456}},
    losses=((10, 0.9), (20, 0.7), (30, 0.75)),
    post_mortems=("file:///w/post-mortem/train-1-node0.json",),
    workspace=f"file:///{EVIL}",
    unread=(EVIL,),
)
EVALUATION = EvaluationReport(
    cycle="2026-11-20",
    inputs={},
    backend="cpu",
    device="cpu",
    precision="fp32",
    candidate=model({"ndcg@10": 0.8125}, {}),
    incumbent=None,
    holdout=HOLDOUT,
    verdict=Verdict(
        promote=False,
        checks=(GateCheck(name="floor ndcg@10", kind="floor", outcome="fail", reason=f"0.8125 < 0.9 {EVIL}"),),
        num_rows=9,
        num_queries=3,
        confidence=0.95,
        slice_confidence=0.99,
        resamples=300,
        seed=1,
    ),
    warnings=(f"few queries {EVIL}",),
    seconds={},
    settings_hash="s",
    code_version="v",
    at=datetime(2026, 11, 20, tzinfo=UTC),
)
VOID = {"meta"}


class Outline(HTMLParser):
    """Raises on tags that are not closed in order; keeps names, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_shows_everything_and_runs_nothing() -> None:
    text = page(REPORT)
    seen = Outline(text)
    assert not seen.tags & {"script", "link", "img", "iframe", "object"}
    assert not seen.attributes & {"src", "href", "onclick", "onload"}
    assert "http" not in text
    assert EVIL in seen.text, "shown as it is, as text"
    for words in (
        "Cycle 2026-11-20: succeeded",
        "12,000",
        "0.1235",
        "yes",
        "goodput",
        "84%",
        "$8.96",
        "exit 75",
        "0.9000 at",
    ):
        assert words in seen.text, words


def test_the_verdict_of_the_gate() -> None:
    seen = Outline(page(replace(REPORT, evaluation=EVALUATION)))
    assert "script" not in seen.tags
    for words in ("ndcg@10", "0.8125", "refuse: 1 checks fail", f"0.8125 < 0.9 {EVIL}", f"few queries {EVIL}"):
        assert words in seen.text, words


def test_why_it_ended() -> None:
    assert "<td>why</td>" not in page(REPORT)
    assert f"train: {EVIL}" in Outline(page(replace(REPORT, reason=f"train: {EVIL}"))).text


def test_sections_without_content_are_left_out() -> None:
    text = page(replace(REPORT, losses=(), figures={}, post_mortems=(), unread=(), evaluation=None))
    assert not any(f"<h2>{name}" in text for name in ("Verdict", "Training", "Figures", "Post-mortems", "Could not"))
    Outline(text)


def test_steps_that_were_done_again_are_drawn_once() -> None:
    moments = [
        Moment(1, str(EventName.TRAIN_STARTED), {"step": 0}),
        Moment(2, str(EventName.TRAIN_STEPS), {"step": 10, "losses": [1.0, 0.8]}),
        Moment(3, str(EventName.TRAIN_STEPS), {"step": 20, "losses": [9.0, "nan"]}),
        Moment(4, str(EventName.TRAIN_STARTED), {"step": 10}),
        Moment(5, str(EventName.TRAIN_STEPS), {"step": 20, "losses": [0.5]}),
        Moment(6, str(EventName.TRAIN_STEPS), {"step": 30, "losses": ["inf"]}),
    ]
    assert losses_of(moments) == ((10, 0.9), (20, 0.5))


def test_a_damaged_result_is_told_of(tmp_path: Path) -> None:
    store = CycleStore(open_storage(str(tmp_path)), "2026-11-20", lambda: 0.0)
    store.storage.write_bytes("cycles/2026-11-20/embed/result.json", b"{")
    store.storage.write_bytes("cycles/2026-11-20/evaluate/report.json", b"{}")
    store.storage.write_bytes("cycles/2026-11-20/jobs/post-mortem/train-1-node0.json", b"{}")
    found = gather(store, GOOD, RECORDS)
    assert (found.figures, found.evaluation, len(found.unread)) == ({}, None, 2)
    assert [uri.rpartition("/")[2] for uri in found.post_mortems] == ["train-1-node0.json"]
