"""GitHub's workflow and the pre-commit hooks do what `.ci/run` and `make lint` do."""

import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.docker.test_dockerfiles import ROOT

pytestmark = pytest.mark.unit

WORKFLOW = ROOT / ".github/workflows/ci.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_it_runs_what_every_machine_runs(workflow: dict[Any, Any]) -> None:
    assert [step["run"] for step in steps(workflow) if "run" in step] == [".ci/run", ".ci/run-native", "make scan"]
    for name, target in (("run", "make test"), ("run-native", "make test-native")):
        script = ROOT / ".ci" / name
        assert script.stat().st_mode & 0o111
        assert script.read_text().splitlines()[-1] == f"exec {target}"
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as a boolean
    assert triggers.keys() == {"push", "pull_request"}


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (.*)", WORKFLOW.read_text())
    assert len(used) == 8
    for text in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", text), text


def test_it_has_few_rights_and_ends(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())
    assert "secrets." not in WORKFLOW.read_text()


def test_it_uses_the_python_of_the_project(workflow: dict[Any, Any]) -> None:
    version, native, _ = [
        step["with"]["python-version"] for step in steps(workflow) if "python-version" in step.get("with", {})
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert version == project["tool"]["mypy"]["python_version"]
    makefile = (ROOT / "Makefile").read_text()
    assert f"PYTHON  ?= python{version}" in makefile
    # That of the hashes of its lock, and the only one that `make test-native` finds there.
    assert f"--python-version {native} \\\n  -c build/constraints.txt --no-emit-package torch" in makefile.replace(
        "\t", ""
    )


def test_hooks_are_local_and_their_commands_are_those_of_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\nscan:")[0]
    for hook in hooks["repos"][0]["hooks"]:
        if hook["entry"].startswith(".venv/bin/"):
            command, _, words = hook["entry"].removeprefix(".venv/bin/").partition(" ")
            assert re.search(rf"\$\(BIN\)/{command}\b.*{re.escape(words)}", lint), hook["entry"]
