"""Input and workspace on S3 (moto): the same token sets as on local disk, and reuse by ETag."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, SyntheticConfig, TokenizerConfig
from pipeline.data.prepare import prepare
from pipeline.data.sources import open_source
from pipeline.data.synthetic import generate
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
