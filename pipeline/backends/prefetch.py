"""Items, such as batches, made ahead by one thread; an error in it surfaces at the consumer's next item."""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


class _Done:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


@contextmanager
def prefetched(items: Iterable[Item], depth: int) -> Iterator[Iterator[Item]]:
    """Iterate `items` up to `depth` ahead. Leaving the context ends the thread."""
    ready: queue.Queue[Item | _Done] = queue.Queue(maxsize=depth)
    left = threading.Event()

    def put(item: Item | _Done) -> bool:
        while not left.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(_Done(None))
        except BaseException as error:  # raised again at the consumer's next item
            put(_Done(error))

    def consume() -> Iterator[Item]:
        while True:
            item = ready.get()
            if isinstance(item, _Done):
                if item.error is not None:
                    raise item.error
                return
            yield item

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        left.set()
        thread.join(timeout=10)
