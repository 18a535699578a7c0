"""One test for every rule of the lint: on real traces where torch_xla makes them, on text written by hand otherwise."""

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import pytest

from pipeline.compile import lint as rules
from pipeline.compile.hlo import Module, parse
from pipeline.compile.lint import Finding, lint, lint_counters
from pipeline.model.config import Architecture, ModelConfig
from tests import zygote
from tests.backends.xla_process import needs_xla
from tests.compile import traces

REDUCER = """
{name} (a: {dtype}[], b: {dtype}[]) -> {dtype}[] {{
  a = {dtype}[] parameter(0)
  b = {dtype}[] parameter(1)
  ROOT r = {dtype}[] {op}
}}
"""


def graph(*rows: str, reducer: str = "add(a, b)", dtype: str = "f32") -> Module:
    """A module written by hand: `x` is a float image, `i` and `n` are integers; the last row is the root."""
    inputs = ["x = f32[1,8,8,2] parameter(0)", "i = s64[4] parameter(1)", "n = s32[4] parameter(2)"]
    called = REDUCER.format(name="sum", dtype=dtype, op=reducer)
    return parse("\n".join(["HloModule hand", called, "ENTRY e {", *inputs, *rows, "}"]))


def codes(findings: tuple[Finding, ...]) -> list[str]:
    return [f"{finding.severity} {finding.code}" for finding in findings]


