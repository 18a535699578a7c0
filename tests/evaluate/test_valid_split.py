"""The valid split beside the one that is judged: ranks go on only when all of them see the same of it."""

from typing import Any

import pytest

from pipeline.core.errors import DataError
from pipeline.evaluate.run import _open_valid
from pipeline.parallel.gang import Gang
from tests.evaluate.gangs import on_ranks


def open_on(*unreadable: int) -> list[Any]:
    """What each of two ranks gets when those named cannot read it."""

    def work(gang: Gang) -> Any:
        def split(name: str) -> Any:
            if gang.world.rank in unreadable:
                raise DataError(f"token shard {gang.world.rank} of {name} cannot be read")
            return [name]  # stands for its rows

        return _open_valid(split, gang)

    return on_ranks(2, work)


def test_all_ranks_see_it_or_none_does() -> None:
    assert open_on() == [["valid"], ["valid"]]
    assert open_on(0, 1) == [f"token shard {rank} of valid cannot be read" for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_split_that_one_rank_cannot_read_ends_all(rank: int) -> None:
    with pytest.raises(DataError, match=f"cannot be used on rank {rank} of 2: token shard {rank} of valid"):
        open_on(rank)
