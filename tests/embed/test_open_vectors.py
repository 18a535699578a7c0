"""Vectors for a program: one memory-mapped matrix with the ids of its rows, and what examples/ make of it."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline import cli
from pipeline.core.arrays import Float32s
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.stop import StopSignal
from pipeline.embed.vectors import IDS, MATRIX, MappedVectors, VectorSet, open_vectors, write_matrix
from pipeline.io import atomic
from pipeline.io.storage import open_storage
from tests.embed.catalogues import Case, products, rows_of, write_catalogue
from tests.kit.killing import killed_at

ODD = ['a"b\\', "tab\there", "two\nlines\r", "é中\u2028\u202e", "<script>", "'; drop table", "\\N", "\\."]


@pytest.fixture
def vectors(tmp_path: Path) -> VectorSet:
    """p0 to p99 and some hostile ids, in four parts."""
    case = Case(tmp_path, {"dtype": "fp16"})
    odd = pa.table({"product_id": ODD, "title": ["phone"] * len(ODD)})
    return case.embed(write_catalogue(tmp_path / "in", [products(range(50)), odd, products(range(50, 100))]))


def check_all(ids: list[Any], found: Any, vectors: VectorSet) -> None:
    wanted: dict[Any, Float32s] = rows_of(vectors)
    assert len(ids) == len(set(ids)) == len(found) and set(ids) == wanted.keys()
    for name, row in zip(ids, found, strict=True):
        np.testing.assert_allclose(np.asarray(row, dtype=np.float32), wanted[name], atol=1e-6)


def test_a_cycle_is_written_once_as_a_matrix(vectors: VectorSet, tmp_path: Path) -> None:
    uri, cache = vectors.storage.uri(vectors.prefix), tmp_path / "cache"
    found = open_vectors(uri, cache)
    assert isinstance(found, MappedVectors) and isinstance(found.vectors, np.memmap) and found.vectors.dtype == "<f2"
    assert (len(found), found.cycle, found.model_digest) == (108, "c1", "model-1")
    assert found.vectors_digest == vectors.manifest.digest and not found.vectors.flags.writeable
    check_all(found.ids.to_pylist(), found.vectors, vectors)
    made = cache / vectors.manifest.digest
    matrix = (made / MATRIX).stat()
    assert len(open_vectors(uri, cache)) == 108 and (made / MATRIX).stat() == matrix
    (made / MATRIX).unlink()
    assert len(open_vectors(uri, cache)) == 108, "made again"
    for bad in (str(tmp_path / "in"), str(tmp_path / "nowhere")):
        with pytest.raises(DataError, match="has no complete vectors"):
            open_vectors(bad, cache)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_other_numbers_become_fp32(tmp_path: Path, dtype: str) -> None:
    vectors = Case(tmp_path, {"dtype": dtype, "format": "npy"}).embed(write_catalogue(tmp_path / "in", [products([1])]))
    found = open_vectors(vectors.storage.uri(vectors.prefix), tmp_path / "cache")
    assert found.vectors.dtype == "<f4"
    check_all(found.ids.to_pylist(), found.vectors, vectors)


def test_killed_anywhere_it_is_written_anew(vectors: VectorSet, tmp_path: Path) -> None:
    """Nothing is taken for finished; what was left does not stop the next."""
    out, number = tmp_path / "out", 1
    while killed_at(number, lambda: write_matrix(vectors, out, StopSignal())) < 0:
        assert write_matrix(vectors, out, StopSignal()).fields["rows"] == 108
        assert {path.name for path in out.iterdir() if not atomic.is_temp(path.name)} == {MATRIX, IDS, "MANIFEST.json"}
        shutil.rmtree(out)
        number += 1
    assert number > 8


def test_files_that_lie_on_s3_alone_cannot_be_mapped(vectors: VectorSet, tmp_path: Path, s3_uri: str) -> None:
    write_matrix(vectors, tmp_path / "out", StopSignal())
    open_storage(s3_uri).upload_dir("out", tmp_path / "out", [path.name for path in (tmp_path / "out").iterdir()])
    with pytest.raises(ConfigError, match="not on a local disk"):
        open_vectors(f"{s3_uri}/out")


def test_the_command(vectors: VectorSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "vectors", "c1", f"--workspace={tmp_path / 'workspace'}", f"--out={tmp_path / 'out'}"]
    assert cli.main(words) == cli.main(words) == 0
    assert "108 vectors of cycle c1" in capsys.readouterr().out
    assert len(open_vectors(str(tmp_path / "out"))) == 108
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    assert cli.main([*words[:-1], f"--out={tmp_path / 'mine'}"]) == 78
    assert "already contains thesis.txt" in capsys.readouterr().err
    assert cli.main([word for word in words if word != "c1"]) == 78
    assert "has no served vectors" in capsys.readouterr().err
    assert cli.main([*words[:-1], "--out=s3://bucket/x"]) == 78


def ids_beside(out: Path) -> list[Any]:
    ids: list[Any] = pa.ipc.open_file(pa.memory_map(f"{out}.ids.arrow")).read_all()["id"].to_pylist()
    return ids


def of_usearch(out: Path) -> tuple[list[Any], Any]:
    index = pytest.importorskip("usearch.index").Index.restore(str(out), view=True)
    return ids_beside(out), index.get(np.arange(108, dtype=np.uint64))


def of_faiss(out: Path) -> tuple[list[Any], Any]:
    return ids_beside(out), pytest.importorskip("faiss").read_index(str(out)).reconstruct_n(0, 108)


def of_lance(out: Path) -> tuple[list[Any], Any]:
    table = pytest.importorskip("lance").dataset(str(out)).to_table()
    return table["id"].to_pylist(), table["vector"].to_pylist()


def of_opensearch(out: Path) -> tuple[list[Any], Any]:
    files = sorted(out.iterdir())
    assert len(files) > 8 and all(path.stat().st_size <= 2000 for path in files)
    lines = [json.loads(line) for path in files for line in path.read_bytes().split(b"\n")[:-1]]
    assert [one["index"]["_id"] for one in lines[::2]] == [one["id"] for one in lines[1::2]]
    return [one["id"] for one in lines[1::2]], [one["vector"] for one in lines[1::2]]


def of_pgvector(out: Path) -> tuple[list[Any], Any]:
    rows = [line.split("\t") for line in out.read_bytes().decode().split("\n")[:-1]]
    escapes = {"t": "\t", "n": "\n", "r": "\r", "\\": "\\"}

    def unescaped(text: str) -> str:
        letters = iter(text)
        return "".join(escapes[next(letters)] if letter == "\\" else letter for letter in letters)

    return [unescaped(name) for name, _ in rows], [json.loads(numbers) for _, numbers in rows]


@pytest.mark.parametrize(
    ("read", "library", "values"),
    [
        (of_usearch, "usearch", {"ROWS": 40}),
        (of_faiss, "faiss", {"ROWS": 40}),
        (of_lance, "lance", {"ROWS": 40}),
        (of_opensearch, "", {"MAX_BYTES": 2000}),
        (of_pgvector, "", {}),
    ],
)
def test_examples(
    vectors: VectorSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any, library: str, values: dict[str, int]
) -> None:
    if library:
        pytest.importorskip(library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scope = runpy.run_path(f"examples/vectors_to_{read.__name__.removeprefix('of_')}.py")
    scope["main"].__globals__.update(values)
    scope["main"](vectors.storage.uri(vectors.prefix), str(tmp_path / "out"))
    ids, found = read(tmp_path / "out")
    check_all(ids, found, vectors)
