"""The stream of batches and what the host notes about each."""

from pathlib import Path

import pytest

from pipeline.core.batch_order import RankShare
from pipeline.data.shards import TokenRows
from pipeline.train.optimizer import schedule_of
from pipeline.train.stream import BatchStream
from tests.train.rows import TRAIN, grouped, make_rows, plan_of


@pytest.fixture
def rows(tmp_path: Path) -> TokenRows:
    return make_rows(tmp_path, [(16, 16)])


def stream_of(rows: TokenRows, start: int = 0, stop: int = 3, accumulation: int = 1) -> BatchStream:
    groups = grouped(rows)
    return BatchStream(groups, plan_of(groups), RankShare(accumulation=accumulation), TRAIN, start, stop)


def test_every_batch_carries_its_step_and_rate(rows: TokenRows) -> None:
    stream = stream_of(rows, start=1, stop=3, accumulation=2)
    batches = list(stream)
    assert [float(batch["control"][3]) for batch in batches] == [2, 2, 3, 3]
    assert float(batches[0]["control"][0]) == pytest.approx(schedule_of(TRAIN.optimizer, 2, 3))


def test_notes_count_tokens_and_name_samples(rows: TokenRows) -> None:
    stream, again = stream_of(rows), stream_of(rows)
    batches = list(stream)
    list(again)
    for position, batch in enumerate(batches):
        tokens, digest, ready_at = stream.received(position)
        texts = len(batch["tokens"]) + int((batch["gain"] >= 0).sum())
        assert tokens == int((batch["tokens"] != 0).sum()) and 4 * texts <= tokens <= 6 * texts
        assert again.received(position)[1] == digest
        assert ready_at > 0


def test_a_batch_of_another_step_is_noticed(rows: TokenRows) -> None:
    stream = stream_of(rows)
    list(stream)
    with pytest.raises(RuntimeError, match="of position 0 at position 1"):
        stream.received(1)


def test_a_batch_more_than_were_made_is_noticed(rows: TokenRows) -> None:
    stream = stream_of(rows, stop=1)
    list(stream)
    stream.received(0)
    with pytest.raises(RuntimeError, match="never made"):
        stream.received(1)
