"""What `docker build` would be sent: only what the images are made of, whatever lies in the checkout.

BuildKit decides for each path by its patterns and those that match a folder above it (moby/patternmatcher), as
`PatternMatcher.matches` of Docker's Python SDK does.
"""

import subprocess
from pathlib import Path

import pytest
from docker.utils.build import PatternMatcher

from tests.docker.dockerfile import DOCKERFILES, ROOT, instructions, of

pytestmark = pytest.mark.unit

PRIVATE = (
    ".env",
    ".git/config",
    ".aws/credentials",
    ".netrc",
    "id_rsa",
    "workspace/quickstart/checkpoints/first/step-1/model.safetensors",
    "build/infra.json",
    "infra/terraform.tfstate",
    "infra/terraform.tfstate.backup",
    "infra/production.tfvars",
    "infra/backend.hcl",
    "infra/.terraform/providers/x",
    "pipeline/.env",
    "pipeline/core/key.pem",
    "pipeline/core/__pycache__/errors.cpython-311.pyc",
    "jobs/batch/credentials.json",
    "jobs/.git/config",
    "configs/production.tfvars",
    "configs/jobs/.env",
    "docker/config.json",
    "docker/.docker/config.json",
    "tests/s3.py",
    "README.md.orig",
    "secrets/README.md",
    "secrets/pipeline/x.py",
)


@pytest.fixture(scope="module")
def ignored() -> PatternMatcher:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return PatternMatcher([line for line in lines if line and not line.startswith("#")])


@pytest.mark.parametrize("path", PRIVATE)
def test_what_is_private_stays(path: str, ignored: PatternMatcher) -> None:
    assert ignored.matches(path)


def test_of_this_checkout_only_sources_go(ignored: PatternMatcher) -> None:
    sent = {path for path in tracked() if not ignored.matches(path)} - {".dockerignore"}  # the client reads it
    folders = {path.partition("/")[0] for path in sent}
    assert folders == {"pipeline", "jobs", "trnpipe", "configs", "docker", "pyproject.toml", "README.md", "LICENSE"}
    assert {Path(path).suffix for path in sent} == {".py", ".toml", ".lock", ".md", ""}
    assert {path for path in sent if not Path(path).suffix} == {"LICENSE"}


def test_no_source_is_left_behind(ignored: PatternMatcher) -> None:
    """A module that the wheel lacked would be missed on the first machine only."""
    ours = [path for path in tracked() if path.startswith(("pipeline/", "jobs/", "configs/"))]
    assert len(ours) > 200
    assert [path for path in ours if ignored.matches(path)] == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_sent(path: Path, ignored: PatternMatcher) -> None:
    copies = [one.rest.split()[:-1] for one in of(instructions(path), "COPY") if not one.rest.startswith("--from=")]
    sources = [source for words in copies for source in words]
    assert len(sources) > 8
    sent = [one for one in tracked() if not ignored.matches(one)]
    for source in sources:
        found = [one for one in sent if one == source or (source.endswith("/") and one.startswith(source))]
        assert found, f"{path.name} copies {source}, of which nothing is sent"


def tracked() -> list[str]:
    """What git knows of, and what it would take: a fresh file of ours counts."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in listed if (ROOT / path).exists()]
