"""`registry/<model>/history.jsonl`: every change of production and every refusal, oldest first.

The log is replaced whole by a conditional write, so it is never torn and of racing writers none loses a line. The
pointer is the entry of the last change itself, and is written first. A writer that dies before its entry is in the log
leaves it there: readers count it in, and the next writer appends it before it does anything else.
"""

import random
import time

from pydantic import ValidationError

from pipeline.core.errors import CheckpointError, DataError, TransientError
from pipeline.io.storage import KeyNotFound, Storage
from pipeline.registry.records import Entry, Pointer, changes_of, check_model, is_model, parse_entry

# `registry/<model>/production.json`: which checkpoint is in production.

FOLDER = "registry"


def pointer_key(model: str) -> str:
    """Raises ConfigError for a name that is none."""
    return f"{FOLDER}/{check_model(model)}/production.json"


def read_pointer(workspace: Storage, model: str) -> tuple[Pointer, str] | None:
    """The pointer and its etag; None when nothing is in production. Raises CheckpointError for a damaged one.

    The etag is at most older than the content: a conditional write with it fails rather than overwrite.
    """
    key = pointer_key(model)
    stat = workspace.stat(key)
    if stat is None:
        return None
    try:
        pointer = Pointer.model_validate_json(workspace.read_bytes(key))
        if pointer.model != model:
            raise ValueError(f"it is of model {pointer.model}")
    except KeyNotFound:  # removed by hand just now
        return None
    except ValueError as error:
        reason = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(
            f"{workspace.uri(key)} is no pointer to a checkpoint: {reason}",
            expected="the last change of production, as trnpipe wrote it",
            next_command=f"put back the last line of {FOLDER}/{model}/history.jsonl that is no refusal, or delete the "
            "file and promote a checkpoint with trnpipe registry promote CHECKPOINT --force REASON",
        ) from error
    return pointer, stat.etag


APPEND_DEADLINE_S = 60.0
MAX_WAIT_S = 1.0


def history_key(model: str) -> str:
    return f"{FOLDER}/{check_model(model)}/history.jsonl"


def list_models(workspace: Storage) -> list[str]:
    """Names of the models that the registry knows, sorted."""
    return [name for name in workspace.list_dirs(FOLDER) if is_model(name)]


def read_history(workspace: Storage, model: str) -> tuple[Entry, ...]:
    """Every entry, the pointer's own included. Raises DataError for a damaged log, CheckpointError for the pointer."""
    found = read_pointer(workspace, model)  # first: whatever came before this pointer is in the log by now
    log = _parse(workspace, history_key(model), _read(workspace, history_key(model)))
    missing = found is not None and found[0].id not in {entry.id for entry in log}
    return (*log, found[0]) if found is not None and missing else log


def append(workspace: Storage, model: str, *entries: Entry) -> tuple[Entry, ...]:
    """Add those entries that the log lacks, and return all of it.

    Raises DataError for a damaged log, TransientError, Preempted.
    """
    key, deadline, wait_s = history_key(model), time.monotonic() + APPEND_DEADLINE_S, 0.01
    while True:
        stat = workspace.stat(key)  # before the content: then an etag that still fits is of no older content
        data = _read(workspace, key)
        log = _parse(workspace, key, data)
        known = {entry.id for entry in log}
        missing = tuple(entry for entry in entries if entry.id not in known)
        if not missing:
            return log
        gap = b"" if not data or data.endswith(b"\n") else b"\n"
        whole = b"".join([data, gap, *(entry.line() for entry in missing)])
        if workspace.write_if_absent(key, whole) if stat is None else workspace.write_if_match(key, whole, stat.etag):
            return log + missing
        if time.monotonic() > deadline:
            raise TransientError(
                f"{workspace.uri(key)} changes all the time",
                expected=f"a moment to append to it within {APPEND_DEADLINE_S:.0f} s",
                next_command="run the same command again",
            )
        workspace.stop.wait(random.uniform(0, wait_s))
        workspace.stop.raise_if_set("appending to the history")
        wait_s = min(2 * wait_s, MAX_WAIT_S)


def _read(workspace: Storage, key: str) -> bytes:
    try:
        return workspace.read_bytes(key)
    except KeyNotFound:
        return b""


def _parse(workspace: Storage, key: str, data: bytes) -> tuple[Entry, ...]:
    entries = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entries.append(parse_entry(line))
        except ValidationError as error:
            raise DataError(
                f"line {number} of {workspace.uri(key)} is no entry: {error.errors(include_url=False)[0]['msg']}",
                expected="one JSON object a line, as trnpipe wrote it",
                next_command="put the file back as it was, or take that line out",
            ) from error
    return tuple(entries)


# Checkpoints that retention must leave alone.


def in_use(workspace: Storage) -> frozenset[str]:
    """Prefixes of the checkpoints that are in production of any model, or were and may be rolled back to.

    Raises DataError and CheckpointError for a damaged registry: then nothing may be deleted.
    """
    return frozenset(
        entry.checkpoint for model in list_models(workspace) for entry in changes_of(read_history(workspace, model))
    )
