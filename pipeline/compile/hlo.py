"""HLO text as torch_xla gives it, read into small values: the key of a graph, its operations, how two graphs differ.

The text form is XLA's `HloModule::ToString` (github.com/openxla/xla, xla/hlo/ir/hlo_instruction.cc); both the long form
(`%name`, operand shapes) and the short one are read.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import Json, fingerprint

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_QUOTED_OR_COMMENT = re.compile(rf"{_QUOTED}|/\*.*?\*/")
_TOKEN = re.compile(rf"{_QUOTED}|[()\[\]{{}},]")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([^\s(={]+)\s*(?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"(ROOT\s+)?%?([^\s=]+)\s*=\s*")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{[^{}]*\})?")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_TABLES = {"FileNames", "FunctionNames", "FileLocations", "StackFrames"}
# Attributes that name computations.
CALLS = frozenset(
    {"to_apply", "calls", "called_computations", "condition", "body", "branch_computations", "true_computation"}
    | {"false_computation", "select", "scatter", "comparator"}
)
_NO_PART_OF_THE_PROGRAM = frozenset({"metadata", "origin", "original_value", "channel_id"})


@dataclass(frozen=True)
class Shape:
    """`f32[2,3]`: dtype "f32", dims (2, 3). A tuple has dtype "tuple" and `parts`; a dynamic dimension its bound."""

    dtype: str
    dims: tuple[int, ...] = ()
    dynamic: bool = False
    parts: tuple["Shape", ...] = ()

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]{' dynamic' if self.dynamic else ''}"

    def arrays(self) -> Iterator["Shape"]:
        """The arrays in it: itself, or the leaves of the tuple."""
        if self.dtype != "tuple":
            yield self
        for part in self.parts:
            yield from part.arrays()


@dataclass(frozen=True)
class Instruction:
    """One operation of a computation."""

    name: str
    opcode: str
    shape: Shape
    shape_text: str
    """As printed, with the layout."""
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    literal: str
    """What stands in the parentheses of a constant (`1.5`, `{...}` when XLA left it out) or parameter (its number)."""
    attributes: tuple[tuple[str, str], ...]
    """`key=value` pairs as printed, without metadata."""
    source: str = ""
    """file:line of our code, when the trace had XLA_HLO_DEBUG=1 and XLA_IR_DEBUG=1."""

    @property
    def dtype(self) -> str:
        return self.shape.dtype

    @property
    def dims(self) -> tuple[int, ...]:
        return self.shape.dims

    @property
    def signature(self) -> str:
        """What is counted: `dot f32[64,256]`."""
        return f"{self.opcode} {self.shape}"

    def attribute(self, key: str) -> str:
        """The value as printed; empty when there is none."""
        return next((value for name, value in self.attributes if name == key), "")

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls, in the printed order."""
        values = (value for key, value in self.attributes if key in CALLS)
        return tuple(name.lstrip("%") for value in values for name in re.findall(r"[^\s,{}]+", value))

    @cached_property
    def window(self) -> dict[str, tuple[int, ...]]:
        """Sizes, strides and dilations of a convolution or reduce-window: `{"stride": (2, 2)}`; padding left out."""
        pairs = re.findall(r"(\w+)=([\dx]+)(?=[\s}])", self.attribute("window"))
        return {key: tuple(int(size) for size in sizes.split("x")) for key, sizes in pairs}


@dataclass(frozen=True)
class Computation:
    """Instructions in the printed order."""

    name: str
    instructions: tuple[Instruction, ...]
    root: str

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def parameters(self) -> list[Instruction]:
        """In the order of their numbers."""
        found = [instruction for instruction in self.instructions if instruction.opcode == "parameter"]
        return sorted(found, key=lambda instruction: int(instruction.literal))


@dataclass(frozen=True)
class Module:
    """One traced graph."""

    name: str
    attributes: tuple[tuple[str, str], ...]
    computations: tuple[Computation, ...]
    entry: Computation = field(repr=False)

    @cached_property
    def by_name(self) -> dict[str, Computation]:
        return {computation.name: computation for computation in self.computations}

    @property
    def instructions(self) -> Iterator[Instruction]:
        """Those of all computations."""
        return (instruction for computation in self.computations for instruction in computation.instructions)


def parse(text: str) -> Module:
    """Read one module. Raises DataError naming the line that is not HLO."""
    return _Reader(text).module()


