"""HLO text: its instructions, how two graphs differ, the names of graphs, and a test for every rule of the lint.

Rules are tested on real traces if torch_xla makes them, on text written by hand otherwise.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.compile import hlo as rules
from pipeline.compile.hlo import (
    Finding,
    arrays,
    describe,
    difference,
    lint,
    lint_counters,
    op_counts,
    read_instructions,
)
from pipeline.model.config import ModelConfig
from tests.backends.xla_process import needs_xla
from tests.compile import traces
from tests.kit import zygote

# As XLA prints it, with what real traces seldom have: comments, quotes, an array over several lines.
LONG = r"""HloModule IrToHlo.12, entry_computation_layout={(f32[], /*index=1*/s64[4,5]{1,0})->(f32[4]{0})}, replica_count=2

%AddComputation.7 (x.8: f32[], y.9: f32[]) -> f32[] {
  %x.8 = f32[] parameter(0)
  %y.9 = f32[] parameter(1)
  ROOT %add.10 = f32[] add(f32[] %x.8, f32[] %y.9)
}

ENTRY %IrToHlo.12 (p0.1: f32[], p1.2: s64[4,5]) -> (f32[4]) {
  %p1.2 = s64[4,5]{1,0} parameter(1), metadata={op_type="xla__device_data" op_name="a}, b" source_file="/x y/z.py" source_line=33}
  %p0.1 = f32[] parameter(0)
  %constant.4 = f32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 }
  })
  %convert.5 = f32[4,5]{1,0:T(8,128)} convert(s64[4,5]{1,0} %p1.2), metadata={op_type="aten__to" op_name="aten__to"}
  %custom-call.6 = (f32[4,5]{1,0}, /*index=1*/u8[<=7]{0}) custom-call(f32[4,5]{1,0} %convert.5, /*index=1*/f32[] %p0.1), custom_call_target="Qr", backend_config="{\"a, b\": (1}"
  %get-tuple-element.7 = f32[4,5]{1,0} get-tuple-element((f32[4,5]{1,0}, u8[<=7]{0}) %custom-call.6), index=0
  %reduce.8 = f32[4]{0} reduce(f32[4,5]{1,0} %get-tuple-element.7, f32[] %p0.1), dimensions={1}, to_apply=%AddComputation.7
  ROOT %tuple.11 = (f32[4]{0}) tuple(f32[4]{0} %reduce.8)
}
"""  # noqa: E501


def test_instructions_are_read() -> None:
    found = {one.name: one for one in read_instructions(LONG)}
    assert list(found)[:3] == ["add.10", "p1.2", "p0.1"] and len(found) == 9, "parameters of the graph alone"
    assert (found["p1.2"].signature, found["p1.2"].source) == ("parameter s64[4,5]", "/x y/z.py:33")
    assert (found["convert.5"].shape, found["convert.5"].first_shape) == ("f32[4,5]", "s64[4,5]")
    assert arrays(found["custom-call.6"].shape) == [("f32", ["4", "5"]), ("u8", ["<=7"])]
    assert found["custom-call.6"].attribute("custom_call_target") == "Qr"
    assert (found["reduce.8"].combiner, found["reduce.8"].attribute("dimensions")) == ("add", "{1}")
    assert sum(op_counts(LONG).values()) == 9 and list(op_counts(LONG)) == sorted(op_counts(LONG))


def test_difference_names_inputs_first() -> None:
    known = {"dot f32[64,256]": 3, "parameter f32[64,2]": 1, "reduce f32[64]": 2, "tanh f32[64]": 1}
    seen = {"dot f32[64,256]": 6, "parameter f32[32,2]": 1, "reduce f32[64]": 1, "tanh f32[64]": 1}
    changes = difference(known, seen)
    assert describe(changes) == "+1 parameter f32[32,2], -1 parameter f32[64,2], +3 dot f32[64,256], -1 reduce f32[64]"
    assert describe(changes, limit=2) == "+1 parameter f32[32,2], -1 parameter f32[64,2] and 2 more"
    assert difference(seen, known) == {op: -change for op, change in changes.items()} and difference(seen, seen) == {}


@pytest.mark.stage
@needs_xla
def test_graphs_have_one_name_in_every_process(tmp_path: Path) -> None:
    """In another process, folder and hash seed; and one for each different graph."""
    env = {**os.environ, "PYTHONPATH": str(zygote.ROOT), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "tests.compile.trial_graphs", traces.OWN[0], traces.OWN[-1]]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    again = json.loads(done.stdout)
    graphs = {flag: met["graphs"] for flag, met in traces.own().items()}
    assert {flag: met["graphs"] for flag, met in again.items()} == {flag: graphs[flag] for flag in again}
    tiny = graphs[traces.OWN[0]]
    assert len(set(tiny.values())) < len(tiny), "one for each shape"
    for flag, other in graphs.items():
        if flag.startswith("--model.architecture"):
            assert len(other) == len(tiny), "as many graphs as BERT"
            shared = {tiny[key] for key in tiny.keys() & other.keys()}
            assert shared <= {"contrast"}, "the same embeddings are compared"


# The lint.


def graph(*rows: str) -> str:
    """A graph with inputs x, n, i of f32, s32, s64 and a sum as combiner."""
    inputs = [
        f"{name} = {dtype}[4] parameter({k})"
        for k, (name, dtype) in enumerate(zip("xni", ("f32", "s32", "s64"), strict=True))
    ]
    body = "\n".join(f"  {row}" for row in (*inputs, *rows))
    plus = "sum {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT r = f32[] add(a, b)\n}\n"
    second = "second {\n  c = s32[] parameter(0)\n  ROOT d = s32[] parameter(1)\n}\n"
    return f"HloModule m\n\n{plus}{second}\nENTRY e {{\n{body}\n}}\n"


def codes(findings: Sequence[Finding]) -> list[str]:
    return [f"{finding.severity} {finding.code}" for finding in findings]


BY_HAND = {
    "error EVRF001": ("r = f32[4] triangular-solve(x, x)", None),
    "error EVRF004": ("r = c64[4] complex(x, x)", "r = f32[4] real(x)"),
    "error EVRF005": ("r = f8e4m3fn[4] convert(x)", "r = f8e5m2[4] convert(x)"),
    "error EVRF006": (
        "r = u32[4] rng-bit-generator(x), algorithm=rng_philox",
        "r = u32[4] rng-bit-generator(x), algorithm=rng_default",
    ),
    "error EVRF013": ("r = s32[4] sort(n), to_apply=sum", "r = (f32[4], s32[4]) sort(x, n), to_apply=sum"),
    "error EVRF015": (
        'r = f32[4] custom-call(x), custom_call_target="Qr"',
        'r = f32[4] custom-call(x), custom_call_target="AwsNeuronErf"',
    ),
    "error EVRF016": ("r = s32[4] scatter(n, i, n), to_apply=sum", "r = s32[4] scatter(n, i, n), to_apply=second"),
    "error ESPP004": ("r = f4e2m1fn[4] convert(x)", "r = bf16[4] convert(x)"),
    "warning ESPP004": ("r = f64[4] convert(x)", None),
    "error EMOD025": ("r = f32[<=4,2] all-gather(x)", "r = f32[4,2] all-gather(x)"),
    "warning HLO004": ("r = s32[4] all-reduce(n), to_apply=sum", "r = f32[4] all-reduce(x), to_apply=sum"),
    "warning HLO007": ("r = bf16[70000001] all-gather(x)", "r = f8e5m2[140000000] all-gather(x)"),
}


@pytest.mark.parametrize("code", BY_HAND)
def test_text_written_by_hand(code: str) -> None:
    bad, good = BY_HAND[code]
    assert codes(lint(graph(bad))) == [code]
    assert good is None or lint(graph(good)) == ()


def test_every_rule_has_a_test() -> None:
    written = set(re.findall(r'"(E[A-Z]{3}\d{3}|HLO\d{3})"', inspect.getsource(rules)))
    assert written == {name.split()[1] for name in BY_HAND} | {"HLO005", "HLO006"}


def test_repeats_at_one_place_are_one_finding_and_errors_come_first() -> None:
    note = 'metadata={op_name="f" source_file="model.py" source_line=7}'
    rows = [f"{name} = f64[4] negate(x), {note}" for name in "abc"]
    first, second = lint(graph(*rows, "d = s32[4] sort(n)"))
    assert (first.code, first.severity) == ("EVRF013", "error")
    assert (second.source, second.count, second.instruction) == ("model.py:7", 3, "a = negate f64[4]")
    text = str(second)
    assert "double precision in negate (f64) (3 times)" in text and "at: model.py:7" in text and second.remedy in text


def test_counters_of_operators_on_the_host() -> None:
    counters = {"xla::add": 7, "aten::nonzero": 2, "aten::unique": 0, "aten::_local_scalar_dense": 5, "MarkStep": 1}
    first, second = lint_counters(counters)
    assert (first.code, first.severity, first.count) == ("HLO005", "error", 2) and "aten::nonzero" in first.message
    assert (second.code, second.severity, second.count) == ("HLO006", "warning", 5)
    assert lint_counters({"xla::add": 7}) == ()


@pytest.mark.stage
@needs_xla
class TestRealTraces:
    """What torch_xla makes of small programs, and of our own."""

    @pytest.mark.parametrize(
        ("program", "expected"),
        [
            ("inverse", {"error EVRF001", "error EVRF015"}),
            ("complex_product", {"error EVRF004"}),
            ("eight_bit", {"error EVRF005"}),
            ("topk_of_integers", {"error EVRF013"}),
            ("scatter_of_integers", {"error EVRF016"}),
            ("compare_with_a_python_float", {"warning ESPP004"}),
            ("nonzero", {"error EMOD025", "error EVRF013"}),  # it sorts the positions
            ("integer_product", {"warning HLO004"}),
            ("random_numbers", set()),
            ("sorts_and_sums", set()),
            ("classifier", set()),
        ],
    )
    def test_a_seeded_problem_is_found_and_the_usual_operators_are_fine(self, program: str, expected: set[str]) -> None:
        found = lint(traces.program(program))
        assert set(codes(found)) == expected, [str(finding) for finding in found]
        assert all(re.search(r"\.py:\d+$", finding.source) for finding in found[:1])

    def test_the_host_is_noticed(self) -> None:
        assert [f.code for f in lint_counters(traces.counters("fallback"))] == ["HLO005"]
        assert [f.code for f in lint_counters(traces.counters("scalar"))] == ["HLO006"]

    def test_our_own_graphs_pass(self) -> None:
        assert {flag: met["findings"] for flag, met in traces.own().items()} == {flag: [] for flag in traces.OWN}

    def test_recompute_adds_the_products_of_the_forward_pass_and_a_barrier_a_layer(self) -> None:
        own, layers = traces.own(), ModelConfig(preset="tiny").encoder.num_layers
        kept, again = (
            Counter(own[flag]["operations"]["first_micro_step"])
            for flag in ("--model.preset=tiny", "--train.parallel.recompute=units")
        )
        assert (kept["opt-barrier"], again["opt-barrier"]) == (0, layers)
        assert again["dot"] - kept["dot"] == 6 * layers, "qkv, two of attention, three linear layers"
