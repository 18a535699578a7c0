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
from pipeline.embed.parts import OpenPart, commit_part, parts_of
from pipeline.embed.vectors import find_vectors
from pipeline.io.storage import open_storage
from tests.embed.catalogues import (
    Case,
    HashEmbedder,
    expected_vector,
    products,
    rows_of,
    title,
    write_catalogue,
)

ROWS = 120


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    return write_catalogue(
        tmp_path / "catalogue", [products(range(70)), products(range(70, 80)), products(range(80, ROWS))]
    )


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_every_row_gets_its_own_vector(case: Case, catalogue: Path) -> None:
    vectors = case.embed(catalogue)
    found = rows_of(vectors)
    assert found.keys() == {f"p{number}" for number in range(ROWS)}
    for number in range(ROWS):
        np.testing.assert_allclose(found[f"p{number}"], expected_vector(title(number)), atol=1e-6)
    assert [part.rows for part in vectors.info.parts] == [shard.rows for shard in case.plan(catalogue).shards]
    assert vectors.info.counts.read == vectors.info.counts.embedded == ROWS


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_any_number_of_workers_leaves_the_same_bytes(tmp_path: Path, catalogue: Path, workers: int) -> None:
    whole, shared = Case(tmp_path / "one"), Case(tmp_path / "many")
    whole.embed(catalogue)
    plan = shared.plan(catalogue)
    for worker in reversed(range(workers)):
        assert len(parts_of(shared.workspace, plan).done()) < len(plan.shards), "the last worker has something to do"
        shared.work(plan, worker, workers)
    shared.finish(plan)
    assert shared.files() == whole.files()


def test_windows_are_full_but_for_the_last_of_a_part(case: Case, catalogue: Path) -> None:
    plan = case.plan(catalogue)
    embedder = case.work(plan)
    expected = []
    for shard in plan.shards:
        full, rest = divmod(shard.rows, plan.window_rows)
        expected += [plan.window_rows] * full + ([rest] if rest else [])
    assert embedder.windows == expected


@pytest.mark.parametrize("window", [0, 3, 7])
@pytest.mark.parametrize("error", [TransientError("the device is gone"), RuntimeError("a bug"), NumericError("NaN")])
def test_what_the_device_raises_comes_out_and_the_rest_is_done_later(
    tmp_path: Path, catalogue: Path, window: int, error: Exception
) -> None:
    whole, case = Case(tmp_path / "whole"), Case(tmp_path / "case")
    whole.embed(catalogue)
    plan = case.plan(catalogue)
    with pytest.raises(type(error), match=str(error)):
        case.work(plan, embedder=HashEmbedder(fail_at=window, error=error))
    done = parts_of(case.workspace, plan).done()
    assert done == _complete_before(plan, window), "parts that were complete are committed, the open one is not"
    again = case.work(plan)
    assert sum(again.windows) == ROWS - sum(plan.shards[index].rows for index in done)
    case.finish(plan)
    assert case.files() == whole.files()


