"""AdamW over flat vectors, with the step skipped on the device when the guard says so.

Decoupled weight decay as in Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019), algorithm 2.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.model.flat import Chunk
from pipeline.train.config import OptimizerConfig

CONTROL_SIZE = 4  # learning rate, 1 - beta1^t, 1 - beta2^t, t


def control_values(step: int, learning_rate: float, config: OptimizerConfig) -> Tensor:
    """The scalars of optimizer step `step` (1-based), fp32 [4].

    They travel with the batch: no transfer of their own, and no graph knows the step. Computed in
    double precision on the host, so they are equal on every backend.
    """
    return torch.tensor(
        [learning_rate, 1.0 - config.beta1**step, 1.0 - config.beta2**step, float(step)], dtype=torch.float32
    )


def rate_of(chunk: Chunk, num_layers: int, config: OptimizerConfig) -> float:
    """Multiple of the learning rate for the parameters of a chunk; the encoder has `num_layers`.

    Layer l of L learns at layer_decay^(L - l), the embeddings are layer 0 (Howard and Ruder, "Universal Language Model
    Fine-tuning for Text Classification", ACL 2018, 3.2, as BERT-like models have it since ELECTRA).
    """
    if not chunk.encoder:
        return config.head_rate
    return 1.0 if chunk.layer is None else config.layer_decay ** (num_layers - chunk.layer)


class AdamW:
    """Two moments for each flat vector."""

    def __init__(
        self,
        masters: Sequence[Tensor],
        decayed: Sequence[bool],
        config: OptimizerConfig,
        *,
        traced: bool,
        rates: Sequence[float] | None = None,
    ) -> None:
        """`decayed`: which are. `traced`: write the update out for a tracing device; else PyTorch's fused kernel.

        `rates`: multiples of the learning rate, one a vector (none: 1).
        """
        self.config = config
        self.masters = list(masters)
        self._decays = [config.weight_decay if one else 0.0 for one in decayed]
        self._rates = list(rates or [1.0] * len(self.masters))
        self.exp_avg = [torch.zeros_like(master, requires_grad=False) for master in masters]
        self.exp_avg_sq = [torch.zeros_like(master, requires_grad=False) for master in masters]
        self._update = self._traced if traced else self._fused

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], control: Tensor, clip: Tensor, ok: Tensor) -> None:
        """Update in place where `ok` (bool scalar). `clip` (fp32 scalar) scales the gradients, `control` see above."""
        for index, grad in enumerate(grads):
            self._update(index, grad, self._decays[index], control, clip, ok)

    def _traced(self, index: int, grad: Tensor, decay: float, control: Tensor, clip: Tensor, ok: Tensor) -> None:
        """The decision is folded into scalars, which halves the time of choosing whole vectors with `where`.

        A skipped step multiplies by one and adds zero: nothing changes by a bit, whatever the gradient holds.
        """
        config = self.config
        master, first, second = self.masters[index], self.exp_avg[index], self.exp_avg_sq[index]
        taken = ok.float()
        gain1, gain2 = taken * (1.0 - config.beta1), taken * (1.0 - config.beta2)
        rate = taken * self._rate(index, control)
        clipped = torch.where(ok, grad * clip, torch.zeros_like(grad))
        new_first = first * (1.0 - gain1) + clipped * gain1
        new_second = second * (1.0 - gain2) + clipped * clipped * gain2
        direction = new_first / (torch.sqrt(new_second) * torch.rsqrt(control[2]) + config.eps)
        master.copy_(master * (1.0 - rate * decay) - direction * (rate / control[1]))
        first.copy_(new_first)
        second.copy_(new_second)

    def _rate(self, index: int, control: Tensor) -> Tensor:
        factor = self._rates[index]
        return control[0] if factor == 1.0 else control[0] * factor

    def _fused(self, index: int, grad: Tensor, decay: float, control: Tensor, clip: Tensor, ok: Tensor) -> None:
        config = self.config
        torch._fused_adamw_(
            [self.masters[index]],
            [grad],
            [self.exp_avg[index]],
            [self.exp_avg_sq[index]],
            [],
            [control[3]],
            lr=self._rate(index, control),
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=1.0 / clip,
            found_inf=1.0 - ok.float(),
        )
