"""What must hold for every image, read off its Dockerfile; and what `docker build` is sent."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docker.utils.build import PatternMatcher

ROOT = Path(__file__).parents[2]
DOCKERFILES = tuple(sorted((ROOT / "docker").glob("*.Dockerfile")))
NATIVE = "neuron-native.Dockerfile"
SECRET = re.compile(r"token|secret|password|credential|key|AKIA[0-9A-Z]{16}", re.IGNORECASE)
SOURCES = {"pipeline", "jobs", "trnpipe", "configs", "docker", "pyproject.toml", "README.md", "LICENSE"}
each = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """(name, rest) of each, also those before the last stage, in which the image is built."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def last_stage(path: Path) -> dict[str, list[str]]:
    """Of the image itself: the rests by name."""
    found: dict[str, list[str]] = {}
    for name, rest in instructions(path):
        if name == "FROM":
            found = {}
        found.setdefault(name, []).append(rest)
    return found


def tracked() -> list[str]:
    """What git knows of, and what it would take: a fresh file of ours counts."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in listed if (ROOT / path).exists()]


@pytest.fixture(scope="module")
def ignored() -> PatternMatcher:
    """BuildKit decides for each path by its patterns and those of the folders above it, as Docker's Python SDK does."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return PatternMatcher([line for line in lines if line and not line.startswith("#")])


@each
def test_the_image_has_only_what_was_built_and_runs_jobs_without_a_shell(path: Path) -> None:
    # AWS's tag of the native image is not confirmed: whoever builds it names one.
    base = next(rest for name, rest in instructions(path) if name == "FROM")
    tag = r"\$\{BASE_IMAGE\}" if path.name == NATIVE else r"\S+:\S*\d+\.\d+\.\d+\S*"
    assert re.fullmatch(tag + r"\$\{BASE_DIGEST:\+@\$\{BASE_DIGEST\}\} AS base", base)
    found = last_stage(path)
    assert not re.search(r"\b(pip|apt|apt-get|curl|wget|make|gcc)\b", " ".join(found.get("RUN", [])))
    assert [one.split()[-1] for one in found["COPY"] if "--from=build" in one] == ["/opt/trnpipe/"]
    assert found["ENTRYPOINT"] == ["[]"], "jobs bring trnjobs-entry themselves"
    assert found["CMD"][0].startswith("[") and found["HEALTHCHECK"] == ["NONE"]
    # Numbers, which every host understands. Only Neuron's devices may need root.
    assert found["USER"] == (["0:0"] if path.name.startswith("neuron") else ["10001:10001"])
    presets = [one.split()[-1] for one in found["COPY"] if one.startswith("configs/")]
    assert presets == [f"{place}/configs/" for place in found["WORKDIR"]]


@each
def test_every_package_is_hashed_and_nothing_secret_is_built_in(path: Path) -> None:
    """Our package comes from the wheel that the build made; every other one has its hash in a lock."""
    runs = "\n".join(rest for name, rest in instructions(path) if name == "RUN")
    installs = re.findall(r"pip (?:--python \S+ )?install (.*?)(?:&&|$)", runs, re.MULTILINE)
    assert len(installs) >= 3
    for words in installs:
        assert "--no-deps" in words and "--no-cache-dir" in words
        assert "--no-index /wheels/" in words or ("--require-hashes" in words and "--requirement docker/" in words)
    assert not SECRET.search(" ".join(rest for name, rest in instructions(path) if name in ("ARG", "ENV", "LABEL")))
    assert "--mount=type=secret" not in path.read_text()
    (check,) = re.findall(r"python docker/verify\.py (.*)", runs)
    assert f"--expect torch=={ {NATIVE: '2.14', 'cuda.Dockerfile': '2.11'}.get(path.name, '2.9') }." in check
    if path.name.startswith("neuron"):
        more = {"torch-xla"} if path.name != NATIVE else set()
        assert set(re.findall(r"--outside (\S+)", check)) == {"torch", "torch-neuronx", "neuronx-cc", "numpy"} | more


STATED = {
    "cuda.Dockerfile": {"TRNPIPE_BACKEND": "cuda"},
    "neuron.Dockerfile": {
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "MALLOC_ARENA_MAX": "64",
        "XLA_DISABLE_FUNCTIONALIZATION": "1",
    },
    NATIVE: {
        "TRNPIPE_BACKEND": "neuron",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "MALLOC_ARENA_MAX": "64",
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
        "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1",
    },
}


@each
def test_the_environment_is_stated_and_known(path: Path) -> None:
    """Unknown settings would end every command with exit 78. A default of torch-neuronx that changed would make all
    graphs new. An interface is named by no image: it differs between machines.
    """
    found = re.findall(r'(\w+)=("[^"]*"|\S+)', " ".join(last_stage(path)["ENV"]))
    given, stated = {name: value.strip('"') for name, value in found}, STATED.get(path.name, {})
    settings = {name: value for name, value in given.items() if name.startswith("TRNPIPE_")}
    assert stated.items() <= given.items() and settings.items() <= stated.items()
    assert given["PATH"].startswith("/opt/trnpipe/bin:") and given["TRN_REVISION"] == "${REVISION}"
    assert not [name for name in given if name.startswith(("FI_", "CCOM_", "GLOO_", "NCCL_SOCKET"))]
    command = [sys.executable, "-m", "pipeline", "config"]
    subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, check=True)


def test_without_a_command_the_cpu_image_does_what_make_cycle_does() -> None:
    show = ["make", "-C", str(ROOT), "--dry-run", "--no-print-directory", "cycle", "WORKSPACE=/workspace/quickstart"]
    env = {name: value for name, value in os.environ.items() if name not in ("CYCLE", "CONFIG", "ARGS", "DATA")}
    shown = subprocess.run(show, env=env, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    words = re.findall(r'"([^"]*)"', last_stage(ROOT / "docker" / "cpu.Dockerfile")["CMD"][0])
    assert words == ["trnjobs-entry", "--", Path(shown[0]).name, *shown[1:]]


def test_all_sources_are_sent_and_nothing_else(ignored: PatternMatcher) -> None:
    """A module that the wheel lacked would be missed on the first machine only."""
    sent = {path for path in tracked() if not ignored.matches(path)} - {".dockerignore"}  # the client reads it
    assert {path.partition("/")[0] for path in sent} == SOURCES
    ours = {path for path in tracked() if path.startswith(("pipeline/", "jobs/", "configs/"))}
    assert len(ours) > 100 and ours <= sent
    for path in DOCKERFILES:
        copies = [rest.split()[:-1] for name, rest in instructions(path) if name == "COPY" and rest[:7] != "--from="]
        for source in [source for words in copies for source in words]:
            assert any(one == source or (source[-1] == "/" and one.startswith(source)) for one in sent), source


@pytest.mark.parametrize(
    "path",
    [
        ".env",
        ".git/config",
        ".aws/credentials",
        "workspace/quickstart/checkpoints/first/step-1/model.safetensors",
        "build/infra.json",
        "infra/terraform.tfstate",
        "infra/production.tfvars",
        "pipeline/.env",
        "pipeline/core/key.pem",
        "jobs/batch/credentials.json",
        "docker/.docker/config.json",
    ],
)
def test_what_is_private_stays(path: str, ignored: PatternMatcher) -> None:
    assert ignored.matches(path)
