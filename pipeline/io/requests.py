"""Storage requests: retried under one deadline, and run in parallel threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Self, TypeVar

import tenacity
from pydantic import Field, model_validator

from pipeline.core.progress import Advance, progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal

T = TypeVar("T")


class RetryPolicy(Record):
    """Retry policy of one storage request. A large transfer has this budget for each of its parts."""

    first_wait_s: float = Field(0.2, gt=0, le=60, description="Maximum first random wait, doubled with every attempt")
    max_wait_s: float = Field(20.0, gt=0, le=300, description="Maximum wait between two attempts")
    total_deadline_s: float = Field(120.0, ge=0, le=3600, description="Time after which no further attempt starts")

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
) -> T:
    """Return the result of `call`, retried while `retryable(error)` holds and the deadline has not passed.

    Waits are uniform in 0..first_wait_s * 2^n (full jitter: AWS Architecture Blog, "Exponential Backoff and Jitter").
    Raises the last error of `call`, or Preempted if `stop` is set before an attempt or during a wait.
    """

    def sleep(seconds: float) -> None:
        stop.wait(seconds)
        stop.raise_if_set(doing)

    stop.raise_if_set(doing)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(retryable),
        wait=tenacity.wait_random_exponential(multiplier=policy.first_wait_s, max=policy.max_wait_s),
        stop=tenacity.stop_before_delay(policy.total_deadline_s),
        sleep=sleep,
        reraise=True,
    )
    return retrying(call)


Item = TypeVar("Item")
Result = TypeVar("Result")


def run_parallel(
    call: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    num_threads: int,
    stop: StopSignal,
    doing: str,
    size_bytes: Callable[[Item], int] | None = None,
) -> list[Result]:
    """Return [call(item) for item in items], computed in at most `num_threads` threads.

    Progress is shown as `doing`, in bytes if `size_bytes` returns the size of an item, else in items. Raises the error
    of the first item that failed.
    """

    def checked(item: Item) -> Result:
        stop.raise_if_set(doing)
        return call(item)

    sizes = [size_bytes(item) if size_bytes else 1 for item in items]
    with progress(doing, sum(sizes), "bytes" if size_bytes else "items") as advance:
        if len(items) < 2 or num_threads < 2:
            results = []
            for item, size in zip(items, sizes, strict=True):
                results.append(checked(item))
                advance(size)
            return results
        return _in_threads(checked, items, sizes, num_threads, advance)


def _in_threads(
    call: Callable[[Item], Result], items: Sequence[Item], sizes: Sequence[int], num_threads: int, advance: Advance
) -> list[Result]:
    with ThreadPoolExecutor(min(num_threads, len(items)), thread_name_prefix="storage") as pool:
        futures = list[Future[Result]]()
        with suppress(RuntimeError):  # the interpreter is shutting down and waits for the calling thread
            for item in items:
                futures.append(pool.submit(call, item))
        for future, size in zip(futures, sizes, strict=False):
            future.add_done_callback(lambda _, size=size: advance(size))  # type: ignore[misc]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also when the main thread is interrupted
            pool.shutdown(wait=True, cancel_futures=True)
        for future in futures:
            if future in done:
                future.result()
        results = [future.result() for future in futures]
    for item, size in zip(items[len(results) :], sizes[len(results) :], strict=True):
        results.append(call(item))
        advance(size)
    return results
