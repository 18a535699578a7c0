"""Drives `neuron_parallel_compile`: one trial run that shows every graph, then parallel compiles into the cache.

The tool deletes its work folder, swallows options of the command it runs, skips locked graphs in silence, reuses cached
failures for ever, leaves locks when killed, and its exit code is the number of failed graphs, so that 256 failures are
a 0. Each run therefore has a folder and a wrapper script of its own, and is judged by its log, its JSON and the cache,
which has the last say: a graph is compiled when its entry is complete. What can be cured is repaired and run again,
within a time limit. Facts: Neuron SDK 2.29, neuron_parallel_compile and persistent cache.
"""

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pipeline.compile.cache import (
    DONE_NAME,
    LOCK_SUFFIX,
    NEFF_NAME,
    SHARED_LOCK_S,
    Compilers,
    EntryState,
    canonical_root,
    compilers_of,
    list_storage,
    refuse_network_root,
    release_dead_locks,
    repair,
)
from pipeline.compile.cache import LOG_NAME as COMPILER_LOG
from pipeline.compile.cache_sync import Direction, sync_cache
from pipeline.compile.config import ALL_THERE_S, CompileConfig
from pipeline.compile.manifest import GraphManifest, Plan, load_manifest, load_manifests
from pipeline.compile.neuron_tool import (
    LOG_NAME,
    PROGRAM,
    SCORING,
    LogWatch,
    NeuronLog,
    entry_key,
    flags_warning,
    graph_name,
    neuron_environment,
    read_log,
    wrapper_script,
)
from pipeline.context import StageContext, nodes_of
from pipeline.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GateRefused,
    NumericError,
    TransientError,
    TrnpipeError,
)
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.progress import Say, progress
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.parallel.node_barrier import Nodes
from pipeline.parallel.world import NUM_NODES, TRACE_FILE
from pipeline.proc.children import TOOL_S
from pipeline.proc.tool import ProcessTree, host_memory_bytes, process_tree
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName

POLL_S = 0.2
OTHERS_POLL_S = 5.0
BYTES_PER_COMPILER = 64 * 2**30  # AWS keeps this much for each neuronx-cc (neuron_parallel_compile, SDK 2.23)
SIGKILLED = (-9, 137)  # as subprocess and as a shell tell it
TAIL_LINES, NUM_NAMED = 25, 5

Repair = Callable[[str], Sequence[str]]
"""Removes locks of the dead, half entries and cached failures below a cache root; says what it did, if anything.

Called while no process of ours is left, also after a stop: it must not heed the stop signal, and be done in seconds.
"""


def repair_after_run(root: str, *, compilers: Compilers | None = None) -> list[str]:
    """Put the cache in `root` in order when no compiler of ours runs any more; [] when there was nothing to do.

    A lock of any age counts as stale then, unless another compiler of this cache lives on this host. On S3, where it
    may be another machine's, one older than SHARED_LOCK_S. Does not heed a stop signal, so that a stopped run leaves
    no lock.
    """
    alive = compilers or (lambda: compilers_of(root))
    report = repair(open_storage(root, stop=StopSignal()), stale_lock_s=0.0, compilers=alive)
    return report.lines() if report.actions else []


# What one run came to, decided from everything it left.


class CompileVerdict(StrEnum):
    """DONE needs nothing more. MEMORY, POISONED, CRASHED and LOCKED are worth another run; the others are not."""

    DONE = "every graph is compiled"
    TRIAL_FAILED = "the trial run failed"
    NOTHING_SEEN = "the trial run showed no graph"
    MEMORY = "the host ran out of memory"
    POISONED = "the cache holds failures of earlier runs"
    CRASHED = "the compile broke off"
    LOCKED = "graphs are locked by another process"
    FAILED = "the compiler refused graphs"


@dataclass(frozen=True)
class Attempt:
    """One finished run. `trial_code` is None when the trial run did not end; `ended_early`: we ended it.

    done: keys of the entries the log wants that are complete now. `folder` holds its log.
    """

    exit_code: int
    trial_code: int | None
    log: NeuronLog
    done: frozenset[str]
    folder: Path
    ended_early: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(key for key in self.log.wanted if key not in self.done)


