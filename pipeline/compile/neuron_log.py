"""What neuron_parallel_compile, the cache and neuronx-cc print, as one typed summary.

Matched by the text of a message, never by its prefix, which changed between releases (`LEVEL ||COMPONENT||:` until
about SDK 2.26, `[LEVEL]:` later), and never by line: many processes write to one pipe, and a row of progress dots may
stand before any message. Facts: Neuron SDK 2.29 docs of neuron_parallel_compile and of the persistent cache.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from pipeline.compile.cache import Compilers, live_compilers
from pipeline.core.neuron_errors import COMPILER_KILLED


@dataclass(frozen=True)
class GraphReport:
    """One graph of the final report. `compile_s` is None where an old release does not tell it."""

    path: str
    succeeded: bool
    retries: int
    compile_s: float | None


@dataclass(frozen=True)
class CompileReport:
    """The JSON summary. The counts are the tool's own; `graphs` may be shorter where it was cut."""

    graphs: tuple[GraphReport, ...]
    num_succeeded: int
    num_failed: int
    seconds: float | None


@dataclass(frozen=True)
class CacheCounts:
    """The cache as a worker saw it last."""

    remaining: int
    locked: int
    failed: int
    done: int
    total: int


@dataclass(frozen=True)
class Waiting:
    """A compile that waits for the lock of another process."""

    what: str
    minutes: float


@dataclass(frozen=True)
class NeuronLog:
    """A log, read to its end. Paths are as printed, each once, in order of appearance.

    extracted: HLO files the trial run put into the cache; hits, cached_failures: NEFF paths found there.
    num_killed: messages that say a compiler was killed, as the host does when memory runs out.
    num_crashed: worker processes that broke off. total_*: the closing lines, None when they are missing.
    """

    cache_path: str
    extracted: tuple[str, ...]
    hits: tuple[str, ...]
    cached_failures: tuple[str, ...]
    num_compiler_calls: int
    num_passed: int
    failures: tuple[str, ...]
    num_killed: int
    num_crashed: int
    waiting: tuple[Waiting, ...]
    counts: CacheCounts | None
    total_graphs: int | None
    total_succeeded: int | None
    total_failed: int | None
    trial_failed: bool
    redirected: bool
    nothing_to_do: bool
    report: CompileReport | None


def parse_log(text: str) -> NeuronLog:
    """Everything a log says. Unknown text is passed over."""
    return NeuronLog(
        cache_path=next(iter(_CACHE_PATH.findall(text)), ""),
        extracted=_unique(_EXTRACTED.findall(text)),
        hits=_unique(_HIT.findall(text)),
        cached_failures=_unique(_CACHED_FAILURE.findall(text)),
        num_compiler_calls=text.count("Call compiler with cmd:"),
        num_passed=sum(status == "PASS" for status in _STATUS.findall(text)),
        failures=_unique(line.strip() for line in text.splitlines() if _FAILURE.search(line)),
        num_killed=sum(_says_killed(line) for line in text.splitlines()),
        num_crashed=len(_CRASHED.findall(text)),
        waiting=parse_waiting(text),
        counts=parse_counts(text),
        total_graphs=_total("graphs", text),
        total_succeeded=_total("successful compilations", text),
        total_failed=_total("failed compilations", text),
        trial_failed="There was an error in the training script" in text,
        redirected="incompatible with torchrun redirect" in text,
        nothing_to_do="No todo hlos found in cache" in text,
        report=_report_in(text),
    )


def parse_counts(text: str) -> CacheCounts | None:
    """The state of the cache as last told."""
    match = _last(_COUNTS, text)
    return CacheCounts(*map(int, match.groups())) if match else None


def parse_waiting(text: str) -> tuple[Waiting, ...]:
    """The longest wait for each lock. Where a message tells no minutes, each counts as one: it comes once a minute."""
    longest: dict[str, float] = {}
    for match in _WAITING.finditer(text):
        what = match["what"].strip(" <>,.")
        told = match["minutes"]
        longest[what] = max(longest.get(what, 0.0), float(told)) if told else longest.get(what, 0.0) + 1.0
    return tuple(Waiting(what, minutes) for what, minutes in longest.items())


def parse_report(text: str) -> CompileReport | None:
    """The JSON summary, from its own file or out of a log; None when it is missing or cut off."""
    try:
        return _report_of(json.loads(text))
    except ValueError:
        return None


def entry_key(path: str) -> str:
    """`neuronxcc-<version>/MODULE_<graph>+<flags>`: the cache entry a path belongs to; '' when it is none."""
    match = _ENTRY.search(path)
    return match[0] if match else ""


def graph_name(path: str) -> str:
    """`MODULE_<graph>+<flags>`, or the text itself when it names no graph."""
    return entry_key(path).partition("/")[2] or path