class _Reader:
    """Line by line; a line whose brackets stay open (a printed array) goes on in the next."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._number = 0
        self._tables: dict[str, dict[int, str]] = {}

    def module(self) -> Module:
        head = table = ""
        computations: list[Computation] = []
        entry: Computation | None = None
        while (line := self._next()) is not None:
            words = line.split(maxsplit=1)
            if not words or line.startswith("//"):
                continue
            if not head:
                if words[0] != "HloModule":
                    raise self._error(line, "HloModule NAME")
                head = words[1] if len(words) > 1 else ""
            elif words[0] in _TABLES:
                table = words[0]
            elif table and words[0].isdecimal():
                self._tables.setdefault(table, {})[int(words[0])] = words[1]
            elif found := _COMPUTATION.match(line):
                computations.append(self._computation(found.group(2)))
                entry = computations[-1] if found.group(1) else entry
            else:
                raise self._error(line, "a computation: NAME (PARAMETERS) -> SHAPE {")
        if entry is None:
            raise DataError("HLO text without an ENTRY computation", expected="one module of _get_xla_tensors_hlo")
        for computation in computations:
            _check_names(computation, {known.name for known in computations})
        name, *attributes = _split(head)
        return Module(name, _pairs(attributes), tuple(computations), entry)

    def _computation(self, name: str) -> Computation:
        instructions: list[Instruction] = []
        root = ""
        while (line := self._next()) is not None:
            if line.startswith("}"):
                if not instructions:
                    raise self._error(line, f"instructions in computation {name}")
                return Computation(name, tuple(instructions), root or instructions[-1].name)
            if line:
                instruction, is_root = self._instruction(line)
                instructions.append(instruction)
                root = instruction.name if is_root else root
        raise DataError(f"HLO text ends within computation {name}", expected="a closing brace")

    def _instruction(self, line: str) -> tuple[Instruction, bool]:
        found = _INSTRUCTION.match(line)
        shape, end = _shape(line, found.end()) if found else (None, 0)
        opcode = _OPCODE.match(line, end)
        if found is None or shape is None or opcode is None:
            raise self._error(line, "NAME = SHAPE OPCODE(OPERANDS)")
        close = _closing(line, opcode.end() - 1)
        inside, pairs = line[opcode.end() : close].strip(), _pairs(_split(line[close + 1 :].lstrip(", ")))
        is_leaf = opcode.group(1) in ("constant", "parameter")
        instruction = Instruction(
            name=found.group(2),
            opcode=opcode.group(1),
            shape=shape,
            shape_text=re.sub(r"\s", "", line[found.end() : end]),
            operands=() if is_leaf else tuple(part.split()[-1].lstrip("%") for part in _split(inside)),
            literal=inside if is_leaf else "",
            attributes=tuple(pair for pair in pairs if pair[0] != "metadata"),
            source=self._source(_metadata(dict(pairs).get("metadata", ""))),
        )
        return instruction, bool(found.group(1))

    def _source(self, metadata: dict[str, str]) -> str:
        if "source_file" in metadata:
            return f"{metadata['source_file']}:{metadata.get('source_line', '?')}"
        row = metadata  # as later versions of XLA print it
        for table, number in (("StackFrames", "stack_frame_id"), ("FileLocations", "file_location_id")):
            row = _metadata(self._tables.get(table, {}).get(int(row.get(number, 0)), ""))
        file = self._tables.get("FileNames", {}).get(int(row.get("file_name_id", 0)), "").strip('"')
        return f"{file}:{row.get('line', '?')}" if file else ""

    def _next(self) -> str | None:
        """The next line without comments, joined with what follows while a bracket is open."""
        if self._number >= len(self._lines):
            return None
        line = self._take()
        while self._number < len(self._lines):
            plain = re.sub(_QUOTED, "", line) if '"' in line else line
            if sum(map(plain.count, "([{")) <= sum(map(plain.count, ")]}")) or _COMPUTATION.match(line):
                break
            line = f"{line} {self._take()}"
        return line

    def _take(self) -> str:
        line = self._lines[self._number].strip()
        self._number += 1
        if "/*" in line:
            line = _QUOTED_OR_COMMENT.sub(lambda found: "" if found.group().startswith("/*") else found.group(), line)
        return line

    def _error(self, line: str, expected: str) -> DataError:
        return DataError(f"HLO text, line {self._number}: {line[:160]}", expected=expected)


def _check_names(computation: Computation, computations: set[str]) -> None:
    """Operands stand above their users, called computations exist: no reader further on can run in circles."""
    above: set[str] = set()
    for instruction in computation.instructions:
        if unknown := (set(instruction.operands) - above) | (set(instruction.called) - computations):
            raise DataError(
                f"HLO computation {computation.name}: {instruction.name} uses {', '.join(sorted(unknown))}",
                expected="instructions printed above it, and computations of the same module",
            )
        above.add(instruction.name)


def _split(text: str) -> list[str]:
    """Parts between commas that stand in no bracket and no quotes."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        depth += (mark in "([{") - (mark in ")]}")
        if mark == "," and not depth:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _pairs(parts: list[str]) -> tuple[tuple[str, str], ...]:
    return tuple((key.strip(), value.strip()) for key, _, value in (part.partition("=") for part in parts))


