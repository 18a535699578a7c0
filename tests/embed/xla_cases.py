"""Embedding on XLA:CPU: the vectors of the eager CPU, and only graphs that compile has met. Run by test_xla.py."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.backends import Backend, open_backend
from pipeline.compile.config import CompileConfig
from pipeline.compile.identity import embed_plan, graph_plan, open_part_guard
from pipeline.compile.manifest import GraphManifest, Guard, Recorder, store_manifest
from pipeline.core.batch_order import Bucket, RankSlice
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens
from pipeline.embed.config import EmbedConfig
from pipeline.embed.engine import Embedder, open_engine
from pipeline.io.storage import open_storage
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.train.config import TrainConfig
from pipeline.train.graph_trial import Trial
from tests.embed.models import CONFIG, MODEL, SEP, SPEC, embedder, encoder, texts, vectors_of

pytestmark = pytest.mark.stage


def windows() -> list[Tokens]:
    """Many lengths; some fill several batches, one none."""
    drawn = [np.random.default_rng(seed).integers(2, 81, count).tolist() for seed, count in enumerate([70, 1, 0, 9])]
    return [texts(lengths, seed) for seed, lengths in enumerate(drawn)]


@pytest.fixture(scope="module")
def xla() -> Backend:
    return open_backend("xla")


@pytest.fixture(scope="module")
def manifest(xla: Backend) -> GraphManifest:
    """What `trnpipe compile` meets of embedding, on two ranks."""
    train = TrainConfig(global_batch_size=8, micro_batch_size=4)
    settings = Settings(train=train, model=MODEL, embed=CONFIG)
    recorder = Recorder(xla, graph_plan(settings, SPEC, (Bucket(8, 8),), RankSlice(0, 2), xla.device_name()))
    Trial(
        settings=settings,
        spec=SPEC,
        buckets=(Bucket(8, 8),),
        backend=xla,
        process_group=ProcessGroup(World(), timeout_s=60.0),
        stop=StopSignal(),
        console=Console(quiet=True),
        watch=recorder,
    ).embed_dummies()
    assert not recorder.extra_compiles
    return GraphManifest(plan=dict(recorder.plan), graphs=tuple(recorder.graphs.values()))


def test_there_is_one_graph_a_bucket(manifest: GraphManifest) -> None:
    assert [(graph.phase, graph.bucket, graph.batch_size) for graph in manifest.graphs] == [
        ("embed", "24", 6),
        ("embed", "80", 2),
    ]
    assert sum(graph.compiles for graph in manifest.graphs) == 2


def test_embedding_meets_no_other_and_agrees_with_the_eager_cpu(
    xla: Backend, manifest: GraphManifest, tmp_path: Path
) -> None:
    workspace = open_storage(str(tmp_path))
    store_manifest(workspace, manifest)
    plan = embed_plan(MODEL, CONFIG, CompileConfig(), SPEC, xla.device_name(), 5)  # of any number of ranks
    guard = open_part_guard(workspace, plan, xla, CompileConfig(), Console(quiet=True))
    assert isinstance(guard, Guard)
    compiled = xla.compile_count()
    made = Embedder(open_engine(encoder(), xla, CONFIG, guard), xla, limit=80, sep_id=SEP, stop=StopSignal())
    found = vectors_of(made, *windows(), *windows())
    assert guard.unknown == 0 and xla.compile_count() == compiled
    for vectors, expected in zip(found, [*vectors_of(embedder(), *windows()), *found[:4]], strict=True):
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)


def test_a_shape_that_was_not_compiled_is_refused(xla: Backend, manifest: GraphManifest) -> None:
    guard = Guard(xla, manifest, "error", lambda text: None)
    config = EmbedConfig(buckets=(32, 80), tokens_per_batch=160)
    made = Embedder(open_engine(encoder(), xla, config, guard), xla, limit=80, sep_id=SEP, stop=StopSignal())
    with pytest.raises(ConfigError, match="the graph of embed of 5 x 32 tokens was not compiled ahead of time"):
        vectors_of(made, texts([20, 20]))
