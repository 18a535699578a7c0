"""The retry policy on its own."""

from itertools import count
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from pipeline.core.errors import Preempted
from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy, call_with_retry

FAST = RetryPolicy(first_wait_s=0.001, max_wait_s=0.002, total_deadline_s=60)


def run(call: object, policy: RetryPolicy, stop: StopSignal) -> object:
    return call_with_retry(
        call,  # type: ignore[arg-type]
        policy,
        retryable=lambda error: isinstance(error, OSError),
        stop=stop,
        doing="testing",
    )


class Failing:
    """Raises `error` so many times."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error, self.calls = times, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return "done"


def test_repeats_until_it_works() -> None:
    call = Failing(3, OSError("x"))
    assert run(call, FAST, StopSignal()) == "done"
    assert call.calls == 4


def test_the_last_error_itself_comes_out_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.time", SimpleNamespace(monotonic=count(0.0, 0.005).__next__))
    call = Failing(10**9, OSError("x"))
    with pytest.raises(OSError, match="x"):
        run(call, FAST.model_copy(update={"total_deadline_s": 0.02}), StopSignal())
    assert call.calls > 1
    with pytest.raises(OSError, match="x"):
        run(Failing(1, OSError("x")), FAST.model_copy(update={"total_deadline_s": 0}), StopSignal())


def test_other_errors_are_not_repeated() -> None:
    call = Failing(1, KeyError("x"))
    with pytest.raises(KeyError):
        run(call, FAST, StopSignal())
    assert call.calls == 1


def test_a_stop_ends_the_wait() -> None:
    stop = StopSignal()
    patient = RetryPolicy(first_wait_s=60, max_wait_s=300, total_deadline_s=3600)

    def call() -> None:
        stop.set("SIGTERM")
        raise OSError("x")

    with pytest.raises(Preempted):
        run(call, patient, stop)
    with pytest.raises(Preempted):
        run(lambda: pytest.fail("no attempt after a stop"), FAST, stop)


@pytest.mark.parametrize("values", [{"first_wait_s": 0}, {"first_wait_s": 30, "max_wait_s": 20}, {"tries": 3}])
def test_nonsense_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        RetryPolicy(**values)
