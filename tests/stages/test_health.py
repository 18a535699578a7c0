"""`trnpipe health` in this process: faults of a host, each with its exit code, before any rank is started."""

import errno
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.core.machines import GIB
from pipeline.health import tools
from pipeline.health.neuron import check_neuron_ls
from pipeline.io import atomic
from pipeline.stages import health
from tests.health.fake_tools import fake_tool, neuron_ls, says

RETRY, FIX = 75, 78
SOUND = (
    "--backend=cpu",
    "--cycle=c1",
    "--health.min-open-files=64",
    "--health.min-free-cache-gib=0",
    "--health.min-free-checkpoint-gib=0",
    "--health.min-shm-gib=0",
)
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """run(flag, ...) -> (exit code, what it said on standard error); it must not come to the ranks."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(health, "launch", lambda *args: pytest.fail("ranks were started"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def command(*flags: str) -> tuple[int, str]:
        words = {flag.partition("=")[0]: flag for flag in (*SOUND, *flags)}
        code = cli.main(["health", f"--workspace={tmp_path / 'w'}", *words.values()])
        return code, capsys.readouterr().err

    yield command
    assert [*temporary.iterdir()] == []


def test_only_some_groups(run: Run, tmp_path: Path) -> None:
    assert run("--health.only=host")[0] == 0
    (report,) = (tmp_path / "w" / "cycles" / "c1" / "health").glob("0-*.json")
    assert '"workspace"' in report.read_text() and "kernel-log" not in report.read_text()
    assert run("--health.only=tools,host")[0] == 0
    assert "kernel-log" in report.read_text()
    code, err = run("--health.only=everything")
    assert code == FIX and "health.only" in err


def test_low_disk(run: Run, tmp_path: Path) -> None:
    """Full: another machine will do. Too small: none of that kind will."""
    free_gib, total_gib = (
        int(size / GIB) for size in (shutil.disk_usage(tmp_path).free, shutil.disk_usage(tmp_path).total)
    )
    if free_gib + 8 < total_gib:
        code, err = run(f"--health.min-free-checkpoint-gib={(free_gib + total_gib) // 2}")
        assert code == RETRY and "check disk: scratch" in err and "du -xh" in err
    code, err = run("--health.min-free-checkpoint-gib=900000")
    assert code == FIX and "check disk: scratch" in err and "a larger volume" in err


def test_a_low_limit_of_open_files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ulimit -n` before the command, with room for what this process holds; only ranks on Neuron take thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 256 + max(int(held.name) for held in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        code, err = run("--health.only=host", f"--health.min-open-files={low + 1}")
        assert code == 0 and "open files" not in err, err  # a busy machine may have other warnings
        monkeypatch.setenv("PJRT_DEVICE", "NEURON")
        code, err = run("--health.only=host", f"--health.min-open-files={low + 1}", "--backend=xla")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert code == FIX and f"check open files: ulimit -n is {low}" in err


def test_a_read_only_workspace(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The verdict of the check is told, though the report of it cannot be stored."""
    (tmp_path / "w").mkdir()

    def write(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(atomic, "write_bytes_atomic", write)
    code, err = run()
    assert code == FIX
    assert f"check workspace: file://{tmp_path}/w/cycles/c1/health/probe-0-" in err and "EROFS" in err


@pytest.mark.parametrize(
    ("script", "code", "seen"),
    [
        (None, FIX, "check neuron-devices: neuron-ls is not installed"),
        ("exit 1", RETRY, "check neuron-devices: neuron-ls: exit code 1, no output"),
        ('echo \'[{"neuron_device": 0, "nc\'', RETRY, "check neuron-devices: neuron-ls: exit code 0"),
    ],
)
def test_tools_of_a_neuron_machine(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, code: int, seen: str
) -> None:
    monkeypatch.setattr(tools, "check_neuron_ls", partial(check_neuron_ls, wait_s=0.01))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    if script:
        fake_tool(tmp_path / "bin", "neuron-ls", script)
    found, err = run("--health.only=tools", "--health.expected-instance=trn1.2xlarge")
    assert (found, seen in err) == (code, True), err


@pytest.mark.parametrize("group", ["cores", "collectives"])
def test_ranks_do_not_open_a_core_that_another_process_holds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """Whatever groups are chosen: a second runtime on a core fails."""
    devices = neuron_ls(1)
    devices[0]["neuron_processes"] = [{"pid": 77, "command": "python train.py", "neuron_runtime_version": "2.31"}]
    says(tmp_path / "bin", "neuron-ls", json.dumps(devices))
    monkeypatch.setattr(tools, "check_neuron_ls", partial(check_neuron_ls, wait_s=0.01))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    code, err = run(f"--health.only={group}", "--backend=xla", "--launch.processes=2")
    assert (code, "process 77 (python train.py) holds neuron0" in err) == (RETRY, True), err


def test_no_place_for_temporary_files(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    code, err = run()
    assert code == RETRY and "the checks cannot be started" in err
