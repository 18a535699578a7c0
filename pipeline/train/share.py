"""How ranks and micro-steps share a global batch. Pure."""

from pipeline.core.batching import RankShare
from pipeline.core.errors import ConfigError
from pipeline.parallel.world import World
from pipeline.train.config import TrainConfig


def batch_share(config: TrainConfig, world: World) -> RankShare:
    """The fewest equal micro-steps that fit `micro_batch_size` and cut no contrastive group.

    Raises ConfigError when the global batch cannot be shared evenly.
    """
    batch = config.global_batch_size
    group = config.loss.negatives_group if config.loss.contrastive_weight else 1
    per_rank, rest = divmod(batch, world.world_size)
    if not rest:
        for accumulation in range(-(-per_rank // config.micro_batch_size), per_rank + 1):
            micro, left = divmod(per_rank, accumulation)
            if not left and micro % group == 0:
                return RankShare(world.rank, world.world_size, accumulation)
    unit = group * world.world_size
    raise ConfigError(
        f"a global batch of {batch} over {world.world_size} ranks, in micro-batches of up to {config.micro_batch_size}",
        expected=f"equal micro-batches of whole contrastive groups (train.loss.negatives_group is {group})",
        next_command=f"--train.global-batch-size {unit * max(1, round(batch / unit))}, or another"
        " --train.micro-batch-size or --train.loss.negatives-group",
    )
