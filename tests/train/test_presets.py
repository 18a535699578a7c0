"""The presets for published weights carry one recipe, with rates that the rule of docs/quality.md allows."""

import math
import tomllib
from pathlib import Path

from pipeline.settings import resolve
from pipeline.train.config import TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"
CHOSEN_AT, CHOSEN_RATE = 64, 1e-4
"""Batch and rate at which small was chosen."""


def preset(name: str) -> TrainConfig:
    with (CONFIGS / f"{name}.toml").open("rb") as file:
        return TrainConfig.model_validate(tomllib.load(file)["train"])


def rate_at_64(train: TrainConfig) -> float:
    return train.optimizer.learning_rate / math.sqrt(train.global_batch_size / CHOSEN_AT)


def test_one_recipe() -> None:
    small, *larger = (preset(name) for name in ("small", "base", "large"))
    for train in larger:
        assert train.optimizer.head_rate == small.optimizer.head_rate >= 10
        assert train.loss == small.loss


def test_the_largest_mines_its_negatives() -> None:
    settings = resolve([CONFIGS / "large.toml"], {}).settings
    assert settings.train.mined_per_query and settings.mine.enabled


def test_rates_are_within_the_rule_and_fall_with_the_size() -> None:
    small, base, large = (rate_at_64(preset(name)) for name in ("small", "base", "large"))
    assert CHOSEN_RATE >= small > base > large >= 1e-5
