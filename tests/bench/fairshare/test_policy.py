"""The bounds AWS Batch puts on a scheduling policy."""

import pytest
from botocore.session import Session
from botocore.validate import validate_parameters
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bench.fairshare.policy import FairSharePolicy, ShareWeight

names = st.text("ab1", min_size=1, max_size=3)
entries = st.builds(lambda name, star: name + "*" * star, names, st.booleans())


def policy(*shares: tuple[str, float], **fields: object) -> FairSharePolicy:
    listed = [{"share_identifier": name, "weight": weight} for name, weight in shares]
    return FairSharePolicy.model_validate({"shares": listed, **fields})


def test_a_request_is_one_that_botocore_takes() -> None:
    request = policy(("production", 0.25), ("backfill*", 4.0), compute_reservation=10).request()
    model = Session().get_service_model("batch").operation_model("CreateSchedulingPolicy")
    validate_parameters(request, model.input_shape)


def test_weights_by_identifier_by_prefix_and_by_default() -> None:
    found = policy(("production", 0.25), ("backfill*", 4.0))
    assert [found.weight_of(name) for name in ("production", "backfillmay", "backfill", "other")] == [0.25, 4, 4, 1]


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, [("prod-1", 1.0)]),
        ({}, [("prod_1", 1.0)]),
        ({}, [("", 1.0)]),
        ({}, [("a*b", 1.0)]),
        ({}, [("production", 0.0)]),
        ({}, [("production", 1000.0)]),
        ({}, [("user*", 1.0), ("user1", 2.0)]),
        ({}, [("user1", 1.0), ("user1", 2.0)]),
        ({"share_decay_s": 604_801}, []),
        ({"compute_reservation": 100}, []),
        ({"name": "a b"}, []),
    ],
)
def test_what_batch_would_refuse_is_refused(fields: dict[str, object], shares: list[tuple[str, float]]) -> None:
    with pytest.raises(ValidationError):
        policy(*shares, **fields)


@given(one=entries, other=entries, identifier=names)
def test_entries_overlap_when_an_identifier_falls_under_both(one: str, other: str, identifier: str) -> None:
    left, right = ShareWeight(share_identifier=one), ShareWeight(share_identifier=other)
    assert left.overlaps(right) == right.overlaps(left)
    if left.matches(identifier) and right.matches(identifier):
        assert left.overlaps(right)


def test_no_decay_means_ten_minutes() -> None:
    assert policy(share_decay_s=0).window_s == 600
