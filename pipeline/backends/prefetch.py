"""Items, such as batches, made ahead by one thread; an error in it surfaces at the consumer's next item."""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def prefetched(items: Iterable[Item], depth: int) -> Iterator[Iterator[Item]]:
    """Iterate `items` up to `depth` ahead. Leaving the context ends the thread."""
    ready: queue.Queue[tuple[Item] | BaseException | None] = queue.Queue(maxsize=depth)
    left = threading.Event()

    def put(found: tuple[Item] | BaseException | None) -> bool:
        while not left.is_set():
            try:
                ready.put(found, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((item,)):
                    return
            put(None)
        except BaseException as error:  # raised again at the consumer's next item
            put(error)

    def consume() -> Iterator[Item]:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found[0]

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        left.set()
        thread.join(timeout=10)
