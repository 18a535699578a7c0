"""What `make bootstrap` prints: commands that AWS has, and machine images of the right age."""

import os
import shlex
import subprocess

import jmespath  # type: ignore[import-untyped]
import pytest

from tests.docs.commands import of_aws
from tests.infra.terraform import INFRA

pytestmark = pytest.mark.unit

IMAGES = "al2023-ami-ecs-neuron-hvm-2023.0"
"""Names as on the release pages of https://github.com/aws/amazon-ecs-ami."""


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """All that begin with `aws`, as a shell takes them apart."""
    env = os.environ | {"AWS_REGION": "us-west-2", "NAME": "relevance"}
    done = subprocess.run(["sh", INFRA / "bootstrap.sh"], env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.lstrip().startswith("aws ")]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def command(commands: list[list[str]], operation: str) -> list[str]:
    [found] = [words for words in commands if words[2] == operation]
    return found


def test_every_command_is_one_of_aws(commands: list[list[str]]) -> None:
    assert len(commands) > 10
    assert {" ".join(words): of_aws(words[1:]) for words in commands if of_aws(words[1:])} == {}


def test_images_with_a_driver_that_fits_the_container_are_listed(commands: list[list[str]]) -> None:
    """Neither the newest, whose driver asks for a newer runtime, nor those from before the container's own SDK."""
    words = command(commands, "describe-images")
    name, values = option(words, "--filters").split(",", 1)
    assert (name, values) == ("Name=name", f"Values={IMAGES}.202604*,{IMAGES}.202605*,{IMAGES}.202606*")
    days = ("20260420", "20260501", "20260515", "20260601", "20260618", "20260627", "20260628", "20260629")
    found = {"Images": [{"Name": f"{IMAGES}.{day}-kernel-6.1-x86_64", "ImageId": f"ami-{day}"} for day in days]}
    listed = jmespath.search(option(words, "--query"), found)
    assert [image for _, image in listed] == [f"ami-{day}" for day in reversed(days[1:6])]


def test_the_image_is_copied_into_the_account(commands: list[list[str]]) -> None:
    words = command(commands, "copy-image")
    assert option(words, "--source-region") == option(words, "--region") == "us-west-2"
    assert "ssm" not in {words[1] for words in commands}, "that parameter names the newest image"
