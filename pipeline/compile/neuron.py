"""Compile the graphs of a cycle with `neuron_parallel_compile`, which traces a trial run and compiles in parallel.

The tool has several pitfalls. It deletes its work folder, parses the options of the command that it runs, silently
skips locked graphs, reuses cached failures, and doesn't release locks when it is killed. The exit code is the number of
failed graphs, so that 256 failures result in exit code 0. To work around this, each run uses a separate folder and a
wrapper script, and a graph is only considered to be compiled if its cache entry is complete. When parsing the log, we
only match the text of messages. The prefix of messages changed between releases, and lines can't be relied on, since
many processes write to the same pipe. This is based on Neuron SDK 2.29 (neuron_parallel_compile and persistent cache).
"""

import json
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel

from pipeline.backends import compiled_cache_variable, has_graph_tool
from pipeline.compile.cache import (
    Compilers,
    EntryState,
    list_entries,
    live_compilers,
    refuse_network_root,
    release_locks,
    repair,
)
from pipeline.compile.config import ALL_THERE_S, CompileConfig
from pipeline.compile.identity import source_digest
from pipeline.compile.manifest import GraphManifest, Plan, load_manifests, load_traced
from pipeline.compile.sync import sync_cache
from pipeline.context import StageContext, node_group
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
from pipeline.core.interpreter import OWN_MODULE
from pipeline.core.neuron_errors import COMPILER_KILLED
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.world import NUM_NODES, TRACE_FILE, Nodes
from pipeline.proc.children import TOOL_S
from pipeline.proc.tool import host_memory_bytes, process_tree
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName

PROGRAM = "neuron_parallel_compile"
LOG_NAME = f"{PROGRAM}.log"
NEFF_ROOT = "/tmp/neff_cache"  # noqa: S108 - default in torch-neuronx (SDK 2.33, torch/reference/env-vars)
SCORING = "TRN_TRACE_SCORING"
"""Environment variable that is set in trial runs which only trace evaluation and embedding."""
NOT_INHERITED = ("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", "NEURON_EXTRACT_GRAPHS_ONLY")
POLL_S, NODES_POLL_S = 0.2, 5.0
DEAD_LOCK_S = 60.0  # a lock that blocks compilation is stale after this time if no compiler is running
BYTES_PER_COMPILER = 64 * 2**30  # memory that AWS reserves for each neuronx-cc (neuron_parallel_compile, SDK 2.23)
SIGKILLED = (-9, 137)  # as reported by subprocess and by a shell
TAIL_LINES, NUM_NAMED = 25, 5


def drives_tool(config: CompileConfig, backend: str, env: Mapping[str, str]) -> bool:
    """Return whether this process should run neuron_parallel_compile. This is never the case in a trial run."""
    if TRACE_FILE in env or config.tool == "none":
        return False
    return config.tool == "neuron" or has_graph_tool(backend, env)


def use_neuron_cache(config: CompileConfig, workspace: str, backend: str, env: MutableMapping[str, str]) -> str:
    """Set the environment variables for the compile cache and, with PyTorch/XLA, for the compiler flags on Neuron.

    This must be called before importing torch_xla. It does nothing in a trial run, where the tool has already set the
    variables. Returns a warning if it overrides NEURON_CC_FLAGS with different flags, or otherwise an empty string.
    """
    if TRACE_FILE in env:
        return ""
    root = config.cache_root(workspace)
    if folder := compiled_cache_variable(backend):
        # If the root is on S3, compile/sync.py copies programs to and from this folder.
        env[folder] = env.get(folder, NEFF_ROOT) if root.startswith("s3://") else root
        return ""
    if not has_graph_tool(backend, env):
        return ""
    before, now = env.get("NEURON_CC_FLAGS", ""), config.flags.text()
    env["NEURON_CC_FLAGS"], env["NEURON_COMPILE_CACHE_URL"] = now, root
    is_changed = before and before.split() != now.split()
    return f"NEURON_CC_FLAGS {before!r} is overridden by {now!r} from the settings" if is_changed else ""


