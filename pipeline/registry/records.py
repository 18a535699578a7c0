"""Read and write `registry/<model>/history.jsonl`: every change of production and every refusal, oldest first.

The whole log is replaced by a conditional write, so it is never truncated and concurrent writers do not lose lines. The
pointer (production.json) is a copy of the entry of the last change, and is written first. If a writer dies before its
entry is in the log, readers add the pointer to the history, and the next writer appends it first.
"""

import getpass
import math
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, ValidationError, model_validator

from pipeline.core.errors import CheckpointError, ConfigError, DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.io.storage import KeyNotFound, Storage, check_key, read_record

# Records. An entry describes one decision, and the pointer is the entry that is in effect.

Action = Literal["promoted", "forced", "rolled_back", "refused"]
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_model(name: str) -> str:
    """Return the name of a model, which becomes part of a key. Raises ConfigError if it is invalid."""
    if _MODEL.fullmatch(name):
        return name
    raise ConfigError(
        f"invalid model name {name!r}",
        expected="letters, digits, '_', '.' and '-', beginning with a letter or digit",
        next_command="correct --model-name",
    )


def check_prefix(prefix: str) -> str:
    """Return the prefix. Raises ConfigError if it is absolute, outside the workspace, or not printable."""
    if not prefix.isprintable() or "\\" in prefix:
        raise ConfigError(f"invalid checkpoint {prefix!r}", expected="checkpoints/<cycle>/step-<n>")
    return check_key(prefix)


def one_line(text: str) -> str:
    """Replace line breaks and control characters in a text by single spaces."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _valid(check: Callable[[str], str]) -> AfterValidator:
    def validate(text: str) -> str:
        try:
            return check(text)
        except ConfigError as error:
            raise ValueError(error.seen) from error

    return AfterValidator(validate)


def _finite(values: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None, so that refusals because of them can be recorded."""
    if not isinstance(values, dict):
        return values
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _lines(texts: Any) -> Any:
    return tuple(one_line(text) for text in texts) if isinstance(texts, list | tuple) else texts


Prefix = Annotated[str, _valid(check_prefix)]
ModelName = Annotated[str, _valid(check_model)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Figures = Annotated[Mapping[str, float | None], BeforeValidator(_finite)]
Reasons = Annotated[tuple[str, ...], BeforeValidator(_lines)]


class CheckpointRef(Record):
    """A reference to a checkpoint by its prefix and content."""

    checkpoint: Prefix = Field(description="Prefix in the workspace")
    digest: Digest = Field(description="Digest of its manifest")


class Production(CheckpointRef):
    """A reference to a checkpoint that is or was in production."""

    generation: int = Field(ge=1, description="Number of the change that put it into production")


class ModelRecord(Record):
    """A record that belongs to one model."""

    model: ModelName


R = TypeVar("R", bound=ModelRecord)


class Author(Record):
    """The user or job that made a decision, with its time, settings and code version."""

    by: str = Field(description="user@host, and the id of the Batch job, if any")
    cycle: str = Field("", description="The cycle that decided (empty for a person)")
    settings_hash: str = ""
    code_version: str = ""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC), description="UTC")


class Decision(Record):
    """A decision to promote or refuse a checkpoint, with its reasons."""

    passed: bool = Field(description="Whether the gate passed")
    digest: str = Field("", description="Digest of the evaluated checkpoint (empty if forced without evaluation)")
    reasons: Reasons = Field((), description="The verdict as lines of text")
    figures: Figures = Field({}, description="Metrics of the candidate, null if not finite")
    verdict: str = Field("", description="Key of the stored verdict in the workspace")
    forced: str = Field("", description="Reason to overrule the gate")


class HistoryEntry(ModelRecord):
    """One line of the history."""

    schema_version: Literal[1] = 1
    id: str = Field("", description="Hash of all fields except user and time, so that a decision is stored once")
    action: Action
    checkpoint: Prefix = Field(description="Prefix in the workspace")
    digest: Digest = Field(description="Digest of its manifest, verified against all files for a change of production")
    cycle: str = Field(description="The cycle that trained it")
    step: int = Field(ge=0)
    generation: int = Field(ge=0, description="Number of changes of production, including this one")
    replaced: Production | None = Field(description="The checkpoint in production before (still there after a refusal)")
    previous: Production | None = Field(description="The default target of a rollback")
    reasons: Reasons
    figures: Figures
    verdict: str
    author: Author

    @model_validator(mode="after")
    def _set_or_check_id(self) -> Self:
        """Set `id` in a new entry, or check the `id` of an entry that is read."""
        # Defaults are excluded, so that new fields do not change the ids of older entries.
        body = self.model_dump(mode="json", exclude={"id": True, "author": {"by", "at"}}, exclude_defaults=True)
        entry_id = fingerprint(body)
        if not self.id:
            object.__setattr__(self, "id", entry_id)
        elif self.id != entry_id:
            raise ValueError("its id does not match its content")
        return self

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class Pointer(HistoryEntry):
    """The entry that put a checkpoint into production, the content of production.json."""

    action: Literal["promoted", "forced", "rolled_back"]
    generation: int = Field(ge=1)

    @property
    def ref(self) -> CheckpointRef:
        return CheckpointRef(checkpoint=self.checkpoint, digest=self.digest)

    @property
    def production(self) -> Production:
        return Production(checkpoint=self.checkpoint, digest=self.digest, generation=self.generation)


