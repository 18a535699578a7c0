"""One thread: the models here are so small that more only get in each other's way. And one case for all tests."""

import pytest
import torch

from tests.parity.case import Case, make_case


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("parity"))
