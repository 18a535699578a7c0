"""Sides as they are typed."""

from typing import get_args

import pytest

from pipeline.backends import NAMES
from pipeline.core.errors import ConfigError
from pipeline.parity.compare import Side
from pipeline.parity.record import BACKENDS, PRECISIONS, parse_side
from pipeline.train.config import TrainConfig


def test_a_backend_with_or_without_a_precision() -> None:
    assert parse_side("cpu", "bf16") == Side("cpu", "bf16")
    assert parse_side("cuda:fp32", "bf16") == Side("cuda", "fp32")
    assert Side("xla", "bf16").name == "xla.bf16"


@pytest.mark.parametrize("text", ["folder", "./cpu", "/tmp/cpu", "s3://bucket/cpu", "file:///x", "", "auto"])
def test_anything_else_is_a_place(text: str) -> None:
    assert parse_side(text, "fp32") is None


@pytest.mark.parametrize("text", ["cpu:", "cpu:fp16", "xla:bf16:x"])
def test_an_unknown_precision_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="fp32") as caught:
        parse_side(text, "fp32")
    assert text in caught.value.seen


def test_every_backend_and_precision_of_training_can_be_a_side() -> None:
    assert {"auto", *BACKENDS} == set(NAMES)
    assert get_args(TrainConfig.model_fields["precision"].annotation) == PRECISIONS
