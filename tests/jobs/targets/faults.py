"""Services of AWS in memory, and a process that dies, or is answered with an error, at a chosen call to them."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from botocore.exceptions import ClientError
from botocore.model import ServiceModel
from botocore.session import Session
from botocore.validate import validate_parameters

from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage

Request = dict[str, Any]
FAST = RetryPolicy(first_wait_s=1e-5, max_wait_s=1e-4, total_deadline_s=60)
ACCOUNT = "us-east-1:123456789012"


class Clock:
    """Seconds since 1970; a millisecond passes at every look."""

    now = 1_763_600_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


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
        self.kill_after, self.errors, self.meanwhile = kill_after, errors or {}, meanwhile or {}
        self.calls: list[str] = []
        self._dead = False

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        if self._dead:
            raise Killed
        self.calls.append(name)
        number = len(self.calls)
        error, done = self.errors.get(number, (None, True))
        self.meanwhile.get(number, lambda: None)()
        try:
            answer = work() if done else None
        finally:
            if number == self.kill_after:
                self._dead = True
                raise Killed
        if error:
            raise error
        return answer


class _FaultyStorage:
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
    return cast(Storage, _FaultyStorage(storage, faults))


def client_error(code: str, message: str = "", status: int = 400, operation: str = "") -> ClientError:
    answer = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, operation)  # type: ignore[arg-type,unused-ignore]


@cache
def _model(service: str) -> ServiceModel:
    return Session().get_service_model(service)


class FakeService:
    """What boto3's client offers: `submit_job(...)` is checked against botocore's model, goes through the faults, and
    is done by `_submit_job(request)`. Subclasses have `service`, `faults` and `calls`."""

    service: str
    faults: Faults
    calls: int = 0

    def __getattr__(self, name: str) -> Callable[..., Request]:
        if name.startswith("_"):
            raise AttributeError(name)
        work, operation = getattr(self, f"_{name}"), "".join(word.capitalize() for word in name.split("_"))

        def call(**request: Any) -> Request:
            validate_parameters(request, cast(Any, _model(self.service).operation_model(operation).input_shape))
            self._count_call()
            answer: Request = self.faults.run(operation, lambda: work(request))
            return json.loads(json.dumps(answer)) if self.service == "batch" else answer  # SageMaker's has times

        return call

    def _count_call(self) -> None:
        self.calls += 1
