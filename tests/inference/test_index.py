"""The products that search looks through: written once for a content, whatever happens, and searched exactly."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import trnpipe
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.embed.vectors import MappedVectors, find_vectors
from pipeline.inference.index import BLOCK_ROWS, KEPT, ProductIndex, open_index
from pipeline.io.storage import Storage, open_storage
from pipeline.retrieval.bm25 import Bm25
from tests.kit.killing import FORK, killed_at

pytestmark = pytest.mark.stage


def open_again(storage: Storage) -> int:
    return len(open_index(storage, find_vectors(storage, "c1"), StopSignal()))


def test_an_index_that_lost_a_file_is_made_again(served: Storage, cache: Path) -> None:
    assert open_again(served) == 101
    files = [path for path in cache.rglob("*") if path.is_file() and path.name != "MANIFEST.json"]
    assert len(files) > 4
    for path in files:
        path.unlink()
        assert open_again(served) == 101 and path.exists()


def test_killed_anywhere_the_index_is_made_anew(served: Storage, cache: Path) -> None:
    number = 1
    while killed_at(number, lambda: open_again(served)) < 0:
        assert open_again(served) == 101
        shutil.rmtree(cache)
        number += 3
    assert number > 10


def test_processes_that_need_the_index_at_once(served: Storage, cache: Path) -> None:
    workers = [FORK.Process(target=open_again, args=(served,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    assert open_again(served) == 101
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == written


def test_sets_that_were_not_used_for_long_are_removed(served: Storage, cache: Path) -> None:
    for kind in ("vectors", "words"):
        for age in range(1, 7):
            (cache / "trnpipe" / kind / f"old-{age}").mkdir(parents=True)
            os.utime(cache / "trnpipe" / kind / f"old-{age}", (1000 - age, 1000 - age))
    assert open_again(served) == 101
    for kind in ("vectors", "words"):
        folder = cache / "trnpipe" / kind
        names = {path.name for path in folder.iterdir()}
        assert len(names) == KEPT and {"old-1", "old-2", "old-3"} < names
        for number in range(KEPT):
            (folder / f"today-{number}").mkdir()
    assert open_again(served) == 101
    for kind in ("vectors", "words"):
        names = {path.name for path in (cache / "trnpipe" / kind).iterdir()}
        assert len(names) == KEPT + 1 and "old-1" not in names, "those of a day are left alone"


def test_a_cache_that_cannot_be_written_is_named(served: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ConfigError, match="/dev/null"):
        open_again(served)


def test_a_workspace_on_s3(served: Storage, s3_uri: str) -> None:
    local = served.local_path("")
    assert local is not None
    names = [path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()]
    open_storage(s3_uri).upload_dir("", local, [name for name in names if not name.startswith(".")])
    expected = trnpipe.load_model(workspace=str(local)).search("drill model 3")
    assert trnpipe.load_model(workspace=s3_uri).search("drill model 3") == expected


def random_index(folder: Path, rows: int, width: int) -> ProductIndex:
    """Random unit vectors, the last hundred of which are those before them again."""
    random = np.random.default_rng(7)
    matrix = np.lib.format.open_memmap(folder / "vectors.npy", mode="w+", dtype="<f2", shape=(rows, width))
    for first in range(0, rows, 8192):
        block = random.standard_normal((min(8192, rows - first), width), dtype=np.float32)
        matrix[first : first + len(block)] = block / np.linalg.norm(block, axis=1, keepdims=True)
    matrix[-100:] = matrix[-200:-100]
    matrix.flush()
    titles = pa.chunked_array([pa.array([f"product {number}" for number in range(rows)])])
    mapped = MappedVectors(titles, np.load(folder / "vectors.npy", mmap_mode="r"), "c", "", "")
    return ProductIndex(mapped, titles, Bm25([]))


def test_blocks_of_vectors_are_searched_exactly(tmp_path: Path) -> None:
    """Against a sort of all cosines in float64, ties by number."""
    index = random_index(tmp_path, 150_000, 16)
    assert len(index) > 2 * BLOCK_ROWS
    every = np.array(index.mapped.vectors).astype(np.float64)
    for seed in range(5):
        query = index.mapped.vectors[-1] if not seed else np.random.default_rng(seed).standard_normal(16)
        vector = (query / np.linalg.norm(query.astype(np.float64))).astype(np.float32)
        cosines = every @ vector.astype(np.float64)
        found = index.search("x", vector, 50).vectors
        best = np.lexsort((np.arange(len(every)), -cosines.round(9)))[:50]
        np.testing.assert_allclose(found.scores[0, :50], cosines[best], atol=1e-7)
        np.testing.assert_array_equal(found.items[0, :50], best)


def added_memory(folder: Path) -> int:
    """Return the MiB that a second search takes at its peak, the mapped vectors aside."""
    index, vector = random_index(folder, 200_000, 384), np.full(384, 384**-0.5, dtype=np.float32)
    index.search("x", vector, 10)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory counts from here

    def now(name: str) -> int:
        return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) // 1024

    before = now("RssAnon")
    index.search("x", vector, 10)
    return now("VmHWM") - now("RssFile") - before


def test_memory_of_a_search_is_that_of_a_block(tmp_path: Path) -> None:
    """All 200,000 vectors would take 300 MB in fp32."""
    code = "import sys; from tests.inference.test_index import *; print(added_memory(Path(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64
