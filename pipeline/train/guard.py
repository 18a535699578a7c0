"""NaN and spike guard, decided on the device: a bad step changes nothing, and the host learns of it later.

The idea (skip beyond so many deviations, in tensor arithmetic) is OLMo-core's SkipStepOptimizer; here over running
moments.
"""

import torch
from torch import Tensor

from pipeline.train.config import GuardConfig

STATE_SIZE = 5
MEAN, VARIANCE, SEEN, SKIPPED_IN_A_ROW, SKIPPED = range(STATE_SIZE)
_LARGEST = 3.0e38


class SpikeGuard:
    """Running mean and variance of the gradient norm, and steps skipped. State: fp32 [5] on the device."""

    def __init__(self, config: GuardConfig, device: torch.device) -> None:
        self.config = config
        self.state = torch.zeros(STATE_SIZE, dtype=torch.float32, device=device)
        # On the device as fp32: comparing with a Python float would put f64 into the graph (docs/neuron.md).
        self._largest = torch.tensor(_LARGEST, dtype=torch.float32, device=device)
        self._warmup = torch.tensor(float(config.warmup_steps), dtype=torch.float32, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """True when the step may be taken (bool scalar); the state moves on. Inputs: fp32 scalars, equal on ranks."""
        config, state = self.config, self.state
        mean, variance, seen = state[MEAN], state[VARIANCE], state[SEEN]
        finite = (torch.abs(loss) < self._largest) & (torch.abs(grad_norm) < self._largest)  # NaN compares as false
        limit = torch.maximum(mean + config.sigma * torch.sqrt(variance), mean * config.min_ratio)
        ok = torch.where(seen < self._warmup, finite, finite & (grad_norm <= limit))
        taken = ok.float()
        # A spike counts as the limit it broke, so that a lasting change of level is followed and not skipped for ever.
        counted = torch.where(seen < self._warmup, grad_norm, torch.minimum(grad_norm, limit))
        # Weight of the newest value: exact mean of the first few, exponential after that.
        weight = torch.clamp(1.0 / (seen + 1.0), min=1.0 - config.decay)
        change = torch.where(finite, counted - mean, torch.zeros_like(mean))
        state.copy_(
            torch.stack(
                [
                    mean + weight * change,
                    torch.where(finite, (1.0 - weight) * (variance + weight * change * change), variance),
                    seen + finite.float(),
                    (state[SKIPPED_IN_A_ROW] + 1.0) * (1.0 - taken),
                    state[SKIPPED] + 1.0 - taken,
                ]
            )
        )
        return ok
