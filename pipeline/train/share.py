"""How ranks and micro-steps share a global batch. Pure."""

from collections.abc import Sequence

from pipeline.core.batching import Bucket, RankShare, row_lengths
from pipeline.core.errors import ConfigError
from pipeline.parallel.world import World
from pipeline.train.config import TrainConfig


def groups_of_batch(config: TrainConfig) -> int:
    """Groups of one query in a global batch. Raises ConfigError when its samples are not whole groups."""
    groups, rest = divmod(config.global_batch_size, config.candidates_per_query)
    if rest or not groups:
        raise _refused(config, 1, f"a global batch of {config.global_batch_size}")
    return groups


def rows_of_batch(config: TrainConfig, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """Lengths of the rows of tokens that batches are made of, ascending; one batch has one of them."""
    return row_lengths(buckets, config.candidates_per_query + config.mined_per_query, config.row_tokens)


def batch_share(config: TrainConfig, world: World) -> RankShare:
    """The fewest equal micro-steps that fit `micro_batch_size` and cut no group of one query.

    Raises ConfigError when the global batch cannot be shared evenly.
    """
    per_rank, rest = divmod(groups_of_batch(config), world.world_size)
    most = config.micro_batch_size // config.candidates_per_query
    if not rest and most:
        accumulation = next(parts for parts in range(-(-per_rank // most), per_rank + 1) if per_rank % parts == 0)
        return RankShare(world.rank, world.world_size, accumulation)
    seen = (
        f"a global batch of {config.global_batch_size} over {world.world_size} ranks, in micro-batches of up to"
        f" {config.micro_batch_size}"
    )
    raise _refused(config, world.world_size, seen)


def needs_two_passes(config: TrainConfig, share: RankShare, *, gathers_in_graph: bool) -> bool:
    """No one graph of a rank can hold the global batch, over which the contrastive loss is one number."""
    if not config.loss.contrastive_weight:
        return False
    return share.accumulation > 1 or (share.world_size > 1 and not gathers_in_graph)


def _refused(config: TrainConfig, world_size: int, seen: str) -> ConfigError:
    slots = config.candidates_per_query
    unit = slots * world_size
    return ConfigError(
        seen,
        expected=f"equal micro-batches of whole groups (train.candidates_per_query is {slots})",
        next_command=f"--train.global-batch-size {unit * max(1, round(config.global_batch_size / unit))}, or another"
        " --train.micro-batch-size or --train.candidates-per-query",
    )
