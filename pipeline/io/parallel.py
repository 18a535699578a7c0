"""Run transfers in threads: the first error ends the rest, a stop is noticed between tasks."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from pipeline.core.progress import Advance, progress
from pipeline.core.stop import StopSignal

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
    """[call(item) for item in items], at most `num_threads` at a time. Raises the first failed item's error.

    Progress is shown as `doing`: in bytes where `size_bytes` tells how many an item has, else in items.
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
        futures = [pool.submit(call, item) for item in items]
        for future, size in zip(futures, sizes, strict=True):
            future.add_done_callback(lambda _, size=size: advance(size))  # type: ignore[misc]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also when the main thread is interrupted
            pool.shutdown(wait=True, cancel_futures=True)
        for future in futures:
            if future in done:
                future.result()
        return [future.result() for future in futures]
