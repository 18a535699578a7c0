"""The training program of a run: its model, spread as the plan says."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.backends import Backend, HostGather, HostMean
from pipeline.compile.watch import GraphWatch
from pipeline.core.batch_order import Bucket, RankShare
from pipeline.core.errors import ConfigError
from pipeline.model.losses import Temperature
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.gang import Gang
from pipeline.parallel.mesh import REPLICATE, SHARD, open_mesh
from pipeline.parallel.strategies.base import Strategy
from pipeline.parallel.strategies.flat import FlatStrategy
from pipeline.parallel.strategies.zero1 import Zero1Strategy
from pipeline.train.config import TrainConfig
from pipeline.train.step import TrainProgram

if TYPE_CHECKING:
    from pipeline.parallel.strategies.fsdp import FsdpStrategy


def open_program(
    model: RelevanceModel,
    backend: Backend,
    config: TrainConfig,
    share: RankShare,
    gang: Gang,
    *,
    figure_rows: int,
    buckets: Sequence[Bucket],
    watch: GraphWatch,
) -> TrainProgram:
    """The program of one rank of a run, or of the trial of one: both have the same graphs. Takes the model over."""
    plan, layout = config.parallel, gang.layout
    model.encoder.longest_text = max(side for one in buckets for side in (one.query_tokens, one.product_tokens))
    strategy: Strategy
    spread = layout.tensor_size > 1 or plan.offload or (plan.shard == "all" and layout.shard_size > 1)
    if spread or backend.compiles_steps:
        strategy = module_strategy(model, backend, config, gang)
    elif layout.shard_size > 1:
        prepare_model(model, backend, config)
        mesh = open_mesh(plan.as_plan(), backend, timeout_s=config.collective_timeout_s)
        strategy = Zero1Strategy(
            model,
            backend,
            precision=config.precision,
            chunk_mib=config.chunk_mib,
            by_layer=config.optimizer.by_layer,
            recompute=plan.recompute == "units",
            shards=mesh.ranks(SHARD),
            replicas=mesh.ranks(REPLICATE),
            host_gather=gang.gather_rows,
            is_averaged=config.average_decay > 0,
        )
    else:
        strategy = flat_strategy(
            model, backend, config, world_size=share.world_size, host_mean=gang.mean, host_gather=gang.gather_rows
        )
    return TrainProgram(strategy, backend, config, share, figure_rows=figure_rows, buckets=buckets, watch=watch)


def module_strategy(model: RelevanceModel, backend: Backend, config: TrainConfig, gang: Gang) -> "FsdpStrategy":
    """Shards, tensor peers and units as the plan of the run says. Takes the model over."""
    from pipeline.parallel.strategies.fsdp import FsdpStrategy  # 0.15 s of a start, and of flat vectors none

    prepare_model(model, backend, config)
    plan = config.parallel.as_plan("bf16" if config.precision == "bf16" else "fp32")
    return FsdpStrategy(
        model,
        open_mesh(plan, backend, timeout_s=config.collective_timeout_s),
        precision=config.precision,
        by_layer=config.optimizer.by_layer,
        host_mean=gang.mean,
        host_gather=gang.gather_rows,
    )


def flat_strategy(
    model: RelevanceModel,
    backend: Backend,
    config: TrainConfig,
    *,
    world_size: int = 1,
    host_mean: HostMean = list,
    host_gather: HostGather = list,
) -> FlatStrategy:
    """Plain data parallel over `world_size` ranks. Takes the model over."""
    prepare_model(model, backend, config)
    return FlatStrategy(
        model,
        backend,
        precision=config.precision,
        chunk_mib=config.chunk_mib,
        by_layer=config.optimizer.by_layer,
        recompute=config.parallel.recompute == "units",
        world_size=world_size,
        host_mean=host_mean,
        host_gather=host_gather,
    )


def prepare_model(model: RelevanceModel, backend: Backend, config: TrainConfig) -> None:
    """Give a model, in place, what its loss learns and the form of its operators. Raises ConfigError for its width."""
    config.loss.check_width(model.encoder.width)
    if config.optimizer.by_layer and not len(model.encoder.layers):
        raise ConfigError(
            f"train.optimizer.layer_decay {config.optimizer.layer_decay} with model.factory, whose layers have no names"
            " here",
            expected="one rate for the whole encoder",
            next_command="--train.optimizer.layer-decay 1",
        )
    if config.loss.learn_temperature:
        model.temperature = Temperature(config.loss.temperature)
    choose_forms(model, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
