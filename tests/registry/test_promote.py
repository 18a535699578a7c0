"""Promotion, refusal and rollback, on files and on S3."""

import math
from typing import Any

import pytest

from pipeline.checkpoint.store import OPTIMIZER, STATE, TOKENIZER, WEIGHTS, Origin
from pipeline.core.errors import CheckpointError, ConfigError, DataError, GateRefused, TransientError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.io.storage import Storage
from pipeline.registry import promote as promote_module
from pipeline.registry.checkpoints import production_prefix
from pipeline.registry.model import roll_back_model as roll_back
from pipeline.registry.promote import promote
from pipeline.registry.records import (
    Decision,
    HistoryEntry,
    Pointer,
    append,
    history_key,
    list_models,
    pointer_key,
    read_history,
)
from tests.registry.cases import AUTHOR, MODEL, consistent, digest_of, passed, prefix, production, put
from tests.registry.conftest import ON_BOTH, Make


def back(workspace: Storage, to: str = "", reason: str = "clicks fell") -> Pointer:
    return roll_back(workspace, MODEL, to, reason=reason, author=AUTHOR)


@ON_BOTH
def test_the_first_and_the_next(workspace: Storage, make: Make) -> None:
    assert production(workspace) is None and consistent(workspace).history == ()
    first = put(workspace, make("a"))
    assert (first.generation, first.replaced, first.previous) == (1, None, None)
    second = put(workspace, make("b", 20), figures={"ndcg": 0.7}, reasons=("ndcg +0.2",))
    told = consistent(workspace)
    assert told.pointer == second
    assert told.actions == [("promoted", prefix("a")), ("promoted", prefix("b", 20))]
    assert second.replaced == second.previous == first.production
    assert (second.cycle, second.step, second.digest) == ("b", 20, digest_of(workspace, prefix("b", 20)))
    assert (second.figures, second.reasons, second.author) == ({"ndcg": 0.7}, ("ndcg +0.2",), AUTHOR)
    assert list_models(workspace) == [MODEL]
    assert production_prefix(workspace, MODEL) == prefix("b", 20), "what the next cycle starts from"
    # The log itself, not only what readers make of it.
    assert len(workspace.read_bytes(history_key(MODEL)).splitlines()) == 2


def test_what_is_in_production_stays_as_it_is(workspace: Storage, make: Make) -> None:
    first = put(workspace, make("a"))
    files = {key: workspace.read_bytes(key) for key in (pointer_key(MODEL), history_key(MODEL))}
    assert put(workspace, prefix("a")) == first
    refused = Decision(passed=False, reasons=("worse",))
    assert promote(workspace, MODEL, prefix("a"), expected=None, decision=refused, author=AUTHOR) == first
    assert {key: workspace.read_bytes(key) for key in files} == files


@ON_BOTH
def test_a_stale_decision_is_refused(workspace: Storage, make: Make) -> None:
    """Whatever it was made against, unless that is in production: nothing, the one before, one that came back."""
    first = put(workspace, make("a"))
    second = put(workspace, make("b"))
    third = back(workspace)
    make("c")
    for expected in (None, first, second):
        with pytest.raises(TransientError, match=r"to checkpoints/a/step-1 \(generation 3\)"):
            promote(
                workspace,
                MODEL,
                prefix("c"),
                expected=expected,
                decision=passed(workspace, prefix("c")),
                author=AUTHOR,
            )
    assert consistent(workspace).pointer == third


@pytest.mark.parametrize("changes", [{"reasons": ("ndcg fell",)}, {}, {"forced": " \n "}])
def test_a_refusal_is_on_record_and_production_stays(workspace: Storage, make: Make, changes: dict[str, Any]) -> None:
    first = put(workspace, make("a"))
    figures = {"ndcg": math.nan, "accuracy": 0.5}
    decision = Decision(passed=False, digest=digest_of(workspace, make("b")), figures=figures, **changes)
    for _ in range(2):
        with pytest.raises(GateRefused, match=r"ndcg fell|the gate did not pass") as caught:
            promote(workspace, MODEL, prefix("b"), expected=first, decision=decision, author=AUTHOR)
    assert "--force REASON" in str(caught.value) and caught.value.exit_code == 80
    told = consistent(workspace)
    assert told.pointer == first
    assert told.actions == [("promoted", prefix("a")), ("refused", prefix("b"))], "told twice, recorded once"
    refused = told.history[-1]
    assert refused.figures == {"ndcg": None, "accuracy": 0.5}
    assert refused.reasons == changes.get("reasons", ("the gate did not pass",))
    assert refused.replaced == first.production and refused.generation == 1


