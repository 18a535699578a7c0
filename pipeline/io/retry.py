"""Retry of storage requests: random exponential waits under one total deadline."""

from collections.abc import Callable
from typing import Self, TypeVar

import tenacity
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.core.stop import StopSignal

T = TypeVar("T")


class RetryPolicy(BaseModel):
    """How long one request may be repeated before its error counts. A long transfer has this budget per part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_wait_s: float = Field(0.2, gt=0, le=60, description="Bound of the first random wait; doubles")
    max_wait_s: float = Field(20.0, gt=0, le=300, description="Upper bound of any wait")
    total_deadline_s: float = Field(120.0, ge=0, le=3600, description="No attempt starts later than this")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.first_wait_s > self.max_wait_s:
            raise ValueError(f"first_wait_s {self.first_wait_s} is larger than max_wait_s {self.max_wait_s}")
        return self


def call_with_retry(
    call: Callable[[], T],
    policy: RetryPolicy,
    *,
    retryable: Callable[[BaseException], bool],
    stop: StopSignal,
    doing: str,
    on_retry: Callable[[], None],
) -> T:
    """The result of `call`, repeated while `retryable(error)` and time is left; then the last error itself.

    Full jitter (wait uniform in 0..first_wait_s * 2^n): AWS Architecture Blog, "Exponential Backoff and Jitter".
    Preempted when `stop` is set before an attempt or during a wait.
    """

    def sleep(seconds: float) -> None:
        stop.wait(seconds)
        stop.raise_if_set(doing)
        on_retry()

    stop.raise_if_set(doing)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(retryable),
        wait=tenacity.wait_random_exponential(multiplier=policy.first_wait_s, max=policy.max_wait_s),
        stop=tenacity.stop_before_delay(policy.total_deadline_s),
        sleep=sleep,
        reraise=True,
    )
    return retrying(call)
