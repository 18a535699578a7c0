"""A temperature that is learnt: one scalar of the training model, the logarithm of what cosines are multiplied by.

As in CLIP (Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021, 2.5):
the cosines are multiplied by at most 100, that is, the temperature stays at 0.01 or above.
"""

import math

import torch
from torch import Tensor, nn

from pipeline.model.config import LOWEST_TEMPERATURE, LossConfig

LOG_SCALE = "temperature.log_scale"
"""Name of the parameter in a training model and in its checkpoints. Models that score or embed have none."""
LARGEST_LOG_SCALE = -math.log(LOWEST_TEMPERATURE)


class Temperature(nn.Module):
    """Holds the parameter."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor([-math.log(start)], dtype=torch.float32))


def start_values(config: LossConfig) -> dict[str, Tensor]:
    """The parameter by name, where the temperature is learnt: for weights that come without it."""
    return {LOG_SCALE: Temperature(config.temperature).log_scale.detach()} if config.learn_temperature else {}


def temperature_of(log_scale: Tensor) -> Tensor:
    """fp32 [1] -> [1]."""
    return torch.exp(-log_scale)