def test_force_needs_a_reason_and_keeps_what_the_gate_said(workspace: Storage, make: Make) -> None:
    first = put(workspace, make("a"))
    decision = Decision(passed=False, reasons=("ndcg fell",), forced="the holdout\nis broken\x1b[2J")
    forced = promote(workspace, MODEL, make("b"), expected=first, decision=decision, author=AUTHOR)
    assert forced.action == "forced"
    assert forced.reasons == ("forced: the holdout is broken [2J", "ndcg fell")
    assert consistent(workspace).pointer == forced


@pytest.mark.parametrize("forced", ["", "why"])
def test_a_verdict_of_other_content_does_not_carry(workspace: Storage, make: Make, forced: str) -> None:
    """Not even by force: its figures would be told of a model that they are not of."""
    decision = passed(workspace, make("a"), forced=forced)
    with pytest.raises(GateRefused, match="the verdict is for digest"):
        promote(workspace, MODEL, make("b"), expected=None, decision=decision, author=AUTHOR)
    assert production(workspace) is None


def damage(workspace: Storage, key: str, how: str) -> None:
    data = bytearray(workspace.read_bytes(key))
    if how == "remove":
        workspace.delete([key])
    elif how == "cut":
        workspace.write_bytes(key, bytes(data[:-2]))
    else:
        data[len(data) // 2] ^= 1
        workspace.write_bytes(key, bytes(data))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("workspace_uri", "name", "how"),
    [
        *(("file", name, "flip") for name in (WEIGHTS, OPTIMIZER, STATE, TOKENIZER, MANIFEST_NAME)),
        *(("file", WEIGHTS, how) for how in ("cut", "remove")),
        ("s3", WEIGHTS, "flip"),
    ],
    indirect=["workspace_uri"],
)
def test_a_damaged_checkpoint_never_gets_there(workspace: Storage, make: Make, name: str, how: str) -> None:
    first = put(workspace, make("a"))
    decision = passed(workspace, make("b"), forced="I insist")
    damage(workspace, f"{prefix('b')}/{name}", how)
    with pytest.raises(CheckpointError, match="checkpoints/b/step-1"):
        promote(workspace, MODEL, prefix("b"), expected=first, decision=decision, author=AUTHOR)
    assert consistent(workspace).pointer == first


@pytest.mark.fault
def test_a_checkpoint_deleted_after_it_was_verified(
    workspace: Storage, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifying a large one takes minutes, in which retention may have let it go."""
    first = put(workspace, make("a"))
    decision = passed(workspace, make("b"))

    def delete_first(workspace: Storage, model: str, *entries: HistoryEntry) -> tuple[HistoryEntry, ...]:
        workspace.delete([f"{prefix('b')}/{MANIFEST_NAME}"])
        return append(workspace, model, *entries)

    monkeypatch.setattr("pipeline.registry.promote.append", delete_first)
    with pytest.raises(CheckpointError, match="does not exist"):
        promote(workspace, MODEL, prefix("b"), expected=first, decision=decision, author=AUTHOR)
    assert production(workspace) == first


# Rollback


@ON_BOTH
def test_rolling_back_to_a_name(workspace: Storage, make: Make) -> None:
    for name in ("a", "b", "c"):
        put(workspace, make(name))
    make("never")
    rolled = back(workspace, prefix("a"))
    assert rolled.checkpoint == prefix("a") and rolled.replaced is not None
    assert rolled.replaced.checkpoint == prefix("c")
    assert back(workspace, prefix("a")) == rolled, "it is there already"
    with pytest.raises(ConfigError, match="was never in production"):
        back(workspace, prefix("never"))
    with pytest.raises(ConfigError, match="storage key"):
        back(workspace, "checkpoints/../a")
    assert consistent(workspace).pointer == rolled


def test_rollback_needs_a_reason_and_something_to_leave(workspace: Storage, make: Make) -> None:
    with pytest.raises(ConfigError, match="no checkpoint of relevance is in production"):
        back(workspace)
    put(workspace, make("a"))
    put(workspace, make("b"))
    with pytest.raises(ConfigError, match="no reason"):
        back(workspace, reason=" \t")
    assert production(workspace) == read_history(workspace, MODEL)[-1]


def test_a_rollback_that_could_not_be_recorded_is_only_recorded_when_it_is_repeated(
    workspace: Storage, make: Make
) -> None:
    for name in "abc":
        put(workspace, make(name))
    before = workspace.read_bytes(history_key(MODEL))
    first = back(workspace)
    workspace.write_bytes(history_key(MODEL), before)  # the storage was not available
    assert (back(workspace), production(workspace)) == (first, first)
    assert read_history(workspace, MODEL)[-1] == first
    assert back(workspace).checkpoint == prefix("a"), "a further request"


def test_a_change_succeeds_even_if_the_history_cannot_be_written(
    workspace: Storage, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the command would be repeated, and a second rollback would go one further back."""
    for name in "ab":
        put(workspace, make(name))

    def append(*_: object) -> None:
        raise TransientError("the storage is not available")

    with monkeypatch.context() as patched:
        patched.setattr(promote_module, "append", append)
        first = back(workspace)
    assert read_history(workspace, MODEL)[-1] == first == production(workspace)
    assert put(workspace, make("c")) == read_history(workspace, MODEL)[-1]
    assert first in consistent(workspace).history


def test_what_was_rolled_back_from_returns_only_by_force(workspace: Storage, make: Make) -> None:
    """A cycle that is run again must not undo what a person did."""
    put(workspace, make("a"))
    put(workspace, make("b"))
    back(workspace)
    for _ in range(2):  # being refused is not being put there again
        with pytest.raises(GateRefused, match="rolled back from it") as caught:
            put(workspace, prefix("b"))
    assert caught.value.next_command == f"trnpipe registry promote {prefix('b')} --force REASON"
    assert put(workspace, prefix("b"), forced="it was not the model").action == "forced"
    put(workspace, make("c"))
    assert put(workspace, prefix("b")).checkpoint == prefix("b"), "put there again since, so it is like any other"
    assert consistent(workspace).actions[3] == ("refused", prefix("b"))


@pytest.mark.fault
def test_a_rollback_verifies_first(workspace: Storage, make: Make) -> None:
    put(workspace, make("a"))
    second = put(workspace, make("b"))
    damage(workspace, f"{prefix('a')}/{WEIGHTS}", "flip")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        back(workspace)
    workspace.delete_prefix(prefix("a"))
    make("a", settings_hash="trained again")
    with pytest.raises(CheckpointError, match="has the digest"):
        back(workspace)
    assert consistent(workspace).pointer == second


# Files that were touched by hand


@pytest.mark.fault
@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((None, content) for content in (b"", b"{}", b"3", b"\xff", b'{"checkpoint": "checkpoints/a/step-1"}')),
        (b"checkpoints/a/", b"checkpoints/b/"),
        (b"checkpoints/a/step-1", b"../../secret"),
        (b'"relevance"', b'"other"'),
    ],
)
def test_a_damaged_pointer_is_named(workspace: Storage, make: Make, old: bytes | None, new: bytes) -> None:
    put(workspace, make("a"))
    now = workspace.read_bytes(pointer_key(MODEL))
    workspace.write_bytes(pointer_key(MODEL), new if old is None else now.replace(old, new))
    for action in (
        lambda: put(workspace, prefix("a")),
        lambda: back(workspace),
        lambda: read_history(workspace, MODEL),
    ):
        with pytest.raises(CheckpointError, match=r"production\.json is not a valid pointer"):
            action()