_EXTRACTED = re.compile(r"Extracting graphs \(([^\s()]+)\)")
_HIT = re.compile(r"Using a cached neff at\s+(\S+?\.neff)")
_CACHED_FAILURE = re.compile(r"Got a cached failed neff at\s+(\S+?\.neff)")
_CACHE_PATH = re.compile(r"Compile cache path:\s*(\S+)")
_STATUS = re.compile(r"Compiler status (\w+)")
_COUNTS = re.compile(
    r"Current remaining items are (\d+), locked are (\d+), failed are (\d+), done are (\d+), total is (\d+)"
)
_WAITING = re.compile(
    r"Another process must be compiling (?P<what>\S*)(?:.*?been waiting for:?\s*(?P<minutes>\d+(?:\.\d+)?))?"
)
_FAILURE = re.compile(
    r"Failed compilation with \[|failed compilation: |encountered error: |Compiler status (?!PASS)\w+"
    r"|neuronx-cc (?:compilation )?failed with|\[F13\d\]|\[NCC_[A-Z]+\d+\]"
)
_CRASHED = re.compile(r"sub-process \d+ got exception:")
_ENTRY = re.compile(r"neuronxcc-[^/\s]+/MODULE_[0-9A-Za-z]+(?:\+[0-9a-f]+)?")


class _Graph(BaseModel):
    status: bool
    retry: int = 0
    compile_time: float | None = None


class _Report(BaseModel):
    compilation_summary: dict[str, int]
    compilation_report: dict[str, _Graph] = {}
    compilation_time: float | None = None


def _report_of(value: object) -> CompileReport:
    found = _Report.model_validate(value)
    graphs = tuple(
        GraphReport(path, graph.status, graph.retry, graph.compile_time)
        for path, graph in found.compilation_report.items()
    )
    num_succeeded = sum(graph.succeeded for graph in graphs)
    return CompileReport(
        graphs,
        max(num_succeeded, found.compilation_summary.get("true", 0)),
        max(len(graphs) - num_succeeded, found.compilation_summary.get("false", 0)),
        found.compilation_time,
    )


def _report_in(text: str) -> CompileReport | None:
    """The last complete summary in a log."""
    end = len(text)
    while (key := text.rfind('"compilation_summary"', 0, end)) >= 0:
        start = text.rfind("{", 0, key)
        if start >= 0:
            with suppress(ValueError):  # cut off, or something else that looks like it
                return _report_of(json.JSONDecoder().raw_decode(text, start)[0])
        end = key
    return None


def _says_killed(line: str) -> bool:
    # The cheap look first: lists of hundreds of paths, with "compile" in each, come on one line.
    return ("-9" in line or "kill" in line.lower() or "[F137]" in line) and bool(COMPILER_KILLED.search(line))


def _total(what: str, text: str) -> int | None:
    match = _last(re.compile(rf"Total {what}: (\d+)"), text)
    return int(match[1]) if match else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    match = None
    for found in pattern.finditer(text):
        match = found
    return match


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))


# A log read while it grows: how far the compile is, and whether it waits for a lock that nobody holds.
#
# A compiler that is killed leaves its lock, and who comes next waits for it without end; hours have been lost to that.

SIGHTINGS = 2  # messages of waiting, one a minute, that came while no compiler ran; one may be bad luck


class LogWatch:
    """Follows the log of one run. With a cache that other machines share, a lock may well be held elsewhere."""

    def __init__(self, path: Path, *, is_local: bool, compilers: Compilers = live_compilers) -> None:
        self.path = path
        self.last_news = ""
        self._is_local = is_local
        self._compilers = compilers
        self._position = 0
        self._rest = b""
        self.counts: CacheCounts | None = None
        self._sightings = 0

    def news(self) -> list[str]:
        """One line when the counts have changed since the last call; [] otherwise. Reads what is new in the log."""
        text = self._read()
        waiting = parse_waiting(text)
        if waiting and self._is_local:
            self._sightings = 0 if self._compilers() else self._sightings + 1
        lines = [f"a compile waits for the lock of {wait.what or 'a graph'}" for wait in waiting]
        counts = parse_counts(text)
        if counts is not None and counts != self.counts:
            self.counts = counts
            lines.append(
                f"graphs in the cache: {counts.done} done, {counts.remaining} to do, {counts.locked} locked, "
                f"{counts.failed} failed"
            )
        self.last_news = lines[-1] if lines else self.last_news
        return lines

    def is_stuck(self) -> bool:
        """True when it keeps waiting for a lock while no compiler runs on this host."""
        return self._sightings >= SIGHTINGS

    def _read(self) -> str:
        """Whole lines written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        return (whole + newline).decode(errors="replace")
