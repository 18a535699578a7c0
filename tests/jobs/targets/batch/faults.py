"""A process that dies, or is answered with an error, at a chosen call to AWS Batch or to the storage."""

from collections.abc import Callable
from typing import Any, cast

from pipeline.io.storage import Storage


class Killed(BaseException):
    """kill -9: from here on nothing of this process has an effect."""


class Faults:
    """Counts calls. `kill_after`: which call (from 1) is the last. `errors`: what the n-th call answers, and
    whether it was carried out. `meanwhile`: what others do before the n-th call arrives."""

    def __init__(
        self,
        *,
        kill_after: int = 0,
        errors: dict[int, tuple[Exception, bool]] | None = None,
        meanwhile: dict[int, Callable[[], object]] | None = None,
    ) -> None:
        self.kill_after, self.errors = kill_after, errors or {}
        self.meanwhile = meanwhile or {}
        self.calls: list[str] = []
        self._dead = False

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        if self._dead:
            raise Killed
        self.calls.append(name)
        number = len(self.calls)
        error, done = self.errors.get(number, (None, True))
        if number in self.meanwhile:
            self.meanwhile[number]()
        try:
            answer = work() if done else None
        finally:
            if number == self.kill_after:
                self._dead = True
                raise Killed
        if error:
            raise error
        return answer


class FaultyStorage:
    """A storage whose calls go through Faults."""

    def __init__(self, storage: Storage, faults: Faults) -> None:
        self._storage, self._faults = storage, faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        if not callable(found) or name in ("uri", "local_path"):
            return found

        def call(*args: Any) -> Any:
            eager = (lambda: list(found(*args))) if name == "list" else (lambda: found(*args))
            return self._faults.run(name, eager)

        return call


def faulty(storage: Storage, faults: Faults) -> Storage:
    return cast(Storage, FaultyStorage(storage, faults))