def parse_entry(data: bytes | str) -> HistoryEntry:
    """Parse a line of the history. Raises ValidationError if it is invalid."""
    entry = HistoryEntry.model_validate_json(data)
    return entry if entry.action == "refused" else Pointer.model_validate_json(data)


def production_changes(entries: Iterable[HistoryEntry]) -> tuple[Pointer, ...]:
    """Return the entries that changed production, without the refusals."""
    return tuple(entry for entry in entries if isinstance(entry, Pointer))


# `cycles/<cycle>/evaluate/verdict.json`: the verdict of the gate on a candidate compared with production.


class StoredVerdict(Record):
    """The verdict of the gate, stored before the candidate is promoted or refused."""

    schema_version: Literal[1] = 1
    model: ModelName
    cycle: str = Field(description="The cycle that evaluated")
    candidate: CheckpointRef
    incumbent: CheckpointRef | None = Field(description="The checkpoint in production, if any")
    promote: bool
    reasons: Reasons = Field(description="The verdict as lines of text")
    figures: Figures = Field({}, description="Metrics of the candidate")
    checks: tuple[dict[str, JsonValue], ...] = Field((), description="All checks of the gate")
    settings_hash: str
    code_version: str
    at: datetime = Field(description="UTC")

    def decision(self) -> Decision:
        """Convert the verdict to a decision for promote() and record_refusal()."""
        return Decision(
            passed=self.promote,
            digest=self.candidate.digest,
            reasons=self.reasons,
            figures=self.figures,
            verdict=verdict_key(self.cycle),
        )


def verdict_key(cycle: str) -> str:
    return f"cycles/{cycle}/evaluate/verdict.json"


def store_verdict(workspace: Storage, verdict: StoredVerdict) -> str:
    """Store the verdict atomically and return its key."""
    key = verdict_key(verdict.cycle)
    workspace.write_bytes(key, verdict.model_dump_json(indent=1).encode() + b"\n")
    return key


def load_verdict(workspace: Storage, cycle: str) -> StoredVerdict | None:
    """Return the stored verdict of a cycle, or None. Raises DataError if it cannot be read."""
    return read_record(workspace, verdict_key(cycle), StoredVerdict, "a verdict", f"trnpipe evaluate --cycle {cycle}")


def stored_decision(
    workspace: Storage, model: str, candidate: CheckpointRef, incumbent: CheckpointRef | None, cycles: Iterable[str]
) -> Decision:
    """Return the decision of the first of these cycles with a verdict on this content, or a decision not to pass.

    A verdict is valid only for the model and the production checkpoint that it was made against.
    """
    reasons = []
    for cycle in dict.fromkeys(cycles):
        try:
            verdict = load_verdict(workspace, cycle)
        except DataError as error:
            reasons.append(error.seen)
            continue
        if verdict is not None and verdict.candidate.digest == candidate.digest:
            reason = ""  # why the verdict is not valid
            if verdict.model != model:
                reason = f"it was evaluated as model {verdict.model}, not {model}"
            elif verdict.incumbent != incumbent:
                old, new = (ref.checkpoint if ref else "nothing" for ref in (verdict.incumbent, incumbent))
                suffix = " with other content" if old == new else ""
                reason = f"it was evaluated when {old} was in production, but now it is {new}{suffix}"
            decision = verdict.decision()
            return decision.model_copy(update={"passed": False, "reasons": (reason,)}) if reason else decision
    return Decision(passed=False, reasons=(*reasons, f"no verdict on {candidate.checkpoint} is stored"))


# The author of a change.


