"""A compiler of another job, which has another cache, does not keep a stale lock alive."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.compile.cache import DEFAULT_ROOT, compilers_of
from pipeline.compile.neuron_compile import repair_after_run
from tests.compile.fake_neuron.toolchain import ToolChain

Start = Callable[..., int]


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[Start]:
    """Start something called neuronx-cc with an environment; its pid."""
    program = tmp_path / "neuronx-cc"
    program.symlink_to("/bin/sleep")
    started: list[subprocess.Popen[bytes]] = []

    def start(**env: str) -> int:
        started.append(subprocess.Popen([str(program), "60"], env={"PATH": os.environ["PATH"], **env}))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def pids(root: str) -> set[int]:
    return {found.pid for found in compilers_of(root)}


def test_only_compilers_of_this_cache_count(compiler: Start, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    (tmp_path / "link").symlink_to(root)
    same = {
        compiler(NEURON_COMPILE_CACHE_URL=f"{root}/"),
        compiler(NEURON_COMPILE_CACHE_URL=str(tmp_path / "link")),
        compiler(NEURON_COMPILE_CACHE_URL="/elsewhere", NEURON_CC_FLAGS=f"--optlevel=1 --cache_dir={root}"),
    }
    others = {
        compiler(NEURON_COMPILE_CACHE_URL=f"{root}-2"),
        compiler(),
        compiler(NEURON_COMPILE_CACHE_URL=str(root), NEURON_CC_FLAGS="--cache_dir=/elsewhere"),
    }
    assert same <= pids(f"file://{root}")
    assert not others & pids(str(root))


def test_one_whose_environment_cannot_be_read_counts(
    compiler: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = compiler(NEURON_COMPILE_CACHE_URL="/elsewhere")

    def denied(self: object) -> dict[str, str]:
        raise PermissionError

    monkeypatch.setattr(psutil.Process, "environ", denied)
    assert pid in pids(str(tmp_path))


def test_the_cache_when_nothing_is_named_and_one_on_s3(compiler: Start) -> None:
    usual, far = compiler(), compiler(NEURON_COMPILE_CACHE_URL="s3://b/c")
    assert usual in pids(DEFAULT_ROOT) and far not in pids(DEFAULT_ROOT)
    assert far in pids("s3://b/c/") and usual not in pids("s3://b/c")


def test_the_repair_after_a_run_goes_by_it(compiler: Start, tmp_path: Path) -> None:
    tools = ToolChain(tmp_path / "tools", "0123abcd")
    lock = tools.lock(0)
    compiler(NEURON_COMPILE_CACHE_URL=str(tmp_path / "other"))
    assert any(line.startswith("unlock") for line in repair_after_run(str(tools.cache)))
    assert not lock.exists()
    lock.touch()
    compiler(NEURON_COMPILE_CACHE_URL=str(tools.cache))
    assert repair_after_run(str(tools.cache)) == []
    assert lock.exists()
