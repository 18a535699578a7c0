"""HLO text as torch_xla prints it: its instructions, how often each occurs, and how two graphs differ.

The text form is XLA's `HloModule::ToString` (github.com/openxla/xla, xla/hlo/ir/hlo_instruction.cc).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([^\s(={]+)\s*(?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?(\S+) = (.+?) ([a-z][\w\-]*)\((.*)")
_FIRST_OPERAND = re.compile(r"(?:[a-z]\w*\[[^\]]*\]\S*\s+)?%?([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_LAYOUT_OR_COMMENT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")


@dataclass(frozen=True)
class Instruction:
    """One operation of a graph."""

    name: str
    opcode: str
    shape: str
    """`f32[2,3]`, or a tuple `(f32[2], s32[2])`. A dynamic dimension is printed as its bound, `<=7`."""
    first_shape: str
    """The shape of its first operand; empty without one."""
    rest: str
    """The text after the opening parenthesis: operands and attributes."""
    combiner: str = ""
    """The operation at the root of the computation that it applies (`to_apply`)."""

    @property
    def signature(self) -> str:
        """The name under which it is counted: `dot f32[64,256]`."""
        return f"{self.opcode} {self.shape}"

    @property
    def source(self) -> str:
        """file:line of our code; empty if the trace was made without XLA_HLO_DEBUG=1 and XLA_IR_DEBUG=1."""
        file, line = self.attribute("source_file"), self.attribute("source_line")
        return f"{file}:{line}" if file else ""

    def attribute(self, name: str) -> str:
        """Return the value of an attribute, without quotes; empty if it is missing."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|[^\s,}}]+))', self.rest)
        return (found[1] or found[2] or "") if found else ""


def arrays(shape: str) -> list[tuple[str, list[str]]]:
    """Return (dtype, dimensions as printed) of an array, or of each array of a tuple."""
    return [(dtype, [size for size in sizes.split(",") if size]) for dtype, sizes in _ARRAY.findall(shape)]


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of all computations; of their parameters only the inputs of the graph."""
    roots: dict[str, str] = {}  # computations are printed before those that apply them
    shapes: dict[str, str] = {}
    computation, is_entry = "", False
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            if start := _COMPUTATION.match(line):
                is_entry, computation = bool(start[1]), start[2]
                shapes = {}
            continue
        is_root, name, printed, opcode, rest = found.groups()
        shape = shapes[name] = _LAYOUT_OR_COMMENT.sub("", printed)
        if is_root:
            roots[computation] = opcode
        if opcode == "parameter" and not is_entry:
            continue
        first = _FIRST_OPERAND.match(rest)
        applied = re.search(r"to_apply=%?([^\s,}]+)", rest)
        yield Instruction(
            name,
            opcode,
            shape,
            shapes.get(first[1], "") if first else "",
            rest,
            roots.get(applied[1], "") if applied else "",
        )


def op_counts(text: str) -> dict[str, int]:
    """Count operations by result shape, over all computations of a graph."""
    return dict(sorted(Counter(one.signature for one in read_instructions(text)).items()))


def difference(known: Mapping[str, int], seen: Mapping[str, int]) -> dict[str, int]:
    """Return what `seen` has more (+) or fewer (-) of than `known`: inputs first, then the largest changes."""
    changes = {op: seen.get(op, 0) - known.get(op, 0) for op in known.keys() | seen.keys()}
    order = sorted(changes, key=lambda op: (not op.startswith("parameter "), -abs(changes[op]), op))
    return {op: changes[op] for op in order if changes[op]}


def describe(changes: Mapping[str, int], limit: int = 8) -> str:
    """Format a difference: `-1 parameter f32[64,2], +3 dot f32[64,256] and 12 more`."""
    if not changes:
        return "the same operations, in another order or with other constants"
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return ", ".join([f"{change:+d} {op}" for op, change in changes.items()][:limit]) + more
