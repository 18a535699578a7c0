"""The page of a cycle: whole, self-contained, the same when made again, and safe against what texts hold.

Its charts: round ticks, thinning that keeps the extremes, and marks where the numbers are.
"""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cycle_page import STAGES, T0, make_cycle
from jobs.cycle.costs import CycleEvent
from jobs.cycle.cycle_store import Claim, CycleStore
from jobs.cycle.job_states import NOT_RUN, Closed, JobRecord, JobState, shown_state
from jobs.cycle.page.charts import (
    bars,
    columns,
    difference,
    forest,
    line_chart,
    number,
    short_number,
    thin,
    ticks,
)
from jobs.cycle.page.gather import ChartSeries, CycleRow, PageData, Training, curves_of, jobs_of, smoothed
from jobs.cycle.page.publish import (
    INDEX,
    INDEX_PAGE,
    _plural,
    data_key,
    ending,
    index,
    outcome_sentence,
    page,
    read_index,
    report_key,
    write_page,
)
from jobs.plan.spec import JobPlan
from jobs.settings import JobsConfig
from pipeline.evaluate.gate.compare import GateCheck
from pipeline.io.storage import Storage, open_storage
from pipeline.telemetry.events import EventName
from tests.jobs.cycle import cases
from tests.jobs.cycle.record_cases import bad

VOID = {"meta", "link"}
HOSTILE = (
    "<script>alert(1)</script>",
    "</style></title><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "{{ 7 * 7 }}{% raw %}",
    "a\x00b\x1b[31mred\u202e\u200fback",
    "line\r\nline\u2028line",
    "javascript:alert(1)",
    "]]>&amp;&#60;",
    "x" * 5000,
)
SECTIONS = (
    "Quality",
    "Queries that moved",
    "Errors and calibration",
    "Training",
    "Data",
    "Vectors",
    "Run",
    "Lineage and settings",
)


