"""Shared by all tests: nobody's environment leaks in, and every test is marked with its kind."""

import os
from collections.abc import Generator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings

from pipeline.proc import pool
from tests.kit.pool_worker import PoolWorker
from tests.kit.storages import aws, moto_address, s3_uri, stop, storage, storage_uri

__all__ = ["aws", "moto_address", "s3_uri", "stop", "storage", "storage_uri"]

ROOT = Path(__file__).parents[1]
# Before torch is imported, here and in children: two threads that spin on a busy machine of two cores take a second for
# a step of ten milliseconds.
os.environ["OMP_NUM_THREADS"] = "1"
# Examples of a property: few in `make test`, many in `make test-thorough`. A test of rare cases has its own number.
settings.register_profile("ci", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=300, deadline=None)
settings.load_profile("ci")


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Workers of a test's own process are forked, but where it is about processes."""
    if item.get_closest_marker("fault") or ROOT / "tests" / "proc" in item.path.parents:
        return (yield)
    with patch.object(pool, "_start", PoolWorker):
        return (yield)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of xdist."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test without a kind is a unit test; those below tests/fault are fault tests."""
    for item in items:
        if ROOT / "tests" / "fault" in item.path.parents:
            item.add_marker(pytest.mark.fault)
        elif not any(item.get_closest_marker(kind) for kind in ("unit", "stage", "fault")):
            item.add_marker(pytest.mark.unit)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)
