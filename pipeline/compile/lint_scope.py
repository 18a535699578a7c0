"""What a rule of the lint may look at around an instruction: operands, called computations, where a value came from."""

import re
from dataclasses import dataclass
from typing import Literal

from pipeline.compile.hlo import Computation, Instruction, Module

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
