"""The made-up rows of a trial are those of training in everything that a graph can see."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.batch_order import RankShare
from pipeline.data.loader import to_tensors, training_batches
from pipeline.train.config import rows_of_batch
from pipeline.train.trial import BlankGroups, blank_pairs
from tests.train.rows import BUCKETS, SPEC, TRAIN, grouped, make_rows, mined_from, plan_of

SHARE = RankShare()


@pytest.mark.parametrize("mined", [0, 2])
def test_batches_have_the_tensors_of_training(tmp_path: Path, mined: int) -> None:
    config = TRAIN.model_copy(update={"mined_per_query": mined})
    rows = make_rows(tmp_path, [(40, 40)])
    real = grouped(rows, config, mined_from(rows, mined) if mined else None)
    blank = BlankGroups(SPEC, rows_of_batch(config, BUCKETS), config.candidates_per_query, mined, 12)
    found = []
    for source in (real, blank):
        plan = plan_of(source, config)
        batches = {batch.length: batch.tensors for batch in training_batches(source, plan, SHARE, 0, 9)}
        found.append({length: {n: (t.dtype, t.shape) for n, t in batches[length].items()} for length in batches})
    of_real, of_blank = found
    assert of_blank.keys() == set(range(len(blank.lengths))) >= of_real.keys()
    assert all(of_blank[length] == tensors for length, tensors in of_real.items())
    (text,) = {tuple(row) for row in blank.read(np.zeros(4, np.int64), np.arange(4), 0)["positions"].tolist()}
    assert max(text) < min(blank.lengths[0], 8) and text.count(0) == 1 + blank.slots + mined


def test_pairs_have_the_tensors_of_evaluation(tmp_path: Path) -> None:
    real = to_tensors(make_rows(tmp_path, [(6, 6)]).read(np.zeros(4, dtype=np.int64), np.arange(4), 1))
    made = blank_pairs(SPEC, BUCKETS[1], 4)
    assert {n: (one.dtype, one.shape) for n, one in real.items()} == {n: (o.dtype, o.shape) for n, o in made.items()}
