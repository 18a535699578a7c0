"""Settings that cannot be meant are refused where they are read, not by what trips over them later."""

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.data.config import DataConfig

BRANDS = [{"column": "brand", "num_ids": num_ids} for num_ids in (8, 16)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"numeric": ["price", "clicks", "price"]}, "'price' more than once"),
        ({"slices": ["market", "market"]}, "'market' more than once"),
        ({"labels": ["no", "yes", "no"]}, "'no' more than once"),
        ({"categorical": BRANDS}, "'brand' more than once"),
        ({"labels": ["match"]}, "only 'match'; expected two classes or more"),
    ],
)
def test_settings_nobody_means(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DataConfig.model_validate(settings)
    assert DataConfig.model_validate({"categorical": BRANDS[:1], "slices": ["brand"], "labels": []})  # two uses
