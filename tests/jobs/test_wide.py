"""A cycle's wide jobs for real, on this machine: arrays of prepare and mine, with the bytes of single jobs."""

from pathlib import Path

import pytest

from jobs import cli
from jobs.plan import cycle as plan
from pipeline.context import load_result
from pipeline.io.storage import open_storage
from tests.fault.harness import DATA, MODEL

WIDE = ("--jobs.prepare.workers=2", "--jobs.mine.workers=2")
FLAGS: tuple[str, ...] = (
    *DATA,
    *MODEL,
    "--backend=cpu",
    "--mine.enabled=true",
    "--mine.queries-per-part=8",
    "--cycle=c1",
)
FLAGS += ("--data.synthetic.num-days=2", "--jobs.local-vcpus=2", "--target=local")
MADE = ("tokens/tiny", "negatives")


def run(workspace: Path, *flags: str) -> dict[str, bytes]:
    """All that a cycle of these two stages prepared and mined, by key."""
    assert cli.main(["submit", f"--workspace={workspace}", *FLAGS, *flags]) == 0
    files = (path for folder in MADE for path in (workspace / folder).rglob("*") if path.is_file())
    return {path.relative_to(workspace).as_posix(): path.read_bytes() for path in files}


@pytest.mark.thorough
@pytest.mark.stage
def test_a_wide_cycle_leaves_the_bytes_of_a_narrow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "AFTER", {"prepare": (), "mine": ("prepare",)})
    narrow, wide = run(tmp_path / "narrow"), run(tmp_path / "wide", *WIDE)
    assert len(wide) > 10 and wide == narrow
    storage = open_storage(str(tmp_path / "wide"))
    prepared, mined = (load_result(storage, "c1", name) for name in ("prepare", "mine"))
    assert prepared is not None and mined is not None
    assert prepared.figures["rows"] == 2 * 60 * 12
    capsys.readouterr()
    flags = [flag for flag in FLAGS if not flag.startswith("--target")]
    assert cli.main(["status", f"--workspace={tmp_path / 'wide'}", *flags, *WIDE]) == 0
    said = capsys.readouterr().out
    assert said.count("SUCCEEDED 2/2") == 2
