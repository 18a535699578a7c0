"""What must hold for every image, read off its Dockerfile."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.dockerfile import DOCKERFILES, ROOT, environment, instructions, last_stage, of

pytestmark = [
    pytest.mark.unit,
    pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name),
]
NATIVE = "neuron-native.Dockerfile"
SECRET = re.compile(r"token|secret|password|credential|key|AKIA[0-9A-Z]{16}", re.IGNORECASE)


def test_the_base_is_a_tag_with_a_place_for_its_digest(path: Path) -> None:
    external = [one.rest for one in of(instructions(path), "FROM") if not one.rest.startswith("base ")]
    assert len(external) == 1, f"{path.name} begins from {external}"
    image, _, name = external[0].partition(" AS ")
    tag = image.removesuffix("${BASE_DIGEST:+@${BASE_DIGEST}}")
    assert (name, tag != image) == ("base", True)
    if (
        path.name == NATIVE
    ):  # AWS's tag of it is not confirmed: whoever builds it names one, and nothing is taken silently
        assert tag == "${BASE_IMAGE}"
        assert [one.rest for one in of(instructions(path), "ARG")][:2] == ["BASE_IMAGE", 'BASE_DIGEST=""']
        return
    assert re.search(r":.*\d+\.\d+\.\d+", tag), f"{tag} names no version"


def test_a_job_is_executed_without_a_shell(path: Path) -> None:
    for one in of(instructions(path), "ENTRYPOINT", "CMD"):
        assert isinstance(one.words, list)
    found = last_stage(path)
    assert of(found, "ENTRYPOINT")[0].words == [], "jobs bring trnjobs-entry themselves"
    assert of(found, "HEALTHCHECK")[0].rest == "NONE"


def test_the_image_has_only_what_was_built(path: Path) -> None:
    """No compiler, package index or cache takes part in the last stage: it copies."""
    runs = " ".join(one.rest for one in of(last_stage(path), "RUN"))
    assert not re.search(r"\b(pip|apt|apt-get|curl|wget|make|gcc)\b", runs), runs
    built = [one.rest.split()[-1] for one in of(last_stage(path), "COPY") if "--from=build" in one.rest]
    assert built == ["/opt/trnpipe/"]


def test_every_package_is_hashed(path: Path) -> None:
    """Ours comes from the wheel that the build made; every other one has its hash in a lock."""
    installs = re.findall(r"pip (?:--python \S+ )?install (.*?)(?:&&|$)", runs_of(path), re.MULTILINE)
    assert len(installs) >= 3
    for words in installs:
        assert "--no-deps" in words
        assert "--no-cache-dir" in words
        assert (
            "--require-hashes --requirement docker/" in words
            or "--no-index /wheels/" in words
            or ("--require-hashes" in words and "--requirement docker/torch-cpu.lock" in words)
        )


def test_nothing_secret_is_built_in(path: Path) -> None:
    for one in of(instructions(path), "ARG", "ENV", "LABEL"):
        assert not SECRET.search(one.rest), one.rest
    assert "--mount=type=secret" not in path.read_text()


def test_copied_files_exist(path: Path) -> None:
    for one in of(instructions(path), "COPY"):
        if not one.rest.startswith("--from="):
            *sources, _ = one.rest.split()
            assert [source for source in sources if not (ROOT / source).exists()] == []


def test_commands_and_presets_are_at_hand(path: Path) -> None:
    found = last_stage(path)
    assert environment(found)["PATH"].startswith("/opt/trnpipe/bin:")
    [place] = [one.rest for one in of(found, "WORKDIR")]
    [presets] = [one.rest.split()[-1] for one in of(found, "COPY") if one.rest.startswith("configs/")]
    assert presets == f"{place}/configs/"


def test_settings_of_the_image_are_settings(path: Path) -> None:
    """Unknown ones would end every command with exit 78."""
    given = {name: value for name, value in environment(last_stage(path)).items() if name.startswith("TRNPIPE_")}
    expected = {
        "cuda.Dockerfile": {"TRNPIPE_BACKEND": "cuda", "TRNPIPE_EMBED__COMPILED": "false"},
        NATIVE: {"TRNPIPE_BACKEND": "neuron"},
    }
    assert given == expected.get(path.name, {})
    command = [sys.executable, "-m", "pipeline", "config"]
    subprocess.run(command, cwd=ROOT, env=os.environ | given, capture_output=True, check=True)


def test_an_interface_is_named_by_no_image(path: Path) -> None:
    """A job on one node is on the host's network, where Neuron's collectives find no eth0 and end."""
    given = environment(last_stage(path))
    assert [name for name in given if name.startswith(("FI_", "CCOM_", "GLOO_", "NCCL_SOCKET"))] == []


def test_what_changes_graphs_and_numbers_on_neuron_is_stated(path: Path) -> None:
    """A default of torch-neuronx that changed would make all graphs new, in the middle of the night."""
    of_xla = {"XLA_DISABLE_FUNCTIONALIZATION": "1"}
    of_native = {
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",
        "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1",
    }
    of_both = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0", "MALLOC_ARENA_MAX": "64"}
    given = environment(last_stage(path))
    found = {name: given[name] for name in of_both | of_xla | of_native if name in given}
    stated = of_both | (of_native if path.name == NATIVE else of_xla)
    assert found == (stated if path.name.startswith("neuron") else {})


def test_where_it_came_from_is_told(path: Path) -> None:
    found = last_stage(path)
    labels = " ".join(one.rest for one in of(found, "LABEL"))
    for name in ("title", "version", "revision", "source", "licenses"):
        assert f"org.opencontainers.image.{name}=" in labels
    assert environment(found)["TRN_REVISION"] == "${REVISION}"


def test_who_it_runs_as(path: Path) -> None:
    """Numbers, which every host understands. Only Neuron's devices may need root."""
    users = [one.rest for one in of(last_stage(path), "USER")]
    assert users == (["0:0"] if path.name.startswith("neuron") else ["10001:10001"])


def test_it_is_checked_before_it_is_an_image(path: Path) -> None:
    checks = re.findall(r"python docker/verify\.py (.*)", runs_of(path))
    assert len(checks) == 1
    assert f"--expect torch=={'2.14' if path.name == NATIVE else '2.9'}." in checks[0]


def runs_of(path: Path) -> str:
    return "\n".join(one.rest for one in of(instructions(path), "RUN"))
