"""AdamW, and a guard that skips steps with a non-finite loss or a gradient spike.

The update follows algorithm 2 of Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.train.config import GuardConfig, OptimizerConfig


def control_values(step: int, learning_rate: float, config: OptimizerConfig) -> Tensor:
    """Return the learning rate, 1 - beta1^t, 1 - beta2^t and t for optimizer step t = `step` (1-based) as fp32 [4].

    These values are sent to the device together with the batch, so that they do not need a separate transfer and the
    graph is the same for every step. They are computed on the host in double precision, which ensures that they are
    equal on every backend.
    """
    return torch.tensor(
        [learning_rate, 1.0 - config.beta1**step, 1.0 - config.beta2**step, float(step)], dtype=torch.float32
    )


def learning_rate_at(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of step `step` (1-based), with a linear warm-up followed by the configured schedule."""
    peak, warmup_steps = config.learning_rate, round(config.warmup_fraction * max_steps)
    if step <= warmup_steps:
        return peak * step / max(1, warmup_steps)
    if config.schedule == "constant":
        return peak
    # Use step - 1, because otherwise the last step would have a learning rate of zero.
    progress = min(1.0, (step - 1 - warmup_steps) / max(1, max_steps - warmup_steps))
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    return peak * remaining


class AdamW:
    """AdamW over the fp32 master weights of a parallel strategy."""

    def __init__(
        self,
        masters: Sequence[Tensor],
        decayed: Sequence[bool],
        config: OptimizerConfig,
        *,
        traced: bool,
        rates: Sequence[float] | None = None,
    ) -> None:
        """Initialise the moments to zero.

        Args:
            decayed: whether weight decay is applied to each master.
            traced: use tensor operations, which a lazy or compiled backend can trace, instead of the fused kernel.
            rates: learning-rate multiplier of each master. Defaults to 1.
        """
        self.config = config
        self.masters = list(masters)
        self._decays = [config.weight_decay if is_decayed else 0.0 for is_decayed in decayed]
        self._rates = list(rates or [1.0] * len(self.masters))
        self.exp_avg = [torch.zeros_like(master, requires_grad=False) for master in masters]
        self.exp_avg_sq = [torch.zeros_like(master, requires_grad=False) for master in masters]
        # Masters with the same weight decay and learning rate are updated by a single call of the fused kernel.
        param_groups: dict[tuple[float, float], list[int]] = {}
        for index, key in enumerate(zip(self._decays, self._rates, strict=True)):
            param_groups.setdefault(key, []).append(index)
        self._param_groups = list(param_groups.values())
        self._traced = traced
        self.zero = torch.zeros((), dtype=torch.float32, device=masters[0].device)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], control: Tensor, clip: Tensor, ok: Tensor) -> None:
        """Update the masters in place, unless `ok` (bool scalar) is false.

        `clip` (fp32 scalar) is a factor applied to `grads`. `control` is the result of `control_values`.
        """
        if self._traced:
            self._traced_step(grads, control, clip, ok)
            return
        config = self.config
        for indices in self._param_groups:
            torch._fused_adamw_(
                [self.masters[index] for index in indices],
                [grads[index] for index in indices],
                [self.exp_avg[index] for index in indices],
                [self.exp_avg_sq[index] for index in indices],
                [],
                [control[3]] * len(indices),
                lr=control[0] * self._rates[indices[0]],
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=self._decays[indices[0]],
                eps=config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=1.0 / clip,
                found_inf=1.0 - ok.float(),
            )

    def _traced_step(self, grads: Sequence[Tensor], control: Tensor, clip: Tensor, ok: Tensor) -> None:
        """Update with tensor operations, tracing the scalars that all masters have in common only once.

        Whether the step is taken is folded into the scalars, which takes half the time of selecting the new values with
        `where`. A skipped step multiplies by one and adds zero, so that the state remains bitwise identical for any
        gradient, even if it contains NaN.
        """
        config, taken = self.config, ok.float()
        rate, correction1, correction2, _ = control.unbind()
        gain1, gain2, deviation = taken * (1.0 - config.beta1), taken * (1.0 - config.beta2), torch.rsqrt(correction2)
        keep1, keep2 = 1.0 - gain1, 1.0 - gain2
        rates = {factor: taken * (rate if factor == 1.0 else rate * factor) for factor in set(self._rates)}
        steps = {factor: scaled / correction1 for factor, scaled in rates.items()}
        for index, (master, grad) in enumerate(zip(self.masters, grads, strict=True)):
            first, second, factor = self.exp_avg[index], self.exp_avg_sq[index], self._rates[index]
            clipped = torch.where(ok, grad * clip, self.zero)
            new_first = first * keep1 + clipped * gain1
            new_second = second * keep2 + clipped * clipped * gain2
            direction = new_first / (torch.sqrt(new_second) * deviation + config.eps)
            decay = self._decays[index]
            kept = master * (1.0 - rates[factor] * decay) if decay else master
            master.copy_(kept - direction * steps[factor])
            first.copy_(new_first)
            second.copy_(new_second)


