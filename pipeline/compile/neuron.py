"""Compiles the graphs of a cycle with `neuron_parallel_compile`: one trial run shows them, parallel compiles follow.

The tool deletes its work folder, swallows options of the command it runs, skips locked graphs in silence, reuses cached
failures for ever, leaves locks when killed, and its exit code is the number of failed graphs, so that 256 failures are
a 0. Each run therefore has a folder and a wrapper script, and the cache decides: a graph is compiled when its entry is
complete. Its messages are matched by their text, never by a prefix, which changed between releases, and never by line:
many processes write to one pipe. Facts: Neuron SDK 2.29, neuron_parallel_compile and persistent cache.
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
from pipeline.compile.manifest import GraphManifest, Plan, load_manifest, load_manifests
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
NEFF_ROOT = "/tmp/neff_cache"  # noqa: S108 - torch-neuronx's own default (SDK 2.33, torch/reference/env-vars)
SCORING = "TRN_TRACE_SCORING"
"""Environment of a trial run that traces evaluation and embedding alone."""
NOT_INHERITED = ("NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE", "NEURON_EXTRACT_GRAPHS_ONLY")
POLL_S, OTHERS_POLL_S = 0.2, 5.0
DEAD_LOCK_S = 60.0  # of a lock that is waited for while no compiler runs
BYTES_PER_COMPILER = 64 * 2**30  # AWS keeps this much for each neuronx-cc (neuron_parallel_compile, SDK 2.23)
SIGKILLED = (-9, 137)  # from subprocess and from a shell
TAIL_LINES, NUM_NAMED = 25, 5


def drives_tool(config: CompileConfig, backend: str, env: Mapping[str, str]) -> bool:
    """Return whether to run neuron_parallel_compile over a trial run; False in that trial run itself."""
    if TRACE_FILE in env or config.tool == "none":
        return False
    return config.tool == "neuron" or has_graph_tool(backend, env)


def use_neuron_cache(config: CompileConfig, workspace: str, backend: str, env: MutableMapping[str, str]) -> str:
    """On Neuron set the flags (PyTorch/XLA) and the cache of the compile stage, before torch_xla is imported.

    A trial run keeps what its tool has set. Returns a warning if other flags were set by hand, else ''.
    """
    if TRACE_FILE in env:
        return ""
    root = config.cache_root(workspace)
    if folder := compiled_cache_variable(backend):
        # S3 is no folder: there programs are copied from and to it, by compile/sync.py.
        env[folder] = env.get(folder, NEFF_ROOT) if root.startswith("s3://") else root
        return ""
    if not has_graph_tool(backend, env):
        return ""
    before, now = env.get("NEURON_CC_FLAGS", ""), config.flags.text()
    env["NEURON_CC_FLAGS"], env["NEURON_COMPILE_CACHE_URL"] = now, root
    is_other = before and before.split() != now.split()
    return f"NEURON_CC_FLAGS was {before!r}; the settings make it {now!r}" if is_other else ""


# The log of a run.


class GraphReport(BaseModel):
    """One graph of the final report, by its path. `compile_time` in seconds, None in an old release."""

    status: bool
    compile_time: float | None = None


class _Summary(BaseModel):
    compilation_summary: dict[str, int]
    compilation_report: dict[str, GraphReport] = {}


@dataclass(frozen=True)
class NeuronLog:
    """A log, read to its end. Graphs by the keys of their cache entries."""

    wanted: tuple[str, ...]
    """All that are named as needed: found there, extracted, or reported on."""
    failures: tuple[str, ...]
    """Lines about graphs that were not compiled."""
    was_killed: bool
    """A compiler was killed, as the host does when memory runs out."""
    report: Mapping[str, GraphReport]
    """Graphs of the last complete summary."""


_WANTED = re.compile(
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
    """Return the cache entry a path belongs to, `neuronxcc-<version>/MODULE_<graph>+<flags>`; '' if there is none."""
    match = _ENTRY.search(path)
    return match[0] if match else ""


def parse_log(text: str) -> NeuronLog:
    """Read a log and the summary in it. Unknown text is passed over."""
    lines, report = text.splitlines(), dict[str, GraphReport]()
    end = len(text)
    while not report and (key := text.rfind('"compilation_summary"', 0, end)) >= 0:
        with suppress(ValueError):  # cut off, or something else that looks like it
            value = json.JSONDecoder().raw_decode(text, max(0, text.rfind("{", 0, key)))[0]
            report = {entry_key(path): one for path, one in _Summary.model_validate(value).compilation_report.items()}
        end = key
    # The cheap look first: lists of hundreds of paths, with "compile" in each, come on one line.
    maybe_killed = (line for line in lines if "-9" in line or "kill" in line.lower() or "[F137]" in line)
    wanted = dict.fromkeys([*map(entry_key, _WANTED.findall(text)), *report])
    return NeuronLog(
        tuple(key for key in wanted if key),
        tuple(dict.fromkeys(line.strip() for line in lines if _FAILURE.search(line))),
        any(COMPILER_KILLED.search(line) for line in maybe_killed),
        report,
    )


@dataclass(frozen=True)
class CompileRun:
    """One finished run. `trial_code` is None if the trial run did not end. `missing`: entries still incomplete."""

    exit_code: int
    trial_code: int | None
    log: NeuronLog
    missing: tuple[str, ...]
    log_file: Path

    @property
    def is_done(self) -> bool:
        return bool(self.log.wanted) and not self.missing and self.trial_code == 0

    @property
    def was_killed(self) -> bool:
        return self.log.was_killed or self.exit_code in SIGKILLED

    @property
    def is_final(self) -> bool:
        """True if another run would end the same: the program failed, shows no graph, or the compiler refused one."""
        if self.trial_code not in (0, None) or (self.exit_code == self.trial_code == 0 and not self.log.wanted):
            return True
        refused = any(key in self.log.report and not self.log.report[key].status for key in self.missing)
        return refused and not self.was_killed

    def error(self) -> TrnpipeError:
        """Return the error for graphs that remain missing."""
        names = ", ".join(key.partition("/")[2] for key in self.missing[:NUM_NAMED]) or "no graph named"
        more = f" and {len(self.missing) - NUM_NAMED} more" if len(self.missing) > NUM_NAMED else ""
        kind: type[TrnpipeError] = ConfigError if self.is_final or self.was_killed else TransientError
        seen, next_command = f"graphs were not compiled: {names}{more}", f"less {self.log_file}"
        expected = "graphs that neuronx-cc accepts; each was tried twice"
        if self.trial_code not in (0, None):
            kind = _BY_EXIT_CODE.get(self.trial_code, TrnpipeError)
            seen, expected = f"the trial run ended with exit code {self.trial_code}", "exit code 0"
        elif self.was_killed:
            seen += "; a compiler was killed (-9)"
            expected = "memory for one neuronx-cc: tens of GB for a large graph"
            next_command = "compile.flags.optlevel 1, a smaller micro-batch, or a machine with more memory"
        elif not self.log.wanted:
            seen = f"the trial run showed no graph, exit code {self.exit_code}"
            expected = "'Extracting graphs (...)' on its standard output, by a program on the Neuron device"
        elif self.is_final:
            next_command += ", and: trnpipe doctor --hlo"
        failures = [f"  | {line[-400:]}" for line in self.log.failures[-NUM_NAMED:]]
        return kind("\n".join([seen, *failures, log_tail(self.log_file)]), expected=expected, next_command=next_command)


# The trial run is this program too. Preempted without a stop of ours is a lost peer.
_BY_EXIT_CODE: dict[int, type[TrnpipeError]] = {
    **{kind.exit_code: kind for kind in (ConfigError, DataError, CheckpointError, NumericError, GateRefused)},
    **dict.fromkeys((*SIGKILLED, 143, -15, TransientError.exit_code), TransientError),
}


def log_tail(log: Path) -> str:
    """Return the last lines of a log, indented."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200 * TAIL_LINES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  | {line[:400]}" for line in lines[-TAIL_LINES:])


