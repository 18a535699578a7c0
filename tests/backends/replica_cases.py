"""Graphs of one of two replicas, traced on XLA:CPU with two devices; nothing is run. Run by test_xla.py.

XLA:CPU stands for a device whose processes are replicas of one program; what initialises and traces them is torch_xla.
"""

import importlib
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline import backends
from pipeline.backends import Backend, Batch, RankGroup
from pipeline.backends import xla as xla_module
from pipeline.backends.xla import XlaTracer
from pipeline.compile.hlo import Instruction, arrays, lint, read_instructions
from pipeline.compile.manifest import Recorder
from pipeline.core.batch_order import RankSlice
from pipeline.core.errors import ConfigError
from pipeline.core.layout import Axis, Layout
from pipeline.core.stop import StopSignal
from pipeline.data.loader import to_tensors, training_batches
from pipeline.data.shards import TokenRows
from pipeline.embed.config import EmbedConfig
from pipeline.evaluate.score import ScoreProgram
from pipeline.model.config import LossConfig
from pipeline.model.relevance import build_model
from pipeline.parallel.mesh import AXES
from pipeline.parallel.process_group import ProcessGroup, open_device
from pipeline.parallel.strategies import Precision
from pipeline.parallel.strategies.flat import CHUNK_MIB
from pipeline.parallel.strategies.zero1 import Zero1Strategy
from pipeline.parallel.world import World
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.train.config import OptimizerConfig, TrainConfig
from pipeline.train.graph_trial import Trial
from pipeline.train.optimizer import control_values
from pipeline.train.step import TrainProgram, flat_strategy, prepare_model
from tests.train.rows import BUCKETS, MODEL, SPEC, TRAIN, grouped, make_rows, plan_of

RANKS = World(rank=0, world_size=2, local_rank=0, local_world_size=2)
pytestmark = pytest.mark.stage


class Replica(XlaTracer):
    separate_processes = frozenset()


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    """As if the other rank had joined."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture
def _replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A runtime that nobody has asked yet; given back so."""
    runtime: Any = importlib.import_module("torch_xla.runtime")
    monkeypatch.setattr(runtime, "_WORLD_SIZE", None)
    monkeypatch.setattr(xla_module.XlaBackend, "separate_processes", frozenset())
    yield runtime
    model: Any = importlib.import_module("torch_xla.core.xla_model")
    model.set_replication(importlib.import_module("torch_xla").device(), [])


@pytest.mark.usefixtures("_replicas")
def test_a_rank_that_has_not_initialised_its_replication_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(name: str, **ranks: int) -> backends.Backend:
        return backends.open_backend(name)

    monkeypatch.setattr("pipeline.parallel.process_group.open_backend", alone)
    with pytest.raises(ConfigError, match="torchrun reports world size 2, but the xla runtime reports 1"):
        open_device("xla", RANKS)


def test_a_rank_whose_runtime_was_asked_too_early_is_refused(_replicas: Any) -> None:
    assert _replicas.world_size() == 1  # and for good
    with pytest.raises(ConfigError, match="world size was queried before replication was initialized"):
        open_device("xla", RANKS)


def test_the_runtime_knows_all_replicas(_replicas: Any) -> None:
    backend = open_device("xla", RANKS)
    assert backend.runtime_world_size() == _replicas.world_size() == 2
    assert backend.reduces_in_graph


def all_reduces(text: str) -> list[str]:
    """What each all-reduce takes."""
    return re.findall(r"= \((.*)\) all-reduce\(", text)


def pairs_of(rows: TokenRows, backend: Backend) -> Batch:
    """Eight pairs on the device."""
    pairs = to_tensors(rows.read(np.zeros(8, dtype=np.int64), np.arange(8), 0))
    return {name: tensor.to(backend.device) for name, tensor in pairs.items()}


