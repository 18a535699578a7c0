"""Progress of long operations. Library code reports it, and the command selects a display, if any."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

Say = Callable[[str], object]
"""Prints a line for the user."""

Advance = Callable[[int], None]
"""Adds a number of finished units. 0 refreshes the display."""
Display = Callable[[str, int | None, str], AbstractContextManager[Advance]]
"""Shows an operation (name, total or None if unknown, unit) in a context that yields an Advance."""

_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def no_display(name: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Show nothing, for an operation inside another one."""
    yield lambda count: None


@contextmanager
def use_display(display: Display) -> Iterator[None]:
    """Show the progress of this thread on `display`. Threads and processes that it starts show nothing."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def progress(name: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Report the progress of an operation of `total` units. A display shows rate and ETA after a few seconds.

    Args:
        unit: plural of the unit. `bytes` are shown with binary prefixes.
    """
    display = _display.get()
    with (display or no_display)(name, total, unit) as advance:
        yield advance
