"""Counts of storage requests: S3 is billed by request, so they are part of a cycle's figures."""

import threading
from typing import Literal

Operation = Literal["get", "put", "list", "delete", "head"]


class RequestCounts:
    """Requests sent, by kind, each attempt counted; `retries` says how many of them were repeats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {"get": 0, "put": 0, "list": 0, "delete": 0, "head": 0}
        self._retries = 0

    def add(self, operation: Operation) -> None:
        with self._lock:
            self._counts[operation] += 1

    def add_retry(self) -> None:
        with self._lock:
            self._retries += 1

    def snapshot(self) -> dict[str, int]:
        """All counts by name, `retries` included; JSON-ready."""
        with self._lock:
            return {**self._counts, "retries": self._retries}

    @property
    def get(self) -> int:
        return self.snapshot()["get"]

    @property
    def put(self) -> int:
        return self.snapshot()["put"]

    @property
    def list(self) -> int:
        return self.snapshot()["list"]

    @property
    def delete(self) -> int:
        return self.snapshot()["delete"]

    @property
    def head(self) -> int:
        return self.snapshot()["head"]

    @property
    def retries(self) -> int:
        return self.snapshot()["retries"]
