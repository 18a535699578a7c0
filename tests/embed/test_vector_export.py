"""Vectors in the form of other tools: all rows, ids once, whatever breaks off a try; and as memory-mapped arrays."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline import cli
from pipeline.core.arrays import Float32s
from pipeline.core.errors import ConfigError, DataError, Preempted
from pipeline.core.optional import install_command
from pipeline.core.stop import StopSignal
from pipeline.embed import vector_export
from pipeline.embed.formats import FORMS, IDS, MATRIX, Piece, open_form
from pipeline.embed.vector_export import STATE, MappedVectors, hand_over, open_vectors
from pipeline.embed.vectors import PartCounts, PartInfo, PartRows, VectorLayout, VectorSet, part_files
from pipeline.embed.vectors import open_vectors as open_committed
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.commit import commit_dir, verify_dir
from pipeline.io.storage import Storage, open_storage
from tests.embed.catalogues import Case, products, rows_of, write_catalogue
from tests.killing import killed_at
from tests.peak import measured, peak_mib
from tests.s3 import MotoServer, lead_to

STOP = StopSignal()
LIBRARIES = {"faiss": "faiss", "lance": "lance", "usearch": "usearch"}
EACH = pytest.mark.parametrize(
    "form",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name in LIBRARIES and find_spec(LIBRARIES[name]) is None, reason=f"{name} is not installed"
            ),
        )
        for name in FORMS
    ],
)
ODD = ['a"b\\', "tab\there", "two\nlines\r", "é中\u2028\u202e", "<script>", "'; drop table", "\\N", "\\."]


@pytest.fixture
def vectors(tmp_path: Path) -> VectorSet:
    """p0 to p99 and some hostile ids, in four parts."""
    case = Case(tmp_path, {"dtype": "fp16"})
    odd = pa.table({"product_id": ODD, "title": ["phone"] * len(ODD)})
    return case.embed(write_catalogue(tmp_path / "in", [products(range(50)), odd, products(range(50, 100))]))


def read_back(folder: Path, form: str) -> dict[Any, Float32s]:
    """Every vector by its id, as the tool reads them; asserts that each id is there once."""
    ids, rows = list[Any](), list[Any]()
    match form:
        case "npy":
            found = open_vectors(str(folder))
            ids, rows = found.ids.to_pylist(), list(found.vectors)
        case "faiss":
            import faiss

            shards = faiss.IndexShards(faiss.read_index(str(min(folder.glob("*.faiss")))).d, False, True)
            held = [faiss.read_index(str(path)) for path in sorted(folder.glob("*.faiss"))]
            for one in held:
                shards.add_shard(one)
            rows = [row for one in held for row in one.reconstruct_n(0, one.ntotal)]
            ids = pa.ipc.open_file(pa.memory_map(str(folder / IDS))).read_all()["id"].to_pylist()
            best = shards.search(np.stack(rows)[:20], 1)[1][:, 0]
            assert np.allclose(np.stack(rows)[best], np.stack(rows)[:20], atol=1e-2), "numbers count over all shards"
        case "usearch":
            from usearch.index import Index

            ids = pa.ipc.open_file(pa.memory_map(str(folder / IDS))).read_all()["id"].to_pylist()
            for path in sorted(folder.glob("*.usearch")):
                index = Index.restore(str(path), view=True)
                assert index is not None
                assert sorted(index.keys) == list(range(len(rows), len(rows) + len(index)))
                rows += list(np.asarray(index.get(np.sort(np.asarray(index.keys)))))
        case "lance":
            import lance

            table = lance.dataset(str(folder / "vectors.lance")).to_table()
            ids, rows = table["id"].to_pylist(), table["vector"].to_pylist()
        case "opensearch-bulk":
            for path in sorted(folder.glob("*.ndjson")):
                lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
                assert [one["index"]["_id"] for one in lines[::2]] == [str(one["id"]) for one in lines[1::2]]
                ids += [one["id"] for one in lines[1::2]]
                rows += [one["vector"] for one in lines[1::2]]
        case "pgvector-copy":
            for path in sorted(folder.glob("*.copy")):
                for line in path.read_bytes().decode().split("\n")[:-1]:
                    name, numbers = line.split("\t")
                    escapes = (("\\t", "\t"), ("\\n", "\n"), ("\\r", "\r"), ("\\\\", "\\"))
                    parts = name.split("\\\\")  # an escaped backslash escapes nothing
                    for escape, char in escapes[:3]:
                        parts = [part.replace(escape, char) for part in parts]
                    ids.append("\\".join(parts))
                    rows.append(json.loads(numbers))
    assert len(ids) == len(set(ids)) == len(rows)
    return {one: np.asarray(row, dtype=np.float32) for one, row in zip(ids, rows, strict=True)}


def check_all(folder: Path, form: str, vectors: VectorSet) -> None:
    wanted, found = rows_of(vectors), read_back(folder, form)
    assert found.keys() == wanted.keys()
    for name, row in wanted.items():
        np.testing.assert_allclose(found[name], row, atol=2e-3 if form == "usearch" else 1e-6)


@EACH
def test_all_rows_are_there_once(vectors: VectorSet, tmp_path: Path, form: str) -> None:
    done, fresh = hand_over(vectors, open_form(form, vectors), tmp_path / "out", STOP)
    assert fresh and done.fields["rows"] == 108
    check_all(tmp_path / "out", form, vectors)
    verify_dir(open_storage(str(tmp_path)), "out", deep=True)
    assert hand_over(vectors, open_form(form, vectors), tmp_path / "out", STOP) == (done, False)


@EACH
def test_a_try_that_was_broken_off_goes_on(
    vectors: VectorSet, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the third piece, between a piece and its record, and while it is read back."""
    made, out = open_form(form, vectors), tmp_path / "out"

    def fail_at(piece: int, after: int) -> Callable[..., Iterator[Any]]:
        def rows(vectors: VectorSet, of: Piece) -> Iterator[Any]:
            for number, some in enumerate(real(vectors, of)):
                if of.number == piece and number == after:
                    raise Preempted("enough")
                yield some
            if of.number == piece and after < 0:
                raise Preempted("enough")

        return rows

    real, write = vector_export.rows_of, write_bytes_atomic
    monkeypatch.setattr(vector_export, "rows_of", fail_at(2, -1))
    with pytest.raises(Preempted):
        hand_over(vectors, made, out, STOP)
    monkeypatch.setattr(vector_export, "rows_of", real)
    assert json.loads((out / STATE).read_bytes())["done"] == 2

    def die(path: Path, data: bytes) -> None:
        if json.loads(data).get("done") == 3:
            raise Preempted("enough")
        write(path, data)

    monkeypatch.setattr(vector_export, "write_bytes_atomic", die)
    with pytest.raises(Preempted):
        hand_over(vectors, made, out, STOP)
    monkeypatch.setattr(vector_export, "write_bytes_atomic", write)
    with monkeypatch.context() as broken:
        broken.setattr(made, "check", lambda *given: (_ for _ in ()).throw(Preempted("enough")))
        with pytest.raises(Preempted):
            hand_over(vectors, made, out, STOP)
    assert hand_over(vectors, made, out, STOP)[1]
    check_all(out, form, vectors)


