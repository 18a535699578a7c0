"""Read and write the history of a model, and the pointer to its production checkpoint.

The history (`registry/<model>/history.jsonl`) is a log of all changes of the production checkpoint and of all refusals,
from oldest to newest. To append an entry, the whole log is replaced with a conditional write. This ensures that the log
is never truncated, and that no entries are lost if several processes write at the same time.

The pointer (`production.json`) is a copy of the entry of the last change, and is written before the log. If a process
dies in between, its entry is missing from the log. Readers therefore add the pointer to the history, and the next
writer appends the missing entry first.
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

# Records. Each history entry describes one decision, and the pointer is the entry that is currently in effect.

Action = Literal["promoted", "forced", "rolled_back", "refused"]
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_model(name: str) -> str:
    """Validate the name of a model, which is used as part of storage keys. Raises ConfigError if it is invalid."""
    if _MODEL.fullmatch(name):
        return name
    raise ConfigError(
        f"invalid model name {name!r}",
        expected="letters, digits, '_', '.' and '-', starting with a letter or digit",
        next_command="correct --model-name",
    )


def check_prefix(prefix: str) -> str:
    """Validate a prefix. Raises ConfigError if it is absolute, outside the workspace, or not printable."""
    if not prefix.isprintable() or "\\" in prefix:
        raise ConfigError(
            f"invalid checkpoint {prefix!r}",
            expected="checkpoints/<cycle>/step-<n>",
            next_command="trnpipe registry list",
        )
    return check_key(prefix)


def one_line(text: str) -> str:
    """Convert a text to a single line by replacing line breaks and control characters with spaces."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _valid(check: Callable[[str], str]) -> AfterValidator:
    def validate(text: str) -> str:
        try:
            return check(text)
        except ConfigError as error:
            raise ValueError(error.seen) from error

    return AfterValidator(validate)


def _finite(values: Any) -> Any:
    """Replace NaN and infinity with None, because they cannot be represented in JSON.

    This makes it possible to record that a checkpoint was refused because of such values.
    """
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
    """A reference to a checkpoint with a specific content."""

    checkpoint: Prefix = Field(description="Prefix in the workspace")
    digest: Digest = Field(description="Digest of the manifest")


class Production(CheckpointRef):
    """A reference to a checkpoint that is or was in production."""

    generation: int = Field(ge=1, description="Number of the change that put it into production")


class ModelRecord(Record):
    """A record that belongs to one model."""

    model: ModelName


R = TypeVar("R", bound=ModelRecord)


class Author(Record):
    """The user or job that made a decision, including the time, the settings and the code version."""

    by: str = Field(description="user@host, followed by the id of the Batch job if any")
    cycle: str = Field("", description="The cycle that made the decision (empty if it was made by a user)")
    settings_hash: str = ""
    code_version: str = ""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC), description="UTC")


class Decision(Record):
    """A decision to promote or to refuse a checkpoint, with the reasons for it."""

    passed: bool = Field(description="Whether the checkpoint passed the gate")
    digest: str = Field("", description="Digest of the evaluated checkpoint (empty if forced without evaluation)")
    reasons: Reasons = Field((), description="The verdict, formatted as lines of text")
    figures: Figures = Field({}, description="Metrics of the candidate, null if not finite")
    verdict: str = Field("", description="Key of the stored verdict in the workspace")
    forced: str = Field("", description="Reason for overriding the gate, if any")


