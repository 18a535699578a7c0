"""Settings that cannot be meant are refused where they are read, not by what trips over them later."""

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.data.config import DataConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"numeric": ["price", "clicks", "price"]}, "'price' more than once"),
        ({"slices": ["market", "market"]}, "'market' more than once"),
        ({"labels": ["no", "yes", "no"]}, "'no' more than once"),
        (
            {"categorical": [{"column": "brand", "num_ids": 8}, {"column": "brand", "num_ids": 16}]},
            "'brand' more than once",
        ),
        ({"labels": ["match"]}, "only 'match'; expected two classes or more"),
    ],
)
def test_settings_nobody_means(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DataConfig.model_validate(settings)


def test_one_column_may_have_several_uses() -> None:
    brand = {"column": "brand", "num_ids": 8}
    assert DataConfig.model_validate({"categorical": [brand], "slices": ["brand"], "labels": []}).slices == ("brand",)