class Outline(HTMLParser):
    """Raises on tags that are not closed in order; keeps names, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.heads: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "h2":
            self.heads.append(data)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def written(storage: Storage, cycle: str = "c", **more: object) -> tuple[str, PageData]:
    """The page of a whole cycle, and what it shows."""
    store, plan, records, closed = make_cycle(storage, cycle, **more)  # type: ignore[arg-type]
    data = write_page(store, plan, records, JobsConfig(), closed)
    return storage.read_bytes(report_key(cycle)).decode(), data


def pages(storage: Storage, cycle: str) -> tuple[bytes, bytes]:
    return storage.read_bytes(report_key(cycle)), storage.read_bytes(data_key(cycle))


def test_every_section_in_the_order_of_questions(storage: Storage) -> None:
    written(storage, "first")
    text, data = written(storage, "second", began=T0 + 100_000, parent="first")
    seen = Outline(text)
    assert tuple(seen.heads) == SECTIONS
    for words in (
        "Promoted: nDCG@10 0.810, previously 0.800",
        "attempt 1: exit 75",
        "Median: of 1 earlier cycle.",
        "search nDCG@10: 9,000 queries in 1,000,000 products",
        "BM25 0.600",
        "cycle first",
        "resumed at step 20",
        "0.93 to 1.00",
        "120 rows correct with production and wrong now, 180 the other way",
        "10 better, 80 equal, 9 worse",
        "long battery life and a case : 0.200 → 0.900",
        "900 groups of new partitions and 100 of earlier ones (10% replayed)",
        "accuracy by confidence (error 0.0210, 0.0640 without temperature 1.8)",
        "rows without a value",
        "reason 3",
        "12 of 12",
        "checkpoints/second/step-1 ← checkpoints/first/step-100 ← published weights /mini (sha256 0a1b)",
        "1 setting changed from cycle first",
        "train.seed",
        "train-1-node0.json",
    ):
        assert words in text or words in seen.text, words
    assert [one.cycle for one in data.history] == ["first"] and data.unread == ()
    assert json.loads(storage.read_bytes(data_key("second")))["schema_version"] == 1
    assert PageData.model_validate_json(storage.read_bytes(data_key("second"))) == data


POINTS = tuple(ChartSeries(name=name, now=((1, 2.0),)) for name in ("loss", "memory, bytes"))


@pytest.mark.parametrize(
    ("without", "gone"),
    [
        ({"evaluation": None}, {"Quality"}),
        ({"scores": None, "vectors": None}, {"Queries that moved", "Errors and calibration", "Vectors"}),
        ({"prepared": None, "figures": {}, "machines": ()}, {"Data"}),
        ({"training": Training(curves=())}, {"Training"}),
        ({"training": Training(curves=POINTS)}, set()),
        ({"jobs": (), "history": (), "notices": (), "post_mortems": ()}, set()),
    ],
)
def test_a_page_without_a_part_is_whole_and_has_no_empty_section(
    storage: Storage, without: dict[str, Any], gone: set[str]
) -> None:
    written(storage, "first")
    _, data = written(storage, "second", began=T0 + 100_000, parent="first")
    seen = Outline(page(data.model_copy(update=without), row("second", "ndcg@10", 0.8)))
    assert set(SECTIONS) - set(seen.heads) == gone and "None" not in seen.text
    assert ("memory, GiB" in seen.text) is ("training" not in without), "one point is no chart"


def test_a_large_cycle_fits_into_300_kb(storage: Storage) -> None:
    large = {"nodes": 128, "steps": 20_000, "slices": 200, "bad_rows": 2000}
    written(storage, "first", **large)
    text, _ = written(storage, "second", began=T0 + 100_000, parent="first", **large)
    assert 200_000 < len(text.encode()) < 300_000


def test_it_asks_for_nothing_and_nothing_may_run(storage: Storage) -> None:
    text, _ = written(storage)
    for one in (text, storage.read_bytes(INDEX_PAGE).decode()):
        seen = Outline(one)
        assert not set(seen.tags) & {"script", "img", "iframe", "object", "embed", "form", "base"}
        assert not [name for name, _ in seen.attributes if name.startswith("on") or name in ("src", "style")]
        links = [value for name, value in seen.attributes if name in ("href", "xlink:href")]
        assert all(re.fullmatch(r"#[a-z-]+|[A-Za-z0-9_.-]+\.(html|json)|data:,", link) for link in links), links
        (policy,) = (value for name, value in seen.attributes if name == "content" and "default-src" in value)
        assert "default-src 'none'" in policy and "script" not in policy and "http" not in policy


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_texts_are_text(storage: Storage, evil: str) -> None:
    """In every place where the text of a judgement, a job or a machine may stand."""
    written(storage, "first")
    plain, _ = written(storage, "second", began=T0 + 100_000, parent="first")
    text, _ = written(storage, "second", began=T0 + 100_000, parent="first", text=evil)
    before, seen = Outline(plain), Outline(text)
    assert set(seen.tags) == set(before.tags)
    assert {name for name, _ in seen.attributes} == {name for name, _ in before.attributes}
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f]", text)
    if len(evil) < 100:
        shown = "".join(
            "\ufffd" if re.match(r"[\x00-\x08\x0b-\x1f\u200f\u202a-\u202e\u2066-\u2069]", c) else c for c in evil
        )
        assert seen.text.count(shown.replace("\r", "\ufffd")) > 20
    line = row("c", "m", 0.5, outcome="failed", promoted=False, reason="plain")
    before = Outline(index([line]))
    for name in ("reason", "metric", "cycle"):
        seen = Outline(index([line.model_copy(update={name: evil})]))
        assert seen.tags == before.tags and [one for one, _ in seen.attributes] == [one for one, _ in before.attributes]
        assert evil in seen.text or len(evil) > 100 or not evil.isprintable(), name


def ends(storage: Storage) -> dict[str, tuple[CycleStore, JobPlan, tuple[JobRecord, ...], Closed]]:
    """A cycle for every way to end: at each stage, cancelled under way, and before the first job."""
    store, plan, records, _ = make_cycle(storage, "whole")
    waiting = {"state": JobState.PENDING, "attempts": (), "children": (), "started_at": None, "stopped_at": None}
    pending = tuple(record.model_copy(update=waiting) for record in records)
    made: dict[str, tuple[tuple[JobRecord, ...], dict[str, str]]] = {
        "cancelled": ((*records[:3], *pending[3:]), {"outcome": "cancelled", "reason": "no"}),
        "cancelled-before-any-job": ((), {"outcome": "cancelled"}),
        "refused": (records, {"outcome": "refused", "reason": "the gate"}),
        "succeeded": (records, {"outcome": "succeeded"}),
    }
    for place, stage in enumerate(STAGES):
        last = records[place].all_attempts()[-1].model_copy(update={"exit_code": 65})
        bad = records[place].model_copy(update={"state": JobState.FAILED, "attempts": (last,), "children": ()})
        failed = {"outcome": "failed", "reason": f"{stage}: exit code 65"}
        made[f"failed-in-{stage}"] = ((*records[:place], bad, *pending[place + 1 :]), failed)
    found = {}
    for place, (name, (ended, closed)) in enumerate(made.items()):
        own = CycleStore(storage, name, store.clock)
        claim = Claim(plan_id="p", target="batch", claimed_at=T0 + place, owner="")
        storage.write_bytes(own.key("claim.json"), claim.model_dump_json().encode())
        end = Closed.model_validate({"at": T0 + 5e4} | closed)
        found[name] = (own, plan.model_copy(update={"cycle": name}), ended, end)
    return found


def test_every_end_has_a_page_and_made_again_it_is_the_same(storage: Storage) -> None:
    words = {"cancelled": "Cancelled: no.", "refused": "Production is unchanged.", "succeeded": "Succeeded."}
    words["cancelled-before-any-job"] = "Cancelled"
    all_ends = ends(storage)
    for store, plan, records, closed in all_ends.values():
        write_page(store, plan, records, JobsConfig(), closed)
    first = {name: pages(storage, name) for name in all_ends}
    for name, (store, plan, records, closed) in reversed(all_ends.items()):
        write_page(store, plan, records, JobsConfig(), closed)
        assert pages(storage, name) == first[name], name
        assert words.get(name, name.replace("failed-in-", "Failed in ")) in Outline(first[name][0].decode()).text, name
    listed = Outline(storage.read_bytes(INDEX_PAGE).decode())
    assert {f"{name}.html" for name in all_ends} <= {value for _, value in listed.attributes}


def test_a_job_that_failed_without_an_attempt_is_not_one_that_was_skipped(storage: Storage) -> None:
    """AWS Batch ends a job that can never start. The page calls it failed, as `trnjobs status` does."""
    shape = cases.plan(cases.job("prepare"), cases.job("train", "prepare"))
    records = (
        bad("prepare", why="MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"),
        bad("train", why=NOT_RUN + "prepare failed"),
    )
    assert [found.ending for found in jobs_of(shape, records)] == ["failed", "not run"]
    assert [shown_state(record) for record in records] == ["FAILED", "NOT RUN"]
    store = CycleStore(storage, "2026-11-20", lambda: T0)
    closed = Closed(outcome="failed", at=T0, reason="prepare: MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")
    data = write_page(store, shape, records, JobsConfig(), closed)
    assert outcome_sentence(data) == "Failed in prepare: prepare: MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT."


def row(cycle: str, metric: str = "", value: float | None = None, **more: object) -> CycleRow:
    """A line of the index."""
    fields = {"claimed_at": 1.0, "closed_at": 2.0, "outcome": "succeeded", "promoted": True, "reason": ""}
    fields |= dict.fromkeys(("took_s", "usd", "wasted_usd", "goodput", "rows")) | {"stage_s": {}, "stage_usd": {}}
    return CycleRow.model_validate({**fields, "machine_s": 0, "cycle": cycle, "metric": metric, "value": value, **more})


def test_the_line_of_the_index_is_one_metric_for_all_cycles() -> None:
    """That of search, or without any of the newest cycle; another metric does not take its place in a cycle."""
    rows = [
        row("a", "retrieval_ndcg@10", 0.7661, metrics={"retrieval_ndcg@10": 0.7661, "ndcg@10": 0.9494}),
        row("b", "retrieval_ndcg@10", 0.11),
        row("c", "ndcg@10", 0.9525),
        row("d", "ndcg@10", 0.9798, metrics={"ndcg@10": 0.9798}),
        row("e"),
    ]
    judged = [one.model_copy(update={"metrics": {}}) if "retrieval" in one.metric else one for one in rows]
    for lines, values, name in (
        (rows, ["0.766", "0.110"], "search nDCG@10"),
        (judged[2:], ["0.953", "0.980"], "nDCG@10"),
    ):
        svg = re.findall(r"<svg.*?</svg>", index(lines))[0]
        assert re.findall(r"<title>([^<]*)</title>", svg) == [*values, name]
        assert f"{name} of the last {len(lines)} cycles" in index(lines)
    assert [one.value_of("retrieval_ndcg@10") for one in rows] == [0.7661, 0.11, None, None, None]


@pytest.mark.parametrize("without", [False, True])
def test_a_promotion_without_a_comparison_is_called_so(storage: Storage, without: bool) -> None:
    _, data = written(storage)
    evaluated = {**data.figures["evaluate"], "without_comparison": without}
    data = data.model_copy(update={"figures": {**data.figures, "evaluate": evaluated}})
    assert outcome_sentence(data).startswith("Promoted WITHOUT a comparison: " if without else "Promoted: ")
    line = row("a", without_comparison=data.without_comparison)
    assert ending(line) == (("without", "promoted WITHOUT a comparison") if without else ("promoted", "promoted"))
    assert (f"● {ending(line)[1]}<" in index([line]), 'class="verdict without"' in page(data, line)) == (True, without)


def test_a_page_while_the_cycle_runs_and_the_one_of_its_end(storage: Storage) -> None:
    store, plan, records, closed = make_cycle(storage, "c")
    running = (*records[:3], records[3].model_copy(update={"state": JobState.RUNNING}))
    assert write_page(store, plan, running, JobsConfig(), None).outcome == "open"
    assert "Under way: train running." in Outline(pages(storage, "c")[0].decode()).text
    write_page(store, plan, records, JobsConfig(), closed)
    found = read_index(storage)
    assert found and [(one.cycle, one.outcome) for one in found.cycles] == [("c", "succeeded")]
    (line,) = found.cycles
    assert line.metrics["ndcg@10"] == 0.81 and line.value_of("ndcg@10") == 0.81


def test_a_damaged_result_is_told_of_and_a_damaged_index_is_left_as_it_is(storage: Storage) -> None:
    store, plan, records, closed = make_cycle(storage, "c")
    for key in ("embed/result.json", "evaluate/report.json", "verify/digest.json", "health/0-i-0abc0000.json"):
        storage.write_bytes(f"cycles/c/{key}", b"{")
    storage.write_bytes(INDEX, b"[]")
    data = write_page(store, plan, records, JobsConfig(), closed)
    assert (len(data.unread), "embed" in data.figures, data.evaluation, data.vectors) == (5, False, None, None)
    assert "Could not be read" in Outline(pages(storage, "c")[0].decode()).text
    assert storage.read_bytes(INDEX) == b"[]"


def test_two_who_end_cycles_at_once_lose_no_line(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    written(storage, "first")
    store, plan, records, closed = make_cycle(storage, "second", began=T0 + 1e5)
    other = make_cycle(storage, "third", began=T0 + 2e5)
    write, raced = type(storage).write_if_match, list[str]()

    def between(self: Storage, key: str, data: bytes, etag: str) -> bool:
        if not raced:
            raced.append(key)
            write_page(other[0], other[1], other[2], JobsConfig(), other[3])
        return write(self, key, data, etag)

    monkeypatch.setattr(type(storage), "write_if_match", between)
    write_page(store, plan, records, JobsConfig(), closed)
    index = read_index(storage)
    assert raced == [INDEX] and index and [row.cycle for row in index.cycles] == ["first", "second", "third"]


def test_steps_that_were_done_again_are_drawn_once() -> None:
    events = [
        CycleEvent(1, str(EventName.TRAIN_STARTED), {"step": 0}),
        CycleEvent(2, str(EventName.TRAIN_STEPS), {"step": 10, "losses": [1.0, 0.8], "samples_per_s": 5}),
        CycleEvent(3, str(EventName.TRAIN_STEPS), {"step": 20, "losses": [9.0, "nan"]}),
        CycleEvent(4, str(EventName.TRAIN_STARTED), {"step": 10}),
        CycleEvent(5, str(EventName.TRAIN_STEPS), {"step": 20, "losses": [0.5]}),
        CycleEvent(6, str(EventName.TRAIN_STEPS), {"step": 30, "losses": ["inf"]}),
    ]
    assert curves_of(events) == {"loss": [(9, 1.0), (10, 0.8), (20, 0.5)], "samples a second": [(10, 5.0)]}


# Charts.

VALUES = st.floats(-1e6, 1e6, allow_nan=False)


@given(VALUES, st.floats(1e-6, 1e6))
def test_ticks_are_round_few_and_inside(low: float, size: float) -> None:
    high = low + size
    found = ticks(low, high)
    assert len(found) <= 7 and found == sorted(found)
    slack = 1e-6 * max(abs(low), abs(high), 1)
    assert all(low - slack <= value <= high + slack for value in found)
    assert (ticks(3, 3), ticks(0, 1)) == ([3], [0, 0.2, 0.4, 0.6, 0.8, 1.0])


@given(st.lists(VALUES, min_size=1, max_size=3000))
def test_thinned_lines_keep_ends_and_extremes(values: list[float]) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    kept = thin(points, 100)
    assert len(kept) <= 100 and kept == sorted(kept) and set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    for choose in (min, max):
        assert choose(value for _, value in kept) == choose(values)


def test_a_line_lies_where_its_ticks_say() -> None:
    text = line_chart([("loss", [(0.0, 1.0), (5.0, 3.0), (10.0, 2.0)], "now")], "loss", marks=[(5, "went on <here>")])
    [path] = re.findall(r'class="line now"[^>]* d="(M[^"]+)"', text)
    x0, y0, dx, dy, *_ = (int(word) / 10 for word in re.findall(r"-?\d+", path))
    levels = {
        label: float(y) - 3.5 for y, label in re.findall(r'y="([\d.]+)" text-anchor="end" class="">([^<]+)<', text)
    }
    assert abs(y0 - levels["1"]) < 0.1 and abs(y0 + dy - levels["3"]) < 0.1
    assert (x0, x0 + dx) == (58, 524) and "went on &lt;here&gt;" in text and text.count("<circle") == 3
    assert line_chart([("loss", [(0, float("nan"))], "now")], "") == columns([], ["now"], "", (500, 100)) == ""


def test_lines_are_named_where_they_end_and_names_do_not_touch() -> None:
    lines = [(name, [(0.0, 0.0), (1.0, value)], "now") for name, value in (("a", 1.0), ("b", 1.0), ("c", 0.9))]
    text = line_chart([*lines, ("", [(0.0, 0.5)], "raw")], "")
    ends = {name: float(y) for y, name in re.findall(r'y="([\d.]+)" text-anchor="start" class="now">([^<]+)<', text)}
    heights = sorted(ends.values())
    assert set(ends) == {"a", "b", "c"} and all(low + 13 <= high + 0.11 for low, high in pairwise(heights))
    assert ">a</text>" not in line_chart(lines[:1], ""), "one line needs no name beside its title"


def test_bars_are_as_long_as_their_values_and_a_difference_is_where_it_is() -> None:
    text = bars([("ours", 0.8, "now"), ("theirs", 0.4, "before")], "who", 500)
    assert re.findall(r'<rect class="(\w+)" x="150" y="\d+" width="(\d+)"', text) == [("now", "300"), ("before", "150")]
    for value, kind, x in ((0.5, "pass", "88"), (-0.5, "fail", "32"), (0.0, "skipped", "60")):
        assert f'class="dot {kind}" transform="translate({x} 7)"' in difference(value, value - 0.1, value + 0.1, 1.0)


def test_a_loss_is_smoothed_by_its_neighbours() -> None:
    points = [(float(i), float(i) + (-1) ** i) for i in range(400)]
    found = smoothed(points)
    assert [x for x, _ in found] == [x for x, _ in points]
    assert all(abs(y - x) <= 0.1 for x, y in found[5:-5]) and smoothed([]) == [] and smoothed(points[:1]) == points[:1]
    assert (found[0][1], found[-1][1]) == (2.5, 396.5), "the mean of the first six, and of the last six"


def test_what_does_not_fit_ends_in_an_arrow() -> None:
    given = {"name": "x", "kind": "delta", "reason": "why", "metric": "ndcg@10", "candidate": 0.7, "incumbent": 0.7}
    small = GateCheck.model_validate(given | {"outcome": "pass", "low": -0.01, "high": 0.01, "bound": 0.005})
    wide = small.model_copy(update={"outcome": "fail", "low": -0.9, "high": 0.9, "bound": None})
    text = forest([*[small] * 40, wide], "differences", 500)
    assert text.count('class="arrow"') == 2 and text.count('class="bound"') == 40 and "dot fail" in text


def test_numbers() -> None:
    shown = {
        None: "-",
        float("nan"): "-",
        12345: "12,345",
        0.8125: "0.812",
        1e-9: "1.00e-09",
        123.4: "123",
        1234.5: "1,234",
        3.0: "3",
    }
    assert [number(value) for value in shown] == [*shown.values()]
    assert [short_number(v) for v in (200_000, 1500, 0.05, 1.2e10)] == ["200k", "1500", "0.05", "12.0B"]
    assert [_plural(1, "node"), _plural(2, "node"), _plural(3, "query")] == ["1 node", "2 nodes", "3 queries"]


def test_parts_by_what_was_trained_on_stand_side_by_side(storage: Storage) -> None:
    text, data = written(storage)
    table = re.search(r"by the side that was trained on.*?<table>(.*?)</table>", text, re.DOTALL)
    assert table is not None
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", table[1])]
    assert rows == [
        ["", "both", "query", "product", "neither", "search: seen", "search: new"],
        ["size", "22,500", "22,500", "22,500", "22,500", "9,000", "9,000"],
        ["candidate", "0.7100", "0.7200", "0.7300", "0.7400", "0.7100", "0.7200"],
        ["BM25", "-", "-", "-", "-", "0.6000", "0.6100"],
    ]
    assert data.evaluation is not None
    unchecked = data.evaluation.holdout.model_copy(update={"parts": {}})
    alone = data.evaluation.candidate.model_copy(update={"slices": ()})
    without = data.evaluation.model_copy(update={"holdout": unchecked, "candidate": alone})
    own = next(iter(read_index(storage).cycles))  # type: ignore[union-attr]
    assert "by the side that was trained on" not in page(data.model_copy(update={"evaluation": without}), own)
