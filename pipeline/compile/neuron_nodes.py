"""Compiling a cycle's graphs with neuron_parallel_compile, on every node of the job, into a cache they can share."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pipeline.compile.cache import EntryState, list_storage, refuse_network_root
from pipeline.compile.cache_sync import Direction, sync_cache
from pipeline.compile.config import ALL_THERE_S
from pipeline.compile.manifest import GraphManifest, Plan, load_manifest, load_manifests
from pipeline.compile.neuron_compile import NeuronCompile, NeuronCompileResult, repair_after_run
from pipeline.compile.neuron_tool import SCORING
from pipeline.context import StageContext, nodes_of
from pipeline.core.errors import DataError, TrnpipeError
from pipeline.io.storage import open_storage
from pipeline.parallel.nodes import Nodes
from pipeline.parallel.world import NUM_NODES, TRACE_FILE
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName


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
        done = node.done()
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

    def done(self) -> set[str]:
        entries = list_storage(open_storage(self.root))
        return {entry.name.key for entry in entries if entry.state is EntryState.DONE}

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