def progress_of(text: str) -> tuple[str, bool]:
    """Return a line about the progress, or '', and whether a compile waits for a lock, by the newest lines of a log."""
    waiting, counts = _WAITING.findall(text), _COUNTS.findall(text)
    if counts:
        todo, locked, failed, done = counts[-1]
        return f"graphs in the cache: {done} done, {todo} to do, {locked} locked, {failed} failed", bool(waiting)
    return f"a compile waits for the lock of {waiting[-1] or 'a graph'}" if waiting else "", bool(waiting)


@contextmanager
def noted(error: BaseException, failure: str) -> Iterator[None]:
    """Add an error of ours in the block to `error` as a note."""
    try:
        yield
    except TrnpipeError as second:
        error.add_note(f"and {failure}: {second}")


@dataclass(frozen=True)
class NeuronCompileResult:
    """`graphs`: keys of all cache entries that the trial run needs. `seconds`: of those compiled here."""

    graphs: tuple[str, ...]
    seconds: Mapping[str, float | None]


@dataclass
class NeuronCompile:
    """Traces `command` and compiles every graph it shows into `cache_root` (an absolute path or s3://...).

    `scratch` is a local folder for logs and work files. `peers`: other nodes, whose trial runs are one program with
    ours; a run that is repeated on one node is repeated on all.
    """

    command: Sequence[str]
    config: CompileConfig
    cache_root: str
    scratch: Path
    stop: StopSignal
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    memory_bytes: int = field(default_factory=host_memory_bytes)
    say: Say = lambda line: None
    peers: Nodes | None = None
    compilers: Compilers = live_compilers

    def __post_init__(self) -> None:
        self.repaired: list[str] = []
        self.scratch = self.scratch.absolute()
        self._deadline = time.monotonic() + self.config.time_limit_s
        # No stop signal: locks of a stopped run are removed, too.
        self._cache = open_storage(self.cache_root, stop=StopSignal())

    def run(self) -> NeuronCompileResult:
        """Run the tool, and once more with fewer compilers if graphs are missing. Leaves the cache in order.

        Raises the error of the trial run's own exit code; ConfigError if the compiler refuses a graph, if one compiler
        alone needs more memory than there is, or if the tools are missing; TransientError if the time limit is over, a
        crash repeats or a peer failed; Preempted when stopped, at most about 10 s later.
        """
        self.stop.raise_if_set("starting to compile")
        self._repair()
        parallel = max(1, math.ceil(self.memory_bytes / BYTES_PER_COMPILER))
        try:
            attempt = first = self._attempt(1, parallel)
            again = not attempt.is_done
            if again and attempt.is_final:
                raise attempt.error()
            if again if self.peers is None else self.peers.any("again", again):
                self._repair()
                attempt = self._attempt(2, 1 if first.was_killed else parallel)
            if not attempt.is_done:
                raise attempt.error()
        except BaseException as error:
            with noted(error, "the cache could not be repaired"):
                self._repair()
            raise
        reports = {**first.log.report, **attempt.log.report}
        seconds = {key: one.compile_time for key, one in reports.items() if one.status}
        return NeuronCompileResult(attempt.log.wanted, seconds)

    def _repair(self) -> None:
        """Delete failures, locks and half entries that no living compiler of this host is at work on."""
        self._note(repair(self._cache, stale_s=0.0, compilers=self.compilers))

    def _note(self, actions: Sequence[str]) -> None:
        lines = [f"compile cache: {action}" for action in actions]
        self.repaired += lines
        for line in lines:
            self.say(line)

    def _attempt(self, number: int, parallel: int) -> CompileRun:
        """Run the tool once and collect its results. No process of it is alive afterwards."""
        self.say(f"compiling at most {parallel} graphs at once, attempt {number}")
        folder = self.scratch / f"attempt-{number}"
        shutil.rmtree(folder, ignore_errors=True)  # from an earlier attempt of this job, whose result must not count
        folder.mkdir(parents=True)
        # The tool hides the exit code of the program, and would parse its options.
        exit_file, script, log_file = folder / "trial-exit-code", folder / "run.sh", folder / LOG_NAME
        quoted = (shlex.quote(str(Path.cwd())), shlex.join(self.command), shlex.quote(str(exit_file)))
        script.write_text('#!/bin/sh\ncd {} || exit 1\n{}\ncode=$?\necho "$code" > {}\nexit "$code"\n'.format(*quoted))
        script.chmod(0o755)
        tool = [PROGRAM, f"--num_parallel={parallel}", f"--parallel_compile_workdir={folder / 'work'}", "./run.sh"]
        env = {name: value for name, value in self.env.items() if name not in NOT_INHERITED} | {
            # The option is not part of the cache key, as the flags are.
            "NEURON_CC_FLAGS": f"{self.config.flags.text()} --retry_failed_compilation",
            "NEURON_COMPILE_CACHE_URL": self.cache_root,
            "NEURON_PARALLEL_COMPILE_MAX_RETRIES": "1",
            "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1",
        }
        exit_code = self._run_tool(tool, env, folder, exit_file)
        files = sorted(folder.glob(f"{PROGRAM}_results_*.json"))
        log = parse_log("\n".join(path.read_text(errors="replace") for path in (*files, log_file)))
        trial_code = None
        with suppress(OSError, ValueError):  # missing or empty, as after a kill
            trial_code = int(exit_file.read_text())
        attempt = CompileRun(exit_code, trial_code, log, self._missing(log.wanted), log_file)
        if attempt.missing and not attempt.is_final:
            self._wait_for_locks(attempt.missing)
            attempt = replace(attempt, missing=self._missing(log.wanted))
        if not attempt.is_done:
            self.say(f"attempt {number} ended with exit code {exit_code}; not compiled: {len(attempt.missing)}")
        return attempt

    def _run_tool(self, tool: list[str], env: Mapping[str, str], folder: Path, trial_exit: Path) -> int:
        """Return the exit code of the tool. Raises Preempted or TransientError: stopped, time limit, failed peer.

        A peer that fails ends a trial run, which waits for it; compiling goes on for the cache's sake.
        """
        checked, log_file, said, held = time.monotonic(), folder / LOG_NAME, "", b""
        with process_tree(tool, cwd=folder, env=env, log=log_file) as tree, log_file.open("rb") as log:
            while (exit_code := tree.poll()) is None:
                if self.peers is not None and time.monotonic() - checked > OTHERS_POLL_S and not trial_exit.exists():
                    self.peers.check()
                    checked = time.monotonic()
                if self.stop.wait(POLL_S):
                    tree.end(TOOL_S)
                    self.stop.raise_if_set("compiling graphs")
                whole, _, held = (held + log.read()).rpartition(b"\n")
                line, is_waiting = progress_of(whole.decode(errors="replace"))
                if line and line != said:
                    self.say(line)
                    said = line
                if is_waiting:  # a killed compiler leaves its lock, and the next one waits for it without end
                    self._release_locks()
                if time.monotonic() > self._deadline:
                    tree.end(TOOL_S)
                    raise self._too_long(log_tail(log_file))
        return exit_code

    def _missing(self, wanted: Sequence[str]) -> tuple[str, ...]:
        done = done_keys(self._cache)
        return tuple(key for key in wanted if key not in done)

    def _wait_for_locks(self, missing: Sequence[str]) -> None:
        """Wait for graphs that other processes compile: the tool skips locked ones in silence."""
        while any(entry.locks for key in missing for entry in list_entries(self._cache, key)):
            self._release_locks()
            if self.stop.wait(POLL_S if self._cache.local_path("") else OTHERS_POLL_S):
                self.stop.raise_if_set("waiting for graphs that another process compiles")
            if time.monotonic() > self._deadline:
                raise self._too_long(f"locked by another process: {', '.join(missing[:NUM_NAMED])}")

    def _release_locks(self) -> None:
        self._note(release_locks(self._cache, stale_s=DEAD_LOCK_S, compilers=self.compilers))

    def _too_long(self, seen: str) -> TransientError:
        return TransientError(
            f"tracing and compiling took longer than {format_duration(self.config.time_limit_s)}\n{seen}",
            expected=f"all graphs within compile.time_limit_s = {self.config.time_limit_s:g}",
            next_command="run the same command again (what is compiled stays in the cache) or raise the limit",
        )


