"""`trnpipe health` in this process: faults of a host, each with its exit code, before any rank is started."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.core.machines import GIB
from pipeline.io import atomic
from pipeline.stages import health

RETRY, FIX = 75, 78
SOUND = (
    "--backend=cpu",
    "--cycle=c1",
    "--health.min-free-gib=0",
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
        code, err = run(f"--health.min-free-gib={(free_gib + total_gib) / 4}")
        assert code == RETRY and "check disk: scratch" in err and "du -xh" in err
    code, err = run("--health.min-free-gib=900000")
    assert code == FIX and "check disk: scratch" in err and "a larger volume" in err


def test_a_read_only_workspace(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The verdict of the check is told, though the report of it cannot be stored."""
    (tmp_path / "w").mkdir()

    def write(path: Path, data: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(atomic, "write_bytes_atomic", write)
    code, err = run()
    assert code == FIX
    prefix = f"check workspace: error while writing file://{tmp_path}/w/cycles/c1/health/probe-0-"
    assert prefix in err and "EROFS" in err


def test_a_tool_that_is_not_installed_is_a_fault_of_the_image(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    code, err = run("--health.only=tools", "--backend=xla", "--launch.processes=2")
    assert (code, "check nccom-test all_reduce: nccom-test is not installed" in err) == (FIX, True), err


def test_no_place_for_temporary_files(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    code, err = run()
    assert code == RETRY and "cannot create a folder for temporary files" in err
