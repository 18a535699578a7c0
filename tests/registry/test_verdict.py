"""The stored verdict carries a promotion only for what it was made of."""

from datetime import UTC, datetime
from typing import Any

import pytest

from pipeline.core.errors import DataError
from pipeline.io.storage import Storage
from pipeline.registry.checkpoints import read_checkpoint
from pipeline.registry.records import (
    CheckpointRef,
    StoredVerdict,
    load_verdict,
    store_verdict,
    stored_decision,
    verdict_key,
)
from tests.registry.cases import MODEL, digest_of, prefix
from tests.registry.conftest import Make

OTHER = CheckpointRef(checkpoint=prefix("z"), digest="00" * 32)


def verdict(workspace: Storage, place: str, cycle: str, **changes: Any) -> StoredVerdict:
    fields: dict[str, Any] = {
        "model": MODEL,
        "cycle": cycle,
        "candidate": CheckpointRef(checkpoint=place, digest=digest_of(workspace, place)),
        "incumbent": None,
        "promote": True,
        "reasons": ("better\neverywhere",),
        "figures": {"ndcg": 0.5, "ece": float("inf")},
        "checks": ({"name": "ndcg floor", "outcome": "pass"},),
        "settings_hash": "h",
        "code_version": "v",
        "at": datetime.now(UTC),
    }
    return StoredVerdict(**fields | changes)


def test_it_comes_back(workspace: Storage, make: Make) -> None:
    assert load_verdict(workspace, "c1") is None
    stored = verdict(workspace, make("c1"), "c1")
    assert store_verdict(workspace, stored) == "cycles/c1/evaluate/verdict.json"
    assert load_verdict(workspace, "c1") == stored
    assert stored.reasons == ("better everywhere",) and stored.figures == {"ndcg": 0.5, "ece": None}


@pytest.mark.fault
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"promote": true}'])
def test_a_damaged_one_is_named_and_carries_nothing(workspace: Storage, make: Make, content: bytes) -> None:
    place = make("c1")
    workspace.write_bytes(verdict_key("c1"), content)
    with pytest.raises(DataError, match=r"verdict\.json is not a verdict"):
        load_verdict(workspace, "c1")
    decision = stored_decision(workspace, MODEL, read_checkpoint(workspace, place).ref, None, ["c1"])
    assert not decision.passed and "is not a verdict" in decision.reasons[0]


def test_it_carries_the_promotion_of_what_was_judged(workspace: Storage, make: Make) -> None:
    place = make("c1")
    store_verdict(workspace, verdict(workspace, place, "c2", incumbent=OTHER))
    decision = stored_decision(workspace, MODEL, read_checkpoint(workspace, place).ref, OTHER, ["c1", "c2", "c2"])
    assert decision.passed and decision.digest == digest_of(workspace, place)
    assert (decision.reasons, decision.verdict) == (("better everywhere",), "cycles/c2/evaluate/verdict.json")


@pytest.mark.parametrize(
    ("changes", "incumbent", "reason"),
    [
        ({"promote": False, "reasons": ("worse",)}, None, "worse"),
        ({"model": "other"}, None, "evaluated as model other"),
        ({"incumbent": OTHER}, None, "checkpoints/z/step-1 was in production, but now it is nothing"),
        ({}, OTHER, "nothing was in production, but now it is checkpoints/z/step-1"),
        (
            {"incumbent": OTHER.model_copy(update={"digest": "11" * 32})},
            OTHER,
            "now it is checkpoints/z/step-1 with different content",
        ),
        ({"candidate": OTHER}, None, "no verdict on checkpoints/c1/step-1 is stored"),
    ],
)
def test_and_of_nothing_else(
    workspace: Storage, make: Make, changes: dict[str, Any], incumbent: CheckpointRef | None, reason: str
) -> None:
    place = make("c1")
    store_verdict(workspace, verdict(workspace, place, "c1", **changes))
    decision = stored_decision(workspace, MODEL, read_checkpoint(workspace, place).ref, incumbent, ["c1"])
    assert not decision.passed and reason in decision.reasons[-1]
