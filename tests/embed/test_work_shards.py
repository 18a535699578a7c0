from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipeline.embed.catalogue import Piece, plan_shards

FILES = st.lists(st.lists(st.integers(0, 300), max_size=5), max_size=6)


@given(FILES, st.integers(1, 120))
def test_every_row_is_in_one_shard_in_order(groups: list[list[int]], limit: int) -> None:
    shards = plan_shards(groups, limit)
    rows = [
        (piece.file, piece.group, piece.start + place)
        for shard in shards
        for piece in shard.pieces
        for place in range(piece.rows)
    ]
    assert rows == [
        (f, g, row) for f, sizes in enumerate(groups) for g, size in enumerate(sizes) for row in range(size)
    ]
    assert all(0 < shard.rows <= limit for shard in shards)
    assert [shard.index for shard in shards] == list(range(len(shards)))


@given(FILES, st.integers(1, 120))
def test_shards_are_as_full_as_they_can_be(groups: list[list[int]], limit: int) -> None:
    for left, right in pairwise(plan_shards(groups, limit)):
        assert left.rows + right.pieces[0].rows > limit


def test_whole_row_groups_stay_together_and_large_ones_are_cut_evenly() -> None:
    shards = plan_shards([[40, 40], [250], [5]], 100)
    assert [shard.pieces for shard in shards] == [
        (Piece(0, 0, 0, 40), Piece(0, 1, 0, 40)),
        (Piece(1, 0, 0, 83),),
        (Piece(1, 0, 83, 83),),
        (Piece(1, 0, 166, 84), Piece(2, 0, 0, 5)),
    ]
    assert [shard.rows for shard in shards] == [80, 83, 83, 89]
