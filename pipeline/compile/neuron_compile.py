"""Drives `neuron_parallel_compile`: one trial run that shows every graph, then parallel compiles into the cache.

The tool deletes its work folder, swallows options of the command it runs, skips locked graphs in silence, reuses cached
failures for ever, leaves locks when killed and counts failures in its exit code. Each run therefore has a folder and a
wrapper script of its own, and is judged by its log, its JSON and the cache (neuron_verdict); what can be cured is
repaired and run again, within a time limit. Facts: Neuron SDK 2.29, neuron_parallel_compile and persistent cache.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pipeline.compile.cache import DONE_NAME, LOCK_SUFFIX, NEFF_NAME, Compilers, compilers_of
from pipeline.compile.cache import LOG_NAME as COMPILER_LOG
from pipeline.compile.cache_repair import repair
from pipeline.compile.config import CompileConfig
from pipeline.compile.neuron_command import neuron_environment, tool_command, wrapper_script
from pipeline.compile.neuron_log import LogWatch, NeuronLog, entry_key, graph_name, parse_log, parse_report
from pipeline.compile.neuron_verdict import (
    LOG_NAME,
    REPAIRABLE,
    Attempt,
    Verdict,
    failed_entries,
    judge,
    parallel_compilers,
    time_error,
    told,
    unexpected_suffixes,
    verdict_error,
    wanted_entries,
)
from pipeline.core.errors import TrnpipeError
from pipeline.core.format import format_bytes
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from pipeline.proc.children import TOOL_S
from pipeline.proc.tool import ProcessTree, host_memory_bytes, process_tree

POLL_S = 0.2
OTHERS_POLL_S = 5.0

Repair = Callable[[str], Sequence[str]]
"""Removes locks of the dead, half entries and cached failures below a cache root; says what it did, if anything.

