"""Token shards: any row by number, in the order asked for, widened to a larger bucket."""

import errno
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import ConfigError, DataError
from pipeline.data.shards import FIELDS, ShardFile, TokenRows, map_safetensors
from tests.train.rows import BUCKETS, PAD, make_rows, write_shard


def test_a_map_holds_what_safetensors_wrote(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    path = write_shard(tmp_path / "a.safetensors", (3, 2), 1).path
    mapped, loaded = map_safetensors(path), load_file(path)
    assert mapped.keys() == loaded.keys()
    for name, values in loaded.items():
        assert mapped[name].dtype == values.dtype
        np.testing.assert_array_equal(mapped[name], values)
    with pytest.raises(ValueError, match="read-only"):
        mapped["b0.query"][0, 0] = 1


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    """Sample ids count up in shard, bucket and row order; the second shard has no row of bucket 0."""
    return make_rows(tmp_path_factory.mktemp("shards"), [(3, 2), (0, 4), (5, 1)])


def sample_id(pool: int, row: int) -> int:
    by_pool = {0: [1, 2, 3, 10, 11, 12, 13, 14], 1: [4, 5, 6, 7, 8, 9, 15]}
    return by_pool[pool][row]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6)), min_size=1, max_size=12))
def test_rows_come_in_the_order_asked_for(rows: TokenRows, wanted: list[tuple[int, int]]) -> None:
    pools, numbers = (np.array(values) for values in zip(*wanted, strict=True))
    seen = rows.read(pools, numbers, 1)
    assert tuple(seen) == FIELDS
    assert seen["sample_id"].tolist() == [sample_id(p, r) for p, r in wanted]
    assert seen["query"].shape == (len(wanted), 6) and seen["product"].shape == (len(wanted), 8)
    assert seen["query"].dtype == seen["product"].dtype == np.int32
    for index, (pool, number) in enumerate(wanted):
        own = rows.read(pools[index : index + 1], numbers[index : index + 1], pool)
        for side in ("query", "product"):
            width = own[side].shape[1]
            np.testing.assert_array_equal(seen[side][index, :width], own[side][0])
            assert (seen[side][index, width:] == PAD).all()
        for name in ("label", "gain", "numeric", "categorical", "query_id"):
            np.testing.assert_array_equal(seen[name][index], own[name][0])
        assert number < rows.sizes[pool]


def test_the_partition_of_each_row(tmp_path: Path) -> None:
    files = [write_shard(tmp_path / f"{n}.safetensors", (2, 1), 10 * n) for n in range(2)]
    numbered = [ShardFile(file.path, file.rows, partition=7 + n) for n, file in enumerate(files)]
    found = TokenRows(numbered, BUCKETS, PAD, ("partition",))
    assert found.read(np.array([0, 0, 1]), np.array([3, 0, 1]), 1)["partition"].tolist() == [8, 7, 8]
    with pytest.raises(DataError, match=r"b0\.slice"):
        TokenRows(files, BUCKETS, PAD, ("slice",)).read(np.array([0]), np.array([0]), 0)


UNKNOWN_TYPE = b'{"b0.query": {"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}}'
BROKEN = [b"", b"\x01\x02", struct.pack("<Q", 10**6) + b"{}", struct.pack("<Q", 2) + b"no"]


@pytest.mark.parametrize("content", [*BROKEN, struct.pack("<Q", len(UNKNOWN_TYPE)) + UNKNOWN_TYPE + b"\0", "cut", None])
def test_a_broken_cut_or_missing_shard_is_a_data_error_that_names_it(
    tmp_path: Path, content: bytes | str | None
) -> None:
    path = write_shard(tmp_path / "broken.safetensors", (50, 0), 1).path
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"broken\.safetensors cannot be read"):
        TokenRows([ShardFile(path, (1, 0))], BUCKETS, PAD).read(np.array([0]), np.array([0]), 0)


def test_a_shard_with_other_rows_than_its_partition_says_is_a_data_error(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.safetensors", (5, 0), 1).path
    for claimed in ((6, 0), (5, 1)):
        with pytest.raises(DataError, match="cannot be read"):
            TokenRows([ShardFile(path, claimed)], BUCKETS, PAD).read(np.array([0]), np.array([0]), 0)


def test_too_many_open_files_are_no_damaged_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(tmp_path, [(3, 2), (1, 1)])

    def refused(path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    rows.read(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), 0)
    monkeypatch.setattr("pipeline.data.shards.map_safetensors", refused)
    with pytest.raises(ConfigError, match=r"too many open files after opening 1 of 2 token shards") as caught:
        rows.read(np.zeros(1, dtype=np.int64), np.full(1, 3), 0)
    assert caught.value.next_command.startswith("ulimit -n")


def test_selected_rows_are_numbered_anew(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(5, 3), (0, 4), (6, 0)])
    kept = [np.array([0, 4, 5, 10]), np.array([2, 6])]
    some = rows.select(kept)
    assert some.sizes == (4, 2) and some.pad_id == rows.pad_id and rows.sizes == (11, 7)
    ids = [part["sample_id"].tolist() for part in some.read_blocks(("sample_id",))]
    every = [part["sample_id"] for part in rows.read_blocks(("sample_id",))]
    assert ids == [part[chosen].tolist() for part, chosen in zip(every, kept, strict=True)]
    pools, numbers = np.array([1, 0, 0]), np.array([1, 3, 0])
    read, plain = some.read(pools, numbers, 1), rows.read(pools, np.array([6, 10, 0]), 1)
    assert read.keys() == plain.keys() and all((read[name] == plain[name]).all() for name in read)
    none = rows.select([np.zeros(0, dtype=np.int64)] * 2)
    assert none.sizes == (0, 0) and list(none.read_blocks(("gain",))) == []
