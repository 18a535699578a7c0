"""Terraform on a copy of infra/: where it is found, where its provider comes from, and one `init` for all tests."""

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

INFRA = Path(__file__).parents[2] / "infra"
OLDEST = (1, 11)
REGISTRY = "registry.terraform.io"
"""A mirror of providers is a folder that holds a folder of this name."""
MIRRORS = ("/opt/*", "/usr/share/terraform/*", "/usr/local/share/terraform/*", "~/.terraform.d/*")
UNREACHABLE = ("Failed to query available provider packages", "Failed to install provider")
LOCAL_STATE = 'terraform {\n  backend "local" {}\n}\n'


@dataclass(frozen=True)
class Terraform:
    """Commands in one folder."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Whatever comes of it."""
        command, none = ["terraform", *words], subprocess.DEVNULL
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, stdin=none, capture_output=True, text=True, check=False
        )

    def must(self, *words: str) -> str:
        """What it wrote; fails the test with all of it if it did not succeed."""
        done = self.run(*words)
        assert done.returncode == 0, f"terraform {' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout


def require_terraform() -> None:
    """Skips without one that is new enough."""
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not on PATH; install 1.11 or newer to run the tests of infra/")
    seen = json.loads(subprocess.run(["terraform", "version", "-json"], capture_output=True, check=True).stdout)
    version = seen["terraform_version"]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        pytest.skip(f"terraform {version} is on PATH; the tests of infra/ need 1.11 or newer")


def started(folder: Path, sources: Sequence[Path]) -> Terraform:
    """A copy of these files and folders, after `terraform init`; made once, whoever comes first (xdist: many do).

    Skips where the provider cannot be had.
    """
    require_terraform()
    folder.mkdir(parents=True, exist_ok=True)
    made = Terraform(folder / "infra", environment_for(folder))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = folder / "outcome"
        if not outcome.exists():
            outcome.write_text(_start(made, sources))
    if problem := outcome.read_text():
        pytest.skip(problem)
    return made


def _start(made: Terraform, sources: Sequence[Path]) -> str:
    """Empty, or why it cannot be."""
    made.folder.mkdir()
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, made.folder / source.name)
        else:
            shutil.copy(source, made.folder)
    (made.folder / "backend_override.tf").write_text(LOCAL_STATE)
    done = made.run("init", "-input=false", "-no-color")
    if any(words in done.stderr for words in UNREACHABLE):
        return f"terraform cannot get the provider of infra/: {' '.join(done.stderr.split())[:300]}"
    assert done.returncode == 0, done.stdout + done.stderr
    return ""


def sources_of_infra() -> list[Path]:
    """All of infra/ but what belongs to somebody's deployment."""
    own = {".terraform", ".terraform.lock.hcl", "backend.hcl", "terraform.tfstate"}
    return [path for path in sorted(INFRA.iterdir()) if path.name not in own]


def environment_for(folder: Path) -> dict[str, str]:
    """The caller's, without its own settings of Terraform, and with a mirror of providers if there is one.

    What Terraform is to read about that is written to `folder`.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    config = os.environ.get("TF_CLI_CONFIG_FILE", "")
    if Path(config).is_file():
        kept["TF_CLI_CONFIG_FILE"] = config
    elif mirror := _mirror():
        written = folder / "terraform.rc"
        written.write_text(
            f'provider_installation {{\n  filesystem_mirror {{\n    path    = "{mirror}"\n'
            '    include = ["*/*/*"]\n  }\n}\n'
        )
        kept["TF_CLI_CONFIG_FILE"] = str(written)
    # GOGC: a start of the provider is a quarter cheaper when it collects garbage less often.
    return kept | {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1", "GOGC": "400"}


def _mirror() -> Path | None:
    """A folder with providers in the usual places."""
    for pattern in MIRRORS:
        place = Path(pattern).expanduser()
        for found in sorted(place.parent.glob(f"{place.name}/{REGISTRY}")):
            return found.parent
    return None
