"""Columns that a file lacks: the error offers the settings that lead on."""

import shlex

import pytest

from pipeline.core.errors import DataError
from pipeline.data.config import ColumnMapping, DataConfig
from pipeline.data.rows import plan_columns


@pytest.mark.unit
@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            "search_term,item_name,grade,brand",
            "--data.columns.query search_term --data.columns.title item_name --data.columns.label grade",
        ),
        (
            "Keyword,Product Name,score,label",
            "--data.columns.query Keyword --data.columns.title 'Product Name'",
        ),
        ("querry,titel,gain", "--data.columns.query querry --data.columns.title titel"),
        ("query,a,b", "--data.columns.title COLUMN --data.columns.label COLUMN"),
    ],
)
def test_columns_of_other_names_are_guessed(columns: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        plan_columns(DataConfig(), columns.split(","), "a.csv")
    assert caught.value.next_command == expected
    # The settings offered are the ones that lead on, where every column was found.
    if "COLUMN" not in expected:
        words = shlex.split(expected)
        names = {flag.rpartition(".")[2]: column for flag, column in zip(words[::2], words[1::2], strict=True)}
        plan_columns(DataConfig(columns=ColumnMapping(**names)), columns.split(","), "a.csv")


@pytest.mark.unit
def test_a_missing_feature_is_corrected_in_its_list() -> None:
    config = DataConfig(numeric=("price", "weight"), slices=("market",))
    with pytest.raises(DataError) as caught:
        plan_columns(config, ["q", "title", "label", "prise", "weight"], "a.csv")
    assert caught.value.next_command == (
        "--data.columns.query q; correct 'price' in --data.numeric ('prise'?); correct 'market' in --data.slices"
    )
