"""Small JSON records in storage, validated as they are read."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.core.errors import DataError
from pipeline.io.errors import KeyNotFound
from pipeline.io.storage import Storage

R = TypeVar("R", bound=BaseModel)


def read_record(storage: Storage, key: str, kind: type[R], *, what: str, writer: str, next_command: str) -> R | None:
    """The record under a key, None when there is none.

    Raises DataError for anything else under its name: `what` it should be ("a stage result"), its `writer`
    ("trnpipe evaluate") and the command to go on with.
    """
    try:
        return kind.model_validate_json(storage.read_bytes(key))
    except KeyNotFound:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{storage.uri(key)} is not {what}: {place + ': ' if place else ''}{first['msg']}",
            expected=f"a file written by {writer}",
            next_command=next_command,
        ) from error
