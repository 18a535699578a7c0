"""What one run of neuron_parallel_compile came to, decided from everything it left; its exit code alone lies.

The exit code is the number of failed graphs, so that 256 failures are a 0. A graph that another process had locked is
skipped without a word, also with 0. So the cache has the last say: a graph is compiled when its entry is complete.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pipeline.compile.config import CompileConfig, flags_hash
from pipeline.compile.neuron_log import NeuronLog, entry_key, graph_name
from pipeline.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GateRefused,
    NumericError,
    TransientError,
    TrnpipeError,
)
from pipeline.core.format import format_duration

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


# Words and errors for what went wrong with neuron_parallel_compile.

LOG_NAME = "neuron_parallel_compile.log"
TAIL_LINES = 25
NUM_NAMED = 5
# Of the classes with an exit code; the trial run is this program too. Preempted without a stop of ours is a lost peer.
_BY_EXIT_CODE: dict[int, type[TrnpipeError]] = {
    error.exit_code: error
    for error in (ConfigError, DataError, CheckpointError, NumericError, GateRefused, TransientError)
}


def told(verdict: Verdict, attempt: Attempt) -> str:
    """One line for the record: the verdict with its figures."""
    missing = _names(attempt.missing)
    match verdict:
        case Verdict.TRIAL_FAILED:
            return f"{verdict} with exit code {attempt.trial_code}"
        case Verdict.MEMORY:
            return f"{verdict}; {attempt.log.num_killed} compilers were killed, without a result: {missing}"
        case Verdict.NOTHING_SEEN:
            return str(verdict)
        case _:
            return f"{verdict} (exit code {attempt.exit_code}); not compiled: {missing}"


def verdict_error(verdict: Verdict, attempt: Attempt, *, cache_root: str, config: CompileConfig) -> TrnpipeError:
    """The error for a verdict that nothing more can be done about."""
    log = attempt.folder / LOG_NAME
    seen = f"{verdict}: {_names(attempt.missing)}; log: {log}"
    match verdict:
        case Verdict.TRIAL_FAILED:
            return _trial_error(attempt, log)
        case Verdict.NOTHING_SEEN:
            return ConfigError(
                f"{verdict}, neither a new one nor one from the cache\n{log_tail(log)}",
                expected="'Extracting graphs (...)' on its standard output, which must not be redirected",
                next_command=f"less {log}  # is the program on the Neuron device (PJRT_DEVICE=NEURON)?",
            )
        case Verdict.MEMORY:
            return ConfigError(
                f"{seen}\n  compilers were killed (-9) even with one at a time",
                expected="memory for one neuronx-cc: tens of GB for a large graph",
                next_command=_memory_remedy(config),
            )
        case Verdict.FAILED | Verdict.POISONED:
            return ConfigError(
                f"{seen}\n{_reasons(attempt)}",
                expected=f"graphs that neuronx-cc accepts; each was tried {config.max_retries + 1} times",
                next_command=f"less {attempt.folder}/MODULE_*.log, and: trnpipe doctor --hlo",
            )
        case Verdict.LOCKED if attempt.log.cache_path and not _same(attempt.log.cache_path, cache_root):
            return ConfigError(
                f"the trial run used the cache {attempt.log.cache_path}",
                expected=cache_root,
                next_command="remove --cache_dir from NEURON_CC_FLAGS in the program; it goes before the setting",
            )
        case Verdict.LOCKED:
            return TransientError(
                seen,
                expected="the other process to finish, or its lock to be stale",
                next_command="trnpipe cache doctor  # names the locks and who holds them",
            )
        case _:
            return TransientError(
                f"{seen}\n{log_tail(log)}",
                expected="neuron_parallel_compile to end with a report",
                next_command="run the same command again; what is compiled stays in the cache",
            )


def time_error(config: CompileConfig, log: Path, last_news: str) -> TransientError:
    """The time limit is over."""
    return TransientError(
        f"tracing and compiling took longer than {format_duration(config.time_limit_s)}"
        + (f" ({last_news})" if last_news else "")
        + f"\n{log_tail(log)}",
        expected=f"all graphs within compile.time_limit_s = {config.time_limit_s:g}",
        next_command=f"less {log}; run the same command again (what is compiled stays in the cache) or raise the limit",
    )


def log_tail(log: Path, num_lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200 * num_lines))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  | {line[:400]}" for line in lines[-num_lines:])


def _trial_error(attempt: Attempt, log: Path) -> TrnpipeError:
    code = attempt.trial_code
    killed = code in SIGKILLED or code in (143, -15)
    kind = TransientError if killed else _BY_EXIT_CODE.get(code or 0, TrnpipeError)
    if attempt.log.redirected:
        kind = ConfigError
    return kind(
        f"the trial run ended with exit code {'unknown' if code is None else code}\n{log_tail(log)}",
        expected="a run of the program to its end, with exit code 0",
        next_command=f"less {log}" + ("; dmesg | grep -i kill  # host memory?" if killed else ""),
    )


def _memory_remedy(config: CompileConfig) -> str:
    lower = "" if config.flags.optlevel == 1 else "set compile.flags.optlevel to 1 (least memory), or "
    return f"{lower}use smaller or fewer graphs (smaller micro-batch), or compile on a machine with more memory"


def _reasons(attempt: Attempt) -> str:
    """What the compiler said last, without its long command line, which comes first."""
    lines = (
        line.partition("Failed compilation with [")[2].partition("]: ")[2] or line for line in attempt.log.failures
    )
    return "\n".join(f"  | {line[:400]}" for line in tuple(dict.fromkeys(lines))[-NUM_NAMED:])


def _names(entries: tuple[str, ...]) -> str:
    names = [graph_name(entry) for entry in entries]
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return (", ".join(names[:NUM_NAMED]) + more) or "no graph named"


def _same(one: str, other: str) -> bool:
    return one.removeprefix("file://").rstrip("/") == other.removeprefix("file://").rstrip("/")
