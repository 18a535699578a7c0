"""How ranks and micro-steps share a global batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import ConfigError
from pipeline.train.config import TrainConfig, batch_share, groups_of_batch


def config(batch: int, micro: int, slots: int = 4) -> TrainConfig:
    return TrainConfig(global_batch_size=batch, micro_batch_size=micro, candidates_per_query=slots)


@pytest.mark.parametrize(
    ("batch", "micro", "world_size", "expected"),
    [(64, 64, 1, 1), (64, 32, 1, 2), (64, 40, 1, 2), (64, 64, 2, 1), (48, 12, 2, 2)],
)
def test_fewest_micro_steps(batch: int, micro: int, world_size: int, expected: int) -> None:
    assert batch_share(config(batch, micro), world_size).accumulation == expected


@given(st.integers(2, 200), st.integers(2, 64), st.integers(1, 6), st.integers(1, 8))
def test_a_share_is_even_fits_and_cuts_no_group(batch: int, micro: int, world_size: int, slots: int) -> None:
    try:
        share = batch_share(config(batch, micro, slots), world_size, world_size - 1)
    except ConfigError as error:
        # Refused only when no count of micro-steps would do.
        sizes = [batch // (world_size * n) for n in range(1, batch + 1) if batch % (world_size * n) == 0]
        assert not [size for size in sizes if size <= micro and size % slots == 0]
        assert f"a global batch of {batch}" in error.seen
        return
    size, left = divmod(batch, world_size * share.accumulation)
    assert left == 0 and size <= micro and size % slots == 0
    assert (share.rank, share.world_size) == (world_size - 1, world_size)
    assert groups_of_batch(config(batch, micro, slots)) * slots == batch


def test_the_suggested_batch_size_works() -> None:
    with pytest.raises(ConfigError, match="a global batch of 52 over 3 ranks") as caught:
        batch_share(config(52, 64), 3)
    suggested = int(caught.value.next_command.split()[1].rstrip(","))
    assert batch_share(config(suggested, 64), 3).accumulation >= 1
