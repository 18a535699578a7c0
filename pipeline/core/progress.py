"""Report the progress of long operations.

Library code reports its progress without knowing whether or how it is displayed. The command selects the display.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

Say = Callable[[str], object]
"""Prints a line for the user."""

Advance = Callable[[int], None]
"""Adds a number of finished units. Passing 0 only refreshes the display."""
Display = Callable[[str, int | None, str], AbstractContextManager[Advance]]
"""Takes the name of an operation, its total (or None if unknown) and its unit. Returns a context that displays it."""

_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def no_display(name: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Display nothing. Use this for an operation that is part of a larger one."""
    yield lambda count: None


@contextmanager
def use_display(display: Display) -> Iterator[None]:
    """Display the progress of operations in the current thread. Other threads and processes are not affected."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def progress(name: str, total: int | None, unit: str) -> Iterator[Advance]:
    """Report the progress of an operation.

    Args:
        name: description of the operation.
        total: number of units, or None if unknown.
        unit: name of the unit in the plural. `bytes` are displayed with binary prefixes.
    """
    display = _display.get()
    with (display or no_display)(name, total, unit) as advance:
        yield advance
