"""Whatever a tool prints: a verdict that can be stored and shown, never an exception."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.core.neuron_errors import device_error
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckResult, Verdict, from_json, gang_error, run_checks, show, to_json
from pipeline.health.config import HealthConfig
from pipeline.health.neuron import NeuronInstance, judge_devices, judge_processes, neuron_instance, parse_neuron_ls
from pipeline.health.tools import NccomTest, judge_nccom
from pipeline.proc.tool import ToolRun
from tests.health import fake_tools

TRN1 = neuron_instance("trn1.32xlarge") or NeuronInstance("")
HELD = {"pid": 7, "command": "python", "neuron_runtime_version": "2.31"}
DOCUMENTS: list[Any] = [
    [{**fake_tools.neuron_ls(1)[0], "neuron_processes": [HELD]}, *fake_tools.neuron_ls(16)[1:3]],
    json.loads(to_json(run_checks([], HealthConfig(), node_rank=0, host="h", stop=StopSignal()))),
]
ODD: list[object] = [
    None,
    True,
    -1,
    1e400,
    float("nan"),
    10**400,
    -(10**400),
    "",
    "\ud800\x1b[2J\x00",
    "x" * 5000,
    [],
    {},
    [[[]]],
    1.5,
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def judged(text: str) -> Iterator[CheckResult]:
    if (devices := parse_neuron_ls(text)) is not None:
        yield from (judge_devices(devices, TRN1), judge_devices(devices, NeuronInstance("x")), judge_processes(devices))
    run = ToolRun(("nccom-test",), 0, text)
    yield judge_nccom(run, NccomTest(32), min_busbw_gib_s=45.0)
    device_error(text)
    try:
        yield from from_json(text).results
    except DataError:
        return


def verdict_on(text: str) -> None:
    checks = [Check("tool", lambda ctx: judged(text))]
    report = run_checks(checks, HealthConfig(), node_rank=0, host="h", stop=StopSignal())
    assert not [result for result in report.results if result.name == "tool"], "an exception"
    back = from_json(to_json(report).encode())
    shown = io.StringIO()
    show(back, shown)
    f"{shown.getvalue()}{gang_error([back])}".encode()


@given(st.sampled_from(DOCUMENTS), st.integers(0, 10**6), st.sampled_from(ODD), st.floats(0, 1.5))
@settings(max_examples=150, deadline=None)
def test_an_odd_value_anywhere_and_a_cut_anywhere(document: Any, where: int, value: object, cut: float) -> None:
    document = json.loads(json.dumps(document))
    found = [*places(document)]
    container, key = found[where % len(found)]
    container[key] = value
    text = json.dumps(document)
    verdict_on(text[: int(cut * len(text))] if cut < 1 else text)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{" * 100_000, "9" * 10_000, "\x00\xff", "size(B) busbw(GB/s)\n" + "9" * 999]
)
def test_no_json_at_all(text: str) -> None:
    verdict_on(text)
    assert parse_neuron_ls(text) is None
    assert judge_nccom(ToolRun(("nccom-test",), 0, text), NccomTest(2)).verdict is Verdict.RETRY