Called while no process of ours is left, also after a stop: it must not heed the stop signal, and be done in seconds.
"""
Say = Callable[[str], None]


class Peers(Protocol):
    """The other nodes, whose trial runs are one program with ours: all run the tool together, or none does."""

    def check(self) -> None:
        """Raise TransientError when another node has failed."""

    def any(self, phase: str, mine: bool) -> bool:
        """Wait for all; True when `mine` was true on one node at least."""


class Alone:
    """No other nodes."""

    def check(self) -> None:
        return

    def any(self, phase: str, mine: bool) -> bool:
        return mine


@dataclass(frozen=True)
class NeuronCompileResult:
    """What a compile did.

    graphs: keys of all cache entries the trial run needs, `neuronxcc-<version>/MODULE_<graph>+<flags>`.
    num_succeeded: those compiled here; num_reused: those found in the cache or compiled by another machine meanwhile;
    num_failed: those that failed at least once before they succeeded. graph_seconds: compile seconds by graph key.
    """

    graphs: tuple[str, ...]
    num_succeeded: int
    num_reused: int
    num_failed: int
    seconds: float
    graph_seconds: Mapping[str, float]
    num_retries: int
    killed_by_oom: int
    parallel: int
    actions: tuple[str, ...]
    log: Path

    @property
    def num_graphs(self) -> int:
        return len(self.graphs)


def compile_graphs(
    command: Sequence[str],
    config: CompileConfig,
    *,
    cache_root: str,
    scratch: Path,
    repair: Repair,
    stop: StopSignal,
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
    memory_bytes: int | None = None,
    say: Say = lambda line: None,
    peers: Peers | None = None,
) -> NeuronCompileResult:
    """Trace `command` and compile every graph it shows into `cache_root` (a folder or s3://...).

    The command starts in `cwd` (default: here) and gets all of its options. `scratch` is a local folder for logs and
    work files. `repair` runs between tries and whenever this ends early, when no process of ours is left. With `peers`
    what has to be run again here is run again on all.

    Raises the error of the trial run's own exit code; ConfigError when the compiler refuses a graph, when even one
    compiler at a time needs more memory than there is, or when the tools are missing; TransientError when the time
    limit is over, a crash repeats or a peer failed; Preempted when stopped, at most about 10 s later.
    """
    job = _Job(
        command=tuple(command),
        config=config,
        cache_root=_plain(cache_root),
        scratch=scratch.absolute(),
        repair=repair,
        stop=stop,
        cwd=cwd or Path.cwd(),
        env=env,
        memory_bytes=memory_bytes or host_memory_bytes(),
        say=say,
        peers=peers or Alone(),
    )
    return job.run()


@dataclass
class _Job:
    """One call of compile_graphs: what it was given, and what it has done so far."""

    command: tuple[str, ...]
    config: CompileConfig
    cache_root: str
    scratch: Path
    repair: Repair
    stop: StopSignal
    cwd: Path
    env: Mapping[str, str]
    memory_bytes: int
    say: Say
    peers: Peers
    started: float = field(default_factory=time.monotonic)
    actions: list[str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    num_repairs: int = 0

    def __post_init__(self) -> None:
        self.deadline = self.started + self.config.time_limit_s
        self.parallel = self.config.parallel or parallel_compilers(self.memory_bytes)

    def run(self) -> NeuronCompileResult:
        """Attempts until nothing is missing; an error when that cannot be had. The cache is left in order."""
        self.stop.raise_if_set("starting to compile")
        self._announce()
        try:
            while self._is_to_run_again(attempt := self._attempt()):
                continue
        except BaseException as error:
            try:
                self._repair()
            except TrnpipeError as second:
                error.add_note(f"and the cache could not be repaired: {second}")
            raise
        return self._result(attempt)

    def _is_to_run_again(self, attempt: Attempt) -> bool:
        """False when no node misses a graph any more."""
        verdict = judge(attempt)
        if verdict is not Verdict.DONE:
            self._act(f"attempt {len(self.attempts)}: {told(verdict, attempt)}")
            self._cure(verdict, attempt)
        again = self.peers.any(f"again-{len(self.attempts)}", verdict is not Verdict.DONE)
        if again and verdict is Verdict.DONE:
            self.say("all is compiled here, but not on another node: running again with it")
        return again

    def _announce(self) -> None:
        before = self.env.get("NEURON_CC_FLAGS", self.config.flags.text())
        if before.split() != list(self.config.flags.tokens()):
            self._act(f"NEURON_CC_FLAGS was {before!r}; the settings make it {self.config.flags.text()!r}")
        memory = "" if self.config.parallel else f" ({format_bytes(self.memory_bytes)} of memory)"
        self.say(f"compiling at most {self.parallel} graphs at once{memory}")

    def _attempt(self) -> Attempt:
        """Run the tool once and gather everything it left. No process of it is alive afterwards."""
        folder = self.scratch / f"attempt-{len(self.attempts) + 1}"
        shutil.rmtree(folder, ignore_errors=True)  # an earlier try of this job, whose result must not count
        folder.mkdir(parents=True)
        exit_file, script = folder / "trial-exit-code", folder / "run.sh"
        script.write_text(wrapper_script(self.command, cwd=self.cwd, exit_file=exit_file))
        script.chmod(0o755)
        tool = tool_command(script.name, parallel=self.parallel, workdir=folder / "work")
        env = neuron_environment(self.env, self.config, cache_root=self.cache_root, retry_failed=bool(self.attempts))
        log_file = folder / LOG_NAME
        is_local = not self.cache_root.startswith("s3://")
        with process_tree(tool, cwd=folder, env=env, log=log_file) as tree:
            watch = LogWatch(log_file, is_local=is_local, compilers=lambda: compilers_of(self.cache_root))
            exit_code = self._watch(tree, watch, exit_file)
        log = read_log(folder)
        done = self._done(wanted_entries(log))
        attempt = Attempt(
            exit_code if exit_code is not None else -signal.SIGTERM,
            _int_in(exit_file),
            log,
            done,
            folder,
            ended_early=exit_code is None,
        )
        self.attempts.append(attempt)
        return attempt

    def _watch(self, tree: ProcessTree, log: LogWatch, trial_exit: Path) -> int | None:
        """The exit code of the tool; None when it was ended, being stuck. Preempted or TransientError: stop, limit.

        A peer that fails ends a trial run, which waits for it; compiling goes on for the cache's sake.
        """
        with ExitStack() as shown:
            return self._follow(tree, log, trial_exit, shown)

    def _follow(self, tree: ProcessTree, log: LogWatch, trial_exit: Path, shown: ExitStack) -> int | None:
        checked = time.monotonic()
        advance, todo = None, 0
        while (exit_code := tree.poll()) is None:
            if time.monotonic() - checked > OTHERS_POLL_S and not trial_exit.exists():
                self.peers.check()
                checked = time.monotonic()
            if self.stop.wait(POLL_S):
                tree.end(TOOL_S)
                self._act(f"stopped by {self.stop.reason}: ended the trial run and all compilers")
                self.stop.raise_if_set("compiling graphs")
            for line in log.news():
                self.say(line)
            if log.counts is not None:
                if advance is None:  # how many there are is known once the trial run has shown them
                    todo = log.counts.remaining
                    advance = shown.enter_context(progress("compiling", todo, "graphs"))
                advance(max(0, todo - log.counts.remaining))
                todo = min(todo, log.counts.remaining)
            if log.is_stuck():
                self._act("a compile waits for a lock that no running compiler holds: ended it")
                tree.end(TOOL_S)
                return None
            if time.monotonic() > self.deadline:
                tree.end(TOOL_S)
                raise time_error(self.config, log.path, log.last_news)
        return exit_code

    def _done(self, entries: Sequence[str]) -> frozenset[str]:
        storage = self._cache()
        return frozenset(
            entry for entry in entries if storage.stat(f"{entry}/{DONE_NAME}") and storage.stat(f"{entry}/{NEFF_NAME}")
        )

    def _cure(self, verdict: Verdict, attempt: Attempt) -> None:
        """Change what made an attempt fail, or raise the error that says why nothing would."""
        if verdict is Verdict.MEMORY and self.parallel > 1:
            self.parallel //= 2
            self._act(f"compiling at most {self.parallel} graphs at once from now on")
        elif verdict in REPAIRABLE and self.num_repairs < max(1, self.config.max_retries):
            self.num_repairs += 1
        else:
            self._keep_logs(attempt)
            raise verdict_error(verdict, attempt, cache_root=self.cache_root, config=self.config)
        if not self._repair() and verdict is Verdict.LOCKED:
            self._wait_for_locks(attempt)

    def _repair(self) -> bool:
        """Put the cache in order; True when there was something to do."""
        lines = list(self.repair(self.cache_root))
        for line in lines:
            self._act(line)
        return bool(lines)

    def _wait_for_locks(self, attempt: Attempt) -> None:
        """Until the other processes that compile what is missing are done, whatever came of it."""
        storage = self._cache()
        self.say(f"waiting for {len(attempt.missing)} graphs that another process compiles")
        while any(_is_locked(storage, entry) for entry in attempt.missing):
            if self.stop.wait(OTHERS_POLL_S):
                self.stop.raise_if_set("waiting for graphs that another process compiles")
            if time.monotonic() > self.deadline:
                raise verdict_error(Verdict.LOCKED, attempt, cache_root=self.cache_root, config=self.config)

    def _keep_logs(self, attempt: Attempt) -> None:
        """Copy the compiler's own message on each failed graph beside our log: the repair removes it."""
        storage = self._cache()
        for entry in attempt.missing:
            if storage.stat(f"{entry}/{COMPILER_LOG}"):
                target = attempt.folder / f"{graph_name(entry)}.log"
                target.write_bytes(storage.read_bytes(f"{entry}/{COMPILER_LOG}"))

    def _cache(self) -> Storage:
        return open_storage(self.cache_root, stop=self.stop)

    def _act(self, line: str) -> None:
        self.actions.append(line)
        self.say(line)

    def _result(self, last: Attempt) -> NeuronCompileResult:
        reports = [graph for attempt in self.attempts if attempt.log.report for graph in attempt.log.report.graphs]
        compiled = {entry_key(graph.path): graph for graph in reports if graph.succeeded}
        odd = unexpected_suffixes(last.wanted, tokens=self.config.flags.tokens(), target=self.config.target)
        if odd:
            self._act(
                f"{len(odd)} graphs ({odd[0]}, ...) were made for other flags or another chip than "
                f"{self.config.flags.text()} for {self.config.target}"
            )
        failed = {entry for attempt in self.attempts for entry in failed_entries(attempt.log)}
        return NeuronCompileResult(
            graphs=last.wanted,
            num_succeeded=len(compiled.keys() & set(last.wanted)),
            num_reused=len(set(last.wanted) - compiled.keys()),
            num_failed=len(failed & set(last.wanted)),
            seconds=time.monotonic() - self.started,
            graph_seconds={entry: graph.compile_s for entry, graph in compiled.items() if graph.compile_s is not None},
            num_retries=len(self.attempts) - 1 + sum(graph.retries for graph in reports),
            killed_by_oom=sum(attempt.log.num_killed for attempt in self.attempts),
            parallel=self.parallel,
            actions=tuple(self.actions),
            log=last.folder / LOG_NAME,
        )


def read_log(folder: Path) -> NeuronLog:
    """The log of a finished run, with the report from its JSON file where the log holds none."""
    log = parse_log((folder / LOG_NAME).read_text(encoding="utf-8", errors="replace"))
    for path in sorted(folder.glob("neuron_parallel_compile_results_*.json")):
        if log.report is None:
            log = replace(log, report=parse_report(path.read_text(encoding="utf-8", errors="replace")))
    return log


def _plain(root: str) -> str:
    """The tools know s3:// and paths, and start in a folder of their own."""
    path = root.removeprefix("file://")
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _is_locked(storage: Storage, entry: str) -> bool:
    return any(stat.key.endswith(LOCK_SUFFIX) for stat in storage.list(entry))


def _int_in(path: Path) -> int | None:
    """The number in a file; None when it is missing or empty, as after a kill."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# The repair of a cache between two runs of neuron_parallel_compile, as `compile_graphs` wants it.


def repair_after_run(root: str, *, compilers: Compilers | None = None) -> list[str]:
    """Put the cache in `root` in order when no compiler of ours runs any more; [] when there was nothing to do.

    A lock of any age counts as stale then, unless another compiler of this cache lives on this host. On S3 locks stay:
    they may be another machine's. Does not heed a stop signal, so that a stopped run leaves no lock.
    """
    alive = compilers or (lambda: compilers_of(root))
    report = repair(open_storage(root, stop=StopSignal()), stale_lock_s=0.0, compilers=alive)
    return report.lines() if report.actions else []