def recorded(
    config: TrainConfig, rows: TokenRows, *, accumulation: int = 1, chunk_mib: float = CHUNK_MIB
) -> tuple[TrainProgram, Recorder]:
    """Two steps and an evaluation."""
    backend = Replica(0, 2, 2)
    recorder = Recorder(backend, {})
    strategy = flat_strategy(
        build_model(MODEL, SPEC, 1),
        backend,
        config,
        world_size=2,
        host_mean=lambda tensors: pytest.fail("the device reduces"),
        chunk_mib=chunk_mib,
    )
    share = RankSlice(0, 2, accumulation)
    program = TrainProgram(strategy, backend, config, share, metric_rows=4, buckets=BUCKETS, watch=recorder)
    groups = grouped(rows, config)
    rates = {"control": control_values(1, 0.1, config.optimizer)}
    stream = [{**micro.tensors, **rates} for micro in training_batches(groups, plan_of(groups, config), share, 0, 2)]
    moved = [{name: tensor.to(backend.device) for name, tensor in micro.items()} for micro in stream]
    for number in range(2):
        program.step(moved[number * accumulation : (number + 1) * accumulation])
    program.outputs(pairs_of(rows, backend))
    assert len({graph.phase for graph in recorder.graphs.values()}) == len(recorder.graphs), "two steps, one graph"
    return program, recorder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return make_rows(tmp_path_factory.mktemp("replicas"), [(48, 0)])