def current_user(env: Mapping[str, str] = os.environ) -> str:
    """Return `user@host`, with the id of the job, if any."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user id may have no name
        user = str(os.getuid())
    job = env.get("TRNJOBS_JOB_ID", "")
    return f"{user}@{socket.gethostname()}{f' (job {job})' if job else ''}"


# `registry/<model>/production.json`: the pointer to the checkpoint in production.

FOLDER = "registry"


def pointer_key(model: str) -> str:
    """Return the key of production.json. Raises ConfigError for an invalid name."""
    return f"{FOLDER}/{check_model(model)}/production.json"


def read_pointer(workspace: Storage, model: str) -> tuple[Pointer, str] | None:
    """Return the pointer and its etag, or None. Raises CheckpointError if it is damaged."""
    repair = (
        f"restore the last line of {FOLDER}/{model}/history.jsonl that is not a refusal, or delete the file and promote"
        " a checkpoint with trnpipe registry promote CHECKPOINT --force REASON"
    )
    return read_current(workspace, pointer_key(model), Pointer, model, "pointer to a checkpoint", repair)


def read_current(
    workspace: Storage, key: str, kind: type[R], model: str, name: str, repair: str
) -> tuple[R, str] | None:
    """Return a record of a model and its etag, or None. Raises CheckpointError if it is damaged.

    The etag is read before the content, so that a conditional write with it never overwrites content that was not read.
    """
    stat = workspace.stat(key)
    if stat is None:
        return None
    try:
        record = kind.model_validate_json(workspace.read_bytes(key))
        if record.model != model:
            raise ValueError(f"it belongs to model {record.model}")
    except KeyNotFound:  # deleted since the stat
        return None
    except ValueError as error:
        reason = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
        message = f"{workspace.uri(key)} is not a valid {name}: {reason}"
        raise CheckpointError(message, expected="the content that trnpipe wrote", next_command=repair) from error
    return record, stat.etag


APPEND_DEADLINE_S = 60.0
MAX_WAIT_S = 1.0


def history_key(model: str) -> str:
    return f"{FOLDER}/{check_model(model)}/history.jsonl"


def list_models(workspace: Storage) -> list[str]:
    """Return the names of all models in the registry, sorted."""
    return [name for name in workspace.list_dirs(FOLDER) if _MODEL.fullmatch(name)]


def read_history(workspace: Storage, model: str) -> tuple[HistoryEntry, ...]:
    """Return all entries, including the pointer's. Raises DataError or CheckpointError if a file is damaged."""
    stored = read_pointer(workspace, model)  # before the log, which then contains all entries before this pointer
    _, log = _read_log(workspace, history_key(model))
    return log if stored is None or stored[0].id in {entry.id for entry in log} else (*log, stored[0])


def append(workspace: Storage, model: str, *entries: HistoryEntry | None) -> tuple[HistoryEntry, ...]:
    """Append entries that are not in the log yet, ignoring None, and return all entries.

    Raises DataError if the log is damaged, TransientError if concurrent writers prevent the append for 60 s.
    """
    key, deadline, wait_s = history_key(model), time.monotonic() + APPEND_DEADLINE_S, 0.01
    while True:
        stat = workspace.stat(key)  # before the content, so that a conditional write fails if the content has changed
        data, log = _read_log(workspace, key)
        existing_ids = {entry.id for entry in log}
        missing = tuple(entry for entry in entries if entry is not None and entry.id not in existing_ids)
        if not missing:
            return log
        separator = b"" if not data or data.endswith(b"\n") else b"\n"
        content = b"".join([data, separator, *(entry.line() for entry in missing)])
        if workspace.write_if_match(key, content, stat.etag) if stat else workspace.write_if_absent(key, content):
            return log + missing
        if time.monotonic() > deadline:
            raise TransientError(
                f"cannot append to {workspace.uri(key)}, which other processes keep changing",
                expected=f"an append within {APPEND_DEADLINE_S:.0f} s",
                next_command="run the same command again",
            )
        workspace.stop.wait(random.uniform(0, wait_s))
        workspace.stop.raise_if_set("appending to the history")
        wait_s = min(2 * wait_s, MAX_WAIT_S)


def _read_log(workspace: Storage, key: str) -> tuple[bytes, tuple[HistoryEntry, ...]]:
    """Return the bytes and the entries of the log. Raises DataError if it is damaged."""
    try:
        data = workspace.read_bytes(key)
    except KeyNotFound:
        return b"", ()
    entries = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entries.append(parse_entry(line))
        except ValidationError as error:
            raise DataError(
                f"invalid entry in line {number} of {workspace.uri(key)}: {error.errors(include_url=False)[0]['msg']}",
                expected="one JSON object per line, as written by trnpipe",
                next_command="restore the file, or delete that line",
            ) from error
    return data, tuple(entries)


# Checkpoints that retention must not delete.


def checkpoints_in_use(workspace: Storage) -> frozenset[str]:
    """Return the prefixes of all checkpoints that are or were in production of any model, and can be rolled back to.

    Raises DataError or CheckpointError if the registry is damaged, in which case nothing may be deleted.
    """
    histories = (read_history(workspace, model) for model in list_models(workspace))
    return frozenset(entry.checkpoint for history in histories for entry in production_changes(history))