@pytest.mark.fault
def test_a_damaged_line_of_the_history_is_named_and_nothing_changes(workspace: Storage, make: Make) -> None:
    first = put(workspace, make("a"))
    workspace.write_bytes(history_key(MODEL), workspace.read_bytes(history_key(MODEL)) + b"rubbish\n")
    with pytest.raises(DataError, match=r"invalid entry in line 2 of .*history\.jsonl"):
        put(workspace, make("b"))
    assert production(workspace) == first


@pytest.mark.fault
def test_a_history_without_its_last_line_end_and_with_blank_lines(workspace: Storage, make: Make) -> None:
    put(workspace, make("a"))
    workspace.write_bytes(history_key(MODEL), b"\n" + workspace.read_bytes(history_key(MODEL)).rstrip())
    put(workspace, make("b"))
    assert [place for _, place in consistent(workspace).actions] == [prefix("a"), prefix("b")]


@pytest.mark.fault
def test_a_pointer_removed_by_hand_starts_no_new_count(workspace: Storage, make: Make) -> None:
    put(workspace, make("a"))
    workspace.delete([pointer_key(MODEL)])
    assert put(workspace, make("b")).generation == 2
    assert [entry.checkpoint for entry in read_history(workspace, MODEL)] == [prefix("a"), prefix("b")]


@pytest.mark.fault
def test_a_history_that_is_lost_leaves_production_and_the_one_before(workspace: Storage, make: Make) -> None:
    for name in ("a", "b"):
        put(workspace, make(name))
    workspace.delete([history_key(MODEL)])
    assert [entry.checkpoint for entry in read_history(workspace, MODEL)] == [prefix("b")]
    assert back(workspace).checkpoint == prefix("a")


def test_a_refusal_names_the_command_that_leads_on(workspace: Storage, make: Make) -> None:
    """An import has no data of its own; what was rolled back from needs a reason and no other verdict."""
    origin = Origin(uri="file:///hub", format="sentence-transformers", fingerprint="f")
    for name, origins, expected in (
        ("a", None, "trnpipe evaluate --cycle a,"),
        ("hub", origin, "--evaluate.candidate"),
    ):
        place = make(name, origin=origins)
        with pytest.raises(GateRefused) as caught:
            put(workspace, place, passed=False)
        assert (
            expected in caught.value.next_command and f"registry promote {place} --force" in caught.value.next_command
        )