def _metadata(text: str) -> dict[str, str]:
    """`{op_type="aten__add" source_line=3}` to its values, without quotes."""
    return {key: value.strip('"') for key, value in re.findall(rf"(\w+)=({_QUOTED}|[^\s}}]+)", text)}


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed; the end of the text when it is not."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token.group() in "([{") - (token.group() in ")]}")
        if not depth:
            return token.start()
    return len(text)


def _shape(text: str, start: int) -> tuple[Shape | None, int]:
    """The shape at `start` and where it ends."""
    if text[start : start + 1] == "(":
        end = _closing(text, start)
        parts = [_shape(part, 0)[0] for part in _split(text[start + 1 : end])]
        return Shape("tuple", parts=tuple(part for part in parts if part is not None)), end + 1
    found = _ARRAY.match(text, start)
    if found is None:
        return None, start
    sizes = [size.strip() for size in found.group(2).split(",") if size.strip()]
    bounds = tuple(int(size.removeprefix("<=").replace("?", "") or 0) for size in sizes)
    dynamic = any(size.startswith(("<=", "?")) for size in sizes)
    return Shape(found.group(1), bounds, dynamic), found.end()


# Operations of a graph, and how two graphs differ.


def op_counts(module: Module) -> dict[str, int]:
    """How often each operation and result shape occurs, in all computations; of parameters only the graph's inputs."""
    counts = Counter(one.signature for one in module.instructions if one.opcode != "parameter")
    return dict(sorted((counts + Counter(one.signature for one in module.entry.parameters)).items()))


def difference(known: Mapping[str, int], seen: Mapping[str, int]) -> dict[str, int]:
    """What `seen` has more (+) or fewer (-) of than `known`: inputs of the graph first, then the largest changes."""
    changes = {op: seen.get(op, 0) - known.get(op, 0) for op in known.keys() | seen.keys()}
    order = sorted(changes, key=lambda op: (not op.startswith("parameter "), -abs(changes[op]), op))
    return {op: changes[op] for op in order if changes[op]}


def describe(changes: Mapping[str, int], limit: int = 8) -> str:
    """`-1 parameter f32[64,2], +3 dot f32[64,256] and 12 more`; `the same operations` when there is none."""
    if not changes:
        return "the same operations, in another order or with other constants"
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return ", ".join([f"{change:+d} {op}" for op, change in changes.items()][:limit]) + more


# The key of a graph.


def stable_key(module: Module) -> str:
    """32 hex digits that name the program and not its print: names, ids, order of lines and metadata do not count.

    Instructions are numbered from the root through their operands, so shared and repeated subgraphs stay apart. Arrays
    that XLA leaves out of the text (`constant({...})`, above ten elements) count by shape alone.
    """
    used = {one.name: {name for found in one.instructions for name in found.called} for one in module.computations}
    keys: dict[str, str] = {}
    for name in TopologicalSorter(used).static_order():
        keys[name] = _computation_key(module.by_name[name], keys)
    return fingerprint([sorted(map(list, module.attributes)), keys[module.entry.name]])


def _computation_key(computation: Computation, keys: Mapping[str, str]) -> str:
    numbers: dict[str, int] = {}
    channels: dict[str, int] = {}
    rows: list[Json] = []
    for instruction in _in_order(computation):
        numbers[instruction.name] = len(numbers)
        channel = instruction.attribute("channel_id")
        rows.append(
            [
                instruction.opcode,
                instruction.shape_text,
                " ".join(instruction.literal.split()),
                [numbers[name] for name in instruction.operands],
                [channels.setdefault(channel, len(channels))] if channel else [],
                _attributes(instruction, keys),
            ]
        )
    return fingerprint([numbers[computation.root], rows])


def _attributes(instruction: Instruction, keys: Mapping[str, str]) -> list[list[str]]:
    """Without what varies by print; called computations by their keys."""
    dropped = _NO_PART_OF_THE_PROGRAM
    if instruction.opcode == "parameter":
        dropped = dropped | {"frontend_attributes"}  # Neuron writes the input's name there
    called = [["called", *(keys[name] for name in instruction.called)]] if instruction.called else []
    plain = [[key, value] for key, value in instruction.attributes if key not in dropped]
    return called + sorted([key, "" if instruction.called and key in CALLS else value] for key, value in plain)


def _in_order(computation: Computation) -> Iterator[Instruction]:
    """Operands before users, from the root and then from what the root does not need, inputs by number first."""
    done: set[str] = set()
    rest = [instruction.name for instruction in computation.instructions if instruction.opcode != "parameter"]
    for start in [computation.root, *(parameter.name for parameter in computation.parameters), *rest]:
        pending = [start]
        while pending:
            instruction = computation.by_name[pending[-1]]
            missing = [name for name in instruction.operands if name not in done]
            if missing:
                pending.extend(reversed(missing))
                continue
            pending.pop()
            if instruction.name not in done:
                done.add(instruction.name)
                yield instruction
