"""infra/ ready to be planned, once for all tests of a session."""

from pathlib import Path

import pytest

from tests.infra.terraform import INFRA, Terraform, sources_of_infra, started


@pytest.fixture(scope="session")
def infra(shared: Path) -> Terraform:
    """All of infra/ with its provider. Keep states elsewhere: -state=..."""
    return started(shared / "infra", sources_of_infra())


@pytest.fixture(scope="session")
def variables(shared: Path) -> Terraform:
    """The variables of infra/ alone: validated without any provider, in a tenth of a second."""
    return started(shared / "variables", [*sorted(INFRA.glob("variables*.tf")), INFRA / "trainium.json"])
