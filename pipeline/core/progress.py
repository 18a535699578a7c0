"""How far long work is. Whoever does it counts; the rim names a display once, and without one nothing is shown."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

Say = Callable[[str], object]
"""Where a line for people goes."""

Advance = Callable[[int], None]
"""Adds to what is done; 0 only says that the work goes on."""
Display = Callable[[str, int | None, str], AbstractContextManager[Advance]]
"""(name, total or None when unknown, unit) to an Advance, for as long as the work takes."""

_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def no_display(name: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Show nothing of work that is part of another."""
    yield lambda count: None


@contextmanager
def use_display(display: Display) -> Iterator[None]:
    """Progress of this thread goes to `display`. Threads and processes that it starts show nothing of their own."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def progress(name: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Work of `total` units. A display shows it with its rate and an ETA once it takes more than a few seconds.

    Args:
        unit: what is counted, in the plural; `bytes` are shown with binary prefixes.
    """
    display = _display.get()
    with (display or no_display)(name, total, unit) as advance:
        yield advance
