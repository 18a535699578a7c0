"""The retry policy on its own."""

from itertools import count
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from pipeline.core.errors import Preempted
from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy, call_with_retry

FAST = RetryPolicy(first_wait_s=0.001, max_wait_s=0.002, total_deadline_s=60)


def run(call: object, policy: RetryPolicy, stop: StopSignal, retries: list[int]) -> object:
    return call_with_retry(
        call,  # type: ignore[arg-type]
        policy,
        retryable=lambda error: isinstance(error, OSError),
        stop=stop,
        doing="testing",
        on_retry=lambda: retries.append(1),
    )


def failing(times: int, error: Exception) -> object:
    left = [times]

    def call() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "done"

    return call


def test_repeats_until_it_works() -> None:
    retries: list[int] = []
    assert run(failing(3, OSError("x")), FAST, StopSignal(), retries) == "done"
    assert len(retries) == 3


def test_the_last_error_itself_comes_out_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.time", SimpleNamespace(monotonic=count(0.0, 0.005).__next__))
    retries: list[int] = []
    with pytest.raises(OSError, match="x"):
        run(failing(10**9, OSError("x")), FAST.model_copy(update={"total_deadline_s": 0.02}), StopSignal(), retries)
    assert retries
    with pytest.raises(OSError, match="x"):
        run(failing(1, OSError("x")), FAST.model_copy(update={"total_deadline_s": 0}), StopSignal(), [])


def test_other_errors_are_not_repeated() -> None:
    retries: list[int] = []
    with pytest.raises(KeyError):
        run(failing(1, KeyError("x")), FAST, StopSignal(), retries)
    assert not retries


def test_a_stop_ends_the_wait() -> None:
    stop = StopSignal()
    patient = RetryPolicy(first_wait_s=60, max_wait_s=300, total_deadline_s=3600)

    def call() -> None:
        stop.set("SIGTERM")
        raise OSError("x")

    with pytest.raises(Preempted):
        run(call, patient, stop, [])
    with pytest.raises(Preempted):
        run(lambda: pytest.fail("no attempt after a stop"), FAST, stop, [])


@pytest.mark.parametrize("values", [{"first_wait_s": 0}, {"first_wait_s": 30, "max_wait_s": 20}, {"tries": 3}])
def test_nonsense_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        RetryPolicy(**values)
