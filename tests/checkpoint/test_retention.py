"""Which checkpoints may be deleted."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.save import steps_to_delete


def test_last_best_and_multiples_stay() -> None:
    gone = steps_to_delete(range(10, 101, 10), keep_last=2, keep_every_steps=40, best_step=30)
    assert gone == (10, 20, 50, 60, 70)
    assert steps_to_delete([], keep_last=1, keep_every_steps=0, best_step=None) == ()
    assert steps_to_delete([5], keep_last=3, keep_every_steps=0, best_step=99) == ()


@given(st.sets(st.integers(0, 500)), st.integers(1, 5), st.integers(0, 50), st.none() | st.integers(0, 500))
def test_the_newest_and_the_best_are_never_deleted(steps: set[int], last: int, every: int, best: int | None) -> None:
    gone = set(steps_to_delete(steps, keep_last=last, keep_every_steps=every, best_step=best))
    assert gone <= steps
    assert not gone & set(sorted(steps)[-last:])
    assert best not in gone
    # Applying it again deletes nothing more.
    assert not steps_to_delete(steps - gone, keep_last=last, keep_every_steps=every, best_step=best)
