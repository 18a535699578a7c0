"""Which manifest a run is held against."""

from pathlib import Path

import pytest

from pipeline.compile.config import CompileConfig
from pipeline.compile.manifest import GraphManifest, Plan, store_manifest
from pipeline.compile.plan import embed_plan, evaluation_plan, graph_plan, open_guard, open_part_guard
from pipeline.compile.watch import GraphWatch, Guard
from pipeline.core.batch_order import Bucket, RankShare
from pipeline.core.errors import ConfigError
from pipeline.embed.config import EmbedConfig
from pipeline.io.storage import Storage, open_storage
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from tests.train.rows import MODEL, SPEC, TRAIN

DEVICE = "xla:NEURON"


class NoCounters:
    compiles_steps = False

    def compile_count(self) -> int:
        return 0

    def compile_seconds(self) -> float:
        return 0.0


def training(world_size: int, embed: EmbedConfig, *, device: str = DEVICE) -> Plan:
    settings = Settings(train=TRAIN, model=MODEL, embed=embed)
    return graph_plan(settings, SPEC, (Bucket(4, 6),), RankShare(0, world_size), device)


def evaluating(world_size: int, *, device: str = DEVICE, bucket: str = "4x6") -> Plan:
    return evaluation_plan(Settings(train=TRAIN, model=MODEL), SPEC, (Bucket.parse(bucket),), world_size, device)


def embedding(embed: EmbedConfig, precision: str = "fp32", *, world_size: int = 8, device: str = DEVICE) -> Plan:
    config = EmbedConfig.model_validate({**embed.model_dump(), "precision": precision})
    return embed_plan(MODEL, config, CompileConfig(), SPEC, device, world_size)


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def part_guard(workspace: Storage, plan: Plan) -> GraphWatch:
    return open_part_guard(workspace, plan, NoCounters(), CompileConfig(), Console(quiet=True))


def test_which_groups_share_a_batch_changes_no_graph() -> None:
    other = TRAIN.model_copy(update={"link_queries": True, "queries_per_topic": 4})
    plans = [
        graph_plan(Settings(train=train, model=MODEL), SPEC, (Bucket(4, 6),), RankShare(0, 1), DEVICE)
        for train in (TRAIN, other)
    ]
    assert plans[0] == plans[1]


def test_on_a_cpu_machine_parts_are_held_against_what_was_compiled_for_any_number_of_ranks(workspace: Storage) -> None:
    manifest = GraphManifest(plan=dict(training(8, EmbedConfig(), device="xla:CPU")), graphs=())
    store_manifest(workspace, manifest)
    for plan in (embedding(EmbedConfig(), world_size=1, device="xla:CPU"), evaluating(3, device="xla:CPU")):
        found = part_guard(workspace, plan)
        assert isinstance(found, Guard) and found.manifest == manifest
    with pytest.raises(ConfigError, match="world_size: compiled 8, now 1"):
        alone = training(1, EmbedConfig(), device="xla:CPU")
        open_guard(workspace, alone, NoCounters(), CompileConfig(), Console(quiet=True))


def test_on_a_device_parts_need_graphs_of_their_own_number_of_ranks(workspace: Storage) -> None:
    """The number of replicas is given to the compiler with every graph."""
    manifest = GraphManifest(plan=dict(training(128, EmbedConfig())), graphs=())
    store_manifest(workspace, manifest)
    for same in (evaluating(128), embedding(EmbedConfig(), world_size=128)):
        found = part_guard(workspace, same)
        assert isinstance(found, Guard) and found.manifest == manifest
    for other in (evaluating(32), embedding(EmbedConfig(), world_size=32)):
        with pytest.raises(ConfigError, match="replicas: compiled 128, now 32\n"):
            part_guard(workspace, other)
    scoring = GraphManifest(plan=dict(evaluating(32)), graphs=())
    store_manifest(workspace, scoring)
    for other in (evaluating(32), embedding(EmbedConfig(), world_size=32)):
        found = part_guard(workspace, other)
        assert isinstance(found, Guard) and found.manifest == scoring
    with pytest.raises(ConfigError, match=r"data\.buckets: compiled \['4x6'\], now \['8x8'\]\n"):
        part_guard(workspace, evaluating(32, bucket="8x8"))


def test_what_was_compiled_for_trainium_does_not_bind_a_cpu_machine(workspace: Storage) -> None:
    store_manifest(workspace, GraphManifest(plan=dict(training(8, EmbedConfig())), graphs=()))
    here = embedding(EmbedConfig(), device="xla:CPU")
    found = open_part_guard(workspace, here, NoCounters(), CompileConfig(), Console(quiet=True))
    assert type(found) is GraphWatch
    store_manifest(workspace, GraphManifest(plan=dict(training(8, EmbedConfig(), device="xla:CPU")), graphs=()))
    assert isinstance(open_part_guard(workspace, here, NoCounters(), CompileConfig(), Console(quiet=True)), Guard)
    with pytest.raises(ConfigError, match=r"embed\.precision: compiled fp32, now bf16"):
        open_part_guard(
            workspace, {**here, "embed.precision": "bf16"}, NoCounters(), CompileConfig(), Console(quiet=True)
        )


def test_another_model_of_the_workspace_does_not_bind_a_cpu_machine(workspace: Storage) -> None:
    other = {**training(1, EmbedConfig(), device="xla:CPU"), "model.num_layers": 12}
    store_manifest(workspace, GraphManifest(plan=other, graphs=()))
    here = embedding(EmbedConfig(), device="xla:CPU")
    found = open_part_guard(workspace, here, NoCounters(), CompileConfig(), Console(quiet=True))
    assert type(found) is GraphWatch


def test_what_was_compiled_on_a_cpu_machine_is_not_enough_for_trainium(workspace: Storage) -> None:
    store_manifest(workspace, GraphManifest(plan=dict(training(8, EmbedConfig(), device="xla:CPU")), graphs=()))
    with pytest.raises(ConfigError, match="device: compiled xla:CPU, now xla:NEURON"):
        open_part_guard(workspace, embedding(EmbedConfig()), NoCounters(), CompileConfig(), Console(quiet=True))


def test_what_embedding_was_not_compiled_for_is_named_alone(workspace: Storage) -> None:
    store_manifest(workspace, GraphManifest(plan=dict(training(8, EmbedConfig(buckets=(64,)))), graphs=()))
    plan = embedding(EmbedConfig(), "bf16")
    with pytest.raises(ConfigError) as raised:
        open_part_guard(workspace, plan, NoCounters(), CompileConfig(), Console(quiet=True))
    assert "embed.buckets: compiled [64], now [128, 512]; embed.precision: compiled fp32, now bf16" in raised.value.seen
    assert "world_size" not in raised.value.seen and "train." not in raised.value.seen
    lenient = CompileConfig(on_unknown_graph="warn")
    assert type(open_part_guard(workspace, plan, NoCounters(), lenient, Console(quiet=True))) is GraphWatch


def test_settings_that_touch_no_graph_are_no_part_of_the_plan() -> None:
    other = EmbedConfig.model_validate({"worker": 3, "workers": 7, "compiled": False, "output": {"dtype": "int8"}})
    assert embedding(other) == embedding(EmbedConfig())
    assert training(1, other) == training(1, EmbedConfig())


def test_without_a_manifest_nothing_is_watched(workspace: Storage) -> None:
    found = open_part_guard(workspace, embedding(EmbedConfig()), NoCounters(), CompileConfig(), Console(quiet=True))
    assert type(found) is GraphWatch
