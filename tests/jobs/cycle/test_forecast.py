"""How long a cycle will take, by what earlier ones took."""

import pytest

from jobs.cycle.job_records import JobRecord
from jobs.cycle.ledger import critical_seconds, expected_seconds
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.record_cases import array, bad, good, tried, under_way


@pytest.mark.parametrize(
    ("record", "seconds"),
    [
        (good("a", tried(at=(5.0, 15.0))), 10.0),
        (good("a", tried(75, at=(0.0, 100.0)), tried(at=(200.0, 230.0))), 30.0),  # the try that did it
        (good("a", tried(at=None)), None),
        (bad("a", tried(65, at=(0.0, 9.0))), None),
        (under_way("a", "RUNNING", tried(at=(0.0, 9.0))), None),
        (array("e", "SUCCEEDED", good("e:0", tried(at=(0.0, 3.0))), good("e:1", tried(at=(10.0, 17.0)))), 7.0),
        (array("e", "FAILED", good("e:0", tried(at=(0.0, 3.0))), bad("e:1", tried(65))), None),
        (array("e", "PENDING", good("e:0", tried(at=(0.0, 3.0))), under_way("e:1")), None),
    ],
)
def test_what_a_job_took(record: JobRecord, seconds: float | None) -> None:
    assert expected_seconds([[record]]).get(record.name) == seconds


def test_the_median_of_the_cycles_in_which_a_job_succeeded() -> None:
    def took(seconds: float) -> JobRecord:
        return good("train", tried(at=(0.0, seconds)))

    history = [[took(100), good("eval", tried(at=(0.0, 5.0)))], [took(9_000)], [took(120), bad("eval", tried(80))]]
    assert expected_seconds(history) == {"train": 120, "eval": 5}
    assert expected_seconds([]) == {}


DIAMOND = plan(job("a"), job("b", "a"), job("c", "a"), job("d", "b", "c"))


def test_the_longest_way_through_the_jobs() -> None:
    assert critical_seconds(DIAMOND, {"a": 1, "b": 10, "c": 20, "d": 3}) == 24
    assert critical_seconds(DIAMOND, {"a": 1, "b": 30, "c": 20, "d": 3}) == 34


def test_of_which_one_is_unknown() -> None:
    assert critical_seconds(DIAMOND, {"a": 1, "b": 10, "d": 3}) is None
    assert critical_seconds(plan(), {}) == 0.0
