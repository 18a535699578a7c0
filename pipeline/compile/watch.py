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


@dataclass
class _Counting:
    counters: Counters
    _count: int = field(default=0, init=False)

    def _compiled(self) -> int:
        """Graphs since this was last asked."""
        count = self.counters.compile_count()
        compiled, self._count = count - self._count, count
        return compiled


@dataclass
class _Recording(_Counting):
    plan: Plan
    graphs: dict[str, GraphRecord] = field(default_factory=dict)
    _seconds: float = field(default=0.0, init=False)

    def _look(self) -> int:
        """What is compiled from here on is of the next graph; how many were since the last."""
        self._seconds = self.counters.compile_seconds()
        return self._compiled()

    def _note(self, key: str) -> int:
        """What was compiled since the last look is of this graph; how many it was."""
        before, known = self._seconds, self.graphs[key]
        compiled = self._look()
        seconds = round(known.compile_s + self._seconds - before, 3)
        self.graphs[key] = known.model_copy(update={"compiles": known.compiles + compiled, "compile_s": seconds})
        return compiled


@dataclass
class _Guarding(_Counting):
    manifest: GraphManifest
    on_unknown: Literal["error", "warn"]
    warn: Callable[[str], None]
    unknown: int = 0
    steps: int = 0
    """Finished in this process."""

    def _passed(self, place: Place) -> int:
        """Count its step, if it ends one; how many graphs were compiled since the last place."""
        self.steps += place.phase in ("step", "update")
        return self._compiled()

    def _met(self, num: int, seen: str, expected: str, *, warning: str, hint: str = "") -> None:
        """Graphs that the manifest does not have. Raises ConfigError, or warns."""
        self.unknown += num
        if self.on_unknown == "error":
            raise ConfigError(seen, expected=expected, next_command=f"{hint}{COMPILE}, or {_WARN_ONLY}")
        self.warn(warning)


# Devices that compile as they go: a graph has no text, and is there when its program was called. What counts is where.


@dataclass
class CountRecorder(_Recording):
    """Notes, by place, what was compiled there in a trial run."""

    def __post_init__(self) -> None:
        self._look()

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        return

    def after(self, place: Place) -> None:
        key = graph_key(str(place), self.plan)
        if key not in self.graphs:
            self.graphs[key] = _record(key, place)
        self._note(key)


@dataclass
class CountGuard(_Guarding):
    """Holds a run against it: programs come from the cache where a place is passed first, and nowhere after that."""

    _places: set[Place] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._compiled()

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        return

    def after(self, place: Place) -> None:
        compiled = self._passed(place)
        is_first = place not in self._places
        self._places.add(place)
        is_known = self.manifest.find(graph_key(str(place), self.manifest.plan)) is not None
        if not compiled or (is_first and is_known):
            return
        why = "was not met ahead of time" if not is_known else "was compiled already: a shape or a type has changed"
        seen = f"after {self.steps} steps, {compiled} graphs were compiled at {place}, which {why}"
        expected = "what the compile stage met: one graph for each shape"
        self._met(compiled, seen, expected, warning=seen, hint="TORCH_LOGS=recompiles tells why; ")


# Devices that trace: a graph has a text, before it is compiled.


@dataclass
class Recorder(_Recording):
    """Notes every different graph of a trial run with what compiling it took."""

    texts: dict[str, str] = field(default_factory=dict)
    """HLO text by key, for the cache."""
    modules: dict[str, Module] = field(default_factory=dict)
    """By key, for the lint."""
    outside: list[str] = field(default_factory=list)
    """Places at which more was compiled than the graph looked at."""
    _keys: dict[str, str] = field(default_factory=dict, init=False)
    _pending: str = field(default="", init=False)

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        text = hlo()
        if text not in self._keys:
            module = parse(text)
            key = self._keys[text] = graph_key(stable_key(module), self.plan)
            if key not in self.graphs:
                self.graphs[key] = _record(key, place, op_counts(module), len(text))
                self.texts[key], self.modules[key] = text, module
        self._pending = self._keys[text]
        if self._look():
            self.outside.append(f"{place}, before its graph")

    def after(self, place: Place) -> None:
        if self._note(self._pending) > 1:
            self.outside.append(str(place))


@dataclass
class Guard(_Guarding):
    """Holds what a run is about to compile against the manifest."""

    _looks: Counter[Place] = field(default_factory=Counter, init=False)
    _looked: bool = field(default=False, init=False)

    def before(self, place: Place, hlo: Callable[[], str]) -> None:
        self._looked = self._looks[place] < _LOOKS
        if not self._looked:
            return
        self._looks[place] += 1
        module = parse(hlo())
        if self.manifest.find(graph_key(stable_key(module), self.manifest.plan)) is None:
            seen = f"after {self.steps} steps, the graph of {place} was not compiled ahead of time"
            expected = self._explain(place, module)
            self._met(1, seen, expected, warning=f"{seen} ({expected}); it is compiled now")

    def after(self, place: Place) -> None:
        if self._passed(place) and not self._looked:
            self._looks[place] -= 1  # either told apart by aliasing alone, or new: the next one is looked at

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


def _record(key: str, place: Place, counts: dict[str, int] | None = None, num_bytes: int = 0) -> GraphRecord:
    counts = counts or {}
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