def _complete_before(plan: Any, window: int) -> set[int]:
    """Parts all of whose windows come before that one."""
    done, first = set(), 0
    for shard in plan.shards:
        first += -(-shard.rows // plan.window_rows)
        if first <= window:
            done.add(shard.index)
    return done


def test_a_stop_keeps_complete_parts(case: Case, catalogue: Path) -> None:
    plan = case.plan(catalogue)

    class Stopping(HashEmbedder):
        def vectors(self, tokens: Any) -> Any:
            if len(self.windows) == 5:
                case.stop.set("SIGTERM")
            return super().vectors(tokens)

    with pytest.raises(Preempted, match="SIGTERM"):
        case.work(plan, embedder=Stopping())
    assert _complete_before(plan, 4) <= parts_of(case.workspace, plan).done()
    case.stop = StopSignal()
    case.work(plan)
    assert rows_of(case.finish(plan)).keys() == {f"p{number}" for number in range(ROWS)}


def test_a_part_that_cannot_be_written_ends_the_run_with_its_error(
    case: Case, catalogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = case.plan(catalogue)

    def fail(storage: Any, plan: Any, part: OpenPart, **kwargs: Any) -> Any:
        if part.index == 2:
            raise TransientError("no space left")
        return commit_part(storage, plan, part, **kwargs)

    monkeypatch.setattr("pipeline.embed.flow.commit_part", fail)
    with pytest.raises(TransientError, match="no space left"):
        case.work(plan)
    assert parts_of(case.workspace, plan).done() == {0, 1}
    assert not [thread for thread in threading.enumerate() if thread.name in ("part-writer_0", "prefetch")]


def test_vectors_that_are_no_numbers_end_the_run(case: Case, catalogue: Path) -> None:
    class Broken(HashEmbedder):
        def vectors(self, tokens: Any) -> Any:
            vectors = super().vectors(tokens)
            if len(self.windows) == 4:
                vectors[3, 1] = np.inf
            return vectors

    plan = case.plan(catalogue)
    with pytest.raises(NumericError, match="1 vectors of part 1 hold NaN or infinity, the first in row 19"):
        case.work(plan, embedder=Broken())
    assert parts_of(case.workspace, plan).done() == {0}


def test_a_catalogue_that_changes_while_it_is_read(case: Case, catalogue: Path) -> None:
    """What is read already is not trusted either: the shard is half one file, half another."""
    plan = case.plan(catalogue)

    class Rewriting(HashEmbedder):
        def vectors(self, tokens: Any) -> Any:
            if len(self.windows) == 1:
                write_catalogue(catalogue, [products(range(500, 570))])
            return super().vectors(tokens)

    with pytest.raises(DataError, match=r"file-0\.parquet was changed since this cycle planned its work"):
        case.work(plan, embedder=Rewriting())
    write_catalogue(catalogue, [products(range(70))])  # put back, byte for byte
    case.work(plan)
    assert rows_of(case.finish(plan)).keys() == {f"p{number}" for number in range(ROWS)}


def test_a_file_that_is_gone(case: Case, catalogue: Path) -> None:
    plan = case.plan(catalogue)
    (catalogue / "file-2.parquet").unlink()
    with pytest.raises(DataError, match=r"file-2\.parquet is gone since this cycle planned its work"):
        case.work(plan)


@pytest.mark.stage
def test_with_worker_processes(tmp_path: Path, catalogue: Path) -> None:
    """The same bytes as without, and nobody is left behind, also after an error."""
    whole, case = Case(tmp_path / "whole"), Case(tmp_path / "case")
    whole.embed(catalogue)
    plan = case.plan(catalogue)
    stop, before = StopSignal(), psutil.Process().children()
    catalogue_storage = open_storage(plan.catalogue.root, stop=stop)
    flow = Flow(plan, catalogue_storage, case.workspace, case.rules(plan), 2, None, stop)
    with pytest.raises(TransientError):
        embed_shards(flow, plan.shards, HashEmbedder(fail_at=4, error=TransientError("gone")).stream)
    left = [child for child in psutil.Process().children() if child not in before]
    left = [child for child in left if "tests.kit.zygote" not in child.cmdline()]  # of the tests themselves, kept
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
    todo = [shard for shard in plan.shards if shard.index not in parts_of(case.workspace, plan).done()]
    embed_shards(flow, todo, HashEmbedder().stream)
    case.finish(plan)
    assert case.files() == whole.files()


def test_readers_of_an_unfinished_run_see_nothing(case: Case, catalogue: Path) -> None:
    plan = case.plan(catalogue)
    case.work(plan, worker=0, workers=2)
    with pytest.raises(DataError, match="holds no finished vectors"):
        find_vectors(case.workspace, "c1")
    case.work(plan, worker=1, workers=2)
    with pytest.raises(DataError, match="holds no finished vectors"):
        find_vectors(case.workspace, "c1")
    case.finish(plan)
    assert find_vectors(case.workspace, "c1").info.rows == ROWS


LAYOUTS: list[dict[str, Any]] = [
    {"dtype": "fp16"},
    {"dtype": "int8"},
    {"dtype": "fp32", "dim": 8},
    {"format": "npy", "dtype": "fp16"},
    {"format": "npy", "dtype": "int8", "dim": 4},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_holds_the_vectors(tmp_path: Path, catalogue: Path, layout: dict[str, Any]) -> None:
    case = Case(tmp_path, layout)
    vectors = case.embed(catalogue)
    dim = layout.get("dim", 16)
    tolerance = {"fp16": 1e-3, "int8": 1e-2}.get(layout["dtype"], 1e-6)
    for name, value in rows_of(vectors).items():
        expected = expected_vector(title(int(name[1:])))[:dim]
        np.testing.assert_allclose(value, expected / np.linalg.norm(expected), atol=tolerance)
    if layout.get("format") == "npy":
        folder = tmp_path / "workspace" / "embeddings" / "c1"
        matrix = np.load(folder / "part-00000.npy")
        ids = pa.parquet.read_table(folder / "part-00000.ids.parquet")
        assert matrix.shape == (len(ids), dim) and "vector" not in ids.column_names
