"""The plan of a run, `[train.parallel]`: how it is written, and what it changes."""

from pathlib import Path

import pytest

from pipeline.compile.plan import graph_plan
from pipeline.core.batch_order import Bucket, RankShare
from pipeline.core.errors import ConfigError
from pipeline.model.config import ModelConfig
from pipeline.settings import Settings, resolve, settings_hash
from pipeline.train.config import TrainConfig, TrainPlan, batch_share, run_layout
from tests.train.rows import SPEC


def graphs(plan: TrainPlan) -> dict[str, object]:
    settings = Settings(train=TrainConfig(parallel=plan), model=ModelConfig(preset="tiny"))
    return dict(graph_plan(settings, SPEC, [Bucket(8, 8)], RankShare(0, 4, 1), "xla:CPU"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("shard_degre = 2", "unknown setting train.parallel.shard_degre .*\n.*train.parallel.shard_degree"),
        ('precision = "bf16"', "train.parallel.precision"),
        ("offload_horizon = 2", "train.parallel.offload_horizon"),
    ],
)
def test_what_a_run_cannot_be_told_is_one_error(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[train.parallel]\n{text}\n")
    with pytest.raises(ConfigError, match=match):
        resolve([file], {})


def test_a_plan_that_an_earlier_version_stored_is_read() -> None:
    stored = {"shard_degree": 4, "collectives": "default", "offload_horizon": 0, "precision": "fp32", "seed": None}
    assert TrainPlan.model_validate(stored) == TrainPlan(shard_degree=4)


def test_rows_are_shared_by_data_ranks() -> None:
    config = TrainConfig(parallel=TrainPlan(shard_degree=2, tensor_degree=2))
    shares = [batch_share(config, 8, rank) for rank in range(8)]
    assert [share.rank for share in shares] == [0, 0, 1, 1, 2, 2, 3, 3] and {share.world_size for share in shares} == {
        4
    }
    assert run_layout(config, 8, 5).shard_rank == 0 and run_layout(config, 8, 7).tensor_rank == 1
    with pytest.raises(ConfigError, match="tensor_degree 2 over 3 ranks"):
        batch_share(config, 3)


def test_a_plan_is_of_the_graphs_it_changes_and_of_no_hash() -> None:
    spread = TrainPlan(shard_degree=2, tensor_degree=2)
    assert graphs(spread) == graphs(TrainPlan()), "devices that trace refuse it"
    names = {"train.parallel.recompute": "units", "train.parallel.state_shards": 4}
    assert graphs(TrainPlan(shard="state", shard_degree=0, recompute="units")) == {**graphs(TrainPlan()), **names}
    assert settings_hash(Settings(train=TrainConfig(parallel=spread))) == settings_hash(Settings())
