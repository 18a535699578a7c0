"""Must hold 5: after every shape was seen once, nothing is compiled any more."""

from collections.abc import Callable

import pytest

from tests.backends.xla_process import needs_xla
from tests.fault.harness import ON_XLA, Place

pytestmark = [needs_xla, pytest.mark.slow]

THREE_EPOCHS = (
    *ON_XLA,
    "--data.buckets=12x20,16x32",
    "--train.max-steps=0",
    "--train.epochs=3",
    "--train.evaluate-every=11",
    "--train.micro-batch-size=8",
    "--train.candidates-per-query=1",
    "--log.every-steps=1",
)


@pytest.mark.thorough
def test_three_epochs_over_random_lengths(place: Callable[..., Place]) -> None:
    here = place("xla", THREE_EPOCHS)
    here.run("train")
    (started,) = here.events("train_started")
    by_length = started["batches_by_row_tokens"]
    met = sum(count > 0 for count in by_length.values())
    assert met >= 2, "more than one shape is trained on"
    epoch = sum(by_length.values())
    assert started["max_steps"] == 3 * epoch
    assert len([e for e in here.events("holdout_evaluated") if e["step"] < 3 * epoch]) >= 3
    compiled = here.events("graph_compiled")
    # The start, the contrastive loss; per length of rows the forward pass, the first and the second of three
    # micro-steps, the third with the update; the evaluation of each of two buckets.
    assert compiled[-1]["total"] == 2 + 4 * met + 2
    assert sum(event["compile_s"] for event in compiled) > 0
    warm = max(epoch, 11) + 1
    assert [event for event in compiled if event["step"] > warm] == []
