"""Which manifest a run is held against."""

import importlib
from pathlib import Path

import pytest

from pipeline.compile.config import CompileConfig
from pipeline.compile.identity import (
    embed_plan,
    evaluation_plan,
    graph_plan,
    open_guard,
    open_part_guard,
    source_digest,
)
from pipeline.compile.manifest import GraphManifest, GraphWatch, Guard, Plan, store_manifest
from pipeline.core.batch_order import Bucket, RankSlice
from pipeline.core.errors import ConfigError
from pipeline.embed.config import EmbedConfig
from pipeline.io.storage import Storage, open_storage
from pipeline.model.config import ModelConfig
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.train.config import TrainConfig, TrainPlan
from tests.kit.fields import check_named, without_effect
from tests.train.rows import MODEL, SPEC, TRAIN

DEVICE = "xla:NEURON"


class NoCounters:
    compiles_steps = False

    def graph_hash(self, tensors: object) -> str:
        return ""

    def hlo_text(self, tensors: object) -> str:
        return ""

    def compile_count(self) -> int:
        return 0

    def compile_seconds(self) -> float:
        return 0.0


def training(world_size: int, embed: EmbedConfig, *, device: str = DEVICE) -> Plan:
    settings = Settings(train=TRAIN, model=MODEL, embed=embed)
    return graph_plan(settings, SPEC, (Bucket(4, 6),), RankSlice(0, world_size), device)


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


SAMPLES = ("replay_share", "queries_per_topic", "link_queries", "repeat_positives", "seed")
LENGTH = ("epochs", "max_steps", "evaluate_every", "evaluate_rows", "patience", "deadline", "on_deadline")
TRAVELS_WITH_A_STEP = ("optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_fraction")
ON_THE_HOST = (
    "start",
    "teacher",
    "metric",
    "metric_rows",
    "collective_timeout_s",
    "guard.patience",
    "parallel",
)  # what counts of it: below
NOT_IN_GRAPHS = {*SAMPLES, *LENGTH, *TRAVELS_WITH_A_STEP, *ON_THE_HOST}


def test_every_setting_of_training_is_in_the_plan_of_graphs_or_named_as_outside() -> None:
    def plan(train: TrainConfig) -> Plan:
        settings = Settings(model=MODEL).model_copy(update={"train": train})
        return graph_plan(settings, SPEC, (Bucket(4, 6),), RankSlice(0, 8, 1), DEVICE)

    check_named(without_effect(TRAIN, plan), NOT_IN_GRAPHS)
    spread = TrainPlan(recompute="units"), TrainPlan(shard="state", shard_degree=2)
    plans = [plan(TRAIN.model_copy(update={"parallel": one})) for one in spread]
    assert all(one != plan(TRAIN) for one in plans)


def test_every_setting_of_embedding_is_in_the_plan_of_graphs_or_named_as_outside() -> None:
    outside = set(EmbedConfig.model_fields) - {"buckets", "tokens_per_batch", "precision", "verify"}  # verify is empty
    check_named(
        without_effect(EmbedConfig(), lambda embed: embed_plan(MODEL, embed, CompileConfig(), SPEC, DEVICE, 8)), outside
    )


def test_every_field_of_the_model_is_in_the_plan_of_graphs_but_where_its_weights_come_from() -> None:
    models = [
        MODEL.model_copy(update={"token_match": True}),
        MODEL.model_copy(update={"architecture": "modernbert"}),
        MODEL.model_copy(update={"factory": "package:function"}),
    ]

    def plan(model: ModelConfig) -> Plan:
        settings = Settings(train=TRAIN).model_copy(update={"model": model})
        return evaluation_plan(settings, SPEC, (Bucket(4, 6),), 8, DEVICE)

    unused = [without_effect(model, plan, preset="small", hidden_size=20, num_heads=4) for model in models]
    assert set.intersection(*unused) == {"preset", "init_from"}, "its sizes count, not its name"


