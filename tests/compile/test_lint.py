"""A test for every rule of the lint: on real traces if torch_xla makes them, on text written by hand otherwise."""

import inspect
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from pipeline.compile import graphs as rules
from pipeline.compile.graphs import Finding, lint, lint_counters
from pipeline.model.config import ModelConfig
from tests.backends.xla_process import needs_xla
from tests.compile import traces


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
    "error EMOD025": ("r = f32[<=4] dynamic-slice(x, n)", "r = f32[4] dynamic-slice(x, n)"),
    "warning HLO004": ("r = s32[4] all-reduce(n), to_apply=sum", "r = f32[4] all-reduce(x), to_apply=sum"),
    "warning HLO007": ("r = bf16[70000001] all-gather(x)", "r = bf16[70000000] all-gather(x)"),
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