@pytest.mark.usefixtures("_replicas")
@pytest.mark.parametrize(
    ("boundary", "chunk_mib", "accumulation"),
    [
        ("fused", 32.0, 1),
        ("split", 0.002, 1),
        ("fused", 0.002, 2),
        pytest.param("split", 32.0, 1, marks=pytest.mark.thorough),
        pytest.param("fused", 0.002, 1, marks=pytest.mark.thorough),
        pytest.param("split", 0.002, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_step_holds_one_all_reduce_for_each_chunk(
    rows: TokenRows, boundary: Literal["fused", "split"], chunk_mib: float, accumulation: int
) -> None:
    config = TRAIN.model_copy(update={"step_boundary": boundary, "global_batch_size": 16})
    program, recorder = recorded(config, rows, accumulation=accumulation, chunk_mib=chunk_mib)
    graphs = {graph.phase: recorder.texts[key] for key, graph in recorder.graphs.items()}
    sizes = [master.numel() for master in program.strategy.masters]
    assert (len(sizes) == 2) == (chunk_mib == 32.0)
    phase = "step" if boundary == "fused" else "update"
    found = all_reduces(graphs.pop(phase))
    assert len(found) == len(sizes)
    for size, operands in zip(sizes, found, strict=True):
        assert operands.startswith(f"f32[{size}]"), "a chunk, in order"
    assert "f32[1]" in found[-1], "the loss goes with the last"
    assert {"start", "evaluate"} <= graphs.keys()
    assert not [phase for phase, text in graphs.items() if "all-reduce" in text]


CORES, LARGEST_BYTES = 32, 3000


def step_in_slices(
    config: TrainConfig, rows: TokenRows, shards: int, rank: int
) -> tuple[Zero1Strategy, str, str, set[str]]:
    """Return strategy, key and text of a step of one of CORES ranks, and the phases of its other graphs.

    `shards` of them have the optimizer's state.
    """
    grid = Layout(rank, CORES // shards, shards)
    backend = Replica(0, 2, 2)
    recorder = Recorder(backend, {})
    model = build_model(MODEL, SPEC, 1)
    prepare_model(model, backend, config)
    strategy = Zero1Strategy(
        model,
        backend,
        precision=config.precision,
        shards=RankGroup(grid.rank, grid.groups("shard")),
        replicas=RankGroup(grid.rank, grid.groups("replicate")),
        largest_bytes=LARGEST_BYTES,
    )
    share = RankSlice(rank, CORES, 1)
    program = TrainProgram(strategy, backend, config, share, metric_rows=4, buckets=BUCKETS, watch=recorder)
    groups = grouped(rows, config)
    rates = {"control": control_values(1, 0.1, config.optimizer)}
    for micro in training_batches(groups, plan_of(groups, config), share, 0, 2):
        program.step([{name: one.to(backend.device) for name, one in {**micro.tensors, **rates}.items()}])
    found = {graph.phase: key for key, graph in recorder.graphs.items()}
    assert len(found) == len(recorder.graphs), "two steps, one graph"
    key = found.pop("step")
    return strategy, key, recorder.texts[key], set(found)


@pytest.mark.parametrize(("shards", "precision"), [(CORES, "fp32"), (16, "bf16")])
def test_state_in_slices_is_exchanged_by_buckets_within_the_graph(
    tmp_path: Path, _replicas: Any, monkeypatch: pytest.MonkeyPatch, shards: int, precision: Precision
) -> None:
    rows = make_rows(tmp_path, [(160, 0)])
    loss = LossConfig(contrastive_weight=0.0)  # whose embeddings would be gathered, too
    config = TRAIN.model_copy(update={"global_batch_size": 2 * CORES, "precision": precision, "loss": loss})
    Replica(0, 2, 2)
    monkeypatch.setattr(_replicas, "_WORLD_SIZE", CORES)
    strategy, key, step, others = step_in_slices(config, rows, shards, 5)
    assert others == {"start"} and len(strategy.buckets) > len(strategy.layout.chunks)
    assert not [str(finding) for finding in lint(step)]
    exchanges: dict[str, list[Instruction]] = {"reduce-scatter": [], "all-reduce": [], "all-gather": []}
    for one in read_instructions(step):
        exchanges.get(one.opcode, []).append(one)
    slices = [master.numel() for master in strategy.masters]
    wholes = [shards * size for size in slices]
    assert 4 * max(wholes) <= LARGEST_BYTES
    of_shards, of_replicas = (group_text(Layout(5, CORES // shards, shards), axis) for axis in AXES[1::-1])
    assert [size_of(one) for one in exchanges["reduce-scatter"]] == slices
    assert [size_of(one) for one in exchanges["all-gather"]] == wholes
    assert {arrays(one.shape)[0][0] for one in exchanges["all-gather"]} == {"bf16" if precision == "bf16" else "f32"}
    for one in (*exchanges["reduce-scatter"], *exchanges["all-gather"]):
        assert one.attribute("replica_groups") == of_shards
    # Beside what is reduced goes a token that orders collectives.
    reduced = [(size_of(one), one.attribute("replica_groups")) for one in exchanges["all-reduce"]]
    scalars = [(1, of_shards)] * 2  # the loss and the norm
    over_replicas = [(size, of_replicas) for size in (*slices, 1)] if shards < CORES else []
    assert sorted(reduced) == sorted(scalars + over_replicas)
    assert step_in_slices(config, rows, shards, 0)[1] == key, "one graph for all ranks"


def size_of(one: Instruction) -> int:
    """Elements of its first array."""
    return prod(map(int, arrays(one.shape)[0][1]))


def group_text(grid: Layout, axis: Axis) -> str:
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in grid.groups(axis)) + "}"


OF_VECTORS = {"loss": LossConfig(matryoshka_sizes=(8,)), "optimizer": OptimizerConfig(head_rate=2.0)}


@pytest.mark.usefixtures("_replicas")
@pytest.mark.parametrize("changes", [{}, OF_VECTORS])
def test_a_trial_of_scoring_meets_the_graphs_that_training_evaluates_with(
    rows: TokenRows, changes: dict[str, object]
) -> None:
    config = TRAIN.model_copy(update={"global_batch_size": 16, **changes})
    _, training = recorded(config, rows)
    recorder = Recorder(Replica(0, 2, 2), {})
    Trial(
        settings=Settings(train=config, model=MODEL, embed=EmbedConfig(buckets=(8,))),
        spec=SPEC,
        buckets=BUCKETS,
        backend=Replica(0, 2, 2),
        process_group=ProcessGroup(World(), timeout_s=1.0),
        stop=StopSignal(),
        console=Console(quiet=True),
        watch=recorder,
    ).score()
    met = [(graph.phase, graph.bucket) for graph in recorder.graphs.values()]
    assert sorted(met) == [("embed", "8"), *(("evaluate", bucket.name) for bucket in BUCKETS)]
    assert {key for key, graph in training.graphs.items() if graph.phase == "evaluate"} <= recorder.graphs.keys()


def test_memory_is_not_asked_of_a_runtime_that_may_abort(_replicas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_device("xla", RANKS)
    assert isinstance(backend, xla_module.XlaBackend)
    monkeypatch.setattr(backend, "device_type", "NEURON")
    monkeypatch.setattr(backend._xm, "get_memory_info", lambda device: pytest.fail("may end the process"))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    assert backend.memory_bytes() is None


@pytest.mark.usefixtures("_replicas")
def test_one_rank_alone_holds_none(rows: TokenRows) -> None:
    backend = Replica()
    recorder = Recorder(backend, {})
    with torch.device("meta"):
        model = build_model(MODEL, SPEC, 1)
    program = ScoreProgram(model, backend, "fp32", recorder)
    program.load(build_model(MODEL, SPEC, 1).state_dict())
    program.outputs(pairs_of(rows, backend))
    assert "all-reduce" not in "".join(recorder.texts.values())
