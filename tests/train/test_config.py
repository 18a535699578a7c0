"""Settings of training: how a batch is shared, the plan of a run, and the recipes of the presets."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.compile.identity import graph_plan
from pipeline.core.batch_order import Bucket, RankSlice
from pipeline.core.errors import ConfigError
from pipeline.model.config import ModelConfig
from pipeline.parallel.config import PLAN_VARIABLE, Plan
from pipeline.settings import Settings, resolve, settings_hash
from pipeline.train.config import TrainConfig, TrainPlan, groups_per_batch, rank_slice, run_layout
from tests.train.rows import SPEC

CONFIGS = Path(__file__).parents[2] / "configs"


def config(batch: int, micro: int, slots: int = 4) -> TrainConfig:
    return TrainConfig(global_batch_size=batch, micro_batch_size=micro, candidates_per_query=slots)


@pytest.mark.parametrize(
    ("batch", "micro", "world_size", "expected"),
    [(64, 64, 1, 1), (64, 32, 1, 2), (64, 40, 1, 2), (64, 64, 2, 1), (48, 12, 2, 2)],
)
def test_fewest_micro_steps(batch: int, micro: int, world_size: int, expected: int) -> None:
    assert rank_slice(config(batch, micro), world_size).accumulation == expected


@given(st.integers(2, 200), st.integers(2, 64), st.integers(1, 6), st.integers(1, 8))
def test_a_share_is_even_fits_and_cuts_no_group(batch: int, micro: int, world_size: int, slots: int) -> None:
    try:
        share = rank_slice(config(batch, micro, slots), world_size, world_size - 1)
    except ConfigError:
        # Refused only when no count of micro-steps would do.
        sizes = [batch // (world_size * n) for n in range(1, batch + 1) if batch % (world_size * n) == 0]
        assert not [size for size in sizes if size <= micro and size % slots == 0]
        return
    size, left = divmod(batch, world_size * share.accumulation)
    assert left == 0 and size <= micro and size % slots == 0
    assert (share.rank, share.world_size) == (world_size - 1, world_size)
    assert groups_per_batch(config(batch, micro, slots)) * slots == batch


def test_the_suggested_batch_size_works() -> None:
    with pytest.raises(ConfigError, match="a global batch of 52 cannot be divided over 3 ranks") as caught:
        rank_slice(config(52, 64), 3)
    suggested = int(caught.value.next_command.split()[1].rstrip(","))
    assert rank_slice(config(suggested, 64), 3).accumulation >= 1
    with pytest.raises(ConfigError) as caught:
        rank_slice(config(64, 2, 4), 1)
    assert caught.value.next_command.startswith("--train.micro-batch-size 4,")


def test_patience_needs_evaluations() -> None:
    with pytest.raises(ValidationError, match="patience requires evaluations"):
        TrainConfig(patience=3, evaluate_every=0)


def test_an_empty_plan_variable_is_no_plan() -> None:
    assert Plan.read(None, {PLAN_VARIABLE: ""}) == Plan()
    with pytest.raises(ConfigError, match=f"{PLAN_VARIABLE}=/nowhere cannot be read"):
        Plan.read(None, {PLAN_VARIABLE: "/nowhere"})


# The plan of a run, `[train.parallel]`.


def graphs(plan: TrainPlan) -> dict[str, object]:
    settings = Settings(train=TrainConfig(parallel=plan), model=ModelConfig(preset="tiny"))
    return dict(graph_plan(settings, SPEC, [Bucket(8, 8)], RankSlice(0, 4, 1), "xla:CPU"))


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
    spread = TrainConfig(parallel=TrainPlan(shard_degree=2, tensor_degree=2))
    shares = [rank_slice(spread, 8, rank) for rank in range(8)]
    assert [(share.rank, share.world_size) for share in shares] == [(rank // 2, 4) for rank in range(8)]
    assert run_layout(spread, 8, 5).shard_rank == 0 and run_layout(spread, 8, 7).tensor_rank == 1
    with pytest.raises(ConfigError, match="tensor_degree 2 does not divide 3 ranks"):
        rank_slice(spread, 3)


def test_a_plan_is_of_the_graphs_it_changes_and_of_no_hash() -> None:
    spread = TrainPlan(shard_degree=2, tensor_degree=2)
    assert graphs(spread) == graphs(TrainPlan()), "devices that trace refuse it"
    names = {"train.parallel.recompute": "units", "train.parallel.state_shards": 4}
    assert graphs(TrainPlan(shard="state", shard_degree=0, recompute="units")) == {**graphs(TrainPlan()), **names}
    assert settings_hash(Settings(train=TrainConfig(parallel=spread))) == settings_hash(Settings())


def test_presets_of_published_weights_have_one_recipe_with_rates_that_fall_with_the_size() -> None:
    """By the rule of docs/quality.md: at most 1e-4 at a batch of 64, as small was chosen."""
    settings = [resolve([CONFIGS / f"{name}.toml"], {}).settings for name in ("small", "base", "large")]
    recipes = [one.train for one in settings]
    assert len({(one.optimizer.head_rate, one.loss) for one in recipes}) == 1 and recipes[0].optimizer.head_rate >= 10
    small, base, large = (one.optimizer.learning_rate / math.sqrt(one.global_batch_size / 64) for one in recipes)
    assert 1e-4 >= small > base > large >= 1e-5
    assert recipes[-1].mined_per_query and settings[-1].mine.enabled
