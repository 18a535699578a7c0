"""Input and workspace on S3 (moto): the same token sets as on local disk, and reuse by ETag."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, SyntheticConfig, TokenizerConfig
from pipeline.data.prepare import prepare
from pipeline.data.shared_prepare import prepare_share
from pipeline.data.sources import open_source
from pipeline.data.synthetic import generate, partitions
from pipeline.io.commit import verify_dir
from pipeline.io.storage import open_storage
from tests.s3 import MotoServer, lead_to


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with MotoServer("data-tests") as server:
        lead_to(server.url, monkeypatch)
        yield server.client


@pytest.mark.stage
def test_same_as_local(bucket: Any, workplace: Callable[[str], Any], tmp_path: Path) -> None:
    name = "in/dt=2026-01-01/a.parquet"
    local = tmp_path / name
    local.parent.mkdir(parents=True)
    rows = generate(SyntheticConfig(num_queries=30), "dt=2026-01-01")
    pq.write_table(pa.Table.from_batches(rows), local)
    bucket.upload_file(str(local), "data-tests", name)
    config = DataConfig(path="s3://data-tests/in", num_workers=1, tokenizer=TokenizerConfig(vocab_size=300))
    stop = StopSignal()
    storage = open_storage("s3://data-tests/workspace", stop=stop)

    def run() -> Any:
        return prepare(config, storage, scratch=tmp_path / "scratch", events=lambda name, /, **fields: None, stop=stop)

    one_file = config.model_copy(update={"path": f"s3://data-tests/{name}"})
    assert [part.name for part in open_source(one_file, scratch=tmp_path, stop=stop).partitions] == ["flat"]
    first, second = run(), run()
    assert (first.prepared, second.prepared, second.reused) == (1, 0, 1)
    verify_dir(storage, first.token_set_prefixes[0], deep=True)
    place = workplace("local")
    beside = place.prepare(config.model_copy(update={"path": str(tmp_path / "in")}))
    assert beside.rows == first.rows == 360
    for key, data in place.bytes_of(beside.token_set_prefixes[0]).items():
        if key.endswith(".safetensors"):
            assert storage.read_bytes(f"{first.token_set_prefixes[0]}/{key}") == data


@pytest.mark.stage
def test_an_array_of_workers_makes_the_same(bucket: Any, workplace: Callable[[str], Any], tmp_path: Path) -> None:
    """Their parts meet in the bucket: survey, tokenizer and shards, each by whoever has it to do."""
    settings = SyntheticConfig(num_queries=30, num_days=2)
    for name in partitions(settings):
        table = pa.Table.from_batches(generate(settings, name))
        for number, part in enumerate((table.slice(0, 200), table.slice(200))):
            file = tmp_path / "array" / name / f"{number}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(part, file)
            bucket.upload_file(str(file), "data-tests", f"array/{name}/{number}.parquet")
    config = DataConfig(
        path="s3://data-tests/array", num_workers=1, rows_per_chunk=100, tokenizer=TokenizerConfig(vocab_size=300)
    )
    stop = StopSignal()
    storage = open_storage("s3://data-tests/array-workspace", stop=stop)
    results = [
        prepare_share(
            config,
            storage,
            worker=worker,
            workers=3,
            scratch=tmp_path / f"scratch-{worker}",
            events=lambda name, /, **fields: None,
            stop=stop,
        )
        for worker in (2, 0, 1)
    ]
    assert all(isinstance(result, int) for result in results[:-1])
    shared: Any = results[-1]
    place = workplace("local")
    alone = place.prepare(config.model_copy(update={"path": str(tmp_path / "array")}))
    assert (shared.rows, shared.prepared) == (alone.rows, 2)
    for theirs, ours in zip(shared.token_set_prefixes, alone.token_set_prefixes, strict=True):
        verify_dir(storage, theirs, deep=True)
        shards = {key: data for key, data in place.bytes_of(ours).items() if key.endswith(".safetensors")}
        assert len(shards) > 4
        for key, data in shards.items():
            assert storage.read_bytes(f"{theirs}/{key}") == data


@pytest.mark.stage
def test_an_object_changed_since_it_was_listed_is_not_read(bucket: Any, tmp_path: Path) -> None:
    lines = "q,t,yes\n" * 300
    bucket.put_object(Bucket="data-tests", Key="changed/a.csv", Body=f"query,title,label\n{lines}".encode())
    config = DataConfig(path="s3://data-tests/changed", rows_per_chunk=100)
    source = open_source(config, scratch=tmp_path, stop=StopSignal())
    (file,) = source.partitions[0].files
    assert sum(batch.num_rows for batch in source.read(file)) == 300
    bucket.put_object(Bucket="data-tests", Key="changed/a.csv", Body=f"query,title,label\n{lines}q,t,no\n".encode())
    with pytest.raises(TransientError, match=r"a\.csv was changed while it was read"):
        next(source.read(file))
    bucket.delete_object(Bucket="data-tests", Key="changed/a.csv")
    with pytest.raises(TransientError, match="is gone since it was listed"):
        next(source.read(file))
