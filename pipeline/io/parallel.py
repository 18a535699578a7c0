"""Run transfers in threads: the first error ends the rest, a stop is noticed between tasks."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from pipeline.core.stop import StopSignal

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_parallel(
    call: Callable[[Item], Result], items: Sequence[Item], *, num_threads: int, stop: StopSignal, doing: str
) -> list[Result]:
    """[call(item) for item in items], at most `num_threads` at a time. Raises the first failed item's error."""

    def checked(item: Item) -> Result:
        stop.raise_if_set(doing)
        return call(item)

    if len(items) < 2 or num_threads < 2:
        return [checked(item) for item in items]
    with ThreadPoolExecutor(min(num_threads, len(items)), thread_name_prefix="storage") as pool:
        futures = [pool.submit(checked, item) for item in items]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also when the main thread is interrupted
            pool.shutdown(wait=True, cancel_futures=True)
        for future in futures:
            if future in done:
                future.result()
        return [future.result() for future in futures]
