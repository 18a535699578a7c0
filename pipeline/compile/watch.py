"""Watches graphs as a program meets them: notes them during a trial run, holds them against the manifest otherwise.

A graph is looked at where the program is about to cut it, before anything is compiled. Reading its text costs as much
as tracing it, so a place in the program (phase, bucket) is looked at the first few times only, and again after the
compile counter has moved.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipeline.compile.hlo import Module, describe, difference, first_source, op_counts, parse, stable_key
from pipeline.compile.manifest import GraphManifest, GraphRecord, Plan, graph_key
from pipeline.core.errors import ConfigError

COMPILE = "trnpipe compile, with the same settings"
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


class GraphWatch(Protocol):
    """Called by a program around every graph it cuts."""

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        """The graph is complete and not yet compiled; `hlo` gives its text."""

    def after(self, place: Place) -> None:
        """It has been handed to the device."""


class NoWatch:
    """Where there is nothing to watch: devices that do not trace."""

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        return

    def after(self, place: Place) -> None:
        return


# Devices that compile as they go: a graph has no text, and is there when its program was called. What counts is where.


@dataclass
class CountRecorder:
    """Notes, by place, what was compiled there in a trial run."""

    counters: Counters
    plan: Plan
    graphs: dict[str, GraphRecord] = field(default_factory=dict)
    _count: int = 0
    _seconds: float = 0.0

    def __post_init__(self) -> None:
        self._count, self._seconds = self.counters.compile_count(), self.counters.compile_seconds()

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        return

    def after(self, place: Place) -> None:
        count = self.counters.compile_count()
        compiled, self._count = count - self._count, count
        before, self._seconds = self._seconds, self.counters.compile_seconds()
        key = graph_key(str(place), self.plan)
        known = self.graphs.get(key) or GraphRecord(
            key=key,
            phase=place.phase,
            bucket=place.bucket,
            batch_size=place.batch_size,
            num_instructions=0,
            hlo_bytes=0,
            op_counts={},
            compiles=0,
            compile_s=0.0,
        )
        spent = round(known.compile_s + self._seconds - before, 3)
        self.graphs[key] = known.model_copy(update={"compiles": known.compiles + compiled, "compile_s": spent})


@dataclass
class CountGuard:
    """Holds a run against it: programs come from the cache where a place is passed first, and nowhere after that."""

    counters: Counters
    manifest: GraphManifest
    on_unknown: Literal["error", "warn"]
    warn: Callable[[str], None]
    unknown: int = 0
    steps: int = 0
    """Finished in this process."""
    _passed: set[Place] = field(default_factory=set)
    _count: int = 0

    def __post_init__(self) -> None:
        self._count = self.counters.compile_count()

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        return

    def after(self, place: Place) -> None:
        self.steps += place.phase in ("step", "update")
        count = self.counters.compile_count()
        compiled, self._count = count - self._count, count
        is_first = place not in self._passed
        self._passed.add(place)
        is_known = self.manifest.find(graph_key(str(place), self.manifest.plan)) is not None
        if not compiled or (is_first and is_known):
            return
        self.unknown += compiled
        why = "was not met ahead of time" if not is_known else "was compiled already: a shape or a type has changed"
        seen = f"after {self.steps} steps, {compiled} graphs were compiled at {place}, which {why}"
        if self.on_unknown == "error":
            raise ConfigError(
                seen,
                expected="what the compile stage met: one graph for each shape",
                next_command=f"TORCH_LOGS=recompiles tells why; {COMPILE}, or --compile.on-unknown-graph warn",
            )
        self.warn(seen)


@dataclass
class Recorder:
    """Notes every different graph of a trial run with what compiling it took."""

    counters: Counters
    plan: Plan
    graphs: dict[str, GraphRecord] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """HLO text by key, for the cache."""
    modules: dict[str, Module] = field(default_factory=dict)
    """By key, for the lint."""
    outside: list[str] = field(default_factory=list)
    """Places at which more was compiled than the graph looked at."""
    _keys: dict[str, str] = field(default_factory=dict)
    _pending: str = ""
    _seconds: float = 0.0
    _count: int = 0

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        text = hlo()
        if text not in self._keys:
            module = parse(text)
            key = self._keys[text] = graph_key(stable_key(module), self.plan)
            if key not in self.graphs:
                counts = op_counts(module)
                self.graphs[key] = GraphRecord(
                    key=key,
                    phase=place.phase,
                    bucket=place.bucket,
                    batch_size=place.batch_size,
                    num_instructions=sum(counts.values()),
                    hlo_bytes=len(text),
                    op_counts=counts,
                    compiles=0,
                    compile_s=0.0,
                )
                self.texts[key], self.modules[key] = text, module
        self._pending = self._keys[text]
        self._seconds, count = self.counters.compile_seconds(), self.counters.compile_count()
        if count > self._count:
            self.outside.append(f"{place}, before its graph")
        self._count = count

    def after(self, place: Place) -> None:
        seconds = self.counters.compile_seconds() - self._seconds
        count = self.counters.compile_count()
        compiled, self._count = count - self._count, count
        known = self.graphs[self._pending]
        self.graphs[self._pending] = known.model_copy(
            update={"compiles": known.compiles + compiled, "compile_s": round(known.compile_s + seconds, 3)}
        )
        if compiled > 1:
            self.outside.append(str(place))


@dataclass
class Guard:
    """Holds what a run is about to compile against the manifest."""

    counters: Counters
    manifest: GraphManifest
    on_unknown: Literal["error", "warn"]
    warn: Callable[[str], None]
    unknown: int = 0
    steps: int = 0
    """Finished in this process."""
    _looks: Counter[Place] = field(default_factory=Counter)
    _looked: bool = False
    _count: int = 0

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        self._looked = self._looks[place] < _LOOKS
        if not self._looked:
            return
        self._looks[place] += 1
        module = parse(hlo())
        if self.manifest.find(graph_key(stable_key(module), self.manifest.plan)) is None:
            self.unknown += 1
            seen = f"after {self.steps} steps, the graph of {place} was not compiled ahead of time"
            expected = self._explain(place, module)
            if self.on_unknown == "error":
                next_command = f"{COMPILE}, or --compile.on-unknown-graph warn"
                raise ConfigError(seen, expected=expected, next_command=next_command)
            self.warn(f"{seen} ({expected}); it is compiled now")

    def after(self, place: Place) -> None:
        self.steps += place.phase in ("step", "update")
        count = self.counters.compile_count()
        if not self._looked and count > self._count:
            self._looks[place] -= 1  # either told apart by aliasing alone, or new: the next one is looked at
        self._count = count

    def _explain(self, place: Place, module: Module) -> str:
        """The nearest known graph, how this one differs, and the line of code the first new operation comes from."""
        counts = op_counts(module)
        nearest = self.manifest.nearest(place.phase, counts)
        if nearest is None:
            return "a manifest with at least one graph"
        changes = difference(nearest.op_counts, counts)
        new = next((op for op, change in changes.items() if change > 0), "")
        source = first_source(module, new) if new else ""
        known = Place(nearest.phase, nearest.bucket, nearest.batch_size)
        # Off by default: slower, and it may change Neuron cache keys.
        origin = f", from {source}" if source else " (XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1 tells the line of code)"
        return f"{known}, the nearest graph that was; this one has {describe(changes)}{origin}"