# The guard against NaN and gradient spikes is evaluated on the device. A skipped step changes neither weights nor
# moments, and the host reads the number of skipped steps later, together with the metrics.

STATE_SIZE = 5
MEAN, VARIANCE, COUNT, SKIPPED_IN_A_ROW, SKIPPED = range(STATE_SIZE)
_LARGEST = 3.0e38
_MIN_RATIO = 4.0  # a norm below this multiple of the mean is never a spike, even if the variance is very low
WARMUP_STEPS = 50  # number of initial steps that are checked for NaN, but not for spikes
_DECAY = 0.98  # decay rate of the running mean and variance


class SpikeGuard:
    """Detects steps with a non-finite loss or a gradient spike, so that they are skipped without a host sync.

    The state is an fp32 tensor [5] with the running mean and variance of the gradient norm and counts of skipped steps.
    Like OLMo-core's SkipStepOptimizer, the guard skips a step if the norm is too many standard deviations above the
    mean, but it uses exponential moving averages instead of a window of past values.
    """

    def __init__(self, config: GuardConfig, device: torch.device) -> None:
        self.config = config
        self.state = torch.zeros(STATE_SIZE, dtype=torch.float32, device=device)
        # Keep these limits on the device in fp32, because comparing a tensor with a Python float adds an f64 constant
        # to the graph (see docs/neuron.md).
        self._largest = torch.tensor(_LARGEST, dtype=torch.float32, device=device)
        self._warmup = torch.tensor(float(WARMUP_STEPS), dtype=torch.float32, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Update the state and return whether to take the step, as a bool scalar on the device.

        `loss` and `grad_norm` are fp32 scalars. They must be equal on all ranks, which ensures that all ranks make the
        same decision.
        """
        config, state = self.config, self.state
        mean, variance, count, skipped_in_a_row, skipped = state.unbind()
        finite = (torch.abs(loss) < self._largest) & (torch.abs(grad_norm) < self._largest)  # NaN compares as false
        limit = torch.maximum(mean + config.sigma * torch.sqrt(variance), mean * _MIN_RATIO)
        ok = torch.where(count < self._warmup, finite, finite & (grad_norm <= limit))
        taken = ok.float()
        # A spike still updates the mean, clipped to the limit. Otherwise, a lasting increase of the gradient norm would
        # cause every later step to be skipped.
        clipped = torch.where(count < self._warmup, grad_norm, torch.minimum(grad_norm, limit))
        # Compute the exact mean of the first values, and an exponential moving average from then on.
        weight = torch.clamp(1.0 / (count + 1.0), min=1.0 - _DECAY)
        change = torch.where(finite, clipped - mean, torch.zeros_like(mean))
        state.copy_(
            torch.stack(
                [
                    mean + weight * change,
                    torch.where(finite, (1.0 - weight) * (variance + weight * change * change), variance),
                    count + finite.float(),
                    (skipped_in_a_row + 1.0) * (1.0 - taken),
                    skipped + 1.0 - taken,
                ]
            )
        )
        return ok
