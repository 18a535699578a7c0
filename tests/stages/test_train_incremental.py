"""Cycles that build on each other: only new days are trained on, nothing of the parent is touched."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data import synthetic
from pipeline.data.config import SyntheticConfig
from tests.fault.harness import TINY, Place, forget

pytestmark = [pytest.mark.stage, pytest.mark.slow, pytest.mark.timeout(300)]

DAYS = ("dt=2026-01-01", "dt=2026-01-02", "dt=2026-01-03")
CATALOGUE = SyntheticConfig(num_queries=50, num_days=3)


def deliver(folder: Path, day: str) -> None:
    """The rows of one day arrive."""
    (folder / day).mkdir(parents=True)
    pq.write_table(pa.Table.from_batches(synthetic.generate(CATALOGUE, day)), folder / day / "rows.parquet")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A workspace whose input folder has two days."""
    for day in DAYS[:2]:
        deliver(tmp_path / "input", day)
    flags = (*TINY, f"--data.path={tmp_path}/input", "--backend=cpu", "--train.max-steps=0", "--train.epochs=2")
    here = Place(str(tmp_path / "workspace"), tmp_path, flags)
    yield here
    here.close()
    forget()


def test_a_second_cycle_and_one_without_news(place: Place, tmp_path: Path) -> None:
    place.run("prepare", cycle="c1")
    place.run("train", cycle="c1")
    parent = place.result(cycle="c1")["outputs"]["checkpoint"]
    parents_files = place.manifests("checkpoints/c1")
    tokens = place.manifests("tokens")
    (started,) = place.events("train_started", cycle="c1")
    assert (started["new_partitions"], started["old_partitions"]) == (list(DAYS[:2]), [])

    deliver(tmp_path / "input", DAYS[2])
    start = f"--train.start={place.storage.uri(parent)}"
    place.run("prepare", start, cycle="c2")
    assert [e["partition"] for e in place.events("partition_reused", cycle="c2")] == list(DAYS[:2])
    assert [e["partition"] for e in place.events("partition_prepared", cycle="c2")] == [DAYS[2]]
    assert not place.events("tokenizer_trained", cycle="c2"), "the parent's tokenizer is used"
    assert tokens.items() <= place.manifests("tokens").items(), "nothing is tokenised twice"

    run = place.run("train", start, cycle="c2")
    (started,) = place.events("train_started", cycle="c2")
    assert (started["new_partitions"], started["old_partitions"]) == ([DAYS[2]], list(DAYS[:2]))
    found = re.search(r"([\d,]+) new and ([\d,]+) replayed groups", run.out)
    assert found is not None
    new, replayed = (int(text.replace(",", "")) for text in found.groups())
    assert replayed / (new + replayed) == pytest.approx(0.5, abs=0.01), "train.replay_share"

    child = place.result(cycle="c2")["outputs"]["checkpoint"]
    state = json.loads(place.storage.read_bytes(f"{child}/state.json"))
    manifest = json.loads(place.storage.read_bytes(f"{parent}/MANIFEST.json"))
    assert state["parent"]["uri"] == place.storage.uri(parent)
    assert state["parent"]["digest"] == manifest["digest"]
    assert (state["parent"]["cycle"], state["watermark"]) == ("c1", "2026-01-03")
    assert sorted(state["partitions"]) == list(DAYS)
    assert place.manifests("checkpoints/c1") == parents_files
    loss = place.trace(cycle="c2")[1][0], place.trace(cycle="c1")[1][0]
    assert loss[0] < loss[1], "it starts where the parent ended"

    start = f"--train.start={place.storage.uri(child)}"
    place.run("prepare", start, cycle="c3")
    run = place.run("train", start, cycle="c3")
    assert "no new partition" in run.out
    result = place.result(cycle="c3")
    assert (result["status"], result["outputs"]["checkpoint"]) == ("done", child)
    assert result["figures"]["steps_done"] == 0
    assert not place.events("train_started", cycle="c3")
    assert not place.storage.list_dirs("checkpoints/c3/")
    assert "already done" in place.run("train", start, cycle="c3").out
