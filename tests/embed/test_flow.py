"""The work of one worker and of several, with a model that costs nothing: vectors, bytes, errors."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from pipeline.core.errors import DataError, NumericError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.embed.flow import Flow, embed_shards
from pipeline.embed.parts import OpenPart, commit_part, part_store
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.vectors import find_vectors
from pipeline.io.storage import open_storage
from tests.embed.catalogues import (
    Case,
    HashEmbedder,
    expected_vector,
    failing,
    products,
    rows_of,
    title,
    write_catalogue,
)

ROWS = 120


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    tables = [products(range(70)), products(range(70, 80)), products(range(80, ROWS))]
    return write_catalogue(tmp_path / "catalogue", tables)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.fixture
def plan(case: Case, catalogue: Path) -> EmbedPlan:
    return case.plan(catalogue)


def check_rest(case: Case, plan: EmbedPlan) -> None:
    """Do what is left, and compare with the bytes of a run that nothing happened to."""
    case.work(plan)
    case.finish(plan)
    whole = Case(case.folder / "whole")
    whole.embed(case.folder / "catalogue")
    assert case.files() == whole.files()


def test_every_row_gets_its_own_vector(case: Case, plan: EmbedPlan) -> None:
    """Windows are full but for the last of a part. Readers see nothing before the end."""
    assert case.work(plan, worker=0, workers=2).windows
    with pytest.raises(DataError, match="has no complete vectors"):
        find_vectors(case.workspace, "c1")
    windows = case.work(plan).windows
    expected = []
    for shard in plan.shards[1::2]:
        full, rest = divmod(shard.rows, plan.window_rows)
        expected += [plan.window_rows] * full + ([rest] if rest else [])
    assert windows == expected
    case.finish(plan)
    vectors = find_vectors(case.workspace, "c1")
    found = rows_of(vectors)
    assert found.keys() == {f"p{number}" for number in range(ROWS)}
    for number in range(ROWS):
        np.testing.assert_allclose(found[f"p{number}"], expected_vector(title(number)), atol=1e-6)
    assert [part.rows for part in vectors.info.parts] == [shard.rows for shard in plan.shards]
    assert vectors.info.counts.read == vectors.info.counts.embedded == ROWS


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_any_number_of_workers_leaves_the_same_bytes(case: Case, plan: EmbedPlan, workers: int) -> None:
    for worker in reversed(range(workers)):
        assert len(part_store(case.workspace, plan).done()) < len(plan.shards), "the last worker has something to do"
        case.work(plan, worker, workers)
    check_rest(case, plan)


def complete_before(plan: EmbedPlan, window: int) -> set[int]:
    """Parts all of whose windows come before that one."""
    ends = np.cumsum([-(-shard.rows // plan.window_rows) for shard in plan.shards])
    return set(np.flatnonzero(ends <= window).tolist())


@pytest.mark.parametrize("window", [0, 3, 7])
@pytest.mark.parametrize("error", [TransientError("the device is gone"), RuntimeError("a bug"), NumericError("NaN")])
def test_what_the_device_raises_comes_out_and_the_rest_is_done_later(
    case: Case, plan: EmbedPlan, window: int, error: Exception
) -> None:
    """Parts that were complete are committed, the open one is not."""
    with pytest.raises(type(error), match=str(error)):
        case.work(plan, embedder=HashEmbedder({window: failing(error)}))
    assert part_store(case.workspace, plan).done() == complete_before(plan, window)
    check_rest(case, plan)


def test_a_stop_keeps_complete_parts(case: Case, plan: EmbedPlan) -> None:
    with pytest.raises(Preempted, match="SIGTERM"):
        case.work(plan, embedder=HashEmbedder({4: lambda: case.stop.set("SIGTERM")}))
    assert complete_before(plan, 4) <= part_store(case.workspace, plan).done()
    case.stop = StopSignal()
    check_rest(case, plan)


def test_a_part_that_cannot_be_written_ends_the_run_with_its_error(
    case: Case, plan: EmbedPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(storage: Any, plan: Any, part: OpenPart, **kwargs: Any) -> Any:
        if part.index == 2:
            raise TransientError("no space left")
        return commit_part(storage, plan, part, **kwargs)

    monkeypatch.setattr("pipeline.embed.flow.commit_part", fail)
    with pytest.raises(TransientError, match="no space left"):
        case.work(plan)
    assert part_store(case.workspace, plan).done() == {0, 1}
    assert not [thread for thread in threading.enumerate() if thread.name in ("part-writer_0", "prefetch")]


def test_vectors_that_are_no_numbers_end_the_run(case: Case, plan: EmbedPlan) -> None:
    class Broken(HashEmbedder):
        def vectors(self, tokens: Any) -> Any:
            vectors = super().vectors(tokens)
            if len(self.windows) == 4:
                vectors[3, 1] = np.inf
            return vectors

    with pytest.raises(NumericError, match="1 vectors of part 1 contain NaN or infinity, the first one in row 19"):
        case.work(plan, embedder=Broken())
    assert part_store(case.workspace, plan).done() == {0}


def test_a_catalogue_that_changes_while_it_is_read(case: Case, plan: EmbedPlan, catalogue: Path) -> None:
    """What is read already is not trusted either: the shard is half one file, half another."""
    change = HashEmbedder({0: lambda: write_catalogue(catalogue, [products(range(500, 570))])})
    with pytest.raises(DataError, match=r"file-0\.parquet was changed after this cycle was planned"):
        case.work(plan, embedder=change)
    write_catalogue(catalogue, [products(range(70))])  # put back, byte for byte
    check_rest(case, plan)
    plan = case.plan(catalogue, "c2", "none")
    (catalogue / "file-2.parquet").unlink()
    with pytest.raises(DataError, match=r"file-2\.parquet was deleted after this cycle was planned"):
        case.work(plan)


@pytest.mark.stage
def test_with_worker_processes(case: Case, plan: EmbedPlan) -> None:
    """The same bytes as without, and nobody is left behind, also after an error."""
    stop, before = StopSignal(), psutil.Process().children()
    flow = Flow(plan, open_storage(plan.catalogue.root, stop=stop), case.workspace, case.rules(plan), 2, None, stop)
    with pytest.raises(TransientError):
        embed_shards(flow, plan.shards, HashEmbedder({4: failing(TransientError("gone"))}).stream)
    left = [child for child in psutil.Process().children() if child not in before]
    left = [child for child in left if "tests.kit.zygote" not in child.cmdline()]  # of the tests themselves, kept
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
    todo = [shard for shard in plan.shards if shard.index not in part_store(case.workspace, plan).done()]
    embed_shards(flow, todo, HashEmbedder().stream)
    check_rest(case, plan)


LAYOUTS: list[dict[str, Any]] = [
    {"dtype": "fp16"},
    {"dtype": "int8"},
    {"dtype": "fp32", "dim": 8},
    {"format": "npy", "dtype": "fp16"},
    {"format": "npy", "dtype": "int8", "dim": 4},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_holds_the_vectors(tmp_path: Path, catalogue: Path, layout: dict[str, Any]) -> None:
    dim = layout.get("dim", 16)
    tolerance = {"fp16": 1e-3, "int8": 1e-2}.get(layout["dtype"], 1e-6)
    for name, value in rows_of(Case(tmp_path, layout).embed(catalogue)).items():
        expected = expected_vector(title(int(name[1:])))[:dim]
        np.testing.assert_allclose(value, expected / np.linalg.norm(expected), atol=tolerance)
    if layout.get("format") == "npy":
        folder = tmp_path / "workspace" / "embeddings" / "c1"
        matrix = np.load(folder / "part-00000.npy")
        ids = pa.parquet.read_table(folder / "part-00000.ids.parquet")
        assert matrix.shape == (len(ids), dim) and "vector" not in ids.column_names
