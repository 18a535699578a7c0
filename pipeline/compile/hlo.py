"""Parse, compare and lint HLO text that was printed by torch_xla.

The format is defined by `HloModule::ToString` in XLA (github.com/openxla/xla, xla/hlo/ir/hlo_instruction.cc).
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
    """An operation in a graph."""

    name: str
    opcode: str
    shape: str
    """For example `f32[2,3]` or a tuple `(f32[2], s32[2])`. Dynamic dimensions are printed as a bound, like `<=7`."""
    first_shape: str
    """The shape of the first operand, or an empty string if there are no operands."""
    rest: str
    """The operands and attributes, which are printed after the opening parenthesis."""
    combiner: str = ""
    """The root operation of the computation that is applied (`to_apply`), if any."""

    @property
    def signature(self) -> str:
        """The operation and its shape, for example `dot f32[64,256]`."""
        return f"{self.opcode} {self.shape}"

    @property
    def source(self) -> str:
        """The source location as file:line, which requires tracing with XLA_HLO_DEBUG=1 and XLA_IR_DEBUG=1."""
        file, line = self.attribute("source_file"), self.attribute("source_line")
        return f"{file}:{line}" if file else ""

    def attribute(self, name: str) -> str:
        """Return the value of an attribute without quotes, or an empty string if it is missing."""
        match = re.search(rf'\b{name}=(?:"([^"]*)"|(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|[^\s,}}]+))', self.rest)
        return (match[1] or match[2] or "") if match else ""


def arrays(shape: str) -> list[tuple[str, list[str]]]:
    """Parse the shape of an array, or of each array in a tuple, as (dtype, dimensions) with dimensions as strings."""
    return [(dtype, [size for size in sizes.split(",") if size]) for dtype, sizes in _ARRAY.findall(shape)]


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of all computations. Parameters are skipped unless they are inputs of the graph."""
    roots: dict[str, str] = {}  # computations are printed before the ones that apply them
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
    """Count the operations in all computations of a graph, grouped by operation and result shape."""
    return dict(sorted(Counter(instruction.signature for instruction in read_instructions(text)).items()))


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the changes in operation counts, starting with graph inputs and followed by the largest changes."""
    changes = {op: after.get(op, 0) - before.get(op, 0) for op in before.keys() | after.keys()}
    order = sorted(changes, key=lambda op: (not op.startswith("parameter "), -abs(changes[op]), op))
    return {op: changes[op] for op in order if changes[op]}


def describe(changes: Mapping[str, int], limit: int = 8) -> str:
    """Format changes, for example as `-1 parameter f32[64,2], +3 dot f32[64,256] and 12 more`."""
    if not changes:
        return "a different order of operations or different constants"
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return ", ".join([f"{change:+d} {op}" for op, change in changes.items()][:limit]) + more


# The lint detects operations that are documented as rejected or miscompiled by neuronx-cc. The rules
# are based on the error code pages in the AWS Neuron documentation and on traces from torch-xla 2.9 on XLA:CPU.
# Codes such as EVRF001 are the ones that neuronx-cc prints (as NCC_EVRF001), whereas HLO0xx are our own, for
# operations that compile but return incorrect results.

Severity = Literal["error", "warning"]

INTEGERS = frozenset({"s2", "s4", "s8", "s16", "s32", "s64", "u2", "u4", "u8", "u16", "u32", "u64"})
DYNAMIC = frozenset({"set-dimension-size", "get-dimension-size", "dynamic-reshape"})
LARGEST_EXCHANGE_BYTES = 140_000_000
_FLOAT_EXACT = "only exact below 2^24"


@dataclass(frozen=True)
class Finding:
    """A problem at one source location, and how often it occurs there."""

    code: str
    message: str
    remedy: str
    severity: Severity = "error"
    instruction: str = ""
    """Name, operation and shape of the first instruction, or an empty string if the problem was found in counters."""
    source: str = ""
    """Source location (see Instruction.source)."""
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        source = f"\n  at: {self.source}" if self.source else ""
        instruction = f"\n  in: {self.instruction}" if self.instruction else ""
        return f"{self.severity} {self.code}: {self.message}{times}{instruction}{source}\n  remedy: {self.remedy}"


def _num_bits(dtype: str) -> int:
    """Return the size of a data type in bits, for example 8 for f8e5m2 and pred."""
    return int(match[0]) if (match := re.search(r"\d+", dtype)) else 8


def _check_shapes(op: Instruction) -> Iterator[Finding]:
    """Check the data types and dimensions of an operation."""
    shapes = [] if op.opcode == "tuple" else arrays(op.shape)
    dtypes = sorted({dtype for dtype, _ in shapes})
    for dtype in dtypes:
        if dtype in ("c64", "c128"):
            yield Finding("EVRF004", f"complex numbers ({dtype})", "store real and imaginary parts in two tensors")
        elif dtype.startswith("f8") and ("fnuz" in dtype or "b11" in dtype or dtype == "f8e4m3fn"):
            remedy = "use bf16, or f8e5m2 or f8e4m3 if the compiler supports them"
            yield Finding("EVRF005", f"an 8-bit float that trn1 and trn2 do not support ({dtype})", remedy)
        elif dtype.startswith("f4"):
            yield Finding("ESPP004", f"a 4-bit float ({dtype})", "use bf16")
        elif dtype == "f64":
            remedy = "use float32, and compare with tensors instead of Python floats"
            yield Finding("ESPP004", f"double precision in {op.opcode} (f64)", remedy, "warning")
    if op.opcode in DYNAMIC or any(size.startswith(("<=", "?")) for _, sizes in shapes for size in sizes):
        remedy = "use static shapes, for example with a mask instead of boolean indexing"
        yield Finding("EMOD025", f"a dynamic dimension in {op.opcode}", remedy)
    integers = ", ".join(dtype for dtype in dtypes if dtype in INTEGERS)
    if integers and op.opcode in ("dot", "all-reduce", "reduce-scatter"):
        remedy = f"use float32, or ensure that values are small ({_FLOAT_EXACT})"
        yield Finding("HLO004", f"{op.opcode} of {integers}", remedy, "warning")
    if op.opcode in ("all-gather", "reduce-scatter"):
        # neuronx-distributed observed NaN above this size (trainer/trainer.py: "Bucket cap > 140 MB").
        largest = max(
            math.prod(int(size) for size in sizes if size.isdecimal()) * _num_bits(dtype) // 8
            for dtype, sizes in (*shapes, *arrays(op.first_shape))
        )
        if largest > LARGEST_EXCHANGE_BYTES:
            remedy = "split the tensor, since collectives above 140 MB may return NaN"
            yield Finding("HLO007", f"{op.opcode} of {largest / 1e6:,.0f} MB", remedy, "warning")


def _check_operation(op: Instruction) -> Iterator[Finding]:
    """Check for operations that are documented as unsupported in general or for integers."""
    target = op.attribute("custom_call_target")
    keys = {dtype for dtype, _ in arrays(op.first_shape)} & INTEGERS
    if keys and (op.opcode in ("sort", "topk") or target in ("TopK", "AwsNeuronTopK")):
        remedy = f"convert the keys to float32 before sort or topk ({_FLOAT_EXACT})"
        yield Finding("EVRF013", f"{target or op.opcode} with {', '.join(sorted(keys))} keys", remedy)
    combined = {dtype for dtype, _ in arrays(op.shape)} & (INTEGERS | {"pred"})
    if op.opcode == "scatter" and combined and op.combiner != "parameter":  # a parameter means that values are replaced
        remedy = f"scatter float32 values and convert back ({_FLOAT_EXACT})"
        yield Finding("EVRF016", f"scatter that combines {', '.join(sorted(combined))}", remedy)
    if op.opcode in ("triangular-solve", "cholesky"):
        yield Finding("EVRF001", f"operator {op.opcode}", "compute it on the host, before or after training")
    if op.opcode == "rng-bit-generator" and op.attribute("algorithm") not in ("", "rng_default"):
        remedy = "unset XLA_RNG_BIT_GENERATOR, since only rng_default is implemented"
        yield Finding("EVRF006", f"random numbers generated by {op.attribute('algorithm')}", remedy)
    if op.opcode == "custom-call" and not target.startswith(("AwsNeuron", "NeuronBoundaryMarker", "Resize")):
        yield Finding("EVRF015", f"custom call {target}", "use regular operators, or compute it on the host")


HOST_READ = "HLO006"
"""Code that is reported if a value was read on the host."""


def lint(*texts: str) -> tuple[Finding, ...]:
    """Apply all rules to all instructions in the given HLO texts.

    Each problem is reported once per source line. Errors precede warnings.
    """
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
    """Report operators that ran on the host, based on the `aten::` counters in torch_xla.debug.metrics."""
    read = "aten::_local_scalar_dense"
    findings = [
        Finding(
            "HLO005",
            f"{name} ran on the host, which splits the graph and copies the result back to the device",
            "use a different operator, or move the computation to data preparation",
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