@pytest.mark.fault
@pytest.mark.parametrize("form", [pytest.param("npy", marks=pytest.mark.thorough), "pgvector-copy"])
def test_kill_9_before_any_change_of_a_file(vectors: VectorSet, tmp_path: Path, form: str) -> None:
    for number in count(1, 5):
        out = tmp_path / f"out-{number}"
        code = killed_at(number, partial(hand_over, vectors, open_form(form, vectors), out, STOP))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        hand_over(vectors, open_form(form, vectors), out, STOP)
        check_all(out, form, vectors)
    assert number > 20


@EACH
def test_what_is_damaged_is_found_when_it_is_read_back(vectors: VectorSet, tmp_path: Path, form: str) -> None:
    made, out = open_form(form, vectors), tmp_path / "out"
    hand_over(vectors, made, out, STOP)
    largest = max((path for path in out.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    # usearch has vectors first, and behind them a graph that differs from run to run and is not read back.
    place = 8 if form == "usearch" else len(data) // 2
    assert data[place : place + 40] != bytes(40)
    data[place : place + 40] = bytes(40)
    largest.write_bytes(data)
    piece = vector_export.pieces_of(vectors)
    with pytest.raises((DataError, RuntimeError, OSError)):
        for one in piece:
            made.check(out, one, vector_export.rows_of(vectors, one))


def test_a_folder_of_others_is_left_alone(vectors: VectorSet, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"holds thesis\.txt"):
        hand_over(vectors, open_form("npy", vectors), tmp_path / "mine", STOP)
    hand_over(vectors, open_form("npy", vectors), tmp_path / "out", STOP)
    with pytest.raises(ConfigError, match="another dtype, form"):
        hand_over(vectors, open_form("pgvector-copy", vectors), tmp_path / "out", STOP)


def test_a_library_that_is_missing_is_one_line(vectors: VectorSet, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("faiss", "lance", "usearch.index"):
        monkeypatch.setitem(sys.modules, name, None)
        module = name.partition(".")[0]
        with pytest.raises(ConfigError, match="cannot be imported") as caught:
            open_form(module, vectors)
        assert install_command(module) in caught.value.next_command
    with pytest.raises(ConfigError, match="--format annoy"):
        open_form("annoy", vectors)
    with pytest.raises(ConfigError, match="does not apply to npy"):
        open_form("npy", vectors, "HNSW32")


@pytest.mark.skipif(find_spec("faiss") is None, reason="faiss is not installed")
def test_an_index_that_has_to_be_trained(vectors: VectorSet, tmp_path: Path) -> None:
    for index, reason in (("IVF16,Flat", "has to be trained"), ("Nonsense", "--index Nonsense")):
        with pytest.raises(ConfigError, match=reason):
            open_form("faiss", vectors, index)
    hand_over(vectors, open_form("faiss", vectors, "HNSW8"), tmp_path / "out", STOP)
    check_all(tmp_path / "out", "faiss", vectors)


def test_bulk_requests_stay_below_the_limit(
    vectors: VectorSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.embed.formats.MAX_FILE_BYTES", 2000)
    hand_over(vectors, open_form("opensearch-bulk", vectors), tmp_path / "out", STOP)
    files = sorted((tmp_path / "out").glob("*.ndjson"))
    assert len(files) > 8 and all(path.stat().st_size <= 2000 for path in files)
    check_all(tmp_path / "out", "opensearch-bulk", vectors)


def test_arrays_of_a_cycle(vectors: VectorSet, tmp_path: Path) -> None:
    uri, cache = vectors.storage.uri(vectors.prefix), tmp_path / "cache"
    found = open_vectors(uri, cache)
    assert isinstance(found, MappedVectors) and isinstance(found.vectors, np.memmap) and found.vectors.dtype == "<f2"
    assert (len(found), found.cycle, found.model_digest) == (108, "c1", "model-1")
    assert found.vectors_digest == vectors.manifest.digest and not found.vectors.flags.writeable
    matrix = (cache / vectors.manifest.digest / MATRIX).stat()
    assert len(open_vectors(uri, cache)) == 108
    assert (cache / vectors.manifest.digest / MATRIX).stat() == matrix, "written once"
    for row, name in enumerate(found.ids.to_pylist()):
        np.testing.assert_array_equal(found.vectors[row], rows_of(vectors)[name]) if row % 20 == 0 else None
    (cache / vectors.manifest.digest / MATRIX).unlink()
    assert len(open_vectors(uri, cache)) == 108, "made again"
    for bad in (str(tmp_path / "in"), str(tmp_path / "nowhere")):
        with pytest.raises(DataError, match="holds no finished vectors"):
            open_vectors(bad, cache)


def test_files_that_lie_on_s3_alone_cannot_be_mapped(
    vectors: VectorSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over(vectors, open_form("npy", vectors), tmp_path / "out", STOP)
    with MotoServer("copies") as server:
        lead_to(server.url, monkeypatch)
        copy = open_storage("s3://copies/out")
        for path in (tmp_path / "out").iterdir():
            copy.upload(path, path.name)
        with pytest.raises(ConfigError, match="is on no disk of this machine"):
            open_vectors("s3://copies/out")


def test_the_command(vectors: VectorSet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "export",
        "vectors",
        "c1",
        f"--workspace={tmp_path / 'workspace'}",
        "--format=npy",
        f"--out={tmp_path / 'out'}",
    ]
    assert cli.main(words) == 0
    assert "108 vectors of cycle c1 as npy, every id read back" in capsys.readouterr().out
    assert cli.main(words) == 0 and "done already" in capsys.readouterr().out
    (tmp_path / "out" / MATRIX).rename(tmp_path / "lost")
    assert cli.main(words) == 65 and f"{MATRIX} is missing" in capsys.readouterr().err
    (tmp_path / "lost").rename(tmp_path / "out" / MATRIX)
    assert cli.main([word for word in words if word != "c1"]) == 78
    assert "nothing is served" in capsys.readouterr().err
    assert cli.main([*words[:-1], "--out=s3://bucket/x"]) == 78
    assert cli.main([*words, "--format=torch"]) == 78
    assert cli.main(["export", f"--workspace={tmp_path / 'workspace'}", "--out=x"]) == 78


# A million vectors, in a process of its own.

MILLION, DIM, ROWS_OF_PART = 1_000_000, 64, 62_500


def commit_parts(workspace: Storage, folder: Path, total: int) -> None:
    """`total` random vectors of length one in equal parts, with ids of text."""
    folder.mkdir()
    layout = VectorLayout(format="parquet", dtype="fp16", dim=DIM, id_type="string")
    parts, rows, random = list[PartInfo](), ROWS_OF_PART, np.random.default_rng(1)
    for part in range(total // rows):
        values = random.normal(size=(rows, DIM))
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        ids = [f"product-{part * rows + row:07d}" for row in range(rows)]
        hashes = np.arange(rows, dtype=np.uint64)
        made = PartRows(pa.array(ids), values.astype(np.float16), None, hashes, hashes)
        for name, data in part_files(layout, f"part-{part:05d}", made, {}).items():
            (folder / name).write_bytes(data)
        parts.append(PartInfo(files=(f"part-{part:05d}.parquet",), rows=rows, id_min=ids[0], id_max=ids[-1]))
    fields: dict[str, Any] = {
        "cycle": "c1",
        "generation": 1,
        "plan": "plan",
        "catalogue": "catalogue",
        "model": {"name": "relevance", "place": "checkpoints/c0/step-1", "digest": "model"},
        "made_by": {},
        "layout": layout.model_dump(),
        "rows": total,
        "counts": PartCounts(read=total, embedded=total).model_dump(),
        "reasons": {},
        "carried_from": None,
        "deleted": None,
        "previous": None,
        "parts": [part.model_dump(mode="json") for part in parts],
    }
    commit_dir(workspace, folder, "embeddings/c1", kind="embeddings", fields=fields)


@contextmanager
def export(workspace: Path, form: str, out: Path) -> Iterator[subprocess.Popen[str]]:
    """In a process of its own, which ends with the block, whatever becomes of the test."""
    words = ["export", "vectors", "c1", f"--workspace={workspace}", f"--format={form}", f"--out={out}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", measured(words)], env=env, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def export_peak_mib(workspace: Path, form: str, out: Path) -> int:
    """The most memory that an export held, mapped files and libraries included; asserts that it succeeded."""
    with export(workspace, form, out) as child:
        said = child.communicate()[0]
    assert child.returncode == 0, said
    return peak_mib(said)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@EACH
def test_a_million_vectors_in_bounded_memory(tmp_path: Path, form: str) -> None:
    """Killed half way and run again; it holds little more than for one part (all: 128 MB of fp16)."""
    few, many, out = tmp_path / "few", tmp_path / "many", tmp_path / "out"
    commit_parts(open_storage(str(few)), tmp_path / "part", ROWS_OF_PART)
    commit_parts(open_storage(str(many)), tmp_path / "parts", MILLION)
    least = export_peak_mib(few, form, tmp_path / "out-few")
    state = out / STATE
    with export(many, form, out) as child:
        while child.poll() is None and not (state.exists() and json.loads(state.read_bytes())["done"] >= 5):
            time.sleep(0.02)
    peak = export_peak_mib(many, form, out)
    print(f"{form}: peak {peak} MiB of {MILLION:,} vectors, {least} MiB of {ROWS_OF_PART:,}")
    assert peak < least + 120
    assert ids_of(out, form, open_committed(open_storage(str(many)), "c1")) == MILLION


def ids_of(folder: Path, form: str, vectors: VectorSet) -> int:
    """How many ids the tool has; asserts that they are those of the vectors, in their order."""
    if form in ("opensearch-bulk", "pgvector-copy"):
        suffix, number = ("ndjson", 0) if form == "opensearch-bulk" else ("copy", 0)
        for path in sorted(folder.glob(f"*.{suffix}")):
            with path.open("rb") as file:
                lines = file if suffix == "copy" else (line for turn, line in enumerate(file) if turn % 2)
                for line in lines:
                    assert f"product-{number:07d}".encode() in line[:24]
                    number += 1
        return number
    if form == "lance":
        import lance

        ids = lance.dataset(str(folder / "vectors.lance")).to_table(columns=["id"])["id"].to_pylist()
    else:
        ids = pa.ipc.open_file(pa.memory_map(str(folder / IDS))).read_all()["id"].to_pylist()
    assert ids == [f"product-{number:07d}" for number in range(MILLION)]
    return len(ids)