def judge(attempt: Attempt) -> CompileVerdict:
    """The verdict; the first reason that explains what is missing counts."""
    log, missing = attempt.log, set(attempt.missing)
    if attempt.ended_early:
        return CompileVerdict.CRASHED
    if attempt.trial_code not in (0, None) or log.trial_failed or log.redirected:
        # A cached failure is raised in the program itself, like a failed compile.
        return CompileVerdict.POISONED if log.cached_failures else CompileVerdict.TRIAL_FAILED
    if log.wanted and not missing and attempt.trial_code == 0:
        return CompileVerdict.DONE
    if log.num_killed or attempt.exit_code in SIGKILLED:
        return CompileVerdict.MEMORY
    if missing & {entry_key(path) for path in log.cached_failures}:
        return CompileVerdict.POISONED
    if not missing:
        return CompileVerdict.NOTHING_SEEN if attempt.exit_code == 0 else CompileVerdict.CRASHED
    if log.has_crashed or (log.report is None and not log.nothing_to_do):
        return CompileVerdict.CRASHED
    return CompileVerdict.FAILED if missing & log.failed else CompileVerdict.LOCKED


# Of the classes with an exit code; the trial run is this program too. Preempted without a stop of ours is a lost peer.
_BY_EXIT_CODE: dict[int, type[TrnpipeError]] = {
    error.exit_code: error
    for error in (ConfigError, DataError, CheckpointError, NumericError, GateRefused, TransientError)
}


def verdict_text(verdict: CompileVerdict, attempt: Attempt) -> str:
    """One line for the record: the verdict with its figures."""
    missing = _names(attempt.missing)
    if verdict is CompileVerdict.TRIAL_FAILED:
        return f"{verdict} with exit code {attempt.trial_code}"
    if verdict is CompileVerdict.MEMORY:
        return f"{verdict}; {attempt.log.num_killed} compilers were killed, without a result: {missing}"
    if verdict is CompileVerdict.NOTHING_SEEN:
        return str(verdict)
    return f"{verdict} (exit code {attempt.exit_code}); not compiled: {missing}"


def verdict_error(verdict: CompileVerdict, attempt: Attempt, *, cache_root: str, config: CompileConfig) -> TrnpipeError:
    """The error for a verdict that nothing more can be done about."""
    log = attempt.folder / LOG_NAME
    seen = f"{verdict}: {_names(attempt.missing)}; log: {log}"
    match verdict:
        case CompileVerdict.TRIAL_FAILED:
            code = attempt.trial_code
            killed = code in SIGKILLED or code in (143, -15)
            kind = TransientError if killed else _BY_EXIT_CODE.get(code or 0, TrnpipeError)
            kind = ConfigError if attempt.log.redirected else kind
            return kind(
                f"the trial run ended with exit code {'unknown' if code is None else code}\n{log_tail(log)}",
                expected="a run of the program to its end, with exit code 0",
                next_command=f"less {log}" + ("; dmesg | grep -i kill  # host memory?" if killed else ""),
            )
        case CompileVerdict.NOTHING_SEEN:
            return ConfigError(
                f"{verdict}, neither a new one nor one from the cache\n{log_tail(log)}",
                expected="'Extracting graphs (...)' on its standard output, which must not be redirected",
                next_command=f"less {log}  # is the program on the Neuron device (PJRT_DEVICE=NEURON)?",
            )
        case CompileVerdict.MEMORY:
            lower = "" if config.flags.optlevel == 1 else "set compile.flags.optlevel to 1 (least memory), or "
            return ConfigError(
                f"{seen}\n  compilers were killed (-9) even with one at a time",
                expected="memory for one neuronx-cc: tens of GB for a large graph",
                next_command=f"{lower}use smaller or fewer graphs (smaller micro-batch), or compile on a machine with"
                " more memory",
            )
        case CompileVerdict.FAILED | CompileVerdict.POISONED:
            # What the compiler said last, without its long command line, which comes first.
            said = [
                line.partition("Failed compilation with [")[2].partition("]: ")[2] or line
                for line in attempt.log.failures
            ]
            reasons = "\n".join(f"  | {line[:400]}" for line in list(dict.fromkeys(said))[-NUM_NAMED:])
            return ConfigError(
                f"{seen}\n{reasons}",
                expected=f"graphs that neuronx-cc accepts; each was tried {config.max_retries + 1} times",
                next_command=f"less {attempt.folder}/MODULE_*.log, and: trnpipe doctor --hlo",
            )
        case CompileVerdict.LOCKED if attempt.log.cache_path and canonical_root(
            attempt.log.cache_path
        ) != canonical_root(cache_root):
            return ConfigError(
                f"the trial run used the cache {attempt.log.cache_path}",
                expected=cache_root,
                next_command="remove --cache_dir from NEURON_CC_FLAGS in the program; it goes before the setting",
            )
        case CompileVerdict.LOCKED:
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


