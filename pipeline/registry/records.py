"""`registry/<model>/history.jsonl`: every change of production and every refusal, oldest first.

The log is replaced whole by a conditional write, so it is never torn and of racing writers none loses a line. The
pointer is the entry of the last change itself, and is written first. A writer that dies before its entry is in the log
leaves it there: readers count it in, and the next writer appends it before it does anything else.
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

# What the registry writes down. One entry tells one decision; the pointer is the entry that is in force.

Action = Literal["promoted", "forced", "rolled_back", "refused"]
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def check_model(name: str) -> str:
    """Return the name itself, which becomes part of a key. Raises ConfigError if it is invalid."""
    if _MODEL.fullmatch(name):
        return name
    raise ConfigError(
        f"model name {name!r}",
        expected="letters, digits, '_', '.' and '-', the first one a letter or digit",
        next_command="correct --model-name",
    )


def check_prefix(prefix: str) -> str:
    """Return the prefix itself. Raises ConfigError if it is absolute, leaves the workspace, or cannot be printed."""
    if not prefix.isprintable() or "\\" in prefix:
        raise ConfigError(f"checkpoint {prefix!r}", expected="checkpoints/<cycle>/step-<n>")
    return check_key(prefix)


def one_line(text: str) -> str:
    """Return what a person typed, without line ends and control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _valid(check: Callable[[str], str]) -> AfterValidator:
    def validate(text: str) -> str:
        try:
            return check(text)
        except ConfigError as error:
            raise ValueError(error.seen) from error

    return AfterValidator(validate)


def _finite(values: Any) -> Any:
    """JSON has no NaN; a candidate is refused for one, and that must be on record."""
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
    """A checkpoint by its place and content."""

    checkpoint: Prefix = Field(description="Prefix in the workspace")
    digest: Digest = Field(description="Digest of its manifest")


class Production(CheckpointRef):
    """A checkpoint at the time it was in production."""

    generation: int = Field(ge=1, description="Which change of production brought it there")


class OfModel(Record):
    """A record of one model."""

    model: ModelName


R = TypeVar("R", bound=OfModel)


class Author(Record):
    """Who decides, when, and with what settings and code."""

    by: str = Field(description="user@host, and the Batch job where there is one")
    cycle: str = Field("", description="The cycle that decides; empty for a person")
    settings_hash: str = ""
    code_version: str = ""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC), description="UTC")


class Decision(Record):
    """Why a checkpoint is promoted or refused."""

    passed: bool = Field(description="The gate let it through")
    digest: str = Field("", description="Digest of the checkpoint that was judged; empty when none was (forced)")
    reasons: Reasons = Field((), description="The verdict in plain lines")
    figures: Figures = Field({}, description="Metrics of the candidate; null for one that is not finite")
    verdict: str = Field("", description="Key of the stored verdict in the workspace")
    forced: str = Field("", description="Why a person overrules the gate")


class HistoryEntry(OfModel):
    """One line of the history."""

    schema_version: Literal[1] = 1
    id: str = Field("", description="Hash of all but who and when: the same decision told twice is one entry")
    action: Action
    checkpoint: Prefix = Field(description="Prefix in the workspace")
    digest: Digest = Field(description="Digest of its manifest, every byte verified for a change of production")
    cycle: str = Field(description="The cycle that trained it")
    step: int = Field(ge=0)
    generation: int = Field(ge=0, description="Changes of production so far, this one included")
    replaced: Production | None = Field(description="In production until then; stays there after a refusal")
    previous: Production | None = Field(description="Where a rollback leads that names nothing")
    reasons: Reasons
    figures: Figures
    verdict: str
    author: Author

    @model_validator(mode="after")
    def _name_it(self) -> Self:
        """`id` may be left out when an entry is made, and must fit when one is read."""
        # Without defaults, so that a field added later leaves the names of older entries as they are.
        body = self.model_dump(mode="json", exclude={"id": True, "author": {"by", "at"}}, exclude_defaults=True)
        name = fingerprint(body)
        if not self.id:
            object.__setattr__(self, "id", name)
        elif self.id != name:
            raise ValueError("its id does not fit its content")
        return self

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class Pointer(HistoryEntry):
    """The entry that put a checkpoint into production: all of production.json."""

    action: Literal["promoted", "forced", "rolled_back"]
    generation: int = Field(ge=1)

    @property
    def place(self) -> CheckpointRef:
        return CheckpointRef(checkpoint=self.checkpoint, digest=self.digest)

    @property
    def production(self) -> Production:
        return Production(checkpoint=self.checkpoint, digest=self.digest, generation=self.generation)


