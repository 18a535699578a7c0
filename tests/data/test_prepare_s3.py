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
from pipeline.data.sources import open_source
from pipeline.data.synthetic import generate, partitions
from pipeline.io.commit import verify_dir
from pipeline.io.storage import open_storage
from tests.kit.s3 import MotoServer, lead_to


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with MotoServer("data-tests") as server:
        lead_to(server.url, monkeypatch)
        yield server.client


@pytest.mark.stage
def test_same_as_local_by_an_array_of_workers_as_well(
    bucket: Any, workplace: Callable[[str], Any], tmp_path: Path
) -> None:
    made = SyntheticConfig(num_queries=30, num_days=2)
    for name in partitions(made):
        file = tmp_path / "in" / name / "a.parquet"
        file.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_batches(generate(made, name)), file)
        bucket.upload_file(str(file), "data-tests", f"in/{name}/a.parquet")
    config = DataConfig(path="s3://data-tests/in", num_workers=1, tokenizer=TokenizerConfig(vocab_size=300), workers=2)
    stop = StopSignal()
    storage = open_storage("s3://data-tests/workspace", stop=stop)

    def run(worker: int) -> Any:
        scratch = tmp_path / f"scratch-{worker}"
        return prepare(config, storage, scratch=scratch, worker=worker, events=lambda _, /, **__: None, stop=stop)

    one_file = config.model_copy(update={"path": "s3://data-tests/in/dt=2026-01-01/a.parquet"})
    assert [part.name for part in open_source(one_file, scratch=tmp_path, stop=stop).partitions] == ["flat"]
    first, second, again = run(1), run(0), run(0)
    assert [(one.prepared, one.reused, one.missing) for one in (first, second, again)] == [
        (1, 0, 1),
        (1, 1, 0),
        (0, 2, 0),
    ]
    place = workplace("local")
    local = place.prepare(config.model_copy(update={"path": str(tmp_path / "in"), "workers": 1}))
    assert local.rows == second.rows == 720
    for remote, prefix in zip(second.token_set_prefixes, local.token_set_prefixes, strict=True):
        verify_dir(storage, remote, deep=True)
        shards = {key: data for key, data in place.bytes_of(prefix).items() if key.endswith(".safetensors")}
        assert {key: storage.read_bytes(f"{remote}/{key}") for key in shards} == shards


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
