"""Embedding with all of it on S3, behind a proxy that throttles, breaks off and loses answers."""

from pathlib import Path

import pyarrow as pa
import pytest

from pipeline import cli
from pipeline.embed.vectors import find_vectors
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage, open_storage
from tests.embed.catalogues import products, rows_of, write_catalogue
from tests.embed.checkpoints import make_checkpoint
from tests.io.conftest import Fault, Proxy, proxy
from tests.kit.storages import FAST

__all__ = ["proxy"]  # a fixture

ROWS = 150
PATIENT = ("--storage.first-wait-s=0.01", "--storage.max-wait-s=0.02", "--storage.total-deadline-s=60")
HASTY = ("--storage.first-wait-s=0.01", "--storage.max-wait-s=0.02", "--storage.total-deadline-s=0.2")


@pytest.fixture
def s3(proxy: Proxy, s3_uri: str, tmp_path: Path) -> Storage:
    """A workspace with a promoted model; the catalogue lies beside it."""
    storage = open_storage(s3_uri, retry=FAST)
    make_checkpoint(storage, tmp_path)
    folder = write_catalogue(tmp_path / "in", [products(range(60)), products(range(60, ROWS))], group_rows=1000)
    for path in folder.iterdir():
        storage.write_bytes(f"in/{path.name}", path.read_bytes())
    return storage


def embed(storage: Storage, tmp_path: Path, *words: str, cycle: str = "c1") -> int:
    flags = [f"--workspace={storage.root}", f"--cycle={cycle}", f"--embed.catalogue.path={storage.root}/in"]
    flags += [f"--scratch={tmp_path}/scratch", "--backend=cpu", "--data.num-workers=1"]
    return cli.main(["embed", *flags, "--embed.output.rows-per-part=45", "--embed.output.carry-over=none", *words])


def tables(storage: Storage, cycle: str) -> list[pa.Table]:
    """All parts, without what they say of their plan."""
    vectors = find_vectors(storage, cycle)
    names = vectors.schema(0).names
    parts = range(len(vectors.info.parts))
    return [vectors.columns(part, names).replace_schema_metadata() for part in parts]


def parts_put(proxy: Proxy) -> list[str]:
    return [path for method, path in proxy.seen if method == "PUT" and "/embeddings/" in path and "/part-" in path]


def test_throttling_broken_bodies_and_lost_answers(s3: Storage, proxy: Proxy, tmp_path: Path) -> None:
    proxy.faults = [
        Fault("slow_down", "GET", "/in/", times=3),
        Fault("cut", "GET", "/in/", times=3),
        Fault("lost", "HEAD", "/in/", times=2),
        Fault("slow_down", "PUT", "/part-00000", times=2),
        Fault("lost", "PUT", "/part-00001", times=2),
        Fault("conflict", "PUT", "/part-00002", times=2),
        Fault("lost", "PUT", "/embed/parts-", times=2),
        Fault("slow_down", "PUT", "MANIFEST.json", times=2),
        Fault("lost", "PUT", "MANIFEST.json", times=1),
        Fault("cut", "GET", "/embed/", times=3),
        Fault("slow_down", "GET", "list-type=2", times=2),
    ]
    assert embed(s3, tmp_path, *PATIENT) == 0
    assert all(fault.hits == fault.times for fault in proxy.faults), proxy.faults
    verify_dir(s3, "embeddings/c1", deep=True)
    assert rows_of(find_vectors(s3, "c1")).keys() == {f"p{n}" for n in range(ROWS)}
    names = [stat.key.rpartition("/")[2] for stat in s3.list("embeddings/c1")]
    parts = [f"part-{number:05d}.parquet" for number in range(4)]
    assert names == ["MANIFEST.json", *parts, "quarantine.jsonl"], "no part twice"
    proxy.faults, proxy.seen = [], []
    assert embed(s3, tmp_path, *PATIENT, cycle="c2") == 0
    assert tables(s3, "c1") == tables(s3, "c2"), "as if nothing had happened"
    assert len(parts_put(proxy)) == len(parts), "one request a part"


@pytest.mark.parametrize(
    ("method", "part", "after"),
    [
        ("PUT", "/part-00002", 2),
        pytest.param("GET", "/in/file-1", 0, marks=pytest.mark.thorough),
        pytest.param("PUT", "MANIFEST.json", 4, marks=pytest.mark.thorough),
    ],
)
def test_beyond_the_retry_budget_it_ends_with_75_and_goes_on_later(
    s3: Storage, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, part: str, after: int
) -> None:
    proxy.faults = [Fault("slow_down", method, part, times=100_000)]
    assert embed(s3, tmp_path, *HASTY) == 75
    err = capsys.readouterr().err
    assert "SlowDown, HTTP 503" in err and "Traceback" not in err
    assert not s3.stat("embeddings/c1/MANIFEST.json")
    proxy.faults, proxy.seen = [], []
    assert embed(s3, tmp_path, *PATIENT) == 0
    assert f"{after} done" in capsys.readouterr().out
    assert len(parts_put(proxy)) == 4 - after
    assert rows_of(find_vectors(s3, "c1")).keys() == {f"p{n}" for n in range(ROWS)}
