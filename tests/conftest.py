"""Shared by all tests: nobody's environment leaks in, and every test is marked with its kind."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop TRNPIPE_ settings and torchrun's variables that the caller's shell may hold."""
    for name in os.environ:
        if name.startswith("TRNPIPE_") or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
        ):
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test without a kind is a unit test; those below tests/fault are fault tests."""
    for item in items:
        if ROOT / "tests" / "fault" in item.path.parents:
            item.add_marker(pytest.mark.fault)
        elif not any(item.get_closest_marker(kind) for kind in ("unit", "stage", "fault")):
            item.add_marker(pytest.mark.unit)