# Parsing the log of the tool.


class GraphReport(BaseModel):
    """The result for a graph in the final report. `compile_time` is in seconds, or None in older releases."""

    status: bool
    compile_time: float | None = None


class _Summary(BaseModel):
    compilation_summary: dict[str, int]
    compilation_report: dict[str, GraphReport] = {}


@dataclass(frozen=True)
class NeuronLog:
    """The parsed content of a log. Graphs are identified by the keys of their cache entries."""

    required: tuple[str, ...]
    """Graphs that the trial run requires, which were either extracted, cached or included in the report."""
    failures: tuple[str, ...]
    """Lines about graphs that failed to compile."""
    was_killed: bool
    """Whether a compiler was killed, for example because the host ran out of memory."""
    report: Mapping[str, GraphReport]
    """Results from the last complete summary, by graph."""


_REQUIRED = re.compile(
    r"(?:Extracting graphs \(|Using a cached neff at\s+|Got a cached failed neff at\s+)([^\s()]+?\.(?:neff|pb))"
)
_ENTRY = re.compile(r"neuronxcc-[^/\s]+/MODULE_[0-9A-Za-z]+(?:\+[0-9a-f]+)?")
_FAILURE = re.compile(
    r"Failed compilation with \[|failed compilation: |Compiler status (?!PASS)\w+|\[F13\d\]|\[NCC_[A-Z]+\d+\]"
    r"|neuronx-cc (?:compilation )?failed with"
)
_COUNTS = re.compile(r"Current remaining items are (\d+), locked are (\d+), failed are (\d+), done are (\d+)")
_WAITING = re.compile(r"Another process must be compiling (\S*)")


def entry_key(path: str) -> str:
    """Extract the key of a cache entry, `neuronxcc-<version>/MODULE_<graph>+<flags>`, from a path.

    Returns an empty string if the path doesn't contain a key.
    """
    match = _ENTRY.search(path)
    return match[0] if match else ""


def parse_log(text: str) -> NeuronLog:
    """Parse a log including its summary. Any other text is ignored."""
    lines, report = text.splitlines(), dict[str, GraphReport]()
    end = len(text)
    while not report and (key := text.rfind('"compilation_summary"', 0, end)) >= 0:
        with suppress(ValueError):  # the summary is truncated, or is other text that looks like a summary
            value = json.JSONDecoder().raw_decode(text, max(0, text.rfind("{", 0, key)))[0]
            summary = _Summary.model_validate(value)
            report = {entry_key(path): graph for path, graph in summary.compilation_report.items()}
        end = key
    # Filter lines before applying the regular expression, since some contain hundreds of paths with "compile" in them.
    maybe_killed = (line for line in lines if "-9" in line or "kill" in line.lower() or "[F137]" in line)
    required = dict.fromkeys([*map(entry_key, _REQUIRED.findall(text)), *report])
    return NeuronLog(
        tuple(key for key in required if key),
        tuple(dict.fromkeys(line.strip() for line in lines if _FAILURE.search(line))),
        any(COMPILER_KILLED.search(line) for line in maybe_killed),
        report,
    )