CPU = "xla:CPU"
TRAINED, ON_CPU = training(8, EmbedConfig()), training(8, EmbedConfig(), device=CPU)
MANY, FEW = training(128, EmbedConfig()), evaluating(32)


@pytest.mark.parametrize(
    ("compiled", "asked", "expected"),
    [
        ([], embedding(EmbedConfig()), None),
        # On a CPU machine: whatever was compiled for it, of this model, for any number of ranks.
        ([ON_CPU], embedding(EmbedConfig(), world_size=1, device=CPU), 0),
        ([ON_CPU], evaluating(3, device=CPU), 0),
        ([TRAINED], embedding(EmbedConfig(), device=CPU), None),
        ([TRAINED, ON_CPU], embedding(EmbedConfig(), device=CPU), 1),
        ([ON_CPU], embedding(EmbedConfig(), "bf16", device=CPU), "embed.precision: compiled fp32, now bf16"),
        ([{**ON_CPU, "model.num_layers": 12}], embedding(EmbedConfig(), device=CPU), None),
        # On a device: of its own number of ranks, which is given to the compiler with every graph.
        ([ON_CPU], embedding(EmbedConfig()), "device: compiled xla:CPU, now xla:NEURON; replicas: compiled 1, now 8"),
        ([MANY], evaluating(128), 0),
        ([MANY], embedding(EmbedConfig(), world_size=32), "replicas: compiled 128, now 32"),
        ([MANY, FEW], evaluating(32), 1),
        ([MANY, FEW], evaluating(32, bucket="8x8"), "data.buckets: compiled ['4x6'], now ['8x8']"),
        (
            [training(8, EmbedConfig(buckets=(64,)))],
            embedding(EmbedConfig(), "bf16"),
            "embed.buckets: compiled [64], now [128, 512]; embed.precision: compiled fp32, now bf16",
        ),
    ],
)
def test_what_evaluation_and_embedding_are_held_against(
    workspace: Storage, compiled: list[Plan], asked: Plan, expected: int | str | None
) -> None:
    manifests = [GraphManifest(plan=dict(plan), graphs=()) for plan in compiled]
    for manifest in manifests:
        store_manifest(workspace, manifest)
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as raised:
            part_guard(workspace, asked)
        assert raised.value.seen.endswith(f": {expected}"), "what differs in this part alone is named"
        lenient = CompileConfig(on_unknown_graph="warn")
        assert type(open_part_guard(workspace, asked, NoCounters(), lenient, Console(quiet=True))) is GraphWatch
    else:
        found = part_guard(workspace, asked)
        assert (found.manifest if isinstance(found, Guard) else None) == (
            None if expected is None else manifests[expected]
        )


def test_the_source_of_a_factory_is_part_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    digests = {source_digest(None), source_digest("no_such_package.module:build")}
    assert len(digests) == 1
    for text in ("build = 1", "build = 2"):
        (tmp_path / "my_encoder.py").write_text(text)
        importlib.invalidate_caches()
        digests.add(source_digest("my_encoder:build"))
    assert len(digests) == 3


def test_a_manifest_of_this_code_goes_before_those_of_other_code(workspace: Storage) -> None:
    for number in range(6):
        code = source_digest(None) if number == 3 else "of an earlier version"
        store_manifest(workspace, GraphManifest(plan={**TRAINED, "accumulation": number}, graphs=(), code=code))
    found = part_guard(workspace, embedding(EmbedConfig()))
    assert isinstance(found, Guard) and found.manifest.plan["accumulation"] == 3


def test_training_is_held_against_exactly_its_plan(workspace: Storage) -> None:
    store_manifest(workspace, GraphManifest(plan=dict(ON_CPU), graphs=()))
    with pytest.raises(ConfigError, match="world_size: compiled 8, now 1"):
        alone = training(1, EmbedConfig(), device=CPU)
        open_guard(workspace, alone, NoCounters(), CompileConfig(), Console(quiet=True))