class HistoryEntry(ModelRecord):
    """An entry of the history, stored as one line."""

    schema_version: Literal[1] = 1
    id: str = Field("", description="Hash of all fields except user and time, so that a decision is only stored once")
    action: Action
    checkpoint: Prefix = Field(description="Prefix in the workspace")
    digest: Digest = Field(description="Digest of the manifest (all files have been verified unless it was refused)")
    cycle: str = Field(description="The cycle that trained the checkpoint")
    step: int = Field(ge=0)
    generation: int = Field(ge=0, description="Number of changes of the production checkpoint, including this one")
    replaced: Production | None = Field(
        description="The checkpoint that was in production at the time of the decision (it stays after a refusal)"
    )
    previous: Production | None = Field(description="The checkpoint that a rollback restores by default")
    reasons: Reasons
    figures: Figures
    verdict: str
    author: Author

    @model_validator(mode="after")
    def _set_or_check_id(self) -> Self:
        """Set the `id` of a new entry, or verify the `id` of an existing entry."""
        # Defaults are excluded so that adding fields does not change the ids of existing entries.
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
    """The entry that put the current checkpoint into production. It is stored in production.json."""

    action: Literal["promoted", "forced", "rolled_back"]
    generation: int = Field(ge=1)

    @property
    def ref(self) -> CheckpointRef:
        return CheckpointRef(checkpoint=self.checkpoint, digest=self.digest)

    @property
    def production(self) -> Production:
        return Production(checkpoint=self.checkpoint, digest=self.digest, generation=self.generation)


def parse_entry(data: bytes | str) -> HistoryEntry:
    """Parse a line of the history. Raises ValidationError if the line is invalid."""
    entry = HistoryEntry.model_validate_json(data)
    return entry if entry.action == "refused" else Pointer.model_validate_json(data)


def production_changes(entries: Iterable[HistoryEntry]) -> tuple[Pointer, ...]:
    """Return only the entries that changed the production checkpoint, which excludes refusals."""
    return tuple(entry for entry in entries if isinstance(entry, Pointer))


# Verdicts of the gate, stored in `cycles/<cycle>/evaluate/verdict.json`.


class StoredVerdict(Record):
    """The verdict of the gate, which is stored before the candidate is promoted or refused."""

    schema_version: Literal[1] = 1
    model: ModelName
    cycle: str = Field(description="The cycle that evaluated the candidate")
    candidate: CheckpointRef
    incumbent: CheckpointRef | None = Field(description="The checkpoint in production, if any")
    promote: bool
    reasons: Reasons = Field(description="The verdict, formatted as lines of text")
    figures: Figures = Field({}, description="Metrics of the candidate")
    checks: tuple[dict[str, JsonValue], ...] = Field((), description="The results of all checks")
    settings_hash: str
    code_version: str
    at: datetime = Field(description="UTC")

    def decision(self) -> Decision:
        """Convert the verdict to a decision that can be passed to `promote` or `record_refusal`."""
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
    """Store a verdict and return its key."""
    key = verdict_key(verdict.cycle)
    workspace.write_bytes(key, verdict.to_json())
    return key


def load_verdict(workspace: Storage, cycle: str) -> StoredVerdict | None:
    """Load the verdict of a cycle, or return None if it does not exist. Raises DataError if it cannot be read."""
    return read_record(workspace, verdict_key(cycle), StoredVerdict, "a verdict", f"trnpipe evaluate --cycle {cycle}")


def stored_decision(
    workspace: Storage, model: str, candidate: CheckpointRef, incumbent: CheckpointRef | None, cycles: Iterable[str]
) -> Decision:
    """Return the decision on a candidate, based on the first of the given cycles that has a verdict on its content.

    A verdict is only valid for the same model, and if the same checkpoint is still in production. If there is no valid
    verdict, a negative decision with the reasons is returned.
    """
    reasons = []
    for cycle in dict.fromkeys(cycles):
        try:
            verdict = load_verdict(workspace, cycle)
        except DataError as error:
            reasons.append(error.seen)
            continue
        if verdict is not None and verdict.candidate.digest == candidate.digest:
            reason = ""  # the reason why the verdict is invalid, if any
            if verdict.model != model:
                reason = f"it was evaluated as model {verdict.model}, not {model}"
            elif verdict.incumbent != incumbent:
                old, new = (ref.checkpoint if ref else "nothing" for ref in (verdict.incumbent, incumbent))
                suffix = " with different content" if old == new else ""
                reason = f"it was evaluated when {old} was in production, but now it is {new}{suffix}"
            decision = verdict.decision()
            return decision.model_copy(update={"passed": False, "reasons": (reason,)}) if reason else decision
    return Decision(passed=False, reasons=(*reasons, f"no verdict on {candidate.checkpoint} is stored"))