@dataclass(frozen=True)
class CompileRun:
    """The result of running the tool once.

    `trial_code`: exit code of the trial run, or None if it didn't finish. `missing`: required graphs that have not been
    compiled.
    """

    exit_code: int
    trial_code: int | None
    log: NeuronLog
    missing: tuple[str, ...]
    log_file: Path

    @property
    def is_done(self) -> bool:
        return bool(self.log.required) and not self.missing and self.trial_code == 0

    @property
    def was_killed(self) -> bool:
        return self.log.was_killed or self.exit_code in SIGKILLED

    @property
    def is_final(self) -> bool:
        """True if a retry would fail again.

        This is the case if the program failed, if it didn't trace any graph, or if the compiler rejected a graph.
        """
        if self.trial_code not in (0, None) or (self.exit_code == self.trial_code == 0 and not self.log.required):
            return True
        refused = any(key in self.log.report and not self.log.report[key].status for key in self.missing)
        return refused and not self.was_killed

    def error(self) -> TrnpipeError:
        """Create the error to raise if any graphs are missing."""
        names = ", ".join(key.partition("/")[2] for key in self.missing[:NUM_NAMED]) or "names unknown"
        more = f" and {len(self.missing) - NUM_NAMED} more" if len(self.missing) > NUM_NAMED else ""
        kind: type[TrnpipeError] = ConfigError if self.is_final or self.was_killed else TransientError
        problem, next_command = f"graphs were not compiled: {names}{more}", f"less {self.log_file}"
        expected = "graphs that neuronx-cc accepts (compilation was retried once)"
        if self.trial_code not in (0, None):
            kind = _BY_EXIT_CODE.get(self.trial_code, TrnpipeError)
            problem, expected = f"the trial run failed with exit code {self.trial_code}", "exit code 0"
        elif self.was_killed:
            problem += ", because a compiler was killed (-9)"
            expected = "enough memory for one neuronx-cc, which needs tens of GB for a large graph"
            next_command = "use compile.flags.optlevel 1, a smaller micro-batch, or a machine with more memory"
        elif not self.log.required:
            problem = f"the trial run did not trace any graphs (exit code {self.exit_code})"
            expected = "'Extracting graphs (...)' in its standard output, from a program that runs on a Neuron device"
        elif self.is_final:
            next_command += ", and: trnpipe doctor --hlo"
        failures = [f"  | {line[-400:]}" for line in self.log.failures[-NUM_NAMED:]]
        message = "\n".join([problem, *failures, log_tail(self.log_file)])
        return kind(message, expected=expected, next_command=next_command)


# The trial run is another process of this program. If it was preempted, but this process has not received a stop
# signal, a different node was lost.
_BY_EXIT_CODE: dict[int, type[TrnpipeError]] = {
    **{kind.exit_code: kind for kind in (ConfigError, DataError, CheckpointError, NumericError, GateRefused)},
    **dict.fromkeys((*SIGKILLED, 143, -15, TransientError.exit_code), TransientError),
}


