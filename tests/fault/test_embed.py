"""Embedding that is killed, stopped and cut off from its storage ends as if nothing had happened.

The full count, 20 kills on the real offers, is `python -m tests.fault.embed_marathon`.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from pipeline.model.config import ModelConfig
from tests.fault.embed_place import digests, flags, kill_in, look, made_up, promote, run_here, snapshot, write_catalogue
from tests.fault.harness import Place, TooLate, again_when_late

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS, PER_PART = 6_000, 500
NUM_PARTS = ROWS // PER_PART
MODEL = ModelConfig(hidden_size=64, num_layers=2, num_heads=2, intermediate_size=256, max_positions=64)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embed")


@pytest.fixture(scope="module")
def place(home: Path) -> Iterator[Callable[[str], Place]]:
    """place(name) -> a fresh workspace with the one promoted model and the one catalogue."""
    table = made_up(ROWS)
    catalogue = write_catalogue(home / "catalogue" / "rows.parquet", table)
    model = snapshot(table["title"].to_pylist(), MODEL)
    made: list[Place] = []

    def make(name: str) -> Place:
        folder = Path(mkdtemp(prefix=f"{name}-", dir=home))
        here = Place(str(folder / "workspace"), folder, flags(catalogue, PER_PART))
        promote(here, model)
        made.append(here)
        return here

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def whole(place: Callable[[str], Place]) -> dict[str, str]:
    """How it ends when nobody interrupts it."""
    here = place("whole")
    run_here(here)
    return digests(here.storage)


@again_when_late
def test_killed_again_and_again(place: Callable[[str], Place], whole: dict[str, str]) -> None:
    here, rng = place("killed"), random.Random(3)
    for phase in ("reading", "device", "commit"):
        if not kill_in(here, phase, rng, num_parts=NUM_PARTS, start_s=2.0, part_s=0.1):
            raise TooLate(f"it had ended before {phase}")
    run_here(here)
    assert digests(here.storage) == whole


@again_when_late
def test_sigterm_keeps_what_is_complete(
    place: Callable[[str], Place], whole: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    here = place("stopped")
    run = here.start("embed")
    run.reach(lambda: len(look(here).records) >= 3)
    assert run.terminate() == 143, run.err
    assert "Traceback" not in run.err and "stopped by SIGTERM" in run.err
    last = here.events()[-1]
    assert (last["event"], last["stage"]) == ("stage_stopped", "embed")
    seen = look(here)
    assert not seen.open_parts and not seen.manifest
    done = len(seen.records)
    run_here(here)
    assert f"{done} done" in capsys.readouterr().out
    redone = [event["part"] for event in here.events("part_embedded")]
    assert len(redone) == len(set(redone)) == NUM_PARTS, "no part was written twice"
    assert digests(here.storage) == whole


def test_ranks_share_the_work(place: Callable[[str], Place], whole: dict[str, str]) -> None:
    here = place("shared")
    runs = here.run_ranks("embed", 2)
    assert digests(here.storage) == whole
    assert sum(run.out.count("embed: 6,000 vectors") for run in runs) >= 1, "whoever was last has signed; both may be"
