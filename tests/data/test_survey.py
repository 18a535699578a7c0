import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data import survey
from pipeline.data.survey import TextSample


def batch(first: int, size: int) -> pa.RecordBatch:
    values = pa.array([f"row {row}".encode() for row in range(first, first + size)], pa.large_binary())
    return pa.RecordBatch.from_arrays([values], names=["query"])


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 30))
def test_sample_is_bounded_and_evenly_spread(sizes: list[int], limit: int) -> None:
    sample, first = TextSample(limit), 0
    for size in sizes:
        sample.add(batch(first, size), 100)
        first += size
    assert len(sample.held) <= limit
    assert list(sample.texts()) == [f"row {row}" for row in range(0, first, sample.stride)]
    assert sample.stride == 1 or len(sample.held) * 2 >= limit - 1, "no sparser than it must be"


def test_sample_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "SAMPLE_BYTES", 100)
    sample = TextSample(10_000)
    for first in range(0, 500, 50):
        sample.add(batch(first, 50), 5)
    assert sum(map(len, sample.texts())) == sample.held_bytes <= 100
    assert next(sample.texts()) == "row 0"
