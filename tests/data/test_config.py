"""Settings that cannot be meant are refused where they are read, not by what trips over them later."""

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.data.config import DataConfig

BRANDS = [{"column": "brand", "num_ids": num_ids} for num_ids in (8, 16)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"numeric": ["price", "clicks", "price"]}, "duplicate names 'price'"),
        ({"slices": ["market", "market"]}, "duplicate names 'market'"),
        ({"labels": ["no", "yes", "no"]}, "duplicate names 'no'"),
        ({"categorical": BRANDS}, "duplicate names 'brand'"),
        ({"labels": ["match"]}, "only one class 'match'"),
    ],
)
def test_settings_nobody_means(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DataConfig.model_validate(settings)
    assert DataConfig.model_validate({"categorical": BRANDS[:1], "slices": ["brand"], "labels": []})  # two uses
