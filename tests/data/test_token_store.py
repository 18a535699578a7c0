"""Prepared partitions opened for reading."""

from pathlib import Path

import pytest
from pydantic import JsonValue

from pipeline.core.errors import ConfigError, DataError
from pipeline.data.token_sets import open_rows, read_token_sets
from pipeline.io.commit import commit_dir
from pipeline.io.storage import Storage, open_storage
from tests.train.rows import write_token_set


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "workspace"))


def commit(workspace: Storage, tmp_path: Path, day: int, *, kind: str = "tokens", **changes: JsonValue) -> str:
    """A partition with 3 + day training rows of bucket 0 and 2 of bucket 1, and no validation rows."""
    folder = tmp_path / f"staging-{day}"
    folder.mkdir()
    partition = f"dt=2026-01-0{day}"
    info = write_token_set(
        folder, {"train": (3 + day, 2)}, partition=partition, fingerprint=f"print-{partition}", first_id=100 * day + 1
    )
    prefix = f"tokens/d/{info.fingerprint}"
    commit_dir(workspace, folder, prefix, kind=kind, fields={**info.model_dump(mode="json"), **changes})
    return prefix


def test_rows_of_all_partitions_in_their_order(workspace: Storage, tmp_path: Path) -> None:
    sets = read_token_sets(workspace, [commit(workspace, tmp_path, day) for day in (2, 1)])
    assert [s.partition.name for s in sets] == ["dt=2026-01-02", "dt=2026-01-01"]
    assert sets[0].partition.watermark == "2026-01-02"
    assert open_rows(workspace, sets, "train", tmp_path / "cache").sizes == (5 + 4, 4)
    assert open_rows(workspace, sets, "valid", tmp_path / "cache").sizes == (0, 0)


def test_what_is_not_committed_is_a_data_error(workspace: Storage, tmp_path: Path) -> None:
    prefix = commit(workspace, tmp_path, 1)
    workspace.delete([f"{prefix}/MANIFEST.json"])
    with pytest.raises(DataError, match=f"{prefix} holds no prepared data"):
        read_token_sets(workspace, [prefix])
    with pytest.raises(DataError, match="no prepared partition"):
        read_token_sets(workspace, [])


def test_a_folder_of_another_kind_or_version_is_a_data_error(workspace: Storage, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no prepared data"):
        read_token_sets(workspace, [commit(workspace, tmp_path, 1, kind="tokenizer")])
    with pytest.raises(DataError, match="another version"):
        read_token_sets(workspace, [commit(workspace, tmp_path, 2, surprise=1)])


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokenizer_fingerprint", "other"), ("buckets", ["4x6", "8x8"]), ("labels", ["x", "y"]), ("pad_id", 3)],
)
def test_partitions_that_do_not_fit_together_are_named(
    workspace: Storage, tmp_path: Path, name: str, value: JsonValue
) -> None:
    prefixes = [commit(workspace, tmp_path, 1), commit(workspace, tmp_path, 2, kind="tokens", **{name: value})]
    with pytest.raises(ConfigError, match=rf"dt=2026-01-02 was prepared with {name}"):
        read_token_sets(workspace, prefixes)


def test_a_shard_of_another_size_is_a_data_error(workspace: Storage, tmp_path: Path) -> None:
    sets = read_token_sets(workspace, [commit(workspace, tmp_path, 1)])
    path = workspace.local_path(f"{sets[0].prefix}/train.safetensors")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train\.safetensors has \d+ bytes"):
        open_rows(workspace, sets, "train", tmp_path / "cache")
