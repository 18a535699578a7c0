"""Promote a checkpoint, roll back to an earlier one, or record that a promotion was refused.

Every change of the production checkpoint consists of the same steps. The new checkpoint is verified, the entry of the
current pointer is appended to the history if it is missing, the pointer is replaced unless it has changed, and finally
the new entry is appended. This ensures that an interruption at any point leaves either the old or the new pointer, and
that no value of the pointer is missing from the history (see records.py).
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pipeline.core.errors import CheckpointError, ConfigError, GateRefused, TransientError
from pipeline.io.storage import Storage
from pipeline.registry.checkpoints import CommittedCheckpoint, check_present, read_checkpoint
from pipeline.registry.records import (
    Author,
    CheckpointRef,
    Decision,
    HistoryEntry,
    Pointer,
    Production,
    append,
    check_prefix,
    one_line,
    pointer_key,
    production_changes,
    read_pointer,
)
from pipeline.registry.signing import NO_KEYS, ModelKeys, check_signature, sign_checkpoint


def promote(
    workspace: Storage,
    model: str,
    prefix: str,
    *,
    expected: Pointer | None,
    decision: Decision,
    author: Author,
    keys: ModelKeys = NO_KEYS,
) -> Pointer:
    """Put the checkpoint at `prefix` into production, after verifying every byte of it.

    `expected` is the pointer at the time of the decision (None if nothing was in production), which must still be the
    current pointer. If the checkpoint is already in production, the pointer is not changed. The checkpoint is signed
    with `keys` before the pointer changes.

    Raises GateRefused if the gate did not pass and the promotion is not forced, if the decision is about a checkpoint
    with different content, or if production was rolled back from this checkpoint. In each of these cases, the refusal
    is recorded in the history. Raises CheckpointError if the checkpoint is damaged or its signature is refused, and
    TransientError if the current pointer is not the expected one.
    """
    stored = read_pointer(workspace, model)
    current, etag = stored or (None, "")
    candidate = read_checkpoint(workspace, prefix, every_byte=True)
    past = append(workspace, model, current)  # in case the process that wrote the pointer died before appending it
    if current is not None and candidate.ref == current.ref:
        sign_checkpoint(workspace, prefix, candidate.sha256, keys)
        return current
    if current != expected:
        raise _stale(workspace, model)
    if refusal := _refusal(decision, candidate, past):
        record_refusal(workspace, model, prefix, decision.model_copy(update={"reasons": refusal}), author)
        option = f"--cycle {candidate.state.cycle}"
        if candidate.state.origin is not None:  # imported checkpoints do not belong to a cycle
            option = f"--evaluate.candidate {prefix}"
        requirement = "a passing verdict that compares exactly this checkpoint with the one in production"
        evaluate = f"trnpipe evaluate {option}, or, to override the gate: "
        if refusal == _ROLLED_BACK:
            requirement, evaluate = "a checkpoint that was not rolled back from, or a reason to promote it again", ""
        raise GateRefused(
            f"{workspace.uri(prefix)} is not promoted: {'; '.join(refusal)}",
            expected=requirement,
            next_command=f"{evaluate}trnpipe registry promote {prefix} --force REASON",
        )
    forced = one_line(decision.forced)
    entry = Pointer(
        **_checkpoint_fields(model, candidate, current, author),
        action="forced" if forced else "promoted",
        generation=_generation(current, past) + 1,
        previous=current.production if current else None,
        reasons=(f"forced: {forced}", *decision.reasons) if forced else decision.reasons,
        figures=decision.figures,
        verdict=decision.verdict,
    )
    sign_checkpoint(workspace, prefix, candidate.sha256, keys)
    return _replace_pointer(workspace, current, etag, entry)


def rollback_target(current: Pointer, past: Iterable[HistoryEntry], to: str) -> Production | None:
    """Return the checkpoint that a rollback should restore.

    This is the earlier production checkpoint at the prefix `to`, or the previous one if `to` is empty. Returns None if
    `to` is already in production. Raises ConfigError if there is no such checkpoint.
    """
    if to and check_prefix(to) == current.checkpoint:
        return None
    if to:
        changes = production_changes(past)
        matches = [entry.production for entry in changes if entry.checkpoint == to]
        if not matches:
            raise ConfigError(
                f"{to} was never in production",
                expected=f"one of {', '.join(sorted({entry.checkpoint for entry in changes}))}",
                next_command=f"trnpipe registry promote {to}",
            )
        return matches[-1]
    if current.previous is None:
        raise ConfigError(
            f"no checkpoint was in production before {current.checkpoint}",
            expected="an earlier production checkpoint",
            next_command="trnpipe registry rollback TO --reason TEXT, or trnpipe registry promote CHECKPOINT"
            " --force REASON",
        )
    return current.previous


def restore_production(
    workspace: Storage,
    stored: tuple[Pointer, str],
    past: Iterable[HistoryEntry],
    target: Production | None,
    reason: str,
    author: Author,
    keys: ModelKeys = NO_KEYS,
) -> Pointer:
    """Put the target of a rollback back into production. If the target is None, nothing is changed.

    `stored` is the current pointer with its etag. After the rollback, the checkpoint that was rolled back from can only
    be promoted by force. Raises CheckpointError if the target is damaged, has changed since it was in production or has
    no valid signature, and TransientError if another process changes the production checkpoint concurrently.
    """
    current, etag = stored
    if target is None:
        return current
    restored = verify_target(workspace, target, keys)
    original = next((entry for entry in production_changes(past) if entry.generation == target.generation), None)
    entry = Pointer(
        **_checkpoint_fields(current.model, restored, current, author),
        action="rolled_back",
        generation=_generation(current, past) + 1,
        previous=original.previous if original else None,
        reasons=(reason,),
        figures=original.figures if original else {},
        verdict=original.verdict if original else "",
    )
    return _replace_pointer(workspace, current, etag, entry)


def verify_target(workspace: Storage, target: CheckpointRef, keys: ModelKeys) -> CommittedCheckpoint:
    """Verify every byte of an earlier production checkpoint, and its signature if there are keys to verify it with.

    Raises CheckpointError if it is damaged, if it has changed since it was in production, or if it is not signed.
    """
    checkpoint = read_checkpoint(workspace, target.checkpoint, every_byte=True)
    if checkpoint.digest != target.digest:
        raise CheckpointError(
            f"{workspace.uri(target.checkpoint)} has the digest {checkpoint.digest}",
            expected=f"{target.digest}, the digest that it had when it was in production",
            next_command="trnpipe registry rollback TO --reason TEXT, with a different TO (see trnpipe registry show)",
        )
    check_signature(workspace, target.checkpoint, checkpoint.sha256, keys)
    return checkpoint


def record_refusal(workspace: Storage, model: str, prefix: str, decision: Decision, author: Author) -> HistoryEntry:
    """Append a refusal to the history unless it has already been recorded.

    Raises CheckpointError if the checkpoint or the pointer is damaged.
    """
    stored = read_pointer(workspace, model)
    current = stored[0] if stored else None
    candidate = read_checkpoint(workspace, prefix)
    entry = HistoryEntry(
        **_checkpoint_fields(model, candidate, current, author),
        action="refused",
        generation=current.generation if current else 0,
        previous=current.previous if current else None,
        reasons=decision.reasons,
        figures=decision.figures,
        verdict=decision.verdict,
    )
    append(workspace, model, current, entry)
    return entry


def _checkpoint_fields(
    model: str, checkpoint: CommittedCheckpoint, current: Pointer | None, author: Author
) -> dict[str, Any]:
    """Return the fields that history entries of all actions have in common."""
    return {
        "model": model,
        "checkpoint": checkpoint.prefix,
        "digest": checkpoint.digest,
        "cycle": checkpoint.state.cycle,
        "step": checkpoint.state.step,
        "replaced": current.production if current else None,
        "author": author,
    }


def rolled_back_digests(entries: Iterable[HistoryEntry]) -> frozenset[str]:
    """Return the digests of all checkpoints that were rolled back from and have not been promoted again since."""
    rolled_back: set[str] = set()
    for change in production_changes(entries):
        if change.action == "rolled_back" and change.replaced is not None:
            rolled_back.add(change.replaced.digest)
        rolled_back.discard(change.digest)
    return frozenset(rolled_back)


_ROLLED_BACK = ("production was rolled back from it",)


def _refusal(decision: Decision, candidate: CommittedCheckpoint, past: Iterable[HistoryEntry]) -> tuple[str, ...]:
    """Return the reasons why the candidate must not be promoted, or an empty tuple if it can be promoted."""
    forced = bool(one_line(decision.forced))
    if not decision.passed and not forced:
        return decision.reasons or ("the gate did not pass",)
    if decision.digest != candidate.digest and (decision.digest or not forced):
        return (f"the verdict is for digest {decision.digest[:12]}, but the checkpoint has {candidate.digest[:12]}",)
    if candidate.digest in rolled_back_digests(past) and not forced:
        return _ROLLED_BACK
    return ()


def _generation(current: Pointer | None, past: Iterable[HistoryEntry]) -> int:
    """Return the generation of the last change. The history is used in case the pointer was deleted manually."""
    return max([current.generation if current else 0, *(entry.generation for entry in past)])


def _replace_pointer(workspace: Storage, current: Pointer | None, etag: str, entry: Pointer) -> Pointer:
    """Replace the current pointer, whose entry must already be in the history, and append the new entry.

    If the entry cannot be appended, the next change appends it. Until then, it is read from the pointer.
    """
    # A training run may have deleted the checkpoint while it was being verified.
    check_present(workspace, entry.checkpoint)
    key, data = pointer_key(entry.model), entry.line()
    written = workspace.write_if_match(key, data, etag) if current else workspace.write_if_absent(key, data)
    if not written:
        raise _stale(workspace, entry.model)
    with suppress(TransientError):  # the change is done, and a repeated rollback would go one further back
        append(workspace, entry.model, entry)
    return entry


def _stale(workspace: Storage, model: str) -> TransientError:
    stored = read_pointer(workspace, model)
    current = f"{stored[0].checkpoint} (generation {stored[0].generation})" if stored else "nothing"
    return TransientError(
        f"another process has changed the production checkpoint of {model} to {current}",
        expected="the production checkpoint that this decision was made against",
        next_command="run the same command again to compare with the new production checkpoint",
    )
