"""neuron_parallel_compile: how it is called, and what it, the cache and neuronx-cc print, as one typed summary.

Messages are matched by their text, never by a prefix, which changed between releases (`LEVEL ||COMPONENT||:` until
about SDK 2.26, `[LEVEL]:` later), and never by line: many processes write to one pipe, and a row of progress dots may
stand before any message. Facts: Neuron SDK 2.29 docs of neuron_parallel_compile and of the persistent cache.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from pipeline.backends import compiled_cache, has_graph_tool
from pipeline.compile.cache import Compilers
from pipeline.compile.config import CompileConfig
from pipeline.core.neuron_errors import COMPILER_KILLED
from pipeline.parallel.world import TRACE_FILE

PROGRAM = "neuron_parallel_compile"
LOG_NAME = f"{PROGRAM}.log"
NEFF_ROOT = "/tmp/neff_cache"  # noqa: S108 - torch-neuronx's own default (SDK 2.33, torch/reference/env-vars)
SCORING = "TRN_TRACE_SCORING"
"""Environment of a trial run that traces evaluation and embedding alone."""
NOT_INHERITED = ("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", "NEURON_EXTRACT_GRAPHS_ONLY")


def drives_tool(config: CompileConfig, backend: str, env: Mapping[str, str]) -> bool:
    """True where neuron_parallel_compile is to be run over a trial run, and this is not that trial run itself."""
    if TRACE_FILE in env or config.tool == "none":
        return False
    return config.tool == "neuron" or has_graph_tool(backend, env)


def use_neuron_cache(config: CompileConfig, workspace: str, backend: str, env: MutableMapping[str, str]) -> str:
    """On Neuron: compile with the flags (PyTorch/XLA), and look into the cache, that the compile stage used.

    To be called before torch_xla is imported. A trial run keeps what its tool has set. The result tells of other flags
    that were set by hand, and now are not; '' when there were none.
    """
    if TRACE_FILE in env:
        return ""
    root = config.cache_root(workspace)
    if folder := compiled_cache(backend):
        # S3 is no folder: there programs are copied from and to it, by compile/shared.py.
        env[folder] = env.get(folder, NEFF_ROOT) if root.startswith("s3://") else root
        return ""
    if not has_graph_tool(backend, env):
        return ""
    warning = flags_warning(env, config)
    env["NEURON_CC_FLAGS"] = config.flags.text()
    env["NEURON_COMPILE_CACHE_URL"] = root
    return warning


def flags_warning(env: Mapping[str, str], config: CompileConfig) -> str:
    """Of other flags that were set by hand; '' when there are none."""
    before, now = env.get("NEURON_CC_FLAGS", ""), config.flags.text()
    is_other = before and before.split() != now.split()
    return f"NEURON_CC_FLAGS was {before!r}; the settings make it {now!r}" if is_other else ""


def wrapper_script(command: Sequence[str], *, cwd: Path, exit_file: Path) -> str:
    """A shell script that runs `command` and leaves its exit code, which the tool would hide, in a file."""
    return (
        "#!/bin/sh\n"
        f"cd {shlex.quote(str(cwd))} || exit 1\n"
        f"{shlex.join(command)}\n"
        "code=$?\n"
        f'echo "$code" > {shlex.quote(str(exit_file))}\n'
        'exit "$code"\n'
    )


def neuron_environment(
    env: Mapping[str, str], config: CompileConfig, *, cache_root: str, retry_failed: bool
) -> dict[str, str]:
    """The environment of the tool. Training must use the same NEURON_CC_FLAGS, which are part of the cache key.

    `retry_failed` adds the option to compile cached failures again; it is not part of the key.
    """
    flags = config.flags.text() + (" --retry_failed_compilation" if retry_failed else "")
    ours = {
        "NEURON_CC_FLAGS": flags,
        "NEURON_COMPILE_CACHE_URL": cache_root,
        "NEURON_PARALLEL_COMPILE_MAX_RETRIES": str(config.max_retries),
        "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1",
    }
    return {name: value for name, value in env.items() if name not in NOT_INHERITED} | ours


# What it says.


class GraphReport(BaseModel):
    """One graph of the final report, by its path. `compile_time` in seconds, None where an old release tells none."""

    status: bool
    retry: int = 0
    compile_time: float | None = None


@dataclass(frozen=True)
class NeuronLog:
    """A log, read to its end. Paths are as printed, each once, in order of appearance."""

    cache_path: str
    extracted: tuple[str, ...]
    """HLO files the trial run put into the cache."""
    hits: tuple[str, ...]
    """NEFF paths found there."""
    cached_failures: tuple[str, ...]
    failures: tuple[str, ...]
    """Lines that tell of a graph that was not compiled."""
    num_killed: int
    """Messages that say a compiler was killed, as the host does when memory runs out."""
    has_crashed: bool
    """A worker process broke off."""
    trial_failed: bool
    redirected: bool
    nothing_to_do: bool
    report: Mapping[str, GraphReport] | None

    @property
    def wanted(self) -> tuple[str, ...]:
        """Keys of all cache entries that are named as needed: found there, extracted, or reported on."""
        keys = (entry_key(path) for path in (*self.hits, *self.cached_failures, *self.extracted, *(self.report or ())))
        return tuple(dict.fromkeys(key for key in keys if key))

    @property
    def failed(self) -> set[str]:
        """Keys of the cache entries that the final report calls failed."""
        return {entry_key(path) for path, graph in (self.report or {}).items() if not graph.status}


def parse_log(text: str) -> NeuronLog:
    """Everything a log says. Unknown text is passed over."""
    # The cheap look first: lists of hundreds of paths, with "compile" in each, come on one line.
    maybe_killed = [line for line in text.splitlines() if "-9" in line or "kill" in line.lower() or "[F137]" in line]
    return NeuronLog(
        cache_path=next(iter(_CACHE_PATH.findall(text)), ""),
        extracted=_unique(_EXTRACTED.findall(text)),
        hits=_unique(_HIT.findall(text)),
        cached_failures=_unique(_CACHED_FAILURE.findall(text)),
        failures=_unique(line.strip() for line in text.splitlines() if _FAILURE.search(line)),
        num_killed=sum(bool(COMPILER_KILLED.search(line)) for line in maybe_killed),
        has_crashed=bool(_CRASHED.search(text)),
        trial_failed="There was an error in the training script" in text,
        redirected="incompatible with torchrun redirect" in text,
        nothing_to_do="No todo hlos found in cache" in text,
        report=_report_in(text),
    )


def read_log(folder: Path) -> NeuronLog:
    """The log of a finished run, with the report from its JSON file where the log holds none."""
    text = (folder / LOG_NAME).read_text(encoding="utf-8", errors="replace")
    files = sorted(folder.glob(f"{PROGRAM}_results_*.json"))
    return parse_log("\n".join([*(path.read_text(encoding="utf-8", errors="replace") for path in files), text]))


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
_COUNTS = re.compile(
    r"Current remaining items are (\d+), locked are (\d+), failed are (\d+), done are (\d+), total is (\d+)"
)
_WAITING = re.compile(r"Another process must be compiling (\S*)")
_FAILURE = re.compile(
    r"Failed compilation with \[|failed compilation: |encountered error: |Compiler status (?!PASS)\w+"
    r"|neuronx-cc (?:compilation )?failed with|\[F13\d\]|\[NCC_[A-Z]+\d+\]"
)
_CRASHED = re.compile(r"sub-process \d+ got exception:")
_ENTRY = re.compile(r"neuronxcc-[^/\s]+/MODULE_[0-9A-Za-z]+(?:\+[0-9a-f]+)?")


class _Summary(BaseModel):
    compilation_summary: dict[str, int]
    compilation_report: dict[str, GraphReport] = {}


def _report_in(text: str) -> Mapping[str, GraphReport] | None:
    """The last complete summary in a log."""
    end = len(text)
    while (key := text.rfind('"compilation_summary"', 0, end)) >= 0:
        start = text.rfind("{", 0, key)
        if start >= 0:
            with suppress(ValueError):  # cut off, or something else that looks like it
                return _Summary.model_validate(json.JSONDecoder().raw_decode(text, start)[0]).compilation_report
        end = key
    return None


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))


# A log read while it grows: how far the compile is, and whether it waits for a lock that nobody holds.
#
# A compiler that is killed leaves its lock, and who comes next waits for it without end; hours have been lost to that.

SIGHTINGS = 2  # messages of waiting, one a minute, that came while no compiler ran; one may be bad luck


class LogWatch:
    """Follows the log of one run. With a cache that other machines share, a lock may well be held elsewhere."""

    def __init__(self, path: Path, *, is_local: bool, compilers: Compilers) -> None:
        self.path = path
        self.last_news = ""
        self.counts: tuple[int, ...] = ()
        """Graphs in the cache as a worker saw it last: remaining, locked, failed, done, all; empty before."""
        self.waits = False
        """The newest lines tell of waiting for a lock."""
        self._is_local = is_local
        self._compilers = compilers
        self._position = 0
        self._rest = b""
        self._sightings = 0

    def news(self) -> list[str]:
        """Reads the new whole lines. A line for each lock that is waited for, and one when the counts have changed."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        text = (whole + newline).decode(errors="replace")
        waiting = _unique(name.strip(" <>,.") for name in _WAITING.findall(text))
        self.waits = bool(waiting)
        if waiting and self._is_local:
            self._sightings = 0 if self._compilers() else self._sightings + 1
        lines = [f"a compile waits for the lock of {name or 'a graph'}" for name in waiting]
        told = _COUNTS.findall(text)
        counts = tuple(map(int, told[-1])) if told else self.counts
        if counts != self.counts:
            self.counts = counts
            remaining, locked, failed, done, _ = counts
            lines.append(f"graphs in the cache: {done} done, {remaining} to do, {locked} locked, {failed} failed")
        self.last_news = lines[-1] if lines else self.last_news
        return lines

    def is_stuck(self) -> bool:
        """True when it keeps waiting for a lock while no compiler runs on this host."""
        return self._sightings >= SIGHTINGS
