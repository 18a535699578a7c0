"""What a run trains on: all rows of the new partitions and a share of the old ones."""

from dataclasses import dataclass

import numpy as np

from pipeline.core.batching import Int64s
from pipeline.core.order import permute, stream_key
from pipeline.data.shards import Arrays, TokenRows

_REPLAY = 3


@dataclass(frozen=True)
class TrainingPools:
    """New rows first, then replayed ones, per bucket. Which old rows are replayed is a function of the seed alone."""

    new: TokenRows
    old: TokenRows | None
    replay_sizes: tuple[int, ...]
    seed: int

    @staticmethod
    def build(new: TokenRows, old: TokenRows | None, replay_share: float, seed: int) -> "TrainingPools":
        """`replay_share` of the run's samples come from `old` (fewer when there are not so many)."""
        if old is None or replay_share == 0.0:
            return TrainingPools(new, None, (0,) * len(new.sizes), seed)
        wanted = sum(new.sizes) * replay_share / (1.0 - replay_share)
        share = min(1.0, wanted / max(1, sum(old.sizes)))
        return TrainingPools(new, old, tuple(round(size * share) for size in old.sizes), seed)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.new.sizes, self.replay_sizes, strict=True))

    def read(self, pools: Int64s, rows: Int64s, bucket: int) -> Arrays:
        """Rows by (pool, number in the pool), in the order asked for."""
        new_sizes = np.array(self.new.sizes, dtype=np.int64)
        replayed = rows >= new_sizes[pools]
        if self.old is None or not replayed.any():
            return self.new.read(pools, rows, bucket)
        chosen = rows.copy()
        for pool in np.unique(pools[replayed]):
            here = replayed & (pools == pool)
            key = stream_key(self.seed, _REPLAY, int(pool))
            chosen[here] = permute(rows[here] - new_sizes[pool], self.old.sizes[pool], key)
        parts = [
            (np.flatnonzero(mask), source.read(pools[mask], chosen[mask], bucket))
            for mask, source in ((~replayed, self.new), (replayed, self.old))
            if mask.any()
        ]
        result = {name: np.empty((len(rows), *values.shape[1:]), values.dtype) for name, values in parts[0][1].items()}
        for places, arrays in parts:
            for name, values in arrays.items():
                result[name][places] = values
        return result
