"""Graphs of evaluation and embedding for another number of ranks than training has: who compiles them, and as what."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pipeline.compile import neuron
from pipeline.compile.cache import DONE_NAME, NEFF_NAME, CacheEntry, CacheFile
from pipeline.compile.identity import source_digest
from pipeline.compile.manifest import GraphManifest, Plan, load_manifests
from pipeline.compile.neuron import SCORING, NeuronCompileResult
from pipeline.context import StageContext, open_context
from pipeline.core.stop import StopSignal
from pipeline.parallel.world import TRACE_FILE, World
from pipeline.settings import Settings
from pipeline.stages import compile as stage
from pipeline.stages.inputs import expected_shapes

RANKS, SCORING_RANKS = 64, 32


@dataclass
class Tool:
    """Stands for Neuron's tool and the trial run below it: notes how it is called, leaves a manifest."""

    plans: Mapping[bool, Plan]
    calls: list[tuple[list[str], dict[str, str], bool]] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def __call__(
        self, command: Sequence[str], *more: object, env: Mapping[str, str], nodes: object, say: object
    ) -> "Done":
        is_scoring = SCORING in env
        self.calls.append((list(command), dict(env), nodes is None))
        traced = GraphManifest(plan=dict(self.plans[is_scoring]), graphs=(), code=source_digest(None))
        Path(env[TRACE_FILE]).write_text(traced.model_dump_json())
        entry = f"MODULE_{int(is_scoring)}"
        self.done.add(entry)
        return Done(NeuronCompileResult((entry,), {entry: 1.0}))


@dataclass
class Done:
    result: NeuronCompileResult
    repaired: tuple[str, ...] = ()

    def run(self) -> NeuronCompileResult:
        return self.result


def make_settings(workspace: Path) -> Settings:
    return Settings.model_validate(
        {
            "workspace": str(workspace),
            "cycle": "c1",
            "backend": "xla",
            "launch": {"processes": RANKS},
            "train": {"global_batch_size": 2 * RANKS, "candidates_per_query": 2},
            "compile": {"scoring_ranks": [SCORING_RANKS, RANKS]},
        }
    )


def entry(key: str) -> CacheEntry:
    return CacheEntry(key, {NEFF_NAME: CacheFile(1), DONE_NAME: CacheFile(0)})


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[StageContext]:
    with open_context(make_settings(tmp_path / "w"), StopSignal(), {}, ("compile", "--launch.processes=64")) as ctx:
        yield ctx


@pytest.fixture
def tool(ctx: StageContext, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    monkeypatch.delenv(TRACE_FILE, raising=False)
    settings, shapes = ctx.settings, expected_shapes(ctx.settings)
    tool = Tool(
        {
            False: shapes.plan(settings, World(world_size=RANKS), "xla:NEURON"),
            True: shapes.scoring_plan(settings, SCORING_RANKS, "xla:NEURON"),
        }
    )
    monkeypatch.setattr(neuron, "NeuronCompile", tool)
    monkeypatch.setattr(neuron, "list_entries", lambda storage: [entry(key) for key in tool.done])
    return tool


def test_they_are_compiled_alone_at_their_own_number_and_published(ctx: StageContext, tool: Tool) -> None:
    result = stage.run(ctx.settings, ctx)
    (together, _, _), (apart, env, is_alone) = tool.calls
    assert "--launch.processes=64" in together and together[-1] != str(SCORING_RANKS)
    assert apart == [*together, "--launch.processes", str(SCORING_RANKS)]
    assert is_alone and env[SCORING]
    plans = {manifest.plan["replicas"]: manifest for manifest in load_manifests(ctx.workspace)}
    assert plans.keys() == {RANKS, SCORING_RANKS}
    assert plans[SCORING_RANKS].plan == tool.plans[True] and plans[SCORING_RANKS].cache_entries == {"MODULE_1": 1.0}
    assert result.inputs == {"plan": plans[RANKS].plan_id}
    assert stage.run(ctx.settings, ctx).status == "already_done" and len(tool.calls) == 2


def test_without_them_the_node_is_cold(ctx: StageContext, tool: Tool) -> None:
    stage.run(ctx.settings, ctx)
    tool.done.discard("MODULE_1")
    assert stage.run(ctx.settings, ctx).status == "done" and len(tool.calls) == 4


def test_graphs_of_other_code_are_traced_again(ctx: StageContext, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.run(ctx.settings, ctx)
    monkeypatch.setattr(neuron, "source_digest", lambda factory: "of an upgrade")
    assert stage.run(ctx.settings, ctx).status == "done" and len(tool.calls) == 4


def test_only_the_main_node_compiles_them_as_a_machine_alone(
    ctx: StageContext, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neuron, "node_group", lambda *rest: Together())
    monkeypatch.setenv("TRNJOBS_NODES", "2")
    plans = {(SCORING_RANKS, "1"): tool.plans[True]}
    for node_rank in range(2):
        on_node = replace(ctx, world=World(rank=node_rank, world_size=2, node_rank=node_rank))
        manifests, _ = neuron.compile_on_neuron(ctx.settings, on_node, tool.plans[False], plans)
        assert len(manifests) == (0 if node_rank else 2)
    assert [("TRNJOBS_NODES" in env, alone) for _, env, alone in tool.calls] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert "TRNJOBS_NODES" in os.environ


class Together:
    """Two nodes, one after the other."""

    def any(self, phase: str, mine: bool, *, timeout_s: float = 0.0) -> bool:
        return mine

    def wait(self, phase: str) -> None:
        return

    def check(self) -> None:
        return

    def report_failure(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_on_a_cpu_machine_there_is_nothing_to_add(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    shapes = expected_shapes(settings)
    plan = shapes.plan(settings, World(world_size=RANKS), "xla:CPU")
    assert shapes.scoring_plan(settings, SCORING_RANKS, "xla:CPU").items() <= plan.items()
