"""Parse, compare and lint HLO text as printed by torch_xla.

The format is that of XLA's `HloModule::ToString` (github.com/openxla/xla, xla/hlo/ir/hlo_instruction.cc).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

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
    """The shape of its first operand, empty if it has none."""
    rest: str
    """The text after the opening parenthesis: operands and attributes."""
    combiner: str = ""
    """The root operation of the computation that it applies (`to_apply`)."""

    @property
    def signature(self) -> str:
        """Operation and shape, for counting: `dot f32[64,256]`."""
        return f"{self.opcode} {self.shape}"

    @property
    def source(self) -> str:
        """Source location as file:line, empty unless traced with XLA_HLO_DEBUG=1 and XLA_IR_DEBUG=1."""
        file, line = self.attribute("source_file"), self.attribute("source_line")
        return f"{file}:{line}" if file else ""

    def attribute(self, name: str) -> str:
        """Return the value of an attribute without quotes, empty if it is missing."""
        match = re.search(rf'\b{name}=(?:"([^"]*)"|(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|[^\s,}}]+))', self.rest)
        return (match[1] or match[2] or "") if match else ""


def arrays(shape: str) -> list[tuple[str, list[str]]]:
    """Return (dtype, dimensions as printed) of an array, or of each array in a tuple."""
    return [(dtype, [size for size in sizes.split(",") if size]) for dtype, sizes in _ARRAY.findall(shape)]


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of all computations, without parameters that are not inputs of the graph."""
    roots: dict[str, str] = {}  # computations are printed before those that apply them
    shapes: dict[str, str] = {}
    computation, is_entry = "", False
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            if start := _COMPUTATION.match(line):
                is_entry, computation = bool(start[1]), start[2]
                shapes = {}
            continue
        is_root, name, printed, opcode, rest = match.groups()
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
    return dict(sorted(Counter(instruction.signature for instruction in read_instructions(text)).items()))


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the changes of operation counts, inputs first, then the largest changes."""
    changes = {op: after.get(op, 0) - before.get(op, 0) for op in before.keys() | after.keys()}
    order = sorted(changes, key=lambda op: (not op.startswith("parameter "), -abs(changes[op]), op))
    return {op: changes[op] for op in order if changes[op]}


def describe(changes: Mapping[str, int], limit: int = 8) -> str:
    """Format a difference: `-1 parameter f32[64,2], +3 dot f32[64,256] and 12 more`."""
    if not changes:
        return "the same operations in another order or with other constants"
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return ", ".join([f"{change:+d} {op}" for op, change in changes.items()][:limit]) + more


# The lint finds operations that neuronx-cc is documented to refuse or to compute wrongly. Sources: AWS Neuron
# documentation (error code pages of neuronx-cc), and traces by torch-xla 2.9 on XLA:CPU. Codes such as EVRF001 are
# printed by neuronx-cc (as NCC_EVRF001). HLO0xx are codes of this lint, for wrong results.

Severity = Literal["error", "warning"]

INTEGERS = frozenset({"s2", "s4", "s8", "s16", "s32", "s64", "u2", "u4", "u8", "u16", "u32", "u64"})
DYNAMIC = frozenset({"set-dimension-size", "get-dimension-size", "dynamic-reshape"})
LARGEST_EXCHANGE_BYTES = 140_000_000
_FLOAT_EXACT = "exact below 2^24 only"


@dataclass(frozen=True)
class Finding:
    """A problem and the number of its occurrences at one source location."""

    code: str
    message: str
    remedy: str
    severity: Severity = "error"
    instruction: str = ""
    """Name, operation and shape of the first instruction, empty for a counter."""
    source: str = ""
    """Source location, see Instruction.source."""
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        source = f"\n  at: {self.source}" if self.source else ""
        instruction = f"\n  in: {self.instruction}" if self.instruction else ""
        return f"{self.severity} {self.code}: {self.message}{times}{instruction}{source}\n  remedy: {self.remedy}"


def _check_shapes(op: Instruction) -> Iterator[Finding]:
    """Check the dtypes and dimensions of any operation."""
    shapes = [] if op.opcode == "tuple" else arrays(op.shape)
    dtypes = sorted({dtype for dtype, _ in shapes})
    for dtype in dtypes:
        if dtype in ("c64", "c128"):
            yield Finding("EVRF004", f"complex numbers ({dtype})", "keep real and imaginary parts in two tensors")
        elif dtype.startswith("f8") and ("fnuz" in dtype or "b11" in dtype or dtype == "f8e4m3fn"):
            remedy = "bf16, or f8e5m2 / f8e4m3 if the compiler supports them"
            yield Finding("EVRF005", f"an 8-bit float that trn1 and trn2 do not support ({dtype})", remedy)
        elif dtype.startswith("f4"):
            yield Finding("ESPP004", f"a 4-bit float ({dtype})", "bf16")
        elif dtype == "f64":
            remedy = "float32: compare with tensors, not with Python floats"
            yield Finding("ESPP004", f"double precision in {op.opcode} (f64)", remedy, "warning")
    if op.opcode in DYNAMIC or any(size.startswith(("<=", "?")) for _, sizes in shapes for size in sizes):
        remedy = "fixed shapes: a mask instead of indexing by condition"
        yield Finding("EMOD025", f"a dimension known only at run time, in {op.opcode}", remedy)
    integers = ", ".join(dtype for dtype in dtypes if dtype in INTEGERS)
    if integers and op.opcode in ("dot", "all-reduce", "reduce-scatter"):
        remedy = f"{_FLOAT_EXACT}: use float32, or keep the values small"
        yield Finding("HLO004", f"{op.opcode} of {integers}", remedy, "warning")
    if op.opcode in ("all-gather", "reduce-scatter"):
        # AWS's trainer got NaN above this size (neuronx-distributed, trainer/trainer.py: "Bucket cap > 140 MB").
        largest = max(
            math.prod(map(int, sizes)) * int("".join(filter(str.isdigit, dtype)) or 8) // 8
            for dtype, sizes in (*shapes, *arrays(op.first_shape))
        )
        if largest > LARGEST_EXCHANGE_BYTES:
            remedy = "split it, because collectives above 140 MB may return NaN"
            yield Finding("HLO007", f"{op.opcode} of {largest / 1e6:,.0f} MB", remedy, "warning")


def _check_operation(op: Instruction) -> Iterator[Finding]:
    """Check for operations that are documented as refused, or refused for integers."""
    target = op.attribute("custom_call_target")
    keys = {dtype for dtype, _ in arrays(op.first_shape)} & INTEGERS
    if keys and (op.opcode in ("sort", "topk") or target in ("TopK", "AwsNeuronTopK")):
        remedy = f"convert the keys to float32 ({_FLOAT_EXACT}) before sort or topk"
        yield Finding("EVRF013", f"{target or op.opcode} by keys of {', '.join(sorted(keys))}", remedy)
    combined = {dtype for dtype, _ in arrays(op.shape)} & (INTEGERS | {"pred"})
    if op.opcode == "scatter" and combined and op.combiner != "parameter":  # a parameter overwrites
        remedy = f"scatter float32 and convert back ({_FLOAT_EXACT})"
        yield Finding("EVRF016", f"scatter that combines {', '.join(sorted(combined))}", remedy)
    if op.opcode in ("triangular-solve", "cholesky"):
        yield Finding("EVRF001", f"operator {op.opcode}", "solve or factor on the host, before or after training")
    if op.opcode == "rng-bit-generator" and op.attribute("algorithm") not in ("", "rng_default"):
        remedy = "unset XLA_RNG_BIT_GENERATOR: only rng_default is implemented"
        yield Finding("EVRF006", f"random numbers by {op.attribute('algorithm')}", remedy)
    if op.opcode == "custom-call" and not target.startswith(("AwsNeuron", "NeuronBoundaryMarker", "Resize")):
        yield Finding("EVRF015", f"custom call {target}", "use plain operators, or compute it on the host")


HOST_READ = "HLO006"
"""Code of the finding that a value was read on the host."""


def lint(*texts: str) -> tuple[Finding, ...]:
    """Apply every rule to every instruction of HLO texts. Returns each problem once per source line, errors first."""
    findings: dict[tuple[str, str, str], Finding] = {}
    for text in texts:
        for op in read_instructions(text):
            for finding in (*_check_operation(op), *_check_shapes(op)):
                key = (finding.code, finding.message, op.source)
                new = replace(finding, instruction=f"{op.name} = {op.signature}", source=op.source, count=0)
                previous = findings.get(key, new)
                findings[key] = replace(previous, count=previous.count + 1)
    return tuple(sorted(findings.values(), key=lambda finding: finding.severity != "error"))


def lint_counters(counters: Mapping[str, int]) -> tuple[Finding, ...]:
    """Report operators that ran on the host, from the `aten::` counters of torch_xla.debug.metrics."""
    read = "aten::_local_scalar_dense"
    findings = [
        Finding(
            "HLO005",
            f"{name} ran on the host, which splits the graph and copies the result back to the device",
            "use another operator, or move the computation to data preparation",
            count=count,
        )
        for name, count in sorted(counters.items())
        if name.startswith("aten::") and name != read and count > 0
    ]
    if reads := counters.get(read, 0):
        message = "a value was read on the host (.item(), float(), bool() of a tensor), which splits the graph"
        findings.append(
            Finding(HOST_READ, message, "keep it on the device and read it every N steps", "warning", count=reads)
        )
    return tuple(findings)
