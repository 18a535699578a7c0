"""The manifest of an artifact, which lists the size and checksum of each file.

An artifact is committed once its manifest exists.
"""

import hashlib
import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field, JsonValue, ValidationError

from pipeline.core.errors import DataError
from pipeline.core.record import Record

MANIFEST_NAME = "MANIFEST.json"
SCHEMA_VERSION = 1


def _check_name(name: str) -> str:
    """Verify that a file name cannot escape the artifact's folder, because manifests are untrusted input."""
    if name == MANIFEST_NAME or "\\" in name or "\0" in name or any(p in ("", ".", "..") for p in name.split("/")):
        raise ValueError(f"file name {name!r} is not a plain relative path")
    return name


FileName = Annotated[str, AfterValidator(_check_name)]


class FileRecord(Record):
    """The size and the xxh3_128 checksum (in hex) of a file."""

    size_bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class Manifest(Record):
    """The list of files in a committed folder, along with metadata in `fields` that depends on the `kind`."""

    schema_version: int = SCHEMA_VERSION
    kind: str = Field(min_length=1)
    created_by: str
    fields: dict[str, JsonValue]
    files: dict[FileName, FileRecord]

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of all fields. Identical artifacts have the same digest."""
        return _digest(self.model_dump(mode="json"))

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(record.size_bytes for record in self.files.values())

    def to_json(self) -> bytes:
        """Serialize the manifest together with its digest. Raises ValueError if a field is NaN or infinite."""
        body = self.model_dump(mode="json")
        return json.dumps({**body, "digest": _digest(body)}, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, *, source: str = "manifest") -> "Manifest":
        """Parse and validate a manifest.

        Raises DataError if the manifest is invalid, if it was modified after it was written, or if a newer version of
        trnpipe wrote it. `source` is the name of the manifest in the error message.
        """
        try:
            body: Any = json.loads(data)
        except ValueError as error:
            raise _bad(source, "is not JSON") from error
        if not isinstance(body, dict):
            raise _bad(source, "is not a JSON object")
        if isinstance(version := body.get("schema_version"), int) and version > SCHEMA_VERSION:
            raise DataError(
                f"{source} has manifest schema {version}",
                expected=f"schema {SCHEMA_VERSION} or earlier",
                next_command="use the version of trnpipe that wrote it, or a later one",
            )
        digest = body.pop("digest", None)
        try:
            if digest != _digest(body):
                raise _bad(source, "has a digest that does not match its content")
            return cls.model_validate(body, strict=True)
        except (ValidationError, ValueError) as error:
            raise _bad(source, "does not have the fields of a manifest") from error


def _digest(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _bad(source: str, problem: str) -> DataError:
    return DataError(
        f"{source} {problem}",
        expected="the manifest exactly as it was committed",
        next_command="delete that folder, then rerun the stage that wrote it",
    )