def parse_entry(data: bytes | str) -> HistoryEntry:
    """Parse a line of the history. Raises ValidationError."""
    entry = HistoryEntry.model_validate_json(data)
    return entry if entry.action == "refused" else Pointer.model_validate_json(data)


def changes_of(entries: Iterable[HistoryEntry]) -> tuple[Pointer, ...]:
    """Return the entries without the refusals."""
    return tuple(entry for entry in entries if isinstance(entry, Pointer))


# `cycles/<cycle>/evaluate/verdict.json`: what the gate said of one candidate against one incumbent.


class StoredVerdict(Record):
    """Written by evaluate before anything is promoted or refused by it."""

    schema_version: Literal[1] = 1
    model: ModelName
    cycle: str = Field(description="The cycle that evaluated")
    candidate: CheckpointRef
    incumbent: CheckpointRef | None = Field(description="None: nothing was in production")
    promote: bool
    reasons: Reasons = Field(description="The verdict in plain lines")
    figures: Figures = Field({}, description="Metrics of the candidate")
    checks: tuple[dict[str, JsonValue], ...] = Field((), description="Every check of the gate")
    settings_hash: str
    code_version: str
    at: datetime = Field(description="UTC")

    def decision(self) -> Decision:
        """Return it for promote() and record_refusal()."""
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
    """Publish it (atomic) and return its key."""
    key = verdict_key(verdict.cycle)
    workspace.write_bytes(key, verdict.model_dump_json(indent=1).encode() + b"\n")
    return key


def load_verdict(workspace: Storage, cycle: str) -> StoredVerdict | None:
    """Return the stored verdict; None if the cycle has none. Raises DataError if it cannot be read."""
    return read_record(workspace, verdict_key(cycle), StoredVerdict, "a verdict", f"trnpipe evaluate --cycle {cycle}")


def stored_decision(
    workspace: Storage, model: str, candidate: CheckpointRef, incumbent: CheckpointRef | None, cycles: Iterable[str]
) -> Decision:
    """Return the decision of the first of these cycles that judged this content; not passed if none did.

    A verdict counts only for the model and the incumbent that it was made against.
    """
    reasons = []
    for cycle in dict.fromkeys(cycles):
        try:
            verdict = load_verdict(workspace, cycle)
        except DataError as error:
            reasons.append(error.seen)
            continue
        if verdict is not None and verdict.candidate.digest == candidate.digest:
            reason = ""  # why the verdict does not count here
            if verdict.model != model:
                reason = f"it was judged as a model {verdict.model}, not {model}"
            elif verdict.incumbent != incumbent:
                judged, now = (place.checkpoint if place else "nothing" for place in (verdict.incumbent, incumbent))
                same = " (other content)" if judged == now else ""
                reason = f"it was judged against {judged} in production, which is {now} now{same}"
            decision = verdict.decision()
            return decision.model_copy(update={"passed": False, "reasons": (reason,)}) if reason else decision
    return Decision(passed=False, reasons=(*reasons, f"no verdict of {candidate.checkpoint} is stored"))


# Who is at work, for the record.


