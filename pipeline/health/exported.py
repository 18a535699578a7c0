"""Environment variables for the processes that are started meanwhile."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def exported(values: Mapping[str, str]) -> Iterator[None]:
    """Set these; what was there comes back on leaving."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
