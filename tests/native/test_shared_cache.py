"""Programs outlive the machine that compiled them: compiled on one, trained on another with an empty cache."""

from pathlib import Path

import pytest

from tests.native.cycle import TINY, Cycle
from tests.native.standin import needs_compiler

ONE_SHAPE = (
    TINY.replace('["16x16", "32x32"]', '["16x16"]')
    .replace("max_steps = 12", "max_steps = 2")
    .replace("evaluate_every = 6", "evaluate_every = 0")
)


def programs(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.neff")}


@needs_compiler
@pytest.mark.stage
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.thorough)])  # alone, and below a launcher
def test_what_one_machine_has_compiled_another_one_only_downloads(tmp_path: Path, processes: int) -> None:
    cycle, shared = Cycle(tmp_path, ONE_SHAPE, processes=processes), tmp_path / "shared"
    cycle.on_host("prepare")
    exchange = ("--compile.sync-url", f"file://{shared}")
    first, second = tmp_path / "first", tmp_path / "second"
    assert "compiled programs to file://" in cycle.run("compile", *exchange, "--compile.cache-url", str(first))
    compiled = programs(first)
    assert compiled and programs(shared / "neff") == compiled
    for name in compiled:  # another text: a program that is compiled anew would have its own
        (shared / "neff" / name).write_bytes(b"downloaded")
    said = cycle.run("train", *exchange, "--compile.cache-url", str(second))
    assert f"{len(compiled)} compiled programs from file://" in said and "compiled ahead of time" in said
    assert programs(second) == dict.fromkeys(compiled, b"downloaded"), "0 programs compiled"