def log_tail(log: Path) -> str:
    """The last lines of a log, indented."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200 * TAIL_LINES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  | {line[:400]}" for line in lines[-TAIL_LINES:])


def _names(entries: Sequence[str]) -> str:
    names = [graph_name(entry) for entry in entries]
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return (", ".join(names[:NUM_NAMED]) + more) or "no graph named"


# The runs.


@dataclass(frozen=True)
class NeuronCompileResult:
    """What a compile did."""

    graphs: tuple[str, ...]
    """Keys of all cache entries the trial run needs, `neuronxcc-<version>/MODULE_<graph>+<flags>`."""
    num_succeeded: int
    """Those compiled here; the others were in the cache, or another machine compiled them meanwhile."""
    graph_seconds: Mapping[str, float]
    """Compile seconds by graph key."""
    seconds: float
    parallel: int


@dataclass
class NeuronCompile:
    """Traces `command` and compiles every graph it shows into `cache_root` (an absolute path or s3://...).

    The command starts in `cwd` and gets all of its options. `scratch` is a local folder for logs and work files.
    `repair` runs between tries and whenever this ends early, when no process of ours is left. `peers`: other nodes,
    whose trial runs are one program with ours; what has to be run again here is run again on all.
    """

    command: Sequence[str]
    config: CompileConfig
    cache_root: str
    scratch: Path
    repair: Repair
    stop: StopSignal
    cwd: Path = field(default_factory=Path.cwd)
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    memory_bytes: int = field(default_factory=host_memory_bytes)
    say: Say = lambda line: None
    peers: Nodes | None = None
    actions: list[str] = field(default_factory=list, init=False)
    attempts: list[Attempt] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.scratch = self.scratch.absolute()
        self.storage = open_storage(self.cache_root, stop=self.stop)
        self.is_local = self.storage.local_path("") is not None
        self.started = time.monotonic()
        self.deadline = self.started + self.config.time_limit_s
        self.parallel = self.config.parallel or max(1, math.ceil(self.memory_bytes / BYTES_PER_COMPILER))
        self.num_repairs = 0

    def run(self) -> NeuronCompileResult:
        """Attempts until nothing is missing. The cache is left in order.

        Raises the error of the trial run's own exit code; ConfigError when the compiler refuses a graph, when even one
        compiler at a time needs more memory than there is, or when the tools are missing; TransientError when the time
        limit is over, a crash repeats or a peer failed; Preempted when stopped, at most about 10 s later.
        """
        self.stop.raise_if_set("starting to compile")
        if warning := flags_warning(self.env, self.config):
            self._act(warning)
        memory = "" if self.config.parallel else f" ({format_bytes(self.memory_bytes)} of memory)"
        self.say(f"compiling at most {self.parallel} graphs at once{memory}")
        try:
            again = True
            while again:
                attempt = self._attempt()
                verdict = judge(attempt)
                mine = verdict is not CompileVerdict.DONE
                if mine:
                    self._act(f"attempt {len(self.attempts)}: {verdict_text(verdict, attempt)}")
                    self._cure(verdict, attempt)
                again = mine if self.peers is None else self.peers.any(f"again-{len(self.attempts)}", mine)
                if again and not mine:
                    self.say("all is compiled here, but not on another node: running again with it")
        except BaseException as error:
            try:
                self._repair()
            except TrnpipeError as second:
                error.add_note(f"and the cache could not be repaired: {second}")
            raise
        graphs = {path: one for past in self.attempts for path, one in (past.log.report or {}).items()}
        compiled = {entry_key(path): one.compile_time for path, one in graphs.items() if one.status}
        return NeuronCompileResult(
            graphs=attempt.log.wanted,
            num_succeeded=len(compiled.keys() & set(attempt.log.wanted)),
            graph_seconds={entry: seconds for entry, seconds in compiled.items() if seconds is not None},
            seconds=time.monotonic() - self.started,
            parallel=self.parallel,
        )

    def _attempt(self) -> Attempt:
        """Run the tool once and gather everything it left. No process of it is alive afterwards."""
        folder = self.scratch / f"attempt-{len(self.attempts) + 1}"
        shutil.rmtree(folder, ignore_errors=True)  # an earlier try of this job, whose result must not count
        folder.mkdir(parents=True)
        exit_file, script = folder / "trial-exit-code", folder / "run.sh"
        script.write_text(wrapper_script(self.command, cwd=self.cwd, exit_file=exit_file))
        script.chmod(0o755)
        # A script beside it, because the tool would parse options of the command itself.
        workdir = f"--parallel_compile_workdir={folder / 'work'}"
        tool = [PROGRAM, f"--num_parallel={self.parallel}", workdir, f"./{script.name}"]
        env = neuron_environment(self.env, self.config, cache_root=self.cache_root, retry_failed=bool(self.attempts))
        log_file = folder / LOG_NAME
        with process_tree(tool, cwd=folder, env=env, log=log_file) as tree:
            watch = LogWatch(log_file, is_local=self.is_local, compilers=lambda: compilers_of(self.cache_root))
            exit_code = self._watch(tree, watch, exit_file)
        log = read_log(folder)
        ends = (DONE_NAME, NEFF_NAME)
        done = frozenset(key for key in log.wanted if all(self.storage.stat(f"{key}/{end}") for end in ends))
        try:
            trial_code = int(exit_file.read_text())
        except (OSError, ValueError):  # missing or empty, as after a kill
            trial_code = None
        ended_early = exit_code is None
        attempt = Attempt(
            -signal.SIGTERM if exit_code is None else exit_code, trial_code, log, done, folder, ended_early
        )
        self.attempts.append(attempt)
        return attempt

    def _watch(self, tree: ProcessTree, log: LogWatch, trial_exit: Path) -> int | None:
        """The exit code of the tool; None when it was ended, being stuck. Preempted or TransientError: stop, limit.

        A peer that fails ends a trial run, which waits for it; compiling goes on for the cache's sake.
        """
        checked, todo = time.monotonic(), -1
        with ExitStack() as shown:
            while (exit_code := tree.poll()) is None:
                if self.peers is not None and time.monotonic() - checked > OTHERS_POLL_S and not trial_exit.exists():
                    self.peers.check()
                    checked = time.monotonic()
                if self.stop.wait(POLL_S):
                    tree.end(TOOL_S)
                    self._act(f"stopped by {self.stop.reason}: ended the trial run and all compilers")
                    self.stop.raise_if_set("compiling graphs")
                for line in log.news():
                    self.say(line)
                if log.waits:
                    self._release_locks()
                if log.counts:
                    remaining = log.counts[0]
                    if todo < 0:  # how many there are is known once the trial run has shown them
                        todo = remaining
                        advance = shown.enter_context(progress("compiling", todo, "graphs"))
                    advance(max(0, todo - remaining))
                    todo = min(todo, remaining)
                if log.is_stuck():
                    self._act("a compile waits for a lock that no running compiler holds: ended it")
                    tree.end(TOOL_S)
                    return None
                if time.monotonic() > self.deadline:
                    tree.end(TOOL_S)
                    limit_s = self.config.time_limit_s
                    news = f" ({log.last_news})" if log.last_news else ""
                    raise TransientError(
                        f"tracing and compiling took longer than {format_duration(limit_s)}{news}\n"
                        + log_tail(log.path),
                        expected=f"all graphs within compile.time_limit_s = {limit_s:g}",
                        next_command=f"less {log.path}; run the same command again (what is compiled stays in the"
                        " cache) or raise the limit",
                    )
        return exit_code

    def _cure(self, verdict: CompileVerdict, attempt: Attempt) -> None:
        """Change what made an attempt fail, or raise the error that says why nothing would."""
        if verdict is CompileVerdict.MEMORY and self.parallel > 1:
            self.parallel //= 2
            self._act(f"compiling at most {self.parallel} graphs at once from now on")
        elif verdict in (
            CompileVerdict.POISONED,
            CompileVerdict.CRASHED,
            CompileVerdict.LOCKED,
        ) and self.num_repairs < max(1, self.config.max_retries):
            self.num_repairs += 1
        else:
            for entry in attempt.missing:  # the compiler's own message on each goes beside our log: repair removes it
                if self.storage.stat(f"{entry}/{COMPILER_LOG}"):
                    target = attempt.folder / f"{graph_name(entry)}.log"
                    target.write_bytes(self.storage.read_bytes(f"{entry}/{COMPILER_LOG}"))
            raise verdict_error(verdict, attempt, cache_root=self.cache_root, config=self.config)
        if not self._repair() and verdict is CompileVerdict.LOCKED:
            self._wait_for_locks(attempt)

    def _repair(self) -> bool:
        """Put the cache in order; True when there was something to do."""
        lines = list(self.repair(self.cache_root))
        for line in lines:
            self._act(line)
        return bool(lines)

    def _wait_for_locks(self, attempt: Attempt) -> None:
        """Until the other processes that compile what is missing are done, whatever came of it."""
        self.say(f"waiting for {len(attempt.missing)} graphs that another process compiles: {_names(attempt.missing)}")
        if not self.is_local:
            limit = format_duration(SHARED_LOCK_S)
            self.say(f"a lock that a dead compiler left is removed here when it is older than {limit}")
        while any(stat.key.endswith(LOCK_SUFFIX) for entry in attempt.missing for stat in self.storage.list(entry)):
            self._release_locks()
            if self.stop.wait(OTHERS_POLL_S):
                self.stop.raise_if_set("waiting for graphs that another process compiles")
            if time.monotonic() > self.deadline:
                raise verdict_error(CompileVerdict.LOCKED, attempt, cache_root=self.cache_root, config=self.config)

    def _release_locks(self) -> None:
        """Delete the old locks of a cache on S3: whoever waits for them goes on."""
        if not self.is_local:
            for action in release_dead_locks(self.storage):
                self._act(f"{action.kind} {action.entry}: {action.reason}")

    def _act(self, line: str) -> None:
        self.actions.append(line)
        self.say(line)


# On every node of the job, into a cache that the nodes can share.


def compile_on_neuron(
    settings: Settings, ctx: StageContext, plan: Plan, scoring: Mapping[int, Plan]
) -> tuple[list[GraphManifest], bool]:
    """(manifests to publish, whether all was there already), when every node is done; none on nodes but the main.

    `scoring`: plans of evaluation and embedding for other numbers of ranks, which the main node compiles alone. The
    manifest of `plan` comes first. A node is warm when the manifests of its plans are known and its cache holds every
    entry of them. One cold node is enough for all to run the trial, which is one gang.
    """
    node = _Node(settings, ctx)
    with node.nodes.telling():
        if node.is_local:
            refuse_network_root(Path(node.root))
        node.exchange("pull")
        parts = scoring if ctx.world.node_rank == 0 else {}
        known = [load_manifest(ctx.workspace, one) for one in (plan, *parts.values())]
        done = {one.name.key for one in list_storage(open_storage(node.root)) if one.state is EntryState.DONE}
        # A manifest without entries is not one of Neuron's tool.
        warm = all(one is not None and one.cache_entries and one.cache_entries.keys() <= done for one in known)
        if not node.nodes.any("cold", not warm, timeout_s=ALL_THERE_S):
            return [one for one in known if one is not None], True
        # This very command once more as the trial run, with the other nodes, to compile what it shows.
        manifests = node.compile(plan, [], dict(os.environ), node.scratch, node.nodes)
        for ranks, part in parts.items():  # the same on this machine alone, with so many ranks that evaluate and embed
            node.say(f"compile: evaluation and embedding on {ranks} ranks")
            env = {name: value for name, value in os.environ.items() if name != NUM_NODES} | {SCORING: "1"}
            flags = ["--launch.processes", str(ranks)]
            manifests += node.compile(part, flags, env, node.scratch / f"scoring-{ranks}", None)
        node.exchange("push")
        node.nodes.wait("compiled")
    return manifests, False


class _Node:
    """This machine's part."""

    def __init__(self, settings: Settings, ctx: StageContext) -> None:
        self.settings, self.ctx = settings, ctx
        self.root = settings.compile.cache_root(ctx.workspace.root)
        self.is_local = not self.root.startswith("s3://")
        self.nodes = nodes_of(ctx, "compile/nodes", settings.compile.time_limit_s)
        self.scratch = ctx.scratch / "compile"
        self.say = Console().info  # every node has a log of its own; ctx.console speaks on the main one alone

    def exchange(self, direction: Direction) -> None:
        """Get from, or give to, the other machines what is new (compile.sync_url)."""
        url, versions = self.settings.compile.sync_url, self.settings.compile.keep_versions
        if self.is_local and url:
            storage = open_storage(url, retry=self.settings.storage, stop=self.ctx.stop)
            report = sync_cache(Path(self.root), storage, direction=direction, compiler_versions=versions or None)
            for line in report.lines():
                self.say(line)

    def compile(
        self, plan: Plan, flags: list[str], env: dict[str, str], scratch: Path, peers: Nodes | None
    ) -> list[GraphManifest]:
        """The manifest; none on nodes but the main."""
        scratch.mkdir(parents=True, exist_ok=True)
        traced = scratch / "traced.json"
        traced.unlink(missing_ok=True)
        try:
            done = NeuronCompile(
                [sys.executable, "-m", "pipeline", *self.ctx.words, "--cycle", self.ctx.cycle, *flags],
                self.settings.compile,
                cache_root=self.root,
                scratch=scratch,
                repair=self._repair,
                stop=self.ctx.stop,
                env={**env, TRACE_FILE: str(traced)},
                say=self.say,
                peers=peers,
            ).run()
        except TrnpipeError as error:
            if not self.ctx.stop.is_set():  # no time for it then
                try:  # a graph that failed must not cost the others again on the next machine
                    self.exchange("push")
                except TrnpipeError as second:
                    error.add_note(f"and what is compiled could not be shared: {second}")
            raise
        return [self._manifest(plan, traced, done)] if self.ctx.world.node_rank == 0 else []

    def _repair(self, root: str) -> list[str]:
        lines = repair_after_run(root)
        if lines:
            self.ctx.events.emit(EventName.CACHE_REPAIRED, actions=lines)
        return lines

    def _manifest(self, plan: Plan, trace_file: Path, done: NeuronCompileResult) -> GraphManifest:
        """What the trial run traced, with the cache entries it needs. Raises DataError when it had another plan."""
        traced = GraphManifest.model_validate_json(trace_file.read_bytes())
        if traced.plan != plan:
            raise DataError(
                "the trial run traced another plan than this command's",
                expected="the same settings and versions in both",
                next_command="unset variables that only one of them sees, then trnpipe compile again",
            )
        earlier = {name: s for old in load_manifests(self.ctx.workspace) for name, s in old.cache_entries.items()}
        seconds = {name: done.graph_seconds.get(name, earlier.get(name)) for name in done.graphs}
        saved_s = sum(seconds[name] or 0.0 for name in done.graphs if name not in done.graph_seconds)
        self.say(
            f"compile: {len(done.graphs)} cache entries, {done.num_succeeded} compiled by {done.parallel} compilers in "
            f"{done.seconds:.0f} s, {len(done.graphs) - done.num_succeeded} found in the cache "
            f"(saving {saved_s:.0f} s of compiling)"
        )
        return traced.model_copy(update={"cache_entries": seconds})
