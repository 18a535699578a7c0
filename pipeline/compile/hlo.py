"""What is asked of a traced graph: its key, its operations, and how it differs from another."""

import gzip
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from pipeline.compile.hlo_text import CALLS, Computation, Instruction, Module, Shape, parse
from pipeline.core.fingerprint import Json, fingerprint
from pipeline.io.storage import Storage

__all__ = [
    "Computation",
    "Instruction",
    "Module",
    "OpChange",
    "Shape",
    "describe",
    "difference",
    "distance",
    "first_source",
    "op_counts",
    "parse",
    "stable_key",
]

_NO_PART_OF_THE_PROGRAM = frozenset({"metadata", "origin", "original_value", "channel_id"})


@dataclass(frozen=True)
class OpChange:
    """`change` more (or fewer) of one operation: OpChange("dot f32[64,256]", 3)."""

    op: str
    change: int

    def __str__(self) -> str:
        return f"{self.change:+d} {self.op}"


def op_counts(module: Module) -> dict[str, int]:
    """How often each operation and result shape occurs, in all computations; of parameters only the graph's inputs."""
    counts = Counter(
        instruction.signature
        for computation in module.computations
        for instruction in computation.instructions
        if instruction.opcode != "parameter" or computation is module.entry
    )
    return dict(sorted(counts.items()))


def difference(known: Mapping[str, int], seen: Mapping[str, int]) -> tuple[OpChange, ...]:
    """What `seen` has more (+) or fewer (-) of than `known`: inputs of the graph first, then the largest changes."""
    changes = [OpChange(op, seen.get(op, 0) - known.get(op, 0)) for op in known.keys() | seen.keys()]
    return tuple(
        sorted(
            (change for change in changes if change.change),
            key=lambda change: (not change.op.startswith("parameter "), -abs(change.change), change.op),
        )
    )


def distance(known: Mapping[str, int], seen: Mapping[str, int]) -> int:
    """Operations to add or take away to get from one graph to the other: the nearest known graph has the smallest."""
    return sum(abs(change.change) for change in difference(known, seen))


def describe(changes: tuple[OpChange, ...], limit: int = 8) -> str:
    """`-1 parameter f32[64,2], +3 dot f32[64,256] and 12 more`; `the same operations` when there is none."""
    if not changes:
        return "the same operations, in another order or with other constants"
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return ", ".join(map(str, changes[:limit])) + more


def first_source(module: Module, op: str) -> str:
    """Where in our code (file:line) the first operation counted as `op` came from; empty when the trace has none."""
    every = (instruction for computation in module.computations for instruction in computation.instructions)
    return next((found.source for found in every if found.signature == op and found.source), "")


def stable_key(module: Module) -> str:
    """32 hex digits that name the program and not its print: names, ids, order of lines and metadata do not count.

    Instructions are numbered from the root through their operands, so shared and repeated subgraphs stay apart. Arrays
    that XLA leaves out of the text (`constant({...})`, above ten elements) count by shape alone.
    """
    used = {computation.name: _called(computation) for computation in module.computations}
    keys: dict[str, str] = {}
    for name in TopologicalSorter(used).static_order():
        keys[name] = _computation_key(module.by_name[name], keys)
    return fingerprint([sorted(map(list, module.attributes)), keys[module.entry.name]])


def _called(computation: Computation) -> set[str]:
    return {name for instruction in computation.instructions for name in instruction.called}


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


# Traced graphs as text: what the compile cache holds for devices that keep no compiled ones.

FOLDER = "compile-cache/hlo"


def store_texts(workspace: Storage, texts: Mapping[str, str]) -> None:
    """Keep the HLO text of each graph under its key; what is there already stays."""
    for key, text in texts.items():
        workspace.write_if_absent(_place(key), gzip.compress(text.encode(), mtime=0))


def _place(key: str) -> str:
    return f"{FOLDER}/{key}.txt.gz"