def who(env: Mapping[str, str] = os.environ) -> str:
    """Return `user@host`, with the id of the job if there is one."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user id has no name
        user = str(os.getuid())
    job = env.get("TRNJOBS_JOB_ID", "")
    return f"{user}@{socket.gethostname()}{f' (job {job})' if job else ''}"


# `registry/<model>/production.json`: which checkpoint is in production.

FOLDER = "registry"


def pointer_key(model: str) -> str:
    """Return the key. Raises ConfigError for an invalid name."""
    return f"{FOLDER}/{check_model(model)}/production.json"


def read_pointer(workspace: Storage, model: str) -> tuple[Pointer, str] | None:
    """Return the pointer and its etag; None if nothing is in production. Raises CheckpointError if it is damaged."""
    repair = (
        f"put back the last line of {FOLDER}/{model}/history.jsonl that is no refusal, or delete the file and promote a"
        " checkpoint with trnpipe registry promote CHECKPOINT --force REASON"
    )
    return read_current(workspace, pointer_key(model), Pointer, model, "pointer to a checkpoint", repair)


def read_current(
    workspace: Storage, key: str, kind: type[R], model: str, what: str, repair: str
) -> tuple[R, str] | None:
    """Return a record of a model and its etag; None if there is none. Raises CheckpointError if it is damaged.

    The etag is at most older than the content: a conditional write with it never overwrites what was not read.
    """
    stat = workspace.stat(key)
    if stat is None:
        return None
    try:
        record = kind.model_validate_json(workspace.read_bytes(key))
        if record.model != model:
            raise ValueError(f"it is of model {record.model}")
    except KeyNotFound:  # removed by hand just now
        return None
    except ValueError as error:
        reason = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(
            f"{workspace.uri(key)} is no {what}: {reason}", expected="what trnpipe wrote there", next_command=repair
        ) from error
    return record, stat.etag


APPEND_DEADLINE_S = 60.0
MAX_WAIT_S = 1.0


def history_key(model: str) -> str:
    return f"{FOLDER}/{check_model(model)}/history.jsonl"


def list_models(workspace: Storage) -> list[str]:
    """Names of the models that the registry knows, sorted."""
    return [name for name in workspace.list_dirs(FOLDER) if _MODEL.fullmatch(name)]


def read_history(workspace: Storage, model: str) -> tuple[HistoryEntry, ...]:
    """Return every entry, including the pointer's. Raises DataError or CheckpointError if either is damaged."""
    found = read_pointer(workspace, model)  # first: whatever came before this pointer is in the log by now
    _, log = _read_log(workspace, history_key(model))
    return log if found is None or found[0].id in {entry.id for entry in log} else (*log, found[0])


def append(workspace: Storage, model: str, *entries: HistoryEntry | None) -> tuple[HistoryEntry, ...]:
    """Add those entries that the log lacks (None: nothing), and return all of it.

    Raises DataError for a damaged log, TransientError, Preempted.
    """
    key, deadline, wait_s = history_key(model), time.monotonic() + APPEND_DEADLINE_S, 0.01
    while True:
        stat = workspace.stat(key)  # before the content: then an etag that still fits is of no older content
        data, log = _read_log(workspace, key)
        known = {entry.id for entry in log}
        missing = tuple(entry for entry in entries if entry is not None and entry.id not in known)
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


def _read_log(workspace: Storage, key: str) -> tuple[bytes, tuple[HistoryEntry, ...]]:
    """Read all of it, and the entries it holds. Raises DataError if it is damaged."""
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
                f"line {number} of {workspace.uri(key)} is no entry: {error.errors(include_url=False)[0]['msg']}",
                expected="one JSON object a line, as trnpipe wrote it",
                next_command="put the file back as it was, or take that line out",
            ) from error
    return data, tuple(entries)


# Checkpoints that retention must leave alone.


def in_use(workspace: Storage) -> frozenset[str]:
    """Return prefixes of the checkpoints that are or were in production of any model: they may be rolled back to.

    Raises DataError and CheckpointError for a damaged registry: then nothing may be deleted.
    """
    return frozenset(
        entry.checkpoint for model in list_models(workspace) for entry in changes_of(read_history(workspace, model))
    )
