"""Learning-rate schedules as a pure function of the step."""

import math
from typing import Literal

Shape = Literal["cosine", "linear", "constant"]


def learning_rate(
    step: int, *, max_steps: int, peak: float, shape: Shape, warmup_steps: int, final_fraction: float
) -> float:
    """Rate of optimizer step `step` (1-based): linear warm-up to `peak`, then down to `final_fraction * peak`."""
    if step <= warmup_steps:
        return peak * step / max(1, warmup_steps)
    if shape == "constant":
        return peak
    # The step before the end of the decay, so that the last step still learns.
    progress = min(1.0, (step - 1 - warmup_steps) / max(1, max_steps - warmup_steps))
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if shape == "cosine" else 1.0 - progress
    return peak * (final_fraction + (1.0 - final_fraction) * remaining)
