"""Which checkpoints stay."""

from collections.abc import Iterable


def steps_to_delete(
    steps: Iterable[int], *, keep_last: int, keep_every_steps: int, best_step: int | None
) -> tuple[int, ...]:
    """Steps whose checkpoints may go: not among the newest, not the best, not a multiple kept for good."""
    ordered = sorted(set(steps))
    kept = set(ordered[-keep_last:])
    if best_step is not None:
        kept.add(best_step)
    if keep_every_steps:
        kept.update(step for step in ordered if step % keep_every_steps == 0)
    return tuple(step for step in ordered if step not in kept)