def log_tail(log: Path) -> str:
    """Return the last lines of a log file with indentation."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200 * TAIL_LINES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  | {line[:400]}" for line in lines[-TAIL_LINES:])


def progress_of(text: str) -> tuple[str, bool]:
    """Determine the progress from the most recent lines of a log.

    Returns a line to print, which may be empty, and whether a compilation is waiting for a lock.
    """
    waiting, counts = _WAITING.findall(text), _COUNTS.findall(text)
    if counts:
        todo, locked, failed, done = counts[-1]
        return f"graphs in the cache: {done} done, {todo} remaining, {locked} locked, {failed} failed", bool(waiting)
    return f"waiting for the lock of {waiting[-1] or 'a graph'}" if waiting else "", bool(waiting)


@contextmanager
def errors_as_notes(error: BaseException, failure: str) -> Iterator[None]:
    """Suppress any TrnpipeError raised in the block and add it to `error` as a note."""
    try:
        yield
    except TrnpipeError as second:
        error.add_note(f"and {failure}: {second}")


@dataclass(frozen=True)
class NeuronCompileResult:
    """The result of NeuronCompile.

    `graphs`: cache keys of all graphs that the trial run requires. `seconds`: compile times of the graphs that were
    compiled by this process, by key.
    """

    graphs: tuple[str, ...]
    seconds: Mapping[str, float | None]


@dataclass
class NeuronCompile:
    """A runner for neuron_parallel_compile, which traces the trial run `command` and compiles its graphs.

    `cache_root`: the compile cache, as an absolute path or an s3:// URI. `scratch`: local folder for logs and temporary
    files. `nodes`: the nodes whose trial runs form a process group. If the trial run has to be repeated on any of them,
    it is repeated on all.
    """

    command: Sequence[str]
    config: CompileConfig
    cache_root: str
    scratch: Path
    stop: StopSignal
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    memory_bytes: int = field(default_factory=host_memory_bytes)
    say: Say = lambda line: None
    nodes: Nodes | None = None
    compilers: Compilers = live_compilers

    def __post_init__(self) -> None:
        self.repaired: list[str] = []
        self.scratch = self.scratch.absolute()
        self._deadline = time.monotonic() + self.config.time_limit_s
        # Use a separate stop signal, so that locks are also deleted after the run has been stopped.
        self._cache = open_storage(self.cache_root, stop=StopSignal())

    def run(self) -> NeuronCompileResult:
        """Repair the cache and run the tool. If any graphs are missing, retry once.

        If a compiler was killed, the retry only compiles one graph at a time.

        If the trial run fails, raises the error that corresponds to its exit code. Raises ConfigError if the compiler
        rejects a graph, if a single compiler runs out of memory, or if the tools are not installed. Raises
        TransientError if the time limit is exceeded, if the retry also crashes, or if another node fails. Raises
        Preempted within about 10 s when stopped.
        """
        self.stop.raise_if_set("starting to compile")
        self._repair()
        parallel = max(1, math.ceil(self.memory_bytes / BYTES_PER_COMPILER))
        try:
            attempt = first = self._attempt(1, parallel)
            retry = not attempt.is_done
            if retry and attempt.is_final:
                raise attempt.error()
            if retry if self.nodes is None else self.nodes.any("again", retry):
                self._repair()
                attempt = self._attempt(2, 1 if first.was_killed else parallel)
            if not attempt.is_done:
                raise attempt.error()
        except BaseException as error:
            with errors_as_notes(error, "the cache could not be repaired"):
                self._repair()
            raise
        reports = {**first.log.report, **attempt.log.report}
        seconds = {key: graph.compile_time for key, graph in reports.items() if graph.status}
        return NeuronCompileResult(attempt.log.required, seconds)

    def _repair(self) -> None:
        """Delete failed entries and, unless a compiler is running on this host, locks and partial entries."""
        self._report(repair(self._cache, stale_s=0.0, compilers=self.compilers))

    def _report(self, actions: Sequence[str]) -> None:
        lines = [f"compile cache: {action}" for action in actions]
        self.repaired += lines
        for line in lines:
            self.say(line)

    def _attempt(self, number: int, parallel: int) -> CompileRun:
        """Run the tool once and collect the results. When this returns, all processes of the tool have exited."""
        self.say(f"compiling up to {parallel} graphs in parallel (attempt {number})")
        folder = self.scratch / f"attempt-{number}"
        shutil.rmtree(folder, ignore_errors=True)  # remove results of an earlier attempt of this job
        folder.mkdir(parents=True)
        # The wrapper script has no options, since the tool would parse them. It also records the exit code, which the
        # tool doesn't return.
        exit_file, script, log_file = folder / "trial-exit-code", folder / "run.sh", folder / LOG_NAME
        quoted = (shlex.quote(str(Path.cwd())), shlex.join(self.command), shlex.quote(str(exit_file)))
        script.write_text('#!/bin/sh\ncd {} || exit 1\n{}\ncode=$?\necho "$code" > {}\nexit "$code"\n'.format(*quoted))
        script.chmod(0o755)
        tool = [PROGRAM, f"--num_parallel={parallel}", f"--parallel_compile_workdir={folder / 'work'}", "./run.sh"]
        env = {name: value for name, value in self.env.items() if name not in NOT_INHERITED} | {
            # Unlike the flags, this option is not part of the cache key.
            "NEURON_CC_FLAGS": f"{self.config.flags.text()} --retry_failed_compilation",
            "NEURON_COMPILE_CACHE_URL": self.cache_root,
            "NEURON_PARALLEL_COMPILE_MAX_RETRIES": "1",
            "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1",
        }
        exit_code = self._run_tool(tool, env, folder, exit_file)
        files = sorted(folder.glob(f"{PROGRAM}_results_*.json"))
        log = parse_log("\n".join(path.read_text(errors="replace") for path in (*files, log_file)))
        trial_code = None
        with suppress(OSError, ValueError):  # the file is missing or empty if the process was killed
            trial_code = int(exit_file.read_text())
        attempt = CompileRun(exit_code, trial_code, log, self._missing(log.required), log_file)
        if attempt.missing and not attempt.is_final:
            self._wait_for_locks(attempt.missing)
            attempt = replace(attempt, missing=self._missing(log.required))
        if not attempt.is_done:
            self.say(f"attempt {number} exited with {exit_code}, and {len(attempt.missing)} graphs were not compiled")
        return attempt

    def _run_tool(self, tool: list[str], env: Mapping[str, str], folder: Path, trial_exit: Path) -> int:
        """Run the tool and return its exit code.

        Raises Preempted when stopped, and TransientError after the time limit or if another node fails during the trial
        run. If a node fails later, compilation continues, so that the graphs are available in the cache.
        """
        checked, log_file, last_line, pending = time.monotonic(), folder / LOG_NAME, "", b""
        with process_tree(tool, cwd=folder, env=env, log=log_file) as tree, log_file.open("rb") as log:
            while (exit_code := tree.poll()) is None:
                if self.nodes is not None and time.monotonic() - checked > NODES_POLL_S and not trial_exit.exists():
                    self.nodes.check()
                    checked = time.monotonic()
                if self.stop.wait(POLL_S):
                    tree.end(TOOL_S)
                    self.stop.raise_if_set("compiling graphs")
                text, _, pending = (pending + log.read()).rpartition(b"\n")
                line, is_waiting = progress_of(text.decode(errors="replace"))
                if line and line != last_line:
                    self.say(line)
                    last_line = line
                if is_waiting:  # the lock may belong to a compiler that was killed and will never release it
                    self._release_locks()
                if time.monotonic() > self._deadline:
                    tree.end(TOOL_S)
                    raise self._timeout_error(log_tail(log_file))
        return exit_code

    def _missing(self, required: Sequence[str]) -> tuple[str, ...]:
        done = done_keys(self._cache)
        return tuple(key for key in required if key not in done)

    def _wait_for_locks(self, missing: Sequence[str]) -> None:
        """Wait for graphs that are being compiled by other processes, since the tool silently skips locked graphs."""
        while any(entry.locks for key in missing for entry in list_entries(self._cache, key)):
            self._release_locks()
            if self.stop.wait(POLL_S if self._cache.local_path("") else NODES_POLL_S):
                self.stop.raise_if_set("waiting for graphs that another process compiles")
            if time.monotonic() > self._deadline:
                raise self._timeout_error(f"graphs locked by other processes: {', '.join(missing[:NUM_NAMED])}")

    def _release_locks(self) -> None:
        self._report(release_locks(self._cache, stale_s=DEAD_LOCK_S, compilers=self.compilers))

    def _timeout_error(self, detail: str) -> TransientError:
        return TransientError(
            f"tracing and compiling took longer than {format_duration(self.config.time_limit_s)}\n{detail}",
            expected=f"all graphs to be compiled within compile.time_limit_s = {self.config.time_limit_s:g}",
            next_command="rerun the command (compiled graphs are cached) or increase the limit",
        )


def done_keys(cache: Storage) -> set[str]:
    return {entry.key for entry in list_entries(cache) if entry.state is EntryState.DONE}


# Compilation on all nodes of a job, which may share a cache.


def compile_on_neuron(
    settings: Settings, ctx: StageContext, plan: Plan, scoring: Mapping[tuple[int, str], Plan]
) -> tuple[list[GraphManifest], bool]:
    """Compile all graphs of a plan on all nodes of a job.

    A node is warm if the manifests of its plans exist for this code and its cache contains all of their entries. If any
    node is cold, all nodes have to run the trial, because the trial runs form one process group. Plans in `scoring` are
    for evaluation and embedding, by the number of ranks and the value of SCORING. Only the main node compiles them.

    Returns the manifests to publish, starting with the one of `plan`, and whether all graphs were already cached. On
    all nodes except the main node, there are no manifests to publish unless everything was cached.
    """
    root, config = settings.compile.cache_root(ctx.workspace.root), settings.compile
    say = Console().info  # each node has its own log, whereas ctx.console only prints on the main node
    is_main, scratch = ctx.world.node_rank == 0, ctx.scratch / "compile"
    nodes = node_group(ctx, "compile/nodes", config.time_limit_s)

    def sync() -> None:
        if config.sync_url and not root.startswith("s3://"):
            shared = open_storage(config.sync_url, retry=settings.storage, stop=ctx.stop)
            for line in sync_cache(Path(root), shared).lines():
                say(line)

    def compile_plan(
        plan: Plan, flags: Sequence[str], env: Mapping[str, str], folder: Path, nodes: Nodes | None
    ) -> list[GraphManifest]:
        """Run this command again as a trial run and compile its graphs. On the main node, returns the manifest."""
        folder.mkdir(parents=True, exist_ok=True)
        traced = folder / "traced.json"
        traced.unlink(missing_ok=True)
        command = [*OWN_MODULE, "pipeline", *ctx.command_line, "--cycle", ctx.cycle, *flags]
        run = NeuronCompile(
            *(command, config, root, folder, ctx.stop), env={**env, TRACE_FILE: str(traced)}, say=say, nodes=nodes
        )
        try:
            result = run.run()
        except TrnpipeError as error:
            if not ctx.stop.is_set():  # share all other graphs, so that they don't have to be compiled again
                with errors_as_notes(error, "compiled graphs could not be shared"):
                    sync()
            raise
        finally:
            if run.repaired:
                ctx.events.emit(EventName.CACHE_REPAIRED, actions=run.repaired)
        return [_manifest(ctx, plan, traced, result, say)] if is_main else []

    with nodes.report_failure():
        if not root.startswith("s3://"):
            refuse_network_root(Path(root))
        sync()
        scoring = scoring if is_main else {}
        code = source_digest(settings.model.factory)
        stored = [load_traced(ctx.workspace, required, code) for required in (plan, *scoring.values())]
        done = done_keys(open_storage(root))
        # If a manifest has no cache entries, it was not created with Neuron's tool.
        is_warm = all(m is not None and m.cache_entries and m.cache_entries.keys() <= done for m in stored)
        if not nodes.any("cold", not is_warm, timeout_s=ALL_THERE_S):
            return [manifest for manifest in stored if manifest is not None], True
        manifests = compile_plan(plan, [], os.environ, scratch, nodes)
        # These only run on this node, with as many ranks as evaluate and embed.
        for (ranks, kind), scoring_plan in scoring.items():
            say(f"compile: compiling evaluation and embedding for {ranks} ranks")
            env = {name: value for name, value in os.environ.items() if name != NUM_NODES} | {SCORING: kind}
            flags = ["--launch.processes", str(ranks)]
            manifests += compile_plan(scoring_plan, flags, env, scratch / f"scoring-{ranks}-{kind}", None)
        sync()
        nodes.wait("compiled")
    return manifests, False


def _manifest(ctx: StageContext, plan: Plan, traced: Path, result: NeuronCompileResult, say: Say) -> GraphManifest:
    """Load the manifest of the trial run and add its cache entries. Raises DataError if its plan is different."""
    manifest = GraphManifest.model_validate_json(traced.read_bytes())
    if manifest.plan != plan:
        raise DataError(
            "the trial run used a different plan from this command",
            expected="the same settings and versions in both processes",
            next_command="unset environment variables that are set in only one of them, then rerun trnpipe compile",
        )
    earlier = {name: s for old in load_manifests(ctx.workspace) for name, s in old.cache_entries.items()}
    num_compiled = len(result.seconds.keys() & set(result.graphs))
    num_cached = len(result.graphs) - num_compiled
    say(f"compile: {len(result.graphs)} cache entries ({num_compiled} compiled, {num_cached} already in the cache)")
    return manifest.model_copy(
        update={"cache_entries": {name: result.seconds.get(name) or earlier.get(name) for name in result.graphs}}
    )
