"""Retry storage requests until a deadline, and run them in parallel threads."""

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
    """The retry policy for a storage request. It applies to each part of a multipart transfer separately."""

    first_wait_s: float = Field(
        0.2, gt=0, le=60, description="Upper bound of the first random wait; doubles with every attempt"
    )
    max_wait_s: float = Field(20.0, gt=0, le=300, description="Maximum wait between two attempts")
    total_deadline_s: float = Field(120.0, ge=0, le=3600, description="Time after which requests are no longer retried")

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
    """Call a function, and retry it with exponential backoff if it raises a retryable error.

    The wait before retry n is drawn uniformly between 0 and `first_wait_s * 2^n`. This is known as full jitter, see
    "Exponential Backoff and Jitter" in the AWS Architecture Blog.

    Once the deadline has passed, the last error is raised. Raises Preempted if `stop` is set before the first attempt
    or during a wait. `doing` describes the request in the message.
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
    """Call a function for every item, using up to `num_threads` threads, and return the results in order.

    The progress is displayed under the name `doing`. It counts bytes if `size_bytes` is set and items otherwise. If a
    call fails, its error is raised and the items that have not started yet are skipped.
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
        # submit() raises RuntimeError while the interpreter is shutting down. The remaining items are processed below.
        with suppress(RuntimeError):
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
