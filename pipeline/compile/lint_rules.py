"""The rules of the readiness lint, one function each. Facts: AWS Neuron documentation (error code pages and
release notes of neuronx-cc), and traces by torch-xla 2.9 on XLA:CPU.

A code such as EVRF001 is the one that neuronx-cc prints (as NCC_EVRF001). HLO0xx are ours, for what has no code:
results that are documented to be wrong, and operators that the published list does not name. What is documented as
refused is an error; what is dated, heuristic or wrong only for some values is a warning.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipeline.compile.hlo import Computation, Instruction, Module

# What the lint knows of operators and custom calls, from the error code pages and release notes of neuronx-cc.


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
    "all-to-all collective-permute convolution erf logistic reduce-scatter reduce-window shift-right-arithmetic sort",
    "topk while",
)

# Refused by name on an error code page; and of the same family, or a transfer to the host, but not named there.
REFUSED = _words("triangular-solve")
DOUBTFUL = _words("cholesky fft infeed outfeed send send-done recv recv-done map")
DYNAMIC = _words("set-dimension-size get-dimension-size dynamic-reshape")


# What a rule of the lint may look at around an instruction: operands, called computations, where a value came from.

INTEGERS = frozenset({"s2", "s4", "s8", "s16", "s32", "s64", "u2", "u4", "u8", "u16", "u32", "u64"})
FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
PASS_ON = frozenset({"reshape", "broadcast", "convert", "transpose", "copy", "bitcast"})


@dataclass(frozen=True)
class Target:
    """What the graph is checked for."""

    stack: Literal["xla", "native"] = "xla"
    """PyTorch/XLA (SDK up to 2.29), or TorchNeuron, which refuses f64."""
    max_instructions: int | None = None
    """A ceiling found by experience; neuronx-cc has ceilings (EVRF007, EXTP004) but publishes no number."""


@dataclass(frozen=True)
class Scope:
    """Where an instruction stands."""

    module: Module
    computation: Computation
    target: Target

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        if index >= len(instruction.operands):
            return None
        return self.computation.by_name[instruction.operands[index]]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.computation.by_name[name] for name in instruction.operands]

    def called(self, instruction: Instruction) -> list[Computation]:
        return [self.module.by_name[name] for name in instruction.called]


def numbers(text: str) -> list[int]:
    """The integers in an attribute or a literal."""
    return [int(number) for number in re.findall(r"-?\d+", text)]


def needed(computation: Computation, name: str) -> set[str]:
    """Names of all instructions that `name` depends on, itself included."""
    found, pending = set[str](), [name]
    while pending:
        top = pending.pop()
        if top not in found:
            found.add(top)
            pending += computation.by_name[top].operands
    return found


def returns_updates(combiner: Computation) -> bool:
    """True when the combiner of a scatter hands on the new values, its second half of parameters, and nothing else."""
    root = combiner.by_name[combiner.root]
    returned = [root] if root.opcode != "tuple" else [combiner.by_name[name] for name in root.operands]
    half = len(combiner.parameters) // 2
    return all(value.opcode == "parameter" and int(value.literal) >= half for value in returned)


def integer_before(instruction: Instruction, scope: Scope) -> str:
    """The integer dtype a float was converted from; empty when it was not."""
    found: Instruction | None = instruction
    while found is not None and found.opcode in PASS_ON | {"abs"}:
        before = scope.operand(found, 0)
        if found.opcode == "convert" and before is not None and before.dtype in INTEGERS:
            return before.dtype
        found = before
    return ""


def largest(instruction: Instruction, scope: Scope) -> int | None:
    """The largest value of an integer array built from iota and constants; None when it depends on data."""
    operands = scope.operands(instruction)
    match instruction.opcode:
        case "iota":
            return instruction.dims[int(instruction.attribute("iota_dimension") or 0)] - 1
        case "constant":
            found = numbers(instruction.literal)
            return max(found) if found and instruction.dtype in INTEGERS else None
        case "add" | "multiply" if instruction.dtype in INTEGERS:
            first, second = (largest(operand, scope) for operand in operands)
            if first is None or second is None or min(first, second) < 0:
                return None
            return first + second if instruction.opcode == "add" else first * second
        case "select" if operands[2].name in operands[1].operands:  # i < 0 ? i + rows : i
            return largest(operands[2], scope)
        case opcode if opcode in PASS_ON:
            return largest(operands[0], scope)
    return None


Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Rule:
    """`check` says what is wrong with an instruction; an empty text when nothing is."""

    code: str
    severity: Severity
    check: Callable[[Instruction, Scope], str]
    remedy: str


_ROUNDING = frozenset({"floor", "ceil", "round-nearest-even", "round-nearest-afz", "select", "sign", "abs", "multiply"})


def refused_operator(instruction: Instruction, scope: Scope) -> str:
    return f"operator {instruction.opcode}" if instruction.opcode in REFUSED else ""


def doubtful_operator(instruction: Instruction, scope: Scope) -> str:
    """Not named as refused, but of the same family, or a transfer to the host."""
    if instruction.opcode == "rng" and instruction.attribute("distribution") != "rng_uniform":
        return f"operator rng with {instruction.attribute('distribution')}"
    return f"operator {instruction.opcode}" if instruction.opcode in DOUBTFUL else ""


def complex_numbers(instruction: Instruction, scope: Scope) -> str:
    return _of_dtype(instruction, lambda dtype: dtype in ("c64", "c128"), "complex numbers")


def unsupported_f8(instruction: Instruction, scope: Scope) -> str:
    """fnuz and b11 flavours anywhere; f8e4m3fn on trn1 and trn2, which are all we aim at."""
    return _of_dtype(
        instruction,
        lambda dtype: dtype.startswith("f8") and ("fnuz" in dtype or "b11" in dtype or dtype == "f8e4m3fn"),
        "an 8-bit float that trn1 and trn2 do not have",
    )


def four_bit_float(instruction: Instruction, scope: Scope) -> str:
    return _of_dtype(instruction, lambda dtype: dtype.startswith("f4"), "a 4-bit float")


def double_tolerated(instruction: Instruction, scope: Scope) -> str:
    return _double(instruction) if scope.target.stack == "xla" else ""


def double_refused(instruction: Instruction, scope: Scope) -> str:
    return _double(instruction) if scope.target.stack == "native" else ""


def rng_algorithm(instruction: Instruction, scope: Scope) -> str:
    algorithm = instruction.attribute("algorithm")
    if instruction.opcode != "rng-bit-generator" or algorithm in ("", "rng_default"):
        return ""
    return f"random numbers by {algorithm}"


def convolution_dilations(instruction: Instruction, scope: Scope) -> str:
    if instruction.opcode != "convolution" or not (_above_one(instruction, "lhs_dilate")):
        return ""
    return "convolution that dilates both sides" if _above_one(instruction, "rhs_dilate") else ""


def strided_dilated_convolution(instruction: Instruction, scope: Scope) -> str:
    if instruction.opcode != "convolution" or not (_above_one(instruction, "lhs_dilate")):
        return ""
    return "convolution with a stride and a dilated input" if _above_one(instruction, "stride") else ""


def integer_keys(instruction: Instruction, scope: Scope) -> str:
    """Keys of a sort are the operands its comparator looks at: parameters 2k and 2k + 1 belong to operand k."""
    keys: list[Instruction | None] = []
    target = instruction.attribute("custom_call_target").strip('"')
    if instruction.opcode == "topk" or (instruction.opcode == "custom-call" and target in ("TopK", "AwsNeuronTopK")):
        keys = [scope.operand(instruction, 0)]
    elif instruction.opcode == "sort":
        for comparator in scope.called(instruction):
            used = needed(comparator, comparator.root)
            numbers = {int(p.literal) // 2 for p in comparator.parameters if p.name in used}
            keys += [scope.operand(instruction, number) for number in sorted(numbers)]
    dtypes = {key.dtype for key in keys if key is not None} & INTEGERS
    return f"{instruction.opcode} by keys of {', '.join(sorted(dtypes))}" if dtypes else ""


def unknown_custom_call(instruction: Instruction, scope: Scope) -> str:
    target = instruction.attribute("custom_call_target").strip('"')
    return f"custom call {target}" if instruction.opcode == "custom-call" and target not in CUSTOM_CALLS else ""


def integer_scatter(instruction: Instruction, scope: Scope) -> str:
    """A scatter whose combiner is not plain overwriting (its second half of parameters returned as they are)."""
    if instruction.opcode != "scatter":
        return ""
    dtypes = {shape.dtype for shape in instruction.shape.arrays()} & (INTEGERS | {"pred"})
    if not dtypes or all(returns_updates(combiner) for combiner in scope.called(instruction)):
        return ""
    return f"scatter that combines {', '.join(sorted(dtypes))}"


def window_base_dilation(instruction: Instruction, scope: Scope) -> str:
    dilated = instruction.opcode == "reduce-window" and _above_one(instruction, "lhs_dilate")
    return "reduce-window over a dilated input" if dilated else ""


def window_dilation(instruction: Instruction, scope: Scope) -> str:
    dilated = instruction.opcode == "reduce-window" and _above_one(instruction, "rhs_dilate")
    return "reduce-window with a dilated window" if dilated else ""


def window_inputs(instruction: Instruction, scope: Scope) -> str:
    several = instruction.opcode == "reduce-window" and len(instruction.operands) > 2
    return f"reduce-window over {len(instruction.operands) // 2} inputs" if several else ""


def arithmetic_shift(instruction: Instruction, scope: Scope) -> str:
    bad = instruction.opcode == "shift-right-arithmetic" and instruction.dtype not in ("s32", "u32")
    return f"shift-right-arithmetic of {instruction.dtype}" if bad else ""


def index_out_of_range(instruction: Instruction, scope: Scope) -> str:
    """Indices that are counted up (iota) or constant, and pass the end of the table."""
    key = {"gather": "start_index_map", "scatter": "scatter_dims_to_operand_dims"}.get(instruction.opcode, "")
    mapped = numbers(instruction.attribute(key)) if key else []
    table, indices = scope.operand(instruction, 0), scope.operand(instruction, 1)
    if len(mapped) != 1 or table is None or indices is None or mapped[0] >= len(table.dims):
        return ""
    rows = table.dims[mapped[0]]
    sizes = numbers(instruction.attribute("slice_sizes"))
    index = largest(indices, scope)
    last = rows - (sizes[mapped[0]] if sizes else 1)
    return f"{instruction.opcode} at index {index} of {rows} rows" if index is not None and index > last else ""


def wide_unsigned_constant(instruction: Instruction, scope: Scope) -> str:
    if instruction.opcode != "constant" or instruction.dtype != "u64":
        return ""
    wide = [number for number in numbers(instruction.literal) if number >= 2**32]
    return f"u64 constant {wide[0]}" if wide else ""


def wide_signed_constant(instruction: Instruction, scope: Scope) -> str:
    """The two ends of the range are what reductions start from, and are left out."""
    if instruction.opcode != "constant" or instruction.dtype != "s64":
        return ""
    ends = (-(2**63), 2**63 - 1)
    wide = [n for n in numbers(instruction.literal) if not -(2**31) <= n < 2**31 and n not in ends]
    return f"s64 constant {wide[0]}" if wide else ""


def dynamic_dimension(instruction: Instruction, scope: Scope) -> str:
    if instruction.opcode in DYNAMIC:
        return f"operator {instruction.opcode}"
    return "a dimension known only at run time" if any(s.dynamic for s in instruction.shape.arrays()) else ""


def division_through_float(instruction: Instruction, scope: Scope) -> str:
    """convert(integer) -> divide -> floor or the like -> convert back. Reported at the way back."""
    if instruction.opcode != "convert" or instruction.dtype not in INTEGERS:
        return ""
    pending, seen = list(scope.operands(instruction)), set[str]()
    while pending:
        found = pending.pop()
        if found.name in seen or found.dtype not in FLOATS:
            continue
        seen.add(found.name)
        if found.opcode in ("divide", "remainder"):
            dtypes = {dtype for operand in scope.operands(found) if (dtype := integer_before(operand, scope))}
            if dtypes:
                return f"integer {found.opcode} of {', '.join(sorted(dtypes))} computed in {found.dtype}"
        elif found.opcode in _ROUNDING | PASS_ON:
            pending += scope.operands(found)
    return ""


def integers_in_fp32(instruction: Instruction, scope: Scope) -> str:
    exact = instruction.opcode not in ("dot", "all-reduce", "reduce-scatter")
    dtypes = set() if exact else {shape.dtype for shape in instruction.shape.arrays()} & INTEGERS
    return f"{instruction.opcode} of {', '.join(sorted(dtypes))}" if dtypes else ""


def unlisted_operator(instruction: Instruction, scope: Scope) -> str:
    opcode = instruction.opcode
    if opcode in ("dynamic-slice", "dynamic-update-slice"):
        starts = scope.operands(instruction)[1 if opcode == "dynamic-slice" else 2 :]
        return "" if all(start.opcode == "constant" for start in starts) else f"{opcode} at a computed index"
    if opcode == "reduce" and len(instruction.operands) == 2:
        how = {reducer.by_name[reducer.root].opcode for reducer in scope.called(instruction)}
        odd = how - REDUCERS
        return f"reduce by {', '.join(sorted(odd))}" if odd else ""
    return "" if opcode in LISTED | USED_TODAY | REFUSED | DOUBTFUL | DYNAMIC else f"operator {opcode}"


RULES: tuple[Rule, ...] = (
    Rule("EVRF001", "error", refused_operator, "solve or factor on the host, before or after training"),
    Rule("EVRF001", "warning", doubtful_operator, "compile this graph alone on a Trainium host before relying on it"),
    Rule("EVRF004", "error", complex_numbers, "keep real and imaginary part in two tensors"),
    Rule("EVRF005", "error", unsupported_f8, "bf16, or f8e5m2 / f8e4m3 where the compiler names them"),
    Rule("EVRF006", "error", rng_algorithm, "unset XLA_RNG_BIT_GENERATOR: only rng_default is implemented"),
    Rule("EVRF010", "error", convolution_dilations, "no dilation in a transposed convolution"),
    Rule("EVRF011", "error", strided_dilated_convolution, "stride 1, then a slice"),
    Rule("EVRF013", "error", integer_keys, "convert the keys to float32 (exact below 2^24) before sort or topk"),
    Rule("EVRF015", "error", unknown_custom_call, "write it with plain operators, or on the host"),
    Rule("EVRF016", "error", integer_scatter, "scatter float32 and convert back (exact below 2^24)"),
    Rule("EVRF017", "error", window_base_dilation, "pad with explicit values first"),
    Rule("EVRF018", "error", window_dilation, "pooling with dilation 1, or slices with a stride"),
    Rule("EVRF019", "error", window_inputs, "max pooling without indices"),
    Rule("EVRF022", "error", arithmetic_shift, "convert to int32 before the shift"),
    Rule("EVRF031", "error", index_out_of_range, "a larger table, such as model.max_positions, or shorter buckets"),
    Rule("ESFH002", "error", wide_unsigned_constant, "keep constants below 2^32, or build them from two halves"),
    Rule("ESPP004", "error", four_bit_float, "bf16"),
    Rule("ESPP004", "error", double_refused, "float32: compare with tensors, not with Python floats"),
    Rule("ESPP004", "warning", double_tolerated, "float32: compare with tensors, not with Python floats"),
    Rule("EMOD025", "error", dynamic_dimension, "fixed shapes: a mask instead of indexing by condition"),
    Rule("HLO001", "warning", unlisted_operator, "not in the published list: compile it on a Trainium host first"),
    Rule("HLO002", "warning", division_through_float, "exact below 2^24 only: shift, multiply, or divide on the host"),
    Rule("HLO003", "warning", wide_signed_constant, "int64 is cut to 32 bits: keep constants below 2^31"),
    Rule("HLO004", "warning", integers_in_fp32, "exact below 2^24 only: use float32, or keep the values small"),
)


def _of_dtype(instruction: Instruction, bad: Callable[[str], bool], what: str) -> str:
    dtypes = sorted({shape.dtype for shape in instruction.shape.arrays() if bad(shape.dtype)})
    return f"{what} ({', '.join(dtypes)})" if dtypes and instruction.opcode != "tuple" else ""


def _double(instruction: Instruction) -> str:
    return _of_dtype(instruction, lambda dtype: dtype == "f64", f"double precision in {instruction.opcode}")


def _above_one(instruction: Instruction, key: str) -> bool:
    return any(size > 1 for size in instruction.window.get(key, ()))
