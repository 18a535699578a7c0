"""One workspace for all tests."""

from pathlib import Path

import pytest

from tests.tune.case import make_workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared rows; searches in it have folders of their own."""
    return make_workspace(tmp_path_factory.mktemp("tune"))
