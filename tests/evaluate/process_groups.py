"""Ranks as threads, for work that meets more than once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pipeline.core.layout import Layout
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World

T = TypeVar("T")
WAIT_S = 120.0


class ThreadGang(ProcessGroup):
    """One rank of several in this process."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(World(), timeout_s=1)
        self.world, self.layout = World(rank=rank, world_size=len(slots)), Layout(rank, len(slots))
        self._slots, self._barrier = slots, barrier

    def gather(self, value: Any) -> list[Any]:
        self._slots[self.world.rank] = value
        self._barrier.wait(WAIT_S)
        values = list(self._slots)
        self._barrier.wait(WAIT_S)
        return values


def alone() -> ProcessGroup:
    return ProcessGroup(World(), timeout_s=1)


def on_ranks(world_size: int, work: Callable[[ProcessGroup], T]) -> list[T]:
    """What each rank returns; the first error of any is raised, if those of others are of the same class."""
    slots, barrier = [None] * world_size, threading.Barrier(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, ThreadGang(rank, slots, barrier)) for rank in range(world_size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        assert len({type(error) for error in errors}) < 2, errors
        return [future.result() for future in futures]
