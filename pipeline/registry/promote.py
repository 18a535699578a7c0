"""Changing what is in production: promote, roll back, and the record of a refusal.

One order of writes for every change: the checkpoint is verified, the outgoing pointer is logged first,
the pointer is replaced if it is still that one, its own entry follows into the log. Killed anywhere, the pointer is
the old one or the new one, and the history (see records.py) tells every change that the pointer went through.
"""

from collections.abc import Iterable
from typing import Any

from pipeline.core.errors import CheckpointError, ConfigError, GateRefused, TransientError
from pipeline.io.storage import Storage
from pipeline.registry.checkpoints import CommittedCheckpoint, check_present, read_checkpoint
from pipeline.registry.records import (
    Author,
    Decision,
    HistoryEntry,
    Pointer,
    Production,
    append,
    changes_of,
    check_prefix,
    one_line,
    pointer_key,
    read_pointer,
)


def promote(
    workspace: Storage, model: str, prefix: str, *, expected: Pointer | None, decision: Decision, author: Author
) -> Pointer:
    """Put the checkpoint at `prefix` into production of `model`, in place of `expected`.

    `expected` is the pointer that the decision was made against (None: nothing was in production).
    Every byte of the checkpoint is verified first. What is in production already is returned as it is.
    Raises GateRefused, with an entry in the history, when the decision has neither passed nor is forced, is of another
    content, or the checkpoint was rolled back from; CheckpointError when it does not verify; TransientError when
    production is not `expected` any more: judge again, against the new one.
    """
    found = read_pointer(workspace, model)
    current, etag = found or (None, "")
    candidate = read_checkpoint(workspace, prefix, every_byte=True)
    past = append(workspace, model, current)  # whoever wrote the pointer may have died before its entry
    if current is not None and candidate.place == current.place:
        return current
    if current != expected:
        raise _stale(workspace, model)
    if refusal := _refusal(decision, candidate, past):
        record_refusal(workspace, model, prefix, decision.model_copy(update={"reasons": refusal}), author)
        which = f"--cycle {candidate.state.cycle}"
        if candidate.state.origin is not None:  # the name of an import is no cycle, and has no data
            which = f"--evaluate.candidate {prefix}"
        wanted = "a passing verdict of this very checkpoint against the one in production"
        again = f"trnpipe evaluate {which}; or, to overrule the gate on record, "
        if refusal == _ROLLED_BACK:
            wanted, again = "a model that was not rolled back from, or a reason to put it there again", ""
        raise GateRefused(
            f"{workspace.uri(prefix)} is not promoted: {'; '.join(refusal)}",
            expected=wanted,
            next_command=f"{again}trnpipe registry promote {prefix} --force REASON",
        )
    forced = one_line(decision.forced)
    entry = Pointer(
        **_about(model, candidate, current, author),
        action="forced" if forced else "promoted",
        generation=_generation(current, past) + 1,
        previous=current.production if current else None,
        reasons=(f"forced: {forced}", *decision.reasons) if forced else decision.reasons,
        figures=decision.figures,
        verdict=decision.verdict,
    )
    return _put(workspace, current, etag, entry)


def rollback_target(current: Pointer, past: Iterable[HistoryEntry], to: str) -> Production | None:
    """Find the checkpoint at prefix `to`, or with '' the one before this, among those that were in production.

    None: it is there already. Raises ConfigError if there is none.
    """
    if to and check_prefix(to) == current.checkpoint:
        return None
    if to:
        changes = changes_of(past)
        found = [entry.production for entry in changes if entry.checkpoint == to]
        if not found:
            raise ConfigError(
                f"{to} was never in production",
                expected=f"one of {', '.join(sorted({entry.checkpoint for entry in changes}))}",
                next_command=f"trnpipe registry promote {to}",
            )
        return found[-1]
    if current.previous is None:
        raise ConfigError(
            f"{current.checkpoint} has nothing before it to roll back to",
            expected="an earlier production checkpoint",
            next_command="trnpipe registry rollback TO --reason TEXT, or trnpipe registry promote CHECKPOINT"
            " --force REASON",
        )
    return current.previous


