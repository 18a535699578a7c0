"""A recorded side: one file beside its scores, written last. It can have been made anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.backends import NAMES
from pipeline.core.errors import ConfigError, DataError
from pipeline.evaluate.parity import Curve, Evaluation
from pipeline.evaluate.scores import ScoreSet, load_scores
from pipeline.io.commit import require_manifest
from pipeline.io.storage import KeyNotFound, Storage

# A side of a comparison: a backend with a precision, computed here.

Precision = Literal["fp32", "autocast", "bf16"]
BACKENDS: tuple[str, ...] = tuple(name for name in NAMES if name != "auto")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Side:
    """What one side computes on, and in."""

    backend: str
    precision: Precision

    @property
    def name(self) -> str:
        """As in file names: cpu.fp32"""
        return f"{self.backend}.{self.precision}"


def parse_side(text: str, precision: Precision) -> Side | None:
    """`cpu` or `cuda:bf16`; None for anything else, which names a place. `precision`: where none is given.

    Raises ConfigError for a precision that is not known.
    """
    backend, colon, given = text.partition(":")
    if backend not in BACKENDS:
        return None
    if not colon:
        return Side(backend, precision)
    for known in PRECISIONS:
        if given == known:
            return Side(backend, known)
    choice = ", ".join(f"{backend}:{known}" for known in PRECISIONS)
    raise ConfigError(f"side {text!r}", expected=f"{backend}, or with a precision: {choice}")


def sides_text(backends: Sequence[str] = BACKENDS) -> str:
    """What may be typed, for messages."""
    return f"{', '.join(backends)}, each also as BACKEND:{'|'.join(PRECISIONS)}, or a folder or URI of a recorded side"


RECORD, SCORES, WORK = "record.json", "scores", "work"


class SideRecord(BaseModel):
    """What one side computed, from what, with what."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[1] = 1
    run: str = Field(description="Name of what was computed; the same for sides that were asked for together")
    backend: str
    precision: Precision
    device: str = Field(description="What graphs are compiled for, such as xla:CPU")
    checkpoint: str = Field(description="URI of the checkpoint")
    digest: str = Field(description="Digest of its manifest: names its content")
    identity: dict[str, str] = Field(description="Fingerprint of all that decides the weights, but the precision")
    metric: str
    evaluations: tuple[Evaluation, ...] = Field(min_length=1, description="Step 0 first: the checkpoint itself")
    curve: Curve
    scores: str = Field(description="Digest of the manifest of the scores beside it")
    settings_hash: str
    code_version: str
    finished: datetime = Field(description="UTC")

    @property
    def side(self) -> Side:
        return Side(self.backend, self.precision)


@dataclass(frozen=True)
class RecordedSide:
    """A record with the scores it goes with."""

    uri: str
    record: SideRecord
    scores: ScoreSet


def find_record(place: Storage) -> SideRecord | None:
    """The record in a place, None when there is none. Raises DataError for something else under its name."""
    try:
        return SideRecord.model_validate_json(place.read_bytes(RECORD))
    except KeyNotFound:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(
            f"{place.uri(RECORD)} is no record of a side: {'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}",
            expected=f"a {RECORD} written by trnpipe parity",
            next_command="record the side again, into another folder",
        ) from error


def store_record(place: Storage, record: SideRecord) -> None:
    """Publish a record (atomic), once its scores are committed."""
    place.write_bytes(RECORD, record.model_dump_json(indent=1).encode() + b"\n")


def load_side(place: Storage, cache_dir: Path) -> RecordedSide:
    """A recorded side with every byte of its scores verified. Raises DataError."""
    record = find_record(place)
    if record is None:
        raise DataError(
            f"{place.uri('')} holds no recorded side",
            expected=sides_text(),
            next_command="record it with trnpipe parity SIDE --to FOLDER, on the machine that has the device",
        )
    if require_manifest(place, SCORES).digest != record.scores:
        raise DataError(
            f"{place.uri(SCORES)} are not the scores that {RECORD} beside it was written with",
            expected="the folder as it was recorded",
            next_command="copy it again as a whole, or record the side again",
        )
    return RecordedSide(place.root, record, load_scores(place, SCORES, cache_dir))