def done_keys(cache: Storage) -> set[str]:
    return {one.key for one in list_entries(cache) if one.state is EntryState.DONE}


# On every node of the job, into a cache that the nodes can share.


def compile_on_neuron(
    settings: Settings, ctx: StageContext, plan: Plan, scoring: Mapping[int, Plan]
) -> tuple[list[GraphManifest], bool]:
    """Return (manifests to publish, whether all was there already) when every node is done; none but on the main node.

    `scoring`: plans of evaluation and embedding for other numbers of ranks, which the main node compiles alone. The
    manifest of `plan` comes first. A node is warm when the manifests of its plans are known and its cache holds every
    entry of them. One cold node is enough for all to run the trial, which is one process group.
    """
    root, config = settings.compile.cache_root(ctx.workspace.root), settings.compile
    say = Console().info  # every node has a log of its own; ctx.console speaks on the main one alone
    is_main, scratch = ctx.world.node_rank == 0, ctx.scratch / "compile"
    nodes = node_group(ctx, "compile/nodes", config.time_limit_s)

    def exchange() -> None:
        if config.sync_url and not root.startswith("s3://"):
            shared = open_storage(config.sync_url, retry=settings.storage, stop=ctx.stop)
            for line in sync_cache(Path(root), shared).lines():
                say(line)

    def compile_plan(
        wanted: Plan, flags: Sequence[str], env: Mapping[str, str], folder: Path, peers: Nodes | None
    ) -> list[GraphManifest]:
        """Run this very command once more as the trial run. Return its manifest, on the main node."""
        folder.mkdir(parents=True, exist_ok=True)
        traced = folder / "traced.json"
        traced.unlink(missing_ok=True)
        command = [*OWN_MODULE, "pipeline", *ctx.command_line, "--cycle", ctx.cycle, *flags]
        run = NeuronCompile(
            *(command, config, root, folder, ctx.stop), env={**env, TRACE_FILE: str(traced)}, say=say, peers=peers
        )
        try:
            done = run.run()
        except TrnpipeError as error:
            if not ctx.stop.is_set():  # a graph that failed must not cost the others again on the next machine
                with noted(error, "what is compiled could not be shared"):
                    exchange()
            raise
        finally:
            if run.repaired:
                ctx.events.emit(EventName.CACHE_REPAIRED, actions=run.repaired)
        return [_manifest(ctx, wanted, traced, done, say)] if is_main else []

    with nodes.telling():
        if not root.startswith("s3://"):
            refuse_network_root(Path(root))
        exchange()
        parts = scoring if is_main else {}
        known = [load_manifest(ctx.workspace, one) for one in (plan, *parts.values())]
        done = done_keys(open_storage(root))
        # A manifest without entries was not made by Neuron's tool.
        warm = all(one is not None and one.cache_entries and one.cache_entries.keys() <= done for one in known)
        if not nodes.any("cold", not warm, timeout_s=ALL_THERE_S):
            return [one for one in known if one is not None], True
        manifests = compile_plan(plan, [], os.environ, scratch, nodes)
        for ranks, part in parts.items():  # on this machine alone, with as many ranks as evaluate and embed have
            say(f"compile: evaluation and embedding on {ranks} ranks")
            env = {name: value for name, value in os.environ.items() if name != NUM_NODES} | {SCORING: "1"}
            flags = ["--launch.processes", str(ranks)]
            manifests += compile_plan(part, flags, env, scratch / f"scoring-{ranks}", None)
        exchange()
        nodes.wait("compiled")
    return manifests, False


def _manifest(ctx: StageContext, plan: Plan, traced: Path, done: NeuronCompileResult, say: Say) -> GraphManifest:
    """Return what the trial run traced, with the cache entries it needs. Raises DataError if it had another plan."""
    manifest = GraphManifest.model_validate_json(traced.read_bytes())
    if manifest.plan != plan:
        raise DataError(
            "the trial run traced another plan than this command's",
            expected="the same settings and versions in both",
            next_command="unset variables that only one of them sees, then trnpipe compile again",
        )
    earlier = {name: s for old in load_manifests(ctx.workspace) for name, s in old.cache_entries.items()}
    num_compiled = len(done.seconds.keys() & set(done.graphs))
    say(f"compile: {len(done.graphs)} cache entries, {num_compiled} compiled, the others found in the cache")
    return manifest.model_copy(
        update={"cache_entries": {name: done.seconds.get(name) or earlier.get(name) for name in done.graphs}}
    )
