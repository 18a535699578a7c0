"""One rank of test_two_ranks.py: the gradients of one step, as this rank has them after the reduction, into a file."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from pipeline.core.batch_order import RankShare
from pipeline.data.loader import training_batches
from pipeline.model.relevance import build_model
from pipeline.parallel.gang import open_ranks
from pipeline.parallel.strategies.flat import CHUNK_MIB, FlatStrategy
from pipeline.parallel.world import World, world_from_env
from pipeline.train.config import TrainConfig
from pipeline.train.step import TrainProgram, prepare_model
from tests.train.rows import BUCKETS, MODEL, SPEC, TRAIN, grouped, make_rows, plan_of


def reduced_gradients(
    world: World, config: TrainConfig, accumulation: int, chunk_mib: float = CHUNK_MIB
) -> dict[str, torch.Tensor]:
    """By name of parameter, and the loss; the mean over all samples of the first global batch."""
    with TemporaryDirectory() as folder, open_ranks("cpu", world, timeout_s=60.0) as (gang, backend):
        rows = make_rows(Path(folder), [(40, 40)])
        share = RankShare(world.rank, world.world_size, accumulation)
        model = build_model(MODEL, SPEC, config.seed)
        prepare_model(model, backend, config)
        strategy = FlatStrategy(
            model,
            backend,
            precision=config.precision,
            chunk_mib=chunk_mib,
            world_size=share.world_size,
            host_mean=gang.mean,
            host_gather=gang.gather_rows,
        )
        program = TrainProgram(strategy, backend, config, share, figure_rows=1, buckets=BUCKETS)
        groups = grouped(rows, config)
        program.accumulate([one.tensors for one in training_batches(groups, plan_of(groups, config), share, 0, 1)])
        sums = program.reduced()
        return {**strategy.layout.unpack(sums[:-1]), "loss": sums[-1]}


def leave_gradients(folder: str, chunk_mib: str, accumulation: str) -> None:
    """In a rank (tests/ranks.py)."""
    torch.set_num_threads(1)
    world = world_from_env()
    found = reduced_gradients(world, TRAIN, int(accumulation), float(chunk_mib))
    torch.save({name: tensor.clone() for name, tensor in found.items()}, Path(folder) / f"rank-{world.rank}.pt")
