"""What one run of neuron_parallel_compile came to, decided from everything it left; its exit code alone lies.

The exit code is the number of failed graphs, so that 256 failures are a 0. A graph that another process had locked is
skipped without a word, also with 0. So the cache has the last say: a graph is compiled when its entry is complete.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pipeline.compile.flags import flags_hash
from pipeline.compile.neuron_log import NeuronLog, entry_key, graph_name

GIB = 2**30
BYTES_PER_COMPILER = 64 * GIB  # AWS keeps this much for each neuronx-cc (neuron_parallel_compile, SDK 2.23)
SIGKILLED = (-9, 137)  # as subprocess and as a shell tell it


class Verdict(StrEnum):
    """DONE needs nothing more. MEMORY, POISONED, CRASHED and LOCKED are worth another run; the others are not."""

    DONE = "every graph is compiled"
    TRIAL_FAILED = "the trial run failed"
    NOTHING_SEEN = "the trial run showed no graph"
    MEMORY = "the host ran out of memory"
    POISONED = "the cache holds failures of earlier runs"
    CRASHED = "the compile broke off"
    LOCKED = "graphs are locked by another process"
    FAILED = "the compiler refused graphs"


REPAIRABLE = frozenset({Verdict.POISONED, Verdict.CRASHED, Verdict.LOCKED})


@dataclass(frozen=True)
class Attempt:
    """One finished run. `trial_code` is None when the trial run did not end; `ended_early`: we ended it.

    wanted: keys of the cache entries it asked for; done: those of them that are complete now. `folder` holds its log.
    """

    exit_code: int
    trial_code: int | None
    log: NeuronLog
    done: frozenset[str]
    folder: Path
    ended_early: bool = False

    @property
    def wanted(self) -> tuple[str, ...]:
        return wanted_entries(self.log)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(key for key in self.wanted if key not in self.done)


def wanted_entries(log: NeuronLog) -> tuple[str, ...]:
    """Keys of all cache entries that a log names as needed: found there, extracted, or reported on."""
    reported = [graph.path for graph in log.report.graphs] if log.report else []
    keys = [entry_key(path) for path in (*log.hits, *log.cached_failures, *log.extracted, *reported)]
    return tuple(dict.fromkeys(key for key in keys if key))


def judge(attempt: Attempt) -> Verdict:
    """The verdict; the first reason that explains what is missing counts."""
    log = attempt.log
    if attempt.ended_early:
        return Verdict.CRASHED
    trial_failed = attempt.trial_code not in (0, None) or log.trial_failed or log.redirected
    if trial_failed:
        # A cached failure is raised in the program itself, like a failed compile.
        return Verdict.POISONED if log.cached_failures else Verdict.TRIAL_FAILED
    if attempt.wanted and not attempt.missing and attempt.trial_code == 0:
        return Verdict.DONE
    if log.num_killed or attempt.exit_code in SIGKILLED:
        return Verdict.MEMORY
    missing = set(attempt.missing)
    if missing & {entry_key(path) for path in log.cached_failures}:
        return Verdict.POISONED
    if not missing:
        return Verdict.NOTHING_SEEN if attempt.exit_code == 0 else Verdict.CRASHED
    if log.num_crashed or (log.report is None and not log.nothing_to_do):
        return Verdict.CRASHED
    return Verdict.FAILED if missing & set(failed_entries(log)) else Verdict.LOCKED


def failed_entries(log: NeuronLog) -> tuple[str, ...]:
    """Keys of the cache entries that the final report calls failed."""
    return tuple(entry_key(graph.path) for graph in log.report.graphs if not graph.succeeded) if log.report else ()


def parallel_compilers(memory_bytes: int) -> int:
    """Compilers at once on a host with this much memory: one for every 64 GiB begun."""
    return max(1, math.ceil(memory_bytes / BYTES_PER_COMPILER))


def unexpected_suffixes(wanted: tuple[str, ...], *, tokens: tuple[str, ...], target: str) -> tuple[str, ...]:
    """Graph names whose flags hash is not the one that `tokens` and `target` give: training would not find them."""
    return tuple(
        graph_name(key)
        for key in wanted
        if "+" in graph_name(key)
        and graph_name(key).rpartition("+")[2] != flags_hash(tokens, compiler=_version(key), target=target)
    )


def _version(key: str) -> str:
    """`2.24.8799.0` of `neuronxcc-2.24.8799.0+a69f71e55/MODULE_...`."""
    return key.partition("/")[0].removeprefix("neuronxcc-").partition("+")[0]
