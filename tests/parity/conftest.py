"""One case for all tests."""

import pytest

from tests.parity.case import Case, make_case


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("parity"))