def put_back(
    workspace: Storage,
    found: tuple[Pointer, str],
    past: Iterable[HistoryEntry],
    target: Production | None,
    reason: str,
    author: Author,
) -> Pointer:
    """Put the target of a rollback, None for what is there, into production in place of the pointer that was `found`.

    What is rolled back from is promoted again only by force. Raises CheckpointError if the target does not verify or
    is not what was promoted then, TransientError if production has changed meanwhile.
    """
    current, etag = found
    if target is None:
        return current
    restored = verified_target(workspace, target)
    then = next((entry for entry in changes_of(past) if entry.generation == target.generation), None)
    entry = Pointer(
        **_about(current.model, restored, current, author),
        action="rolled_back",
        generation=_generation(current, past) + 1,
        previous=then.previous if then else None,
        reasons=(reason,),
        figures=then.figures if then else {},
        verdict=then.verdict if then else "",
    )
    return _put(workspace, current, etag, entry)


def verified_target(workspace: Storage, target: Production) -> CommittedCheckpoint:
    """Return the checkpoint that was in production, every byte verified. Raises CheckpointError."""
    found = read_checkpoint(workspace, target.checkpoint, every_byte=True)
    if found.digest != target.digest:
        raise CheckpointError(
            f"{workspace.uri(target.checkpoint)} has the digest {found.digest}",
            expected=f"{target.digest}, as when it was in production",
            next_command="trnpipe registry rollback TO --reason TEXT, with another TO that trnpipe registry show lists",
        )
    return found


def record_refusal(workspace: Storage, model: str, prefix: str, decision: Decision, author: Author) -> HistoryEntry:
    """Write a refusal into the history; the same refusal twice is one entry. Raises CheckpointError."""
    found = read_pointer(workspace, model)
    current = found[0] if found else None
    candidate = read_checkpoint(workspace, prefix)
    entry = HistoryEntry(
        **_about(model, candidate, current, author),
        action="refused",
        generation=current.generation if current else 0,
        previous=current.previous if current else None,
        reasons=decision.reasons,
        figures=decision.figures,
        verdict=decision.verdict,
    )
    append(workspace, model, current, entry)
    return entry


def _about(model: str, known: CommittedCheckpoint, current: Pointer | None, author: Author) -> dict[str, Any]:
    """Return the fields of an entry that name a checkpoint."""
    return {
        "model": model,
        "checkpoint": known.prefix,
        "digest": known.digest,
        "cycle": known.state.cycle,
        "step": known.state.step,
        "replaced": current.production if current else None,
        "author": author,
    }


def rolled_back_digests(entries: Iterable[HistoryEntry]) -> frozenset[str]:
    """Return digests that production was rolled back from and that were not put there again since."""
    gone: set[str] = set()
    for change in changes_of(entries):
        if change.action == "rolled_back" and change.replaced is not None:
            gone.add(change.replaced.digest)
        gone.discard(change.digest)
    return frozenset(gone)


_ROLLED_BACK = ("production was rolled back from it",)


def _refusal(decision: Decision, candidate: CommittedCheckpoint, past: Iterable[HistoryEntry]) -> tuple[str, ...]:
    """Return why the decision does not promote the candidate; empty if it does."""
    forced = bool(one_line(decision.forced))
    if not decision.passed and not forced:
        return decision.reasons or ("the gate did not let it through",)
    if decision.digest != candidate.digest and (decision.digest or not forced):
        return (f"the verdict is of content {decision.digest[:12]}, the checkpoint has {candidate.digest[:12]}",)
    if candidate.digest in rolled_back_digests(past) and not forced:
        return _ROLLED_BACK
    return ()


def _generation(current: Pointer | None, past: Iterable[HistoryEntry]) -> int:
    """Return that of the last change; of the history if the pointer was removed by hand."""
    return max([current.generation if current else 0, *(entry.generation for entry in past)])


def _put(workspace: Storage, current: Pointer | None, etag: str, entry: Pointer) -> Pointer:
    """Replace the pointer, whose own entry is in the log, and append the new entry."""
    # Verifying took its time; a training run may have let the checkpoint go meanwhile.
    check_present(workspace, entry.checkpoint)
    key, data = pointer_key(entry.model), entry.line()
    written = workspace.write_if_match(key, data, etag) if current else workspace.write_if_absent(key, data)
    if not written:
        raise _stale(workspace, entry.model)
    append(workspace, entry.model, entry)
    return entry


def _stale(workspace: Storage, model: str) -> TransientError:
    found = read_pointer(workspace, model)
    seen = f"{found[0].checkpoint} (generation {found[0].generation})" if found else "nothing"
    return TransientError(
        f"another has changed production of {model} meanwhile: it is {seen} now",
        expected="the checkpoint that this decision was made against",
        next_command="run the same command again; it is judged against the new one",
    )
