"""infra/ by Terraform's own means, without an account: form, types, and the tests beside it (mock providers)."""

from pathlib import Path

import pytest

from tests.infra.terraform import INFRA, Terraform, environment_for, require_terraform


def test_files_are_formatted(tmp_path: Path) -> None:
    require_terraform()
    done = Terraform(INFRA, environment_for(tmp_path)).run("fmt", "-check", "-recursive", "-diff", "-no-color")
    assert done.returncode == 0, f"terraform -chdir=infra fmt -recursive would change:\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_its_own_tests_pass(infra: Terraform) -> None:
    """`terraform test` validates first."""
    said = infra.must("test", "-no-color")
    assert "0 failed" in said and "0 passed" not in said, said
