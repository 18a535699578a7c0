"""`make image push`, against commands that only note how they were called."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.test_dockerfiles import ROOT

pytestmark = pytest.mark.stage

ACCOUNT = "123456789012"
REGISTRY = f"{ACCOUNT}.dkr.ecr.eu-north-1.amazonaws.com"
DIGEST = "sha256:" + "ab" * 32
FAKE = f"""#!{sys.executable}
import json, os, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
given = sys.stdin.read() if "--password-stdin" in words else ""
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([[name, *words], given]) + "\\n")
if "get-login-password" in words:
    print("once")
if "describe-images" in words:
    print("{DIGEST}")
sys.exit(int(os.environ.get("FAIL") == " ".join(words[:2])))
"""


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    for name in ("docker", "aws"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(FAKE)
        command.chmod(0o755)
    return tmp_path


def make(fakes: Path, *words: str, fail: str = "") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": f"{fakes / 'bin'}:{os.environ['PATH']}", "CALLS": str(fakes / "calls"), "FAIL": fail}
    command = ["make", "--no-print-directory", "-C", str(ROOT), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def calls(fakes: Path) -> list[tuple[list[str], str]]:
    path = fakes / "calls"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def test_an_image_is_built_and_pushed_and_its_digest_told(fakes: Path) -> None:
    repository = f"{REGISTRY}/team/relevance"
    more = [f"REPOSITORY={repository}", "REVISION=0123456789ab", f"BASE_DIGEST={DIGEST}"]
    done = make(fakes, "image", "push", "IMAGE=neuron", *more)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f'image = "{repository}@{DIGEST}"'), done.stderr
    (build, _), (ask, _), (login, password), (push, _), (describe, _) = calls(fakes)
    tag, ecr = f"{repository}:neuron-0123456789ab", ["aws", "ecr"]
    assert build[:4] == ["docker", "buildx", "build", "--platform"] and build[-3:] == ["--tag", tag, "."]
    assert {f"BASE_DIGEST={DIGEST}", "VERSION=0.1.0", "REVISION=0123456789ab", "docker/neuron.Dockerfile"} <= set(build)
    assert ask == [*ecr, "get-login-password", "--region", "eu-north-1"]
    assert (login, password) == (["docker", "login", "--username", "AWS", "--password-stdin", REGISTRY], "once")
    assert push == ["docker", "push", tag]
    assert describe[:7] == [*ecr, "describe-images", "--region", "eu-north-1", "--registry-id", ACCOUNT]
    assert describe[7:11] == ["--repository-name", "team/relevance", "--image-ids", "imageTag=neuron-0123456789ab"]


def test_the_native_image_is_built_from_the_one_that_is_named(fakes: Path) -> None:
    done = make(fakes, "image", "IMAGE=neuron-native", f"BASE_IMAGE={REGISTRY}/mirror:1.2.3", "REVISION=0123456789ab")
    assert done.returncode == 0, done.stderr
    [(build, _)] = calls(fakes)
    assert {f"BASE_IMAGE={REGISTRY}/mirror:1.2.3", "docker/neuron-native.Dockerfile"} <= set(build)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["image", "IMAGE=tpu"], "IMAGE is 'tpu', expected one of cpu cuda neuron neuron-native"),
        (["image", "IMAGE=neuron-native"], "BASE_IMAGE is empty, expected AWS's training image of Neuron SDK 2.33"),
        (["image", "IMAGE=neuron", "BASE_IMAGE=a:1"], "BASE_IMAGE is 'a:1', which only IMAGE=neuron-native takes"),
        (["push"], "REPOSITORY is 'trnpipe', expected one in ECR"),
        (["push", f"REPOSITORY={REGISTRY}/relevance", "REVISION=abc-dirty"], "the checkout has changes"),
    ],
)
def test_mistakes_are_told_before_anything_runs(words: list[str], expected: str, fakes: Path) -> None:
    done = make(fakes, *words)
    assert (done.returncode, expected in done.stderr, calls(fakes)) == (2, True, [])


def test_the_revision_is_the_commit(tmp_path: Path) -> None:
    """With a change: `-dirty`, which push refuses."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    show = ["make", "-C", str(tmp_path), "--no-print-directory", "--dry-run", "image"]
    clean = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert f"--tag 'trnpipe:cpu-{commit[:12]}'" in clean
    (tmp_path / "Makefile").open("a").write("\n")
    changed = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert f"--tag 'trnpipe:cpu-{commit[:12]}-dirty'" in changed
