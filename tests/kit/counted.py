"""The requests that a storage sends, by kind: S3 is billed by request."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import pytest

from pipeline.io.s3 import S3Storage
from pipeline.io.storage import LocalStorage, Storage

Kind = Literal["get", "put", "list", "head", "delete"]

LOCAL: dict[str, Kind] = {
    **dict.fromkeys(("open_read", "download"), "get"),
    **dict.fromkeys(("write_bytes", "write_if_absent", "write_if_match", "upload"), "put"),
    **dict.fromkeys(("list", "list_dirs"), "list"),
    **dict.fromkeys(("delete", "delete_prefix"), "delete"),
    "stat": "head",
}
"""Methods that stand for one request each; the others call them."""
S3: dict[str, Kind] = {"Get": "get", "Head": "head", "List": "list", "Delete": "delete", "Abort": "delete"}


@contextmanager
def watched(storage: Storage, note: Callable[[Kind], object]) -> Iterator[None]:
    """`note` is called with the kind of every request, each attempt, before it is sent."""
    if isinstance(storage, S3Storage):

        def sent(event_name: str, **_: object) -> None:
            name = event_name.rpartition(".")[2]
            note(next((kind for start, kind in S3.items() if name.startswith(start)), "put"))

        events = storage._client.raw.meta.events
        events.register("before-send.s3", sent)
        try:
            yield
        finally:
            events.unregister("before-send.s3", sent)
        return
    assert isinstance(storage, LocalStorage)
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in LOCAL.items():
            patch.setattr(storage, name, partial(_noted, note, kind, getattr(storage, name)))
        yield


def _noted(note: Callable[[Kind], object], kind: Kind, method: Callable[..., Any], *values: Any) -> Any:
    note(kind)
    return method(*values)


@contextmanager
def counted(storage: Storage) -> Iterator[Counter[str]]:
    """How many requests of each kind were sent so far."""
    counts: Counter[str] = Counter()
    with watched(storage, lambda kind: counts.update((kind,))):
        yield counts