def errors(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    return tuple(finding for finding in findings if finding.severity == "error")


# Refused, each with its permitted neighbour (None: there is none).
BY_HAND = {
    "EVRF001 triangular-solve": ("ROOT r = f32[4,4] triangular-solve(x, x), lower=true", "ROOT r = f32[4,4] dot(x, x)"),
    "EVRF001 fft": ("ROOT r = f32[4] fft(x), fft_type=RFFT, fft_length={8}", None),
    "EVRF001 cholesky": ("ROOT r = f32[4,4] cholesky(x), lower=true", None),
    "EVRF001 infeed": ("ROOT r = (f32[4], token[]) infeed(x)", None),
    "EVRF001 map": ("ROOT r = f32[4] map(x), dimensions={0}, to_apply=sum", None),
    "EVRF001 rng": (
        "ROOT r = f32[4] rng(x, x), distribution=rng_normal",
        "ROOT r = f32[4] rng(x, x), distribution=rng_uniform",
    ),
    "EVRF004 c128": ("ROOT r = c128[4] convert(x)", "ROOT r = f32[4] convert(x)"),
    "EVRF005 fnuz": ("ROOT r = f8e5m2fnuz[4] convert(x)", "ROOT r = f8e5m2[4] convert(x)"),
    "EVRF005 b11": ("ROOT r = f8e4m3b11fnuz[4] convert(x)", "ROOT r = f8e4m3[4] convert(x)"),
    "EVRF006": (
        "ROOT r = (u64[2], u32[4]) rng-bit-generator(x), algorithm=rng_three_fry",
        "ROOT r = (u64[2], u32[4]) rng-bit-generator(x), algorithm=rng_default",
    ),
    "EVRF010": (
        "ROOT r = f32[9] convolution(x, x), window={size=3x3 lhs_dilate=2x2 rhs_dilate=2x2}",
        "ROOT r = f32[9] convolution(x, x), window={size=3x3 pad=1_1x1_1 rhs_dilate=2x2}",
    ),
    "EVRF011": (
        "ROOT r = f32[9] convolution(x, x), window={size=3x3 stride=1x2 lhs_dilate=2x2}",
        "ROOT r = f32[9] convolution(x, x), window={size=3x3 lhs_dilate=2x2}",
    ),
    "EVRF013 topk": ("ROOT r = (s32[2], s32[2]) topk(n), k=2, largest=true", "ROOT r = (f32[2], s32[2]) topk(x), k=2"),
    "EVRF013 custom call": (
        'ROOT r = (s32[2], s32[2]) custom-call(n), custom_call_target="AwsNeuronTopK"',
        'ROOT r = (f32[2], s32[2]) custom-call(x), custom_call_target="AwsNeuronTopK"',
    ),
    "EVRF015": (
        'ROOT r = f32[4] custom-call(x), custom_call_target="LuDecomposition"',
        'ROOT r = f32[4] custom-call(x), custom_call_target="AwsNeuronModuleMarkerStart-Forward"',
    ),
    "EVRF017": (
        "ROOT r = f32[9] reduce-window(x, x), window={size=1x2x2x1 lhs_dilate=1x2x2x1}, to_apply=sum",
        "ROOT r = f32[9] reduce-window(x, x), window={size=1x2x2x1 stride=1x2x2x1}, to_apply=sum",
    ),
    "EVRF018": (
        "ROOT r = f32[9] reduce-window(x, x), window={size=1x2x2x1 rhs_dilate=1x2x2x1}, to_apply=sum",
        "ROOT r = f32[9] reduce-window(x, x), window={size=1x2x2x1 rhs_dilate=1x1x1x1}, to_apply=sum",
    ),
    "EVRF019": (
        "ROOT r = (f32[9], s64[9]) reduce-window(x, i, x, i), window={size=1x2x2x1}, to_apply=sum",
        "ROOT r = f32[9] reduce-window(x, x), window={size=1x2x2x1}, to_apply=sum",
    ),
    "EVRF022": ("ROOT r = s16[4] shift-right-arithmetic(n, n)", "ROOT r = s32[4] shift-right-arithmetic(n, n)"),
    "ESFH002": ("ROOT r = u64[2] constant({1, 4294967296})", "ROOT r = u64[2] constant({1, 4294967295})"),
    "ESPP004 f4": ("ROOT r = f4e2m1fn[4] convert(x)", "ROOT r = bf16[4] convert(x)"),
    "ESPP004 f64": ("ROOT r = f64[4] convert(x)", "ROOT r = f32[4] convert(x)"),
    "EMOD025 bound": ("ROOT r = f32[<=4] negate(x)", "ROOT r = f32[4] negate(x)"),
    "EMOD025 operator": ("ROOT r = f32[4] set-dimension-size(x, n), dimensions={0}", None),
    "HLO001 operator": ("ROOT r = f32[4] log-plus-one(x)", "ROOT r = f32[4] log(x)"),
    "HLO001 dynamic-slice": ("ROOT r = f32[2] dynamic-slice(x, n), dynamic_slice_sizes={2}", None),
    "HLO003": ("ROOT r = s64[] constant(2147483648)", "ROOT r = s64[] constant(9223372036854775807)"),
    "HLO007 all-gather": (
        "ROOT r = bf16[70000001] all-gather(x), dimensions={0}",
        "ROOT r = bf16[70000000] all-gather(x), dimensions={0}",
    ),
    "HLO004 all-reduce": ("ROOT r = s32[4] all-reduce(n), to_apply=sum", "ROOT r = f32[4] all-reduce(x), to_apply=sum"),
}
WARNINGS = {"EVRF001 fft", "EVRF001 cholesky", "EVRF001 infeed", "EVRF001 map", "EVRF001 rng", "ESPP004 f64"}


@pytest.mark.parametrize("name", BY_HAND)
def test_text_written_by_hand(name: str) -> None:
    bad, good = BY_HAND[name]
    severity = "warning" if name in WARNINGS or name.startswith("HLO") else "error"
    assert codes(lint(graph(bad))) == [f"{severity} {name.split()[0]}"]
    assert good is None or lint(graph(good)) == ()


def test_every_rule_has_a_test() -> None:
    elsewhere = {"EVRF013", "EVRF016", "EVRF031", "HLO002", "HLO005", "HLO006"}
    written = set(re.findall(r'"(E[A-Z]{3}\d{3}|HLO\d{3})"', inspect.getsource(rules)))
    assert written == {name.split()[0] for name in BY_HAND} | elsewhere


def test_an_update_at_a_fixed_place_is_fine() -> None:
    at, update = "k = s32[] constant(3)", "ROOT r = f32[4] dynamic-update-slice(x, x, k)"
    assert lint(graph(at, update)) == ()
    assert codes(lint(graph(update.replace(", k)", ", n)")))) == ["warning HLO001"]


def test_a_scatter_that_overwrites_integers_is_fine() -> None:
    scatter = "ROOT r = s32[4] scatter(n, i, n), update_window_dims={}, to_apply=sum"
    assert codes(lint(graph(scatter, dtype="s32"))) == ["error EVRF016"]
    text = "s {{\na = s32[] parameter(0)\nb = s32[] parameter(1)\nROOT r = s32[] {}(b, b)\n}}\n"
    entry = "ENTRY e {\nn = s32[4] parameter(0)\nROOT r = s32[4] scatter(n, n, n), to_apply=s\n}"
    overwriting = text.replace("\nb =", "\nROOT b =").replace("ROOT r = s32[] {}(b, b)\n", "")
    assert lint(parse(f"HloModule m\n{overwriting.format()}{entry}")) == ()
    assert codes(lint(parse(f"HloModule m\n{text.format('maximum')}{entry}"))) == ["error EVRF016"]


def test_a_sort_is_judged_by_what_it_compares() -> None:
    """Values carried along (indices, as argsort has them) may be integers."""
    text = """HloModule m
less {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  c = s32[] parameter(2)
  d = s32[] parameter(3)
  ROOT r = pred[] compare(KEYS), direction=LT
}
ENTRY e {
  x = f32[4] parameter(0)
  n = s32[4] parameter(1)
  ROOT r = (f32[4], s32[4]) sort(x, n), dimensions={0}, to_apply=less
}
"""
    assert lint(parse(text.replace("KEYS", "a, b"))) == ()
    assert codes(lint(parse(text.replace("KEYS", "c, d")))) == ["error EVRF013"]


GATHER = "offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,4}"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (["k = s32[6] iota(), iota_dimension=0"], ""),
        (["k = s32[7] iota(), iota_dimension=0"], "gather at index 6 of 6 rows"),
        (
            ["c = s32[] constant(2)", "a = s32[5] iota(), iota_dimension=0", "k = s32[5] add(a, c)"],
            "gather at index 6 of 6 rows",
        ),
        (["a = s64[3,7] iota(), iota_dimension=0", "k = s64[21] reshape(a)"], ""),
        (["a = s64[3,7] iota(), iota_dimension=1", "k = s64[21] reshape(a)"], "gather at index 6 of 6 rows"),
        (["k = s32[2] constant({0, 9})"], "gather at index 9 of 6 rows"),
        (["a = s32[7] iota(), iota_dimension=0", "k = s32[7] minimum(a, n)"], ""),  # of data: not known
    ],
)
def test_indices_beyond_the_table(index: list[str], message: str) -> None:
    table, gather = "t = f32[6,4] parameter(3)", f"ROOT r = f32[7,4] gather(t, k), {GATHER}"
    found = lint(graph(table, *index, gather))
    assert [(f.code, f.message) for f in found] == ([("EVRF031", message)] if message else [])


