"""HLO text: what is read, which key a graph gets, how two graphs differ."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.compile.hlo import (
    Shape,
    describe,
    difference,
    op_counts,
    parse,
    stable_key,
)
from pipeline.core.errors import DataError
from tests.backends.xla_process import needs_xla
from tests.compile import traces

# Written by hand after XLA's printer, with what real traces seldom have: comments, quotes, an array over several lines.
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
SHORT = """HloModule other, entry_computation_layout={(f32[2]{0})->f32[2]{0}}

FileNames
1 "/code/model.py"

FunctionNames
1 "forward"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY main {
  x = f32[2]{0} parameter(0)
  y = f32[2]{0} add(x, x), metadata={op_name="add" stack_frame_id=1}
  ROOT z = f32[2]{0} negate(y)
}
"""


def test_everything_of_the_long_form_is_read() -> None:
    module = parse(LONG)
    entry = module.entry.by_name
    assert (module.name, module.entry.name, module.entry.root) == ("IrToHlo.12", "IrToHlo.12", "tuple.11")
    assert dict(module.attributes)["replica_count"] == "2"
    assert [computation.name for computation in module.computations] == ["AddComputation.7", "IrToHlo.12"]
    assert [parameter.name for parameter in module.entry.parameters] == ["p0.1", "p1.2"]
    assert (entry["p1.2"].dtype, entry["p1.2"].dims, entry["p1.2"].source) == ("s64", (4, 5), "/x y/z.py:33")
    assert entry["p1.2"].attributes == ()
    assert entry["constant.4"].literal == "{ { 1, 2 }, { 3, 4 } }"
    assert entry["convert.5"].operands == ("p1.2",) and entry["convert.5"].source == ""
    assert entry["custom-call.6"].shape == Shape("tuple", parts=(Shape("f32", (4, 5)), Shape("u8", (7,), dynamic=True)))
    assert entry["custom-call.6"].operands == ("convert.5", "p0.1")
    assert entry["custom-call.6"].attribute("custom_call_target") == '"Qr"'
    assert entry["reduce.8"].called == ("AddComputation.7",)
    assert entry["reduce.8"].signature == "reduce f32[4]"
    assert sum(1 for _ in module.instructions) == 11


def test_the_short_form_and_stack_frames_are_read() -> None:
    entry = parse(SHORT).entry
    assert entry.by_name["y"].operands == ("x", "x")
    assert entry.by_name["y"].source == "/code/model.py:12"
    assert entry.root == "z"


def test_a_window_is_read() -> None:
    line = "ROOT c = f32[1] convolution(x, x), window={size=3x3 stride=2x1 pad=0_1x0_1 rhs_dilate=1x2}, dim_labels=b01f"
    window = parse(f"HloModule m\nENTRY e {{\nx = f32[1] parameter(0)\n{line}\n}}").entry.by_name["c"].window
    assert window == {"size": (3, 3), "stride": (2, 1), "rhs_dilate": (1, 2)}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "without an ENTRY"),
        ("module @main {", "line 1: module @main"),
        ("HloModule m\n\nENTRY e {\n  x = f32[2] parameter(0)\n", "ends within computation e"),
        ("HloModule m\n\nENTRY e {\n}", "line 4"),
        ("HloModule m\n\nENTRY e {\n  x is f32[2] parameter(0)\n}", "line 4: x is"),
        ("HloModule m\n\nENTRY e {\n  x = parameter(0)\n}", "line 4: x = parameter"),
        ("HloModule m\n\nENTRY e {\n  x = f32[2] negate(y)\n}", "x uses y"),
        ("HloModule m\n\nENTRY e {\n  x = f32[2] negate(x)\n}", "x uses x"),
        ("HloModule m\n\nENTRY e {\n  x = f32[2] call(), to_apply=%f\n}", "x uses f"),
        ("HloModule m\n\ng {\n  x = f32[2] parameter(0)\n}", "without an ENTRY"),
    ],
)
def test_what_is_no_hlo_is_refused(text: str, seen: str) -> None:
    with pytest.raises(DataError, match=re.escape(seen)):
        parse(text)


def test_counts_leave_out_the_parameters_of_reducers() -> None:
    counts = op_counts(parse(LONG))
    assert counts["parameter f32[]"] == 1 and counts["add f32[]"] == 1
    assert sum(counts.values()) == 11 - 2
    assert list(counts) == sorted(counts)


def test_difference_names_inputs_first() -> None:
    known = {"dot f32[64,256]": 3, "parameter f32[64,2]": 1, "reduce f32[64]": 2, "tanh f32[64]": 1}
    seen = {"dot f32[64,256]": 6, "parameter f32[32,2]": 1, "reduce f32[64]": 1, "tanh f32[64]": 1}
    changes = difference(known, seen)
    assert describe(changes) == "+1 parameter f32[32,2], -1 parameter f32[64,2], +3 dot f32[64,256], -1 reduce f32[64]"
    assert describe(changes, limit=2) == "+1 parameter f32[32,2], -1 parameter f32[64,2] and 2 more"
    assert describe({}).startswith("the same operations")


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5)),
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5)),
)
def test_difference_leads_from_one_table_to_the_other(known: dict[str, int], seen: dict[str, int]) -> None:
    reached = dict(known)
    for op, change in difference(known, seen).items():
        reached[op] = reached.get(op, 0) + change
    assert {op: count for op, count in reached.items() if count} == seen
    assert difference(seen, known) == {op: -change for op, change in difference(known, seen).items()}


@dataclass(frozen=True)
class Line:
    """One instruction of a made-up program; `operands` are numbers of lines above."""

    opcode: str
    size: int
    operands: tuple[int, ...] = ()
    literal: str = ""
    attribute: str = ""
    calls: bool = False


@st.composite
def programs(draw: st.DrawFn) -> list[Line]:
    lines = [Line("parameter", draw(st.integers(1, 4)), literal=str(n)) for n in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(1, 12))):
        operands = tuple(draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=3)))
        size, attribute = draw(st.integers(1, 4)), draw(st.sampled_from(["", "dimensions={0}", "dimensions={1}"]))
        opcode = draw(st.sampled_from(["add", "dot", "constant", "reduce"]))
        if opcode == "constant":
            lines.append(Line(opcode, size, literal=str(draw(st.integers(0, 3)))))
        else:
            lines.append(Line(opcode, size, operands, attribute=attribute, calls=opcode == "reduce"))
    return lines


def printed(lines: Sequence[Line], seed: int, *, reducer: str = "add", shuffle: bool = True) -> str:
    """The program with names, ids, order of independent lines and metadata of `seed`."""
    chance = random.Random(seed)
    names = [f"{line.opcode}.{number}" for number, line in enumerate(lines)]
    module, region = f"SyncTensorsGraph.{chance.randrange(999)}", f"region.{chance.randrange(999)}"
    if shuffle:
        names = [f"{chance.choice('pqx')}{chance.randrange(999)}.{number}" for number in range(len(lines))]
    left, order = set(range(len(lines))), list[int]()
    while left:
        ready = sorted(n for n in left if not set(lines[n].operands) & left)
        order.append(chance.choice(ready) if shuffle else ready[0])
        left.remove(order[-1])
    rows = []
    for number in order:
        line = lines[number]
        inside = line.literal or ", ".join(f"%{names[operand]}" for operand in line.operands)
        root = "ROOT " if number == len(lines) - 1 else ""
        attributes = [line.attribute] if line.attribute else []
        attributes += [f"to_apply=%{region}"] if line.calls else []
        attributes += [f'metadata={{op_name="m{chance.random()}" source_line={number + seed}}}'] if shuffle else []
        tail = "".join(f", {attribute}" for attribute in attributes)
        rows.append(f"  {root}%{names[number]} = f32[{line.size}]{{0}} {line.opcode}({inside}){tail}")
    a, b = f"x.{chance.randrange(9)}", f"y.{chance.randrange(9)}"
    body = f"  %{a} = f32[] parameter(0)\n  %{b} = f32[] parameter(1)\n  ROOT %r = f32[] {reducer}(%{a}, %{b})"
    header = f"%{region} ({a}: f32[], {b}: f32[]) -> f32[] {{\n{body}\n}}"
    return "\n".join([f"HloModule {module}", "", header, "", f"ENTRY %{module} () -> f32[] {{", *rows, "}", ""])


@given(programs(), st.integers(0, 2**16), st.integers(0, 2**16))
def test_the_key_does_not_depend_on_the_print(lines: list[Line], one: int, other: int) -> None:
    # Instructions that nothing uses have no place but the printed one, so the root uses all.
    lines = [*lines, Line("add", 1, tuple(range(len(lines))))]
    assert stable_key(parse(printed(lines, one))) == stable_key(parse(printed(lines, other)))


@settings(max_examples=150)
@given(programs(), st.data())
def test_the_key_depends_on_the_program(lines: list[Line], data: st.DataObject) -> None:
    lines = [*lines, Line("add", 1, tuple(range(len(lines))))]
    number = data.draw(st.integers(0, len(lines) - 1))
    line = lines[number]
    changes = [replace(line, size=line.size + 1)]
    if line.opcode != "parameter":
        changes += [replace(line, attribute="dimensions={2}")]
    if line.opcode == "constant":
        changes += [replace(line, literal=f"{line.literal}5")]
    if line.operands:
        changes += [replace(line, opcode="subtract"), replace(line, operands=(*line.operands, line.operands[0]))]
    changed = [*lines[:number], data.draw(st.sampled_from(changes)), *lines[number + 1 :]]
    assert stable_key(parse(printed(lines, 1))) != stable_key(parse(printed(changed, 1)))


def key(*rows: str, head: str = "HloModule m") -> str:
    return stable_key(parse("\n".join([head, "", "ENTRY e {", *rows, "}"])))


def test_a_shared_value_is_not_a_repeated_one() -> None:
    x, root = "x = f32[2] parameter(0)", "ROOT r = f32[2] add(a, b)"
    once = key(x, "a = f32[2] negate(x)", root.replace("b)", "a)"))
    assert once != key(x, "a = f32[2] negate(x)", "b = f32[2] negate(x)", root)


def test_the_order_of_operands_and_the_root_count() -> None:
    x, y = "x = f32[2] parameter(0)", "y = f32[2] parameter(1)"
    assert key(x, y, "ROOT r = f32[2] divide(x, y)") != key(x, y, "ROOT r = f32[2] divide(y, x)")
    assert key(x, "ROOT a = f32[2] sine(x)", "b = f32[2] cosine(x)") != key(
        x, "a = f32[2] sine(x)", "ROOT b = f32[2] cosine(x)"
    )


def test_layout_dtype_and_module_attributes_count() -> None:
    x = "ROOT x = f32[2,3]{1,0} parameter(0)"
    keys = {
        key(x),
        key(x.replace("{1,0}", "{0,1}")),
        key(x.replace("f32", "bf16")),
        key(x, head="HloModule m, replica_count=2"),
    }
    assert len(keys) == 4 and key(x, head="HloModule other") in keys


def test_a_reducer_counts_by_what_it_does() -> None:
    lines = [Line("parameter", 2, literal="0"), Line("reduce", 1, (0, 0), calls=True)]
    assert stable_key(parse(printed(lines, 1))) == stable_key(parse(printed(lines, 2)))
    assert stable_key(parse(printed(lines, 1))) != stable_key(parse(printed(lines, 1, reducer="maximum")))


def test_channels_count_by_who_shares_them_and_input_names_not_at_all() -> None:
    x = 'x = f32[2] parameter(0), frontend_attributes={neff_input_names="input0"}'
    a, root = "a = f32[2] all-reduce(x), channel_id=%s", "ROOT r = f32[2] all-reduce(a), channel_id=%s"
    assert key(x, a % 1, root % 2) == key(x.replace("input0", "in"), a % 7, root % 9) != key(x, a % 1, root % 1)


@pytest.mark.stage
@needs_xla
class TestRealTraces:
    """Graphs of torch_xla on XLA:CPU."""

    @pytest.mark.parametrize(
        "texts",
        [traces.program_texts, traces.own_texts, pytest.param(traces.variant_texts, marks=pytest.mark.thorough)],
    )
    def test_every_line_is_read(self, texts: Callable[[], dict[str, str]]) -> None:
        for name, text in texts().items():
            if text.startswith("HloModule"):
                lines = re.findall(r"^\s+(?:ROOT )?%?\S+ = ", text, re.MULTILINE)
                assert sum(1 for _ in parse(text).instructions) == len(lines), name

    def test_two_processes_two_folders_and_debug_output_give_one_key(self) -> None:
        seen, other = traces.program("own-tiny"), traces.own("tiny")
        assert stable_key(seen) == stable_key(other)
        assert op_counts(seen) == op_counts(other) and difference(op_counts(seen), op_counts(other)) == {}

    def test_different_programs_have_different_keys(self) -> None:
        names = [name.removeprefix("own-") for name in traces.own_texts() if name.startswith("own-")]
        keys = {name: stable_key(traces.own(name)) for name in names}
        assert len(names) >= 10 and len(set(keys.values())) == len(names), keys

    def test_a_longer_bucket_is_named_by_its_inputs(self) -> None:
        changes = difference(op_counts(traces.own("tiny")), op_counts(traces.own("tiny-longer")))
        assert list(changes.items())[:2] == [("parameter s32[4,136]", 3), ("parameter s32[4,72]", -3)]

    def test_source_lines_are_those_of_our_code(self) -> None:
        module = traces.program("own-tiny")
        sources = {i.source.rpartition(":")[0] for c in module.computations for i in c.instructions}
        assert any(source.endswith("pipeline/train/optimizer.py") for source in sources)
        assert all(re.fullmatch(r".*\.py:\d+", i.source) for i in module.instructions if i.opcode == "sqrt")
        assert not any(i.source for i in traces.own("tiny").instructions if i.opcode == "sqrt")
