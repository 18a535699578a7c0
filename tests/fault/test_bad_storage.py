"""Must hold 6: a damaged newest checkpoint, and a disk that is full while saving."""

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fault.harness import MAX_STEPS, TINY, Place, TooLate, again_when_late, reference

pytestmark = pytest.mark.slow

LONG_STEPS = 180
LONG = (*TINY, f"--train.max-steps={LONG_STEPS}", "--train.evaluate-every=0")


def stopped_at(place: Place, step: int) -> list[int]:
    """Train until `step`, stop, and return the steps of the checkpoints."""
    run = place.start("train")
    run.reach(lambda: place.step() >= step)
    assert run.terminate() == 143, run.err
    saved = place.steps_saved()
    assert len(saved) >= 2
    return saved


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("optimizer.safetensors", "MANIFEST.json")),
    ],
)
@again_when_late
def test_a_flipped_bit_in_the_newest_checkpoint(place: Callable[..., Place], name: str) -> None:
    here = place("cpu")
    *_, previous, newest = stopped_at(here, 45)
    flip(here.path / f"checkpoints/c1/step-{newest}/{name}")
    run = here.run("train")
    (warning,) = (line for line in run.out.splitlines() if line.startswith("warning: skipped"))
    assert f"step-{newest}" in warning and "skipped an unusable checkpoint" in warning
    (rejected,) = here.events("checkpoint_rejected")
    assert rejected["step"] == newest
    assert name in rejected["reason"]
    assert [event["step"] for event in here.events("train_resumed")] == [previous]
    assert here.ended() == reference("cpu")


@pytest.mark.thorough
@again_when_late
def test_every_checkpoint_is_bad(place: Callable[..., Place]) -> None:
    """It starts again from the beginning, says so, and ends as it should."""
    here = place("cpu")
    for step in stopped_at(here, 25):
        flip(here.path / f"checkpoints/c1/step-{step}/model.safetensors")
    run = here.run("train")
    assert "skipped an unusable checkpoint" in run.out
    assert not here.events("train_resumed")
    assert here.ended() == reference("cpu")


@pytest.mark.thorough
def test_no_file_can_grow_while_saving(place: Callable[..., Place]) -> None:
    """A limit on file sizes set from outside, and lifted again: the kernel refuses the writes as on a full disk."""
    here = place("cpu", LONG)
    run = here.start("train")
    assert run.until(lambda: len(here.steps_saved()) >= 2)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
    good = here.steps_saved()
    assert run.until(lambda: len(here.events("checkpoint_failed")) >= 2), "it went on after the first failure"
    assert set(good[-1:]) <= set(here.steps_saved()), "the last good checkpoint stays"
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert run.wait() == 0, run.err[-3000:]
    assert "a checkpoint could not be saved, but training continues" in run.out
    assert "Traceback" not in run.err
    assert max(here.steps_saved()) == LONG_STEPS
    assert here.ended() == reference("cpu", LONG)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A tmpfs of `size` mounted at a folder, for as long as inside."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take all the space that is left, again when some was freed."""
    with path.open("ab", buffering=0) as file:
        for block in (2**16, 2**12, 1):
            try:
                while file.write(b"\0" * block) == block:
                    pass
            except OSError:
                continue


@pytest.mark.parametrize(
    "full", ["checkpoints", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("scratch", "cycles"))]
)
@again_when_late
def test_the_disk_is_full_for_a_while(place: Callable[..., Place], full: str) -> None:
    """Wherever nothing fits any more (with `cycles` not even an event): training continues, and saves again later."""
    here = place("cpu", LONG)
    folder = here.scratch if full == "scratch" else here.path / full
    kept = here.folder / "kept"
    if folder.exists():
        folder.rename(kept)
    with small_disk(folder, "8m"):
        if kept.exists():
            shutil.copytree(kept, folder, dirs_exist_ok=True)
        run = here.start("train")
        assert run.until(lambda: len(here.steps_saved()) >= 2)

        def has_failed() -> bool:
            fill(folder / "filler")  # old checkpoints and staged files go, and leave room
            return "training continues" in run.out

        run.reach(has_failed)
        last_good = here.steps_saved()[-1]
        (folder / "filler").unlink()
        code = run.wait()
        if f"the checkpoint of step {LONG_STEPS} could not be saved" in run.err:
            raise TooLate
        assert code == 0, run.err[-3000:]
        failed = [event["step"] for event in here.events("checkpoint_failed")]
        assert failed and last_good <= failed[0], "the last good checkpoint stayed"
        assert "Traceback" not in run.err
        assert max(here.steps_saved()) == LONG_STEPS
        assert here.ended() == reference("cpu", LONG)


@again_when_late
def test_the_last_save_fails(place: Callable[..., Place]) -> None:
    """Then, and only then, the run has failed: the transient code, and the next attempt goes on from the good one."""
    here = place("cpu")
    run = here.start("train")
    run.reach(lambda: here.step() >= MAX_STEPS // 2)
    if not run.is_alive:
        raise TooLate
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
    code = run.wait()
    run.assert_not_late()
    assert code == 75, run.err[-3000:]
    assert f"the checkpoint of step {MAX_STEPS} could not be saved" in run.err
    assert "Traceback" not in run.err
    saved = here.steps_saved()
    assert saved and max(saved) < MAX_STEPS
    here.run("train")
    assert [event["step"] for event in here.events("train_resumed")] == [max(saved)]
    assert here.ended() == reference("cpu")
