"""What costs quality in silence is said, with counts."""

from pathlib import Path

import pytest

from pipeline.data.token_sets import JudgedSplit, TokenSetInfo
from pipeline.model.config import LossConfig
from pipeline.train.inputs import warnings_of
from tests.train.rows import TRAIN, grouped, make_rows, token_set_info

GOOD = JudgedSplit(
    gains=({0: 60, 100: 30}, {0: 20, 100: 10}),
    labels=(40, 40, 40),
    label_gain_sums=(0.0, 4.0, 40.0),
    query_best={100: 40},
    query_worst={0: 38, 100: 2},
)


def said(tmp_path: Path, changes: dict[str, object], loss: LossConfig | None = None) -> list[str]:
    train = TRAIN.model_copy(update={"loss": loss or LossConfig()})
    return warnings_of(grouped(make_rows(tmp_path, [(30, 10)]), train), train, [info_of(changes)])


def info_of(changes: dict[str, object]) -> TokenSetInfo:
    judged = GOOD.model_copy(update=changes)
    return token_set_info("flat").model_copy(update={"labels": ("no", "some", "yes"), "judged": {"train": judged}})


def test_good_data_is_passed_over_in_silence(tmp_path: Path) -> None:
    assert said(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gains": ({0: 90}, {0: 30})}, "no row has a gain of train.loss.positive_gain 0.99 or more"),
        ({"query_best": {0: 25, 100: 15}}, "25 of 40 queries have no row with a gain"),
        ({"query_worst": {0: 15, 100: 25}}, "25 of 40 queries have no judged negative"),
        ({"label_gain_sums": (40.0, 4.0, 0.0)}, "these mean gains: no 1, some 0.1, yes 0; put data.labels"),
    ],
)
def test_each_thing_that_costs_quality_is_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    (message,) = said(tmp_path, changes)
    assert words in message


def test_no_contrastive_loss_needs_no_positive(tmp_path: Path) -> None:
    assert said(tmp_path, {"gains": ({0: 90}, {0: 30})}, LossConfig(contrastive_weight=0.0)) == []
    assert said(tmp_path, {"labels": (40, 0, 40), "label_gain_sums": (0.0, 0.0, 40.0)}) == []


def test_slots_that_stay_empty(tmp_path: Path) -> None:
    train = TRAIN.model_copy(update={"candidates_per_query": 16, "global_batch_size": 16, "micro_batch_size": 16})
    groups = grouped(make_rows(tmp_path, [(30, 10)]), train)
    assert any("slots of a query hold a row" in line for line in warnings_of(groups, train, [info_of({})]))
