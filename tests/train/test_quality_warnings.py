"""What costs quality in silence is said, with counts."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.data.sampler import Judged
from pipeline.model.config import LossConfig
from pipeline.train.inputs import warnings_of
from tests.train.rows import BUCKETS, TRAIN, grouped, make_rows

LABELS = ("no", "some", "yes")
GOOD = Judged(rows=(90, 30), positives=(30, 10), queries=40, queries_without_negative=2, mean_gains=(0.0, 0.1, 1.0))


def said(tmp_path: Path, judged: Judged, loss: LossConfig | None = None) -> list[str]:
    train = TRAIN.model_copy(update={"loss": loss or LossConfig()})
    groups = grouped(make_rows(tmp_path, [(30, 10)]), train)
    return warnings_of(replace(groups, judged=judged), train, LABELS, BUCKETS)


def test_good_data_is_passed_over_in_silence(tmp_path: Path) -> None:
    assert said(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        (replace(GOOD, positives=(0, 0)), "no row has a gain of train.loss.positive_gain 0.99 or more"),
        (replace(GOOD, positives=(30, 0)), "30 in bucket 6x8; no positive is so long"),
        (replace(GOOD, queries_without_negative=25), "25 of 40 queries have no judged negative"),
        (replace(GOOD, mean_gains=(1.0, 0.1, 0.0)), "these mean gains: no 1, some 0.1, yes 0; put data.labels"),
    ],
)
def test_each_thing_that_costs_quality_is_named(tmp_path: Path, judged: Judged, words: str) -> None:
    (message,) = said(tmp_path, judged)
    assert words in message


def test_no_contrastive_loss_needs_no_positive(tmp_path: Path) -> None:
    assert said(tmp_path, replace(GOOD, positives=(0, 0)), LossConfig(contrastive_weight=0.0)) == []
    missing = replace(GOOD, mean_gains=(0.0, None, 1.0))
    assert said(tmp_path, missing) == []


def test_slots_that_stay_empty(tmp_path: Path) -> None:
    train = TRAIN.model_copy(update={"candidates_per_query": 16, "global_batch_size": 16, "micro_batch_size": 16})
    groups = grouped(make_rows(tmp_path, [(30, 10)]), train)
    assert any("slots of a query hold a row" in line for line in warnings_of(groups, train, LABELS, BUCKETS))
