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
CPU, NATIVE = ROOT / "docker" / "cpu.Dockerfile", "neuron-native.Dockerfile"
SECRET = re.compile(r"token|secret|password|credential|key|AKIA[0-9A-Z]{16}", re.IGNORECASE)
SOURCES = {"pipeline", "jobs", "trnpipe", "configs", "docker", "pyproject.toml", "README.md", "LICENSE"}
each = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def text_of(path: Path) -> str:
    """Its instructions, one a line."""
    lines = (line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    return re.sub(r"\\\n\s*", " ", "\n".join(lines))


def rests(text: str, name: str) -> list[str]:
    return re.findall(rf"^{name} +(.*\S)", text, re.MULTILINE)


def last_stage(path: Path) -> str:
    """Of the image itself, and not of what it was built in."""
    return text_of(path).rpartition("\nFROM ")[2]


def environment(path: Path) -> dict[str, str]:
    found = re.findall(r'(\w+)=("[^"]*"|\S+)', " ".join(rests(last_stage(path), "ENV")))
    return {name: value.strip('"') for name, value in found}


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
def test_the_base_is_a_tag_with_a_place_for_its_digest(path: Path) -> None:
    (base,) = [one for one in rests(text_of(path), "FROM") if not one.startswith("base ")]
    tag = base.removesuffix("${BASE_DIGEST:+@${BASE_DIGEST}} AS base")
    assert tag != base
    # AWS's tag of the native image is not confirmed: whoever builds it names one.
    assert tag == "${BASE_IMAGE}" if path.name == NATIVE else re.search(r":.*\d+\.\d+\.\d+", tag)


@each
def test_the_image_has_only_what_was_built_and_runs_jobs_without_a_shell(path: Path) -> None:
    found = last_stage(path)
    assert not re.search(r"\b(pip|apt|apt-get|curl|wget|make|gcc)\b", " ".join(rests(found, "RUN")))
    copies = rests(found, "COPY")
    assert [one.split()[-1] for one in copies if "--from=build" in one] == ["/opt/trnpipe/"]
    assert rests(found, "ENTRYPOINT") == ["[]"], "jobs bring trnjobs-entry themselves"
    assert rests(found, "CMD")[0].startswith("[") and rests(found, "HEALTHCHECK") == ["NONE"]
    # Numbers, which every host understands. Only Neuron's devices may need root.
    assert rests(found, "USER") == (["0:0"] if path.name.startswith("neuron") else ["10001:10001"])
    (presets,) = [one.split()[-1] for one in copies if one.startswith("configs/")]
    assert [presets] == [f"{place}/configs/" for place in rests(found, "WORKDIR")]
    assert environment(path)["PATH"].startswith("/opt/trnpipe/bin:")
    assert environment(path)["TRN_REVISION"] == "${REVISION}"


@each
def test_every_package_is_hashed_and_nothing_secret_is_built_in(path: Path) -> None:
    """Our package comes from the wheel that the build made; every other one has its hash in a lock."""
    text = text_of(path)
    installs = re.findall(r"pip (?:--python \S+ )?install (.*?)(?:&&|$)", "\n".join(rests(text, "RUN")), re.MULTILINE)
    assert len(installs) >= 3
    for words in installs:
        assert "--no-deps" in words and "--no-cache-dir" in words
        is_locked = re.search(r"--require-hashes .*--requirement docker/\S+\.lock|--require-hashes", words)
        assert (is_locked and "--requirement docker/" in words) or "--no-index /wheels/" in words
    assert not SECRET.search(" ".join(one for name in ("ARG", "ENV", "LABEL") for one in rests(text, name)))
    assert "--mount=type=secret" not in text


@each
def test_the_environment_is_stated_and_known(path: Path) -> None:
    """Unknown settings would end every command with exit 78. A default of torch-neuronx that changed would make all
    graphs new. An interface is named by no image: it differs between machines.
    """
    given = environment(path)
    settings = {name: value for name, value in given.items() if name.startswith("TRNPIPE_")}
    expected = {
        "cuda.Dockerfile": {"TRNPIPE_BACKEND": "cuda", "TRNPIPE_EMBED__COMPILED": "false"},
        NATIVE: {"TRNPIPE_BACKEND": "neuron"},
    }
    assert settings == expected.get(path.name, {})
    command = [sys.executable, "-m", "pipeline", "config"]
    subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, check=True)
    stated = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0", "MALLOC_ARENA_MAX": "64"}
    stated |= {
        "neuron.Dockerfile": {"XLA_DISABLE_FUNCTIONALIZATION": "1"},
        NATIVE: {
            "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
            "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1",
        },
    }.get(path.name, {})
    assert stated.items() <= given.items() or not path.name.startswith("neuron")
    assert [name for name in given if name.startswith(("FI_", "CCOM_", "GLOO_", "NCCL_SOCKET"))] == []


@each
def test_it_is_checked_before_it_is_an_image(path: Path) -> None:
    (check,) = re.findall(r"python docker/verify\.py (.*)", text_of(path))
    assert f"--expect torch=={'2.14' if path.name == NATIVE else '2.9'}." in check
    if path.name.startswith("neuron"):
        more = {"torch-xla"} if path.name != NATIVE else set()
        assert set(re.findall(r"--outside (\S+)", check)) == {"torch", "torch-neuronx", "neuronx-cc", "numpy"} | more


def test_without_a_command_the_cpu_image_does_what_make_cycle_does() -> None:
    show = ["make", "-C", str(ROOT), "--dry-run", "--no-print-directory", "cycle", "WORKSPACE=/workspace/quickstart"]
    env = {name: value for name, value in os.environ.items() if name not in ("CYCLE", "CONFIG", "ARGS", "DATA")}
    shown = subprocess.run(show, env=env, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    words = re.findall(r'"([^"]*)"', rests(last_stage(CPU), "CMD")[0])
    assert words == ["trnjobs-entry", "--", Path(shown[0]).name, *shown[1:]]


@each
def test_what_is_copied_is_there_and_sent(path: Path, ignored: PatternMatcher) -> None:
    copies = [one.split()[:-1] for one in rests(text_of(path), "COPY") if not one.startswith("--from=")]
    sources = [source for words in copies for source in words]
    sent = [one for one in tracked() if not ignored.matches(one)]
    assert len(sources) > 8
    for source in sources:
        assert any(one == source or (source.endswith("/") and one.startswith(source)) for one in sent), source


def test_all_sources_are_sent_and_nothing_else(ignored: PatternMatcher) -> None:
    """A module that the wheel lacked would be missed on the first machine only."""
    sent = {path for path in tracked() if not ignored.matches(path)} - {".dockerignore"}  # the client reads it
    assert {path.partition("/")[0] for path in sent} == SOURCES
    ours = {path for path in tracked() if path.startswith(("pipeline/", "jobs/", "configs/"))}
    assert len(ours) > 100 and ours <= sent


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
        "pipeline/core/__pycache__/errors.cpython-311.pyc",
        "jobs/batch/credentials.json",
        "configs/jobs/.env",
        "docker/.docker/config.json",
        "secrets/pipeline/x.py",
    ],
)
def test_what_is_private_stays(path: str, ignored: PatternMatcher) -> None:
    assert ignored.matches(path)
