"""Watches graphs as a program meets them: notes them during a trial run, holds them against the manifest otherwise.

A graph is looked at where the program is about to cut it, before anything is compiled. Reading its text costs as much
as tracing it, so a place in the program (phase, bucket) is looked at the first few times only, and again after the
compile counter has moved. Devices that compile as they go (`compiles_steps`) have no text to look at: a graph is there
when its program was called, and what counts is where.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipeline.compile.hlo import Module, describe, difference, op_counts, parse, stable_key
from pipeline.compile.manifest import GraphManifest, GraphRecord, Plan, graph_key
from pipeline.core.errors import ConfigError

COMPILE = "trnpipe compile, with the same settings"
_WARN_ONLY = "--compile.on-unknown-graph warn"
_LOOKS = 3  # at each place, before the compile counter alone is trusted


@dataclass(frozen=True)
class Place:
    """Where in a program a graph ends."""

    phase: str
    bucket: str = ""
    batch_size: int = 0

    def __str__(self) -> str:
        shape = f" of {self.batch_size} x {self.bucket} tokens" if self.bucket else ""
        return f"{self.phase}{shape}"


class Counters(Protocol):
    """What a backend counts."""

    compiles_steps: bool

    def compile_count(self) -> int: ...
    def compile_seconds(self) -> float: ...


class GraphWatch:
    """Called by a program around every graph it cuts. As it is here it watches nothing: devices that do not trace."""

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        """The graph is complete and not yet compiled; `hlo` gives its text."""

    def after(self, place: Place) -> None:
        """It has been handed to the device."""


@dataclass
class Recorder(GraphWatch):
    """Notes every different graph of a trial run with what compiling it took."""

    counters: Counters
    plan: Plan
    graphs: dict[str, GraphRecord] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """HLO text by key, for the cache."""
    modules: dict[str, Module] = field(default_factory=dict)
    """By key, for the lint."""
    met: Callable[[int, Place], object] = lambda number, place: None
    """Told of every new graph, from 1 on: before it is compiled, or after where a device compiles as it goes."""
    outside: list[str] = field(default_factory=list)
    """Places at which more was compiled than the graph looked at."""
    _keys: dict[str, str] = field(default_factory=dict, init=False)
    _pending: str = field(default="", init=False)
    _count: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.counters.compiles_steps:
            self._look()

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        if self.counters.compiles_steps:
            return
        text = hlo()
        if text not in self._keys:
            module = parse(text)
            key = self._keys[text] = graph_key(stable_key(module), self.plan)
            if key not in self.graphs:
                self.graphs[key] = _record(key, place, op_counts(module), len(text))
                self.texts[key], self.modules[key] = text, module
                self.met(len(self.graphs), place)
        self._pending = self._keys[text]
        if self._look():
            self.outside.append(f"{place}, before its graph")

    def after(self, place: Place) -> None:
        if self.counters.compiles_steps:
            self._pending = graph_key(str(place), self.plan)
            if self._pending not in self.graphs:
                self.graphs[self._pending] = _record(self._pending, place, {}, 0)
                self.met(len(self.graphs), place)
        before, known = self._seconds, self.graphs[self._pending]
        compiled = self._look()
        seconds = round(known.compile_s + self._seconds - before, 3)
        update = {"compiles": known.compiles + compiled, "compile_s": seconds}
        self.graphs[self._pending] = known.model_copy(update=update)
        if compiled > 1 and not self.counters.compiles_steps:
            self.outside.append(str(place))

    def _look(self) -> int:
        """What is compiled from here on is of the next graph; how many were since the last."""
        count = self.counters.compile_count()
        compiled, self._count = count - self._count, count
        self._seconds = self.counters.compile_seconds()
        return compiled


@dataclass
class Guard(GraphWatch):
    """Holds what a run is about to compile against the manifest.

    Where a device compiles as it goes: programs come from the cache where a place is passed first, and nowhere after.
    """

    counters: Counters
    manifest: GraphManifest
    on_unknown: Literal["error", "warn"]
    warn: Callable[[str], None]
    unknown: int = 0
    steps: int = 0
    """Finished in this process."""
    _count: int = field(default=0, init=False)
    _looks: Counter[Place] = field(default_factory=Counter, init=False)
    """At each place; of a device that compiles as it goes: how often it was passed."""
    _looked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._keys = {graph.key for graph in self.manifest.graphs}
        self._count = self.counters.compile_count()

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        self._looked = not self.counters.compiles_steps and self._looks[place] < _LOOKS
        if not self._looked:
            return
        self._looks[place] += 1
        module = parse(hlo())
        if graph_key(stable_key(module), self.manifest.plan) not in self._keys:
            seen = f"after {self.steps} steps, the graph of {place} was not compiled ahead of time"
            expected = self._explain(place, module)
            self._met(1, seen, expected, warning=f"{seen} ({expected}); it is compiled now")

    def after(self, place: Place) -> None:
        self.steps += place.phase in ("step", "update")
        count = self.counters.compile_count()
        compiled, self._count = count - self._count, count
        if not self.counters.compiles_steps:
            if compiled and not self._looked:
                self._looks[place] -= 1  # either told apart by aliasing alone, or new: the next one is looked at
            return
        self._looks[place] += 1
        is_known = graph_key(str(place), self.manifest.plan) in self._keys
        if not compiled or (is_known and self._looks[place] == 1):
            return
        why = "was not met ahead of time" if not is_known else "was compiled already: a shape or a type has changed"
        seen = f"after {self.steps} steps, {compiled} graphs were compiled at {place}, which {why}"
        expected = "what the compile stage met: one graph for each shape"
        self._met(compiled, seen, expected, warning=seen, hint="TORCH_LOGS=recompiles tells why; ")

    def _met(self, num: int, seen: str, expected: str, *, warning: str, hint: str = "") -> None:
        """Graphs that the manifest does not have. Raises ConfigError, or warns."""
        self.unknown += num
        if self.on_unknown == "error":
            raise ConfigError(seen, expected=expected, next_command=f"{hint}{COMPILE}, or {_WARN_ONLY}")
        self.warn(warning)

    def _explain(self, place: Place, module: Module) -> str:
        """The nearest known graph, how this one differs, and the line of code the first new operation comes from."""
        counts = op_counts(module)
        nearest = self.manifest.nearest(place.phase, counts)
        if nearest is None:
            return "a manifest with at least one graph"
        changes = difference(nearest.op_counts, counts)
        new = next((op for op, change in changes.items() if change > 0), "")
        source = next((one.source for one in module.instructions if one.signature == new and one.source), "")
        known = Place(nearest.phase, nearest.bucket, nearest.batch_size)
        # Off by default: slower, and it may change Neuron cache keys.
        origin = f", from {source}" if source else " (XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1 tells the line of code)"
        return f"{known}, the nearest graph that was; this one has {describe(changes)}{origin}"


def _record(key: str, place: Place, counts: dict[str, int], num_bytes: int) -> GraphRecord:
    return GraphRecord(
        key=key,
        phase=place.phase,
        bucket=place.bucket,
        batch_size=place.batch_size,
        num_instructions=sum(counts.values()),
        hlo_bytes=num_bytes,
        op_counts=counts,
        compiles=0,
        compile_s=0.0,
    )
