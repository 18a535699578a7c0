"""GitHub's workflow and the pre-commit hooks do what `.ci/run` and `make lint` do."""

import re
import tomllib

import pytest
import yaml

from tests.docker.test_dockerfiles import ROOT

pytestmark = pytest.mark.unit

TEXT = (ROOT / ".github/workflows/ci.yml").read_text()
WORKFLOW = yaml.safe_load(TEXT)
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
MAKEFILE = (ROOT / "Makefile").read_text().replace("\t", "")


def test_it_runs_what_every_machine_runs_with_few_rights_and_ends() -> None:
    assert [step["run"] for step in STEPS if "run" in step] == [".ci/run", ".ci/run-native", "make scan"]
    for name, target in (("run", "make test"), ("run-native", "make test-native")):
        script = ROOT / ".ci" / name
        assert script.stat().st_mode & 0o111
        assert script.read_text().splitlines()[-1] == f"exec {target}"
    assert WORKFLOW[True].keys() == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as a boolean
    assert WORKFLOW["permissions"] == {"contents": "read"} and "secrets." not in TEXT
    assert all(0 < job["timeout-minutes"] <= 90 for job in WORKFLOW["jobs"].values())


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (.*)", TEXT)
    assert len(used) == 8
    for text in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", text), text


def test_it_uses_the_python_of_the_project() -> None:
    versions = [step["with"]["python-version"] for step in STEPS if "python-version" in step.get("with", {})]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert versions[0] == project["tool"]["mypy"]["python_version"]
    assert f"PYTHON  ?= python{versions[0]}" in MAKEFILE
    # That of the hashes of its lock, and the only one that `make test-native` finds there.
    assert f"--python-version {versions[1]} \\\n  -c build/constraints.txt --no-emit-package torch" in MAKEFILE


def test_hooks_are_local_and_their_commands_are_those_of_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    lint = MAKEFILE.partition("\nlint:")[2].partition("\nscan:")[0]
    for hook in hooks["repos"][0]["hooks"]:
        if hook["entry"].startswith(".venv/bin/"):
            command, _, words = hook["entry"].removeprefix(".venv/bin/").partition(" ")
            assert re.search(rf"\$\(BIN\)/{command}\b.*{re.escape(words)}", lint), hook["entry"]
