"""A display that remembers what progress was shown on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.core.progress import Advance


@dataclass
class Work:
    total: int | None
    unit: str
    done: int = 0


@dataclass
class Shown:
    """Use as `with use_display(shown.display)`."""

    works: list[tuple[str, Work]] = field(default_factory=list)

    @contextmanager
    def display(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        work = Work(total, unit)
        self.works.append((name, work))

        def advance(count: int) -> None:
            work.done += count

        yield advance

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.works}

    def check_complete(self) -> None:
        """Every piece of work of a known size reached it."""
        for name, work in self.works:
            assert work.total is None or work.done == work.total, f"{name}: {work}"
