"""How a catalogue is cut into work shards, and which worker does which. Pure: every worker comes to the same plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `start + rows` of one row group."""

    file: int
    group: int
    start: int
    rows: int


@dataclass(frozen=True)
class WorkShard:
    """Consecutive rows of the catalogue that become one part: the unit of work and of resume."""

    index: int
    first_row: int
    """Place of its first row in the whole catalogue."""
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


def plan_shards(groups: Sequence[Sequence[int]], rows_per_shard: int) -> tuple[WorkShard, ...]:
    """Cut files into shards of at most `rows_per_shard` rows, in order.

    `groups[f][g]` is the number of rows of row group g of file f. Row groups that fit stay whole, so that few are read
    twice; larger ones are cut into equal pieces; small ones, of several files too, go together.
    """
    shards: list[WorkShard] = []
    held: list[Piece] = []
    done = rows = 0
    for piece in _pieces(groups, rows_per_shard):
        if rows + piece.rows > rows_per_shard:
            shards.append(WorkShard(len(shards), done, tuple(held)))
            held, done, rows = [], done + rows, 0
        held.append(piece)
        rows += piece.rows
    if held:
        shards.append(WorkShard(len(shards), done, tuple(held)))
    return tuple(shards)


def _pieces(groups: Sequence[Sequence[int]], limit: int) -> Iterator[Piece]:
    for file, sizes in enumerate(groups):
        for group, rows in enumerate(sizes):
            parts = -(-rows // limit)
            for part in range(parts):
                start, end = part * rows // parts, (part + 1) * rows // parts
                yield Piece(file, group, start, end - start)


def share_of(num_shards: int, worker: int, workers: int) -> range:
    """Indices of the shards that `worker` of `workers` does: every `workers`-th.

    New rows mostly come together, so neighbours go to different workers. Raises ValueError for a worker out of range.
    """
    if not 0 <= worker < workers:
        raise ValueError(f"worker {worker} of {workers}")
    return range(worker, num_shards, workers)
