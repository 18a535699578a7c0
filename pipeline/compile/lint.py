"""The readiness lint: what neuronx-cc is documented to refuse or to compute wrongly, found in a traced graph.

Facts: AWS Neuron documentation (error code pages and release notes of neuronx-cc), and traces by torch-xla 2.9 on
XLA:CPU. A code such as EVRF001 is the one that neuronx-cc prints (as NCC_EVRF001). HLO0xx are ours, for what has no
code: results that are documented to be wrong, and operators that the published list does not name. What is documented
as refused is an error; what is dated, heuristic or wrong only for some values is a warning.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.compile.hlo import Computation, Instruction, Module

Severity = Literal["error", "warning"]


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


# Names on the page of EVRF015.
CUSTOM_CALLS = _words(
    "AwsNeuronErf AwsNeuronGelu AwsNeuronGeluApprxTanh AwsNeuronGeluBackward AwsNeuronSilu AwsNeuronSiluBackward",
    "AwsNeuronRmsNorm AwsNeuronSoftmax AwsNeuronSoftmaxBackward AwsNeuronCollectiveMatmul AwsNeuronIntMatmult",
    "AwsNeuronArgMax AwsNeuronArgMin AwsNeuronTopK AwsNeuronDropoutMaskV1 AwsNeuronCustomNativeKernel",
    "AwsNeuronCustomOp AwsNeuronDevicePrint AwsNeuronLNCShardingConstraint AwsNeuronTransferWithStaticRing",
    "ResizeNearest ResizeBilinear ResizeNearestGrad NeuronBoundaryMarker-Start NeuronBoundaryMarker-End",
    "AwsNeuronModuleMarkerStart-Forward AwsNeuronModuleMarkerEnd-Forward",
    "AwsNeuronModuleMarkerStart-Backward AwsNeuronModuleMarkerEnd-Backward",
)

# The last published operator list (release notes, "Supported Operators") in the words of HLO.
LISTED = _words(
    "abs add all-gather all-reduce and atan2 batch-norm-grad batch-norm-inference batch-norm-training bitcast-convert",
    "broadcast ceil clamp compare concatenate constant convert cosine custom-call divide dot dynamic-update-slice",
    "exponential floor gather get-tuple-element iota log maximum minimum multiply negate not pad parameter power",
    "reduce reshape reverse rng rng-bit-generator rsqrt scatter select select-and-scatter shift-right-logical sign",
    "sine slice sqrt subtract tanh transpose tuple",
)
REDUCERS = _words("maximum minimum add multiply")

# Absent from it, but used by AWS's own frameworks today, or refused only in special forms (error code pages).
USED_TODAY = _words(
    "all-to-all collective-permute convolution erf logistic opt-barrier reduce-scatter reduce-window",
    "shift-right-arithmetic sort topk while",
)

# Of the family of triangular-solve, which is refused by name on an error code page, or a transfer to the host.
DOUBTFUL = _words("cholesky fft infeed outfeed send send-done recv recv-done map")
DYNAMIC = _words("set-dimension-size get-dimension-size dynamic-reshape")

LARGEST_EXCHANGE_BYTES = 140_000_000

INTEGERS = _words("s2 s4 s8 s16 s32 s64 u2 u4 u8 u16 u32 u64")
FLOATS = _words("f16 bf16 f32 f64")
PASS_ON = _words("reshape broadcast convert transpose copy bitcast")
ROUNDING = _words("floor ceil round-nearest-even round-nearest-afz select sign abs multiply")


@dataclass(frozen=True)
class Scope:
    """Where an instruction stands: what a rule may look at around it."""

    module: Module
    computation: Computation

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        return self.operands(instruction)[index] if index < len(instruction.operands) else None

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.computation.by_name[name] for name in instruction.operands]

    def called(self, instruction: Instruction) -> list[Computation]:
        return [self.module.by_name[name] for name in instruction.called]


@dataclass(frozen=True)
class Finding:
    """One problem, however often it occurs at one place; none with an empty `message`."""

    code: str
    message: str
    remedy: str
    severity: Severity = "error"
    instruction: str = ""
    """Name, operation and shape of the first one; empty for what is no instruction."""
    source: str = ""
    """file:line; empty when the trace was made without XLA_HLO_DEBUG=1 XLA_IR_DEBUG=1."""
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        where = f"\n  at: {self.source}" if self.source else ""
        what = f"\n  in: {self.instruction}" if self.instruction else ""
        return f"{self.severity} {self.code}: {self.message}{times}{what}{where}\n  remedy: {self.remedy}"


def _numbers(text: str) -> list[int]:
    """The integers in an attribute or a literal."""
    return [int(number) for number in re.findall(r"-?\d+", text)]


def _integer_keys(one: Instruction, scope: Scope) -> str:
    """Keys of a sort are the operands its comparator looks at: parameters 2k and 2k + 1 belong to operand k."""
    keys = [] if one.opcode == "sort" else [scope.operand(one, 0)]
    for comparator in scope.called(one) if one.opcode == "sort" else ():
        used, pending = set[str](), [comparator.root]
        while pending:
            used.add(name := pending.pop())
            pending += [operand for operand in comparator.by_name[name].operands if operand not in used]
        numbers = {int(p.literal) // 2 for p in comparator.parameters if p.name in used}
        keys += [scope.operand(one, number) for number in sorted(numbers)]
    dtypes = {key.dtype for key in keys if key is not None} & INTEGERS
    return f"{one.opcode} by keys of {', '.join(sorted(dtypes))}" if dtypes else ""


def _integer_scatter(one: Instruction, scope: Scope) -> str:
    """A scatter whose combiner is not plain overwriting (its second half of parameters returned as they are)."""
    dtypes = {shape.dtype for shape in one.shape.arrays()} & (INTEGERS | {"pred"})
    for combiner in scope.called(one) if dtypes else ():
        root = combiner.by_name[combiner.root]
        returned = [root] if root.opcode != "tuple" else [combiner.by_name[name] for name in root.operands]
        half = len(combiner.parameters) // 2
        if not all(value.opcode == "parameter" and int(value.literal) >= half for value in returned):
            return f"scatter that combines {', '.join(sorted(dtypes))}"
    return ""


def _index_out_of_range(one: Instruction, scope: Scope) -> str:
    """Indices that are counted up (iota) or constant, and pass the end of the table."""
    mapped = _numbers(one.attribute("start_index_map" if one.opcode == "gather" else "scatter_dims_to_operand_dims"))
    table, indices = scope.operand(one, 0), scope.operand(one, 1)
    if len(mapped) != 1 or table is None or indices is None or mapped[0] >= len(table.dims):
        return ""
    rows = table.dims[mapped[0]]
    sizes = _numbers(one.attribute("slice_sizes"))
    index = _largest(indices, scope)
    last = rows - (sizes[mapped[0]] if sizes else 1)
    return f"{one.opcode} at index {index} of {rows} rows" if index is not None and index > last else ""


def _largest(one: Instruction, scope: Scope) -> int | None:
    """The largest value of an integer array built from iota and constants; None when it depends on data."""
    operands = scope.operands(one)
    match one.opcode:
        case "iota":
            return one.dims[int(one.attribute("iota_dimension") or 0)] - 1
        case "constant":
            found = _numbers(one.literal)
            return max(found) if found and one.dtype in INTEGERS else None
        case "add" | "multiply" if one.dtype in INTEGERS:
            first, second = (_largest(operand, scope) for operand in operands)
            if first is None or second is None or min(first, second) < 0:
                return None
            return first + second if one.opcode == "add" else first * second
        case "select" if operands[2].name in operands[1].operands:  # i < 0 ? i + rows : i
            return _largest(operands[2], scope)
        case opcode if opcode in PASS_ON:
            return _largest(operands[0], scope)
    return None


def _division_through_float(one: Instruction, scope: Scope) -> str:
    """convert(integer) -> divide -> floor or the like -> convert back. Reported at the way back."""
    pending, seen = scope.operands(one) if one.dtype in INTEGERS else [], set[str]()
    while pending:
        found = pending.pop()
        if found.name in seen or found.dtype not in FLOATS:
            continue
        seen.add(found.name)
        if found.opcode in ("divide", "remainder"):
            dtypes = {dtype for operand in scope.operands(found) if (dtype := _integer_before(operand, scope))}
            if dtypes:
                return f"integer {found.opcode} of {', '.join(sorted(dtypes))} computed in {found.dtype}"
        elif found.opcode in ROUNDING | PASS_ON:
            pending += scope.operands(found)
    return ""


def _integer_before(one: Instruction, scope: Scope) -> str:
    """The integer dtype a float was converted from; empty when it was not."""
    found: Instruction | None = one
    while found is not None and found.opcode in PASS_ON | {"abs"}:
        before = scope.operand(found, 0)
        if found.opcode == "convert" and before is not None and before.dtype in INTEGERS:
            return before.dtype
        found = before
    return ""


def _unlisted_operator(one: Instruction, scope: Scope) -> str:
    if one.opcode in ("dynamic-slice", "dynamic-update-slice"):
        starts = scope.operands(one)[1 if one.opcode == "dynamic-slice" else 2 :]
        return "" if all(start.opcode == "constant" for start in starts) else f"{one.opcode} at a computed index"
    if one.opcode == "reduce" and len(one.operands) == 2:
        odd = {reducer.by_name[reducer.root].opcode for reducer in scope.called(one)} - REDUCERS
        return f"reduce by {', '.join(sorted(odd))}" if odd else ""
    return (
        ""
        if one.opcode in LISTED | USED_TODAY | DOUBTFUL | DYNAMIC | {"triangular-solve"}
        else f"operator {one.opcode}"
    )


def _refused(one: Instruction, scope: Scope) -> Iterator[Finding]:
    """Operators that are documented as refused, or refused in this form."""
    above_one = {key for key, sizes in one.window.items() if any(size > 1 for size in sizes)}
    target = one.attribute("custom_call_target").strip('"')
    if one.opcode in ("topk", "sort") or target in ("TopK", "AwsNeuronTopK"):
        remedy = "convert the keys to float32 (exact below 2^24) before sort or topk"
        yield Finding("EVRF013", _integer_keys(one, scope), remedy)
    if one.opcode in ("gather", "scatter"):
        remedy = "a larger table, such as model.max_positions, or shorter buckets"
        yield Finding("EVRF031", _index_out_of_range(one, scope), remedy)
    match one.opcode:
        case "triangular-solve":
            yield Finding("EVRF001", f"operator {one.opcode}", "solve or factor on the host, before or after training")
        case "rng-bit-generator" if (algorithm := one.attribute("algorithm")) not in ("", "rng_default"):
            remedy = "unset XLA_RNG_BIT_GENERATOR: only rng_default is implemented"
            yield Finding("EVRF006", f"random numbers by {algorithm}", remedy)
        case "convolution":
            if {"lhs_dilate", "rhs_dilate"} <= above_one:
                remedy = "no dilation in a transposed convolution"
                yield Finding("EVRF010", "convolution that dilates both sides", remedy)
            if {"lhs_dilate", "stride"} <= above_one:
                yield Finding("EVRF011", "convolution with a stride and a dilated input", "stride 1, then a slice")
        case "custom-call" if target not in CUSTOM_CALLS:
            yield Finding("EVRF015", f"custom call {target}", "write it with plain operators, or on the host")
        case "scatter":
            remedy = "scatter float32 and convert back (exact below 2^24)"
            yield Finding("EVRF016", _integer_scatter(one, scope), remedy)
        case "reduce-window":
            if "lhs_dilate" in above_one:
                yield Finding("EVRF017", "reduce-window over a dilated input", "pad with explicit values first")
            if "rhs_dilate" in above_one:
                remedy = "pooling with dilation 1, or slices with a stride"
                yield Finding("EVRF018", "reduce-window with a dilated window", remedy)
            if (num := len(one.operands)) > 2:
                yield Finding("EVRF019", f"reduce-window over {num // 2} inputs", "max pooling without indices")
        case "shift-right-arithmetic" if one.dtype not in ("s32", "u32"):
            message = f"shift-right-arithmetic of {one.dtype}"
            yield Finding("EVRF022", message, "convert to int32 before the shift")
        case "constant" if one.dtype == "u64":
            if wide := [number for number in _numbers(one.literal) if number >= 2**32]:
                remedy = "keep constants below 2^32, or build them from two halves"
                yield Finding("ESFH002", f"u64 constant {wide[0]}", remedy)


def _refused_types(one: Instruction) -> Iterator[Finding]:
    """Dtypes and dimensions, of any operator."""
    dtypes = [] if one.opcode == "tuple" else sorted({shape.dtype for shape in one.shape.arrays()})
    if found := [dtype for dtype in dtypes if dtype in ("c64", "c128")]:
        message = f"complex numbers ({', '.join(found)})"
        yield Finding("EVRF004", message, "keep real and imaginary part in two tensors")
    # fnuz and b11 flavours anywhere; f8e4m3fn on trn1 and trn2, which are all we aim at.
    eights = [dtype for dtype in dtypes if dtype.startswith("f8")]
    if found := [dtype for dtype in eights if "fnuz" in dtype or "b11" in dtype or dtype == "f8e4m3fn"]:
        message = f"an 8-bit float that trn1 and trn2 do not have ({', '.join(found)})"
        yield Finding("EVRF005", message, "bf16, or f8e5m2 / f8e4m3 where the compiler names them")
    if found := [dtype for dtype in dtypes if dtype.startswith("f4")]:
        yield Finding("ESPP004", f"a 4-bit float ({', '.join(found)})", "bf16")
    if "f64" in dtypes:
        remedy = "float32: compare with tensors, not with Python floats"
        yield Finding("ESPP004", f"double precision in {one.opcode} (f64)", remedy, "warning")
    is_dynamic = one.opcode in DYNAMIC
    if is_dynamic or any(shape.dynamic for shape in one.shape.arrays()):
        message = f"operator {one.opcode}" if is_dynamic else "a dimension known only at run time"
        yield Finding("EMOD025", message, "fixed shapes: a mask instead of indexing by condition")


def _doubtful(one: Instruction, scope: Scope) -> Iterator[Finding]:
    """Operators that may be refused, or computed wrongly for some values."""
    distribution = one.attribute("distribution")
    if one.opcode in DOUBTFUL or (one.opcode == "rng" and distribution != "rng_uniform"):
        message = f"operator rng with {distribution}" if one.opcode == "rng" else f"operator {one.opcode}"
        remedy = "compile this graph alone on a Trainium host before relying on it"
        yield Finding("EVRF001", message, remedy, "warning")
    remedy = "not in the published list: compile it on a Trainium host first"
    yield Finding("HLO001", _unlisted_operator(one, scope), remedy, "warning")
    if one.opcode == "convert":
        remedy = "exact below 2^24 only: shift, multiply, or divide on the host"
        yield Finding("HLO002", _division_through_float(one, scope), remedy, "warning")
    if one.opcode == "constant" and one.dtype == "s64":
        ends = (-(2**63), 2**63 - 1)  # of the range, which reductions start from
        if wide := [n for n in _numbers(one.literal) if not -(2**31) <= n < 2**31 and n not in ends]:
            remedy = "int64 is cut to 32 bits: keep constants below 2^31"
            yield Finding("HLO003", f"s64 constant {wide[0]}", remedy, "warning")
    dtypes = sorted({shape.dtype for shape in one.shape.arrays()} & INTEGERS)
    if one.opcode in ("dot", "all-reduce", "reduce-scatter") and dtypes:
        remedy = "exact below 2^24 only: use float32, or keep the values small"
        yield Finding("HLO004", f"{one.opcode} of {', '.join(dtypes)}", remedy, "warning")
    if one.opcode in ("all-gather", "reduce-scatter"):
        # Above it AWS's own trainer met NaN (neuronx-distributed, trainer/trainer.py: "Bucket cap > 140 MB").
        parts = [part for whole in (one, *scope.operands(one)) for part in whole.shape.arrays()]
        num_bytes = max(math.prod(part.dims) * sum(_numbers(part.dtype)[:1]) for part in parts) / 8
        if num_bytes > LARGEST_EXCHANGE_BYTES:
            remedy = "NaN was seen above 140 MB: exchange it in parts"
            yield Finding("HLO007", f"{one.opcode} of {num_bytes / 1e6:,.0f} MB", remedy, "warning")


HOST_READ = "HLO006"
"""Code of a value that was read on the host."""


def lint(*modules: Module) -> tuple[Finding, ...]:
    """Every rule over every instruction. Errors first, each problem once for a place in our code."""
    found: dict[tuple[str, str, str], Finding] = {}
    for module in modules:
        for computation in module.computations:
            scope = Scope(module, computation)
            for one in computation.instructions:
                where = f"{one.name} = {one.signature}"
                for finding in (*_refused(one, scope), *_refused_types(one), *_doubtful(one, scope)):
                    if finding.message:
                        key = (finding.code, finding.message, one.source)
                        before = found.get(key, replace(finding, instruction=where, source=one.source, count=0))
                        found[key] = replace(before, count=before.count + 1)
    return tuple(sorted(found.values(), key=lambda finding: finding.severity != "error"))


def lint_counters(counters: Mapping[str, int]) -> tuple[Finding, ...]:
    """Operators that ran on the host, from the `aten::` counters of the traced program (torch_xla.debug.metrics)."""
    read = "aten::_local_scalar_dense"
    findings = [
        Finding(
            "HLO005",
            f"{name} ran on the host: the graph is cut there, and its result goes back to the device",
            "another operator, or move this part into the data preparation",
            count=count,
        )
        for name, count in sorted(counters.items())
        if name.startswith("aten::") and name != read and count > 0
    ]
    if reads := counters.get(read, 0):
        message = "a value was read on the host (.item(), float(), bool() of a tensor): the graph is cut there"
        findings.append(
            Finding(HOST_READ, message, "keep it on the device and read it every N steps", "warning", count=reads)
        )
    return tuple(findings)
