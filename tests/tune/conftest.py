"""One thread: the models here are so small that more only get in each other's way. And one workspace for all tests."""

from pathlib import Path

import pytest
import torch

from tests.tune.case import make_workspace


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared rows; searches in it have folders of their own."""
    return make_workspace(tmp_path_factory.mktemp("tune"))