# The author of a change.


def current_user() -> str:
    """Return `user@host`, followed by the id of the job if any."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user id may not have a name
        user = str(os.getuid())
    job = os.environ.get("TRNJOBS_JOB_ID", "")
    return f"{user}@{socket.gethostname()}{f' (job {job})' if job else ''}"


# The pointer to the production checkpoint, stored in `registry/<model>/production.json`.

FOLDER = "registry"


def pointer_key(model: str) -> str:
    """Return the key of production.json. Raises ConfigError if the name of the model is invalid."""
    return f"{FOLDER}/{check_model(model)}/production.json"


def read_pointer(workspace: Storage, model: str) -> tuple[Pointer, str] | None:
    """Read the pointer and its etag. Returns None if it does not exist, and raises CheckpointError if it is damaged."""
    repair = (
        f"restore the last line of {FOLDER}/{model}/history.jsonl that is not a refusal, or delete the file and promote"
        " a checkpoint with trnpipe registry promote CHECKPOINT --force REASON"
    )
    return read_current(workspace, pointer_key(model), Pointer, model, "pointer to a checkpoint", repair)


def read_current(
    workspace: Storage, key: str, kind: type[R], model: str, name: str, repair: str
) -> tuple[R, str] | None:
    """Read a record of a model, together with its etag. Returns None if it does not exist.

    The etag is read before the content. This ensures that a conditional write with the etag cannot overwrite a version
    that the caller has not seen. Raises CheckpointError if the record is damaged.
    """
    stat = workspace.stat(key)
    if stat is None:
        return None
    try:
        record = kind.model_validate_json(workspace.read_bytes(key))
        if record.model != model:
            raise ValueError(f"it belongs to model {record.model}")
    except KeyNotFound:  # it was deleted after the call of stat()
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
    """Return the sorted names of all models in the registry."""
    return [name for name in workspace.list_dirs(FOLDER) if _MODEL.fullmatch(name)]


def read_history(workspace: Storage, model: str) -> tuple[HistoryEntry, ...]:
    """Read all entries of the history, including that of the pointer.

    Raises DataError if the log is damaged, and CheckpointError if the pointer is damaged.
    """
    stored = read_pointer(workspace, model)  # read it first, so that the log contains all earlier entries
    _, log = _read_log(workspace, history_key(model))
    return log if stored is None or stored[0].id in {entry.id for entry in log} else (*log, stored[0])


def append(workspace: Storage, model: str, *entries: HistoryEntry | None) -> tuple[HistoryEntry, ...]:
    """Append entries to the log unless they already exist, and return all entries. None is ignored.

    Raises DataError if the log is damaged, and TransientError if concurrent writers prevent the append for 60 s.
    """
    key, deadline, wait_s = history_key(model), time.monotonic() + APPEND_DEADLINE_S, 0.01
    while True:
        stat = workspace.stat(key)  # read before the content, so that the write fails if the content has changed
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


def is_recorded(workspace: Storage, entry: HistoryEntry) -> bool:
    """Return whether the log contains an entry. Raises DataError if the log is damaged."""
    return entry.id in {other.id for other in _read_log(workspace, history_key(entry.model))[1]}


def _read_log(workspace: Storage, key: str) -> tuple[bytes, tuple[HistoryEntry, ...]]:
    """Read the log, and return its bytes and its entries. Raises DataError if the log is damaged."""
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
                next_command="restore the file, or delete the line",
            ) from error
    return data, tuple(entries)


# Checkpoints that must be retained.


def checkpoints_in_use(workspace: Storage) -> frozenset[str]:
    """Return the prefixes of all checkpoints that must not be deleted, because a rollback may restore them.

    These are the checkpoints that are or have been in production for any model. Raises DataError or CheckpointError if
    the registry is damaged. In that case, no checkpoint may be deleted.
    """
    histories = (read_history(workspace, model) for model in list_models(workspace))
    return frozenset(entry.checkpoint for history in histories for entry in production_changes(history))
