"""Golden queries: how the file is read, which items a name means, and what the gate says of what is found."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.core.errors import DataError
from pipeline.core.stop import StopSignal
from pipeline.data.rows import RawBatch
from pipeline.data.token_sets import QuarantinedRow
from pipeline.evaluate.config import OnGolden
from pipeline.evaluate.gate.compare import GateInput
from pipeline.evaluate.gate.judge import judge
from pipeline.evaluate.golden import GoldenQuery, golden_check, items_named, judge_golden, read_golden
from pipeline.evaluate.metrics.scored_rows import PerQuery
from pipeline.evaluate.models import Models
from pipeline.evaluate.report import GoldenReport
from pipeline.evaluate.retrieval import field_texts
from pipeline.settings import Settings, settings_hash
from tests.evaluate.holdouts import holdout

FILE = """\
[[golden]]  # what people search for most
query = "usb c cable"
must = ["Acme Cable", "p7"]
must_not = ["p9"]
top = 2

[[golden]]
query = "größe 38"
must = ["p1"]
"""


def settings_of(path: Path, **gate: Any) -> Settings:
    return Settings.model_validate({"evaluate": {"golden": str(path)}, "gate": gate})


def test_the_file(tmp_path: Path) -> None:
    (tmp_path / "golden.toml").write_text(FILE, encoding="utf-8")
    first, second = read_golden(settings_of(tmp_path / "golden.toml"), StopSignal())
    assert first == GoldenQuery(query="usb c cable", must=("Acme Cable", "p7"), must_not=("p9",), top=2)
    assert (second.query, second.must_not, second.top) == ("größe 38", (), 10)
    assert read_golden(Settings(), StopSignal()) == ()


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"query = shoe", "Invalid value"),
        (b"\xff", "utf-8"),
        (b"", "golden: Field required"),
        (b"golden = []", "golden: "),
        (b"[[golden]]\nmust = ['a']", "golden.0.query: Field required"),
        (b"[[golden]]\nquery = ' '", "golden.0.query: "),
        (b"[[golden]]\nquery = 'a'\nmust = 'b'", "golden.0.must: "),
        (b"[[golden]]\nquery = 'a'\n[[golden]]\nquery = 'a'\ntop = 0", "golden.1.top: "),
        (b"[[golden]]\nquery = 'a'\nmusst = ['b']", "golden.0.musst: "),
        (b"[[golden]]\nquery = 'a'\ntop = 101", "top is 101 for 'a'"),
        (None, "does not exist"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: bytes | None, seen: str) -> None:
    path = tmp_path / "golden.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_golden(settings_of(path), StopSignal())
    assert seen in caught.value.seen and str(path) in caught.value.seen


def test_a_name_is_an_id_or_else_a_title() -> None:
    rows = [("p1", "Red  Shoe", ""), ("p2", "blue hat", ""), ("p3", "p2", ""), ("p4", "RED shoe", ""), ("p5", "x", "")]
    items = [4, 5, 6, 7, -1]
    found = items_named(["red shoe ", "p2", "P1", "x", "gone"], rows, lambda row, text: items[row])
    assert found == {"red shoe ": [4, 7], "p2": [5], "P1": [], "x": [], "gone": []}


def report(ours: list[list[int]], theirs: list[list[int]] | None) -> GoldenReport:
    queries = [GoldenQuery(query="a", must=("one",), must_not=("bad",), top=2), GoldenQuery(query="b", must=("gone",))]
    items = {"one": [1, 11], "bad": [2], "gone": []}
    return judge_golden(queries, items, np.array(ours), None if theirs is None else np.array(theirs))


def test_ranks_are_those_of_the_first_item_that_a_name_means() -> None:
    found = report([[5, 11, 1, 2], [1, 1, 1, 1]], [[5, 2, -1, -1], [1, 1, 1, 1]])
    assert [(one.product, one.must, one.candidate, one.incumbent) for one in found.outcomes] == [
        ("one", True, 2, 0),
        ("bad", False, 4, 2),
    ]
    assert found.unknown == ("gone",) and not found.missed
    assert [one.holds(one.incumbent or 0) for one in found.outcomes] == [False, False]
    lost = report([[5, 2, 1, 11], [0, 0, 0, 0]], [[11, 1, 0, 0], [0, 0, 0, 0]])
    assert [str(one) for one in lost.missed] == [
        "'a' must find 'one' in the top 2 (at 3, production at 1)",
        "'a' must not find 'bad' in the top 2 (at 2, production not found)",
    ]


GOOD, BAD = [[1, 5, 6, 7], [0, 0, 0, 0]], [[5, 6, 7, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("ours", "theirs", "action", "outcome"),
    [
        (GOOD, BAD, "fail", "pass"),
        (GOOD, None, "fail", "pass"),
        (BAD, GOOD, "fail", "fail"),
        (BAD, GOOD, "warn", "warn"),
        (BAD, BAD, "fail", "warn"),  # a wish that production does not fulfil either
        (BAD, None, "fail", "fail"),
        (BAD, None, "warn", "warn"),
    ],
)
def test_the_gate(ours: list[list[int]], theirs: list[list[int]] | None, action: OnGolden, outcome: str) -> None:
    check = golden_check(report(ours, theirs), action)
    assert (check.kind, check.outcome) == ("golden", outcome)
    assert ("'a' must find 'one'" in check.reason) == (ours is BAD)
    rows = holdout([1, 1, 2, 2], [0, 1, 0, 1], [[2, 1], [1, 2], [2, 1], [1, 2]])
    side = GateInput(rows, Settings().evaluate.metrics, retrieval=PerQuery(np.array([1, 2]), {}))
    gate = Settings().gate.model_copy(update={"first_without_comparison": True})
    verdict = judge(side, None, gate, golden=check)
    assert verdict.promote == (outcome != "fail") and verdict.without_comparison == verdict.promote


@pytest.mark.parametrize(("action", "outcome"), [("fail", "fail"), ("warn", "warn")])
def test_golden_queries_that_were_not_judged_are_no_pass(action: OnGolden, outcome: str) -> None:
    for one in (GoldenReport(missing="no search"), GoldenReport(unknown=("gone",))):
        check = golden_check(one, action)
        assert check.outcome == outcome and "not judged: " in check.reason


def test_what_decides_a_verdict_is_as_it_was_without_golden_queries(tmp_path: Path) -> None:
    """Their content decides, and what the gate makes of it; not the name of the file."""
    state = SimpleNamespace(max_tokens=32, model=SimpleNamespace(max_positions=32))
    checkpoint: Any = SimpleNamespace(digest="d", state=state)
    ctx: Any = SimpleNamespace(stop=StopSignal(), code_version="v")

    def inputs(settings: Settings) -> dict[str, str]:
        return Models(checkpoint, True, None, None, True).inputs(settings, ctx, [])

    plain = inputs(Settings())
    assert (
        plain["gate"] == "2ed7149c241f39d7e6ef889db7f4cb3e"
        and plain["evaluate"] == "e756ab06a93c6b4e40f58bcdc1f32db6"
        and "golden" not in plain
    )
    assert inputs(Settings.model_validate({"gate": {"golden": "off"}})) == plain
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text(FILE, encoding="utf-8")
    other.write_text(FILE + "\n", encoding="utf-8")
    first = inputs(settings_of(one))
    assert first == inputs(settings_of(other)) and {**plain, "golden": first["golden"]} == first
    assert first != inputs(settings_of(one, golden="fail"))
    other.write_text(FILE.replace("top = 2", "top = 3"), encoding="utf-8")
    assert first != inputs(settings_of(other))
    assert settings_hash(settings_of(one)) == settings_hash(Settings())


def test_a_bad_row_of_the_data_has_no_name() -> None:
    """A reader returns it beside the columns, of which one may be missing."""
    columns = pa.record_batch({"title": pa.array([b"red shoe"], pa.large_binary())})
    batch = RawBatch(
        columns, np.array([0]), (QuarantinedRow(file="a.csv", row=1, reason="malformed row", content="x"),)
    )
    assert [field_texts(batch, name) for name in ("product_id", "title")] == [[""], ["red shoe"]]