def test_scatter_beyond_the_table() -> None:
    rows = ["t = f32[6,4] parameter(3)", "k = s32[7] iota(), iota_dimension=0"]
    how = "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1"
    assert codes(lint(graph(*rows, f"ROOT r = f32[6,4] scatter(t, k, x), {how}, to_apply=sum"))) == ["error EVRF031"]


def test_an_odd_reduction_is_a_warning() -> None:
    reduce = "ROOT r = f32[] reduce(x, x), dimensions={0,1,2,3}, to_apply=sum"
    assert lint(graph(reduce)) == lint(graph(reduce, reducer="maximum(a, b)")) == ()
    assert codes(lint(graph(reduce, reducer="xor(a, b)"))) == ["warning HLO001", "warning HLO001"]


def test_repeats_at_one_place_are_one_finding_and_errors_come_first() -> None:
    note = 'metadata={op_name="f" source_file="model.py" source_line=7}'
    rows = [f"{name} = f64[4] negate(x), {note}" for name in "abc"]
    rows += ["d = f64[4] negate(x)", "ROOT e = s64[4] shift-right-arithmetic(i, i)"]
    first, second, third = lint(graph(*rows))
    assert (first.code, first.count) == ("EVRF022", 1)
    assert (second.source, second.count, second.instruction) == ("model.py:7", 3, "a = negate f64[4]")
    assert (third.source, third.count) == ("", 1)
    assert errors((first, second, third)) == (first,)
    text = str(second)
    assert text.startswith("warning ESPP004: double precision in negate (f64) (3 times)")
    assert "at: model.py:7" in text and second.remedy in text


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
            ("dilated_transposed_convolution", {"error EVRF010"}),
            ("topk_of_integers", {"error EVRF013"}),
            ("scatter_of_integers", {"error EVRF016"}),
            ("compare_with_a_python_float", {"warning ESPP004"}),
            ("nonzero", {"error EMOD025", "error EVRF013"}),  # it sorts the positions
            ("floor_division", {"warning HLO002"}),
            ("truncated_division", {"warning HLO002"}),
            ("index_beyond_the_table", {"error EVRF031"}),
            ("all_true", {"warning HLO001"}),
            ("integer_product", {"warning HLO004"}),
            ("log1p", {"warning HLO001"}),
        ],
    )
    def test_a_seeded_problem_is_found(self, program: str, expected: set[str]) -> None:
        found = lint(traces.program(program))
        assert expected <= set(codes(found)), [str(finding) for finding in found]
        seeded = [finding for finding in found if f"{finding.severity} {finding.code}" in expected]
        assert any(re.search(r"\.py:\d+$", finding.source) for finding in seeded)
        assert {f"error {finding.code}" for finding in errors(found)} <= expected

    @pytest.mark.parametrize(
        ("program", "warnings"),
        [
            ("shift_of_int32", set()),
            ("true_division", set()),
            ("index_within_the_table", set()),
            ("random_numbers", set()),
            ("convolution", set()),
            ("sorts_and_sums", set()),
            ("classifier", {"reduce by select"}),  # torch's attention asks whether a whole row is masked
        ],
    )
    def test_the_usual_operators_are_fine(self, program: str, warnings: set[str]) -> None:
        assert {finding.message for finding in lint(traces.program(program))} == warnings

    def test_the_host_is_noticed(self) -> None:
        assert [(f.code, "aten::bincount" in f.message) for f in lint_counters(traces.counters("fallback"))] == [
            ("HLO005", True)
        ]
        assert [f.code for f in lint_counters(traces.counters("scalar"))] == ["HLO006"]

    @pytest.mark.parametrize(
        ("texts", "least"),
        [(traces.own_texts, 10), pytest.param(traces.variant_texts, 6, marks=pytest.mark.thorough)],
    )
    def test_our_own_graphs_have_no_error_and_no_warning_but_dropout(
        self, texts: Callable[[], dict[str, str]], least: int
    ) -> None:
        names = [name for name in texts() if name.startswith("own-")]
        assert len(names) >= least and not any(name.endswith(" failed") for name in names)
        found = {name: lint(parse(texts()[name])) for name in names}
        assert {name: errors(findings) for name, findings in found.items() if errors(findings)} == {}
        seen = {(finding.code, finding.message) for findings in found.values() for finding in findings}
        # Dropout brings the operators of its random numbers.
        assert seen <= {("HLO001", f"operator {name}") for name in ("shift-left", "xor", "or")}

    @pytest.mark.parametrize(
        "encoders",
        [("bert", "modernbert"), pytest.param(get_args(Architecture), marks=pytest.mark.thorough)],
        ids=["most unlike", "all"],
    )
    def test_every_encoder_needs_as_many_graphs_as_bert(self, encoders: Sequence[str]) -> None:
        names = [f"--model.architecture={name}" for name in encoders]
        done = zygote.run("tests.compile.trial_graphs", *names, timeout_s=300.0)
        assert done.returncode == 0, done.stderr[-3000:]
        graphs = json.loads(done.stdout)
        assert list(graphs) == names and len(set(graphs.values())) == 1, graphs

    def test_recompute_adds_the_products_of_the_forward_pass_and_a_barrier_a_layer(self) -> None:
        kept, again = (
            Counter(one.opcode for part in traces.own(name).computations for one in part.instructions)
            for name in ("tiny", "tiny-recompute")
        )
        layers = ModelConfig(preset="tiny").encoder.num_layers
        assert (kept["opt-barrier"], again["opt-barrier"]) == (0, layers)
        assert again["dot"] - kept["dot"] == 6 * layers, "qkv, two of attention, three linear layers"
