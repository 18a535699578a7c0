"""Committed negatives: what is read is what was written, and only for the data they were mined from."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.io.storage import Storage, open_storage
from pipeline.mine.store import (
    Negatives,
    NegativeSet,
    NegativesInfo,
    check_negatives,
    commit_negatives,
    find_negatives,
    open_negatives,
)

INFO = NegativesInfo(
    dataset="d", token_sets=("one", "two"), rows=(7, 3), source="bm25", settings={"depth": 5}, figures={"queries": 2}
)
MINED = Negatives(np.array([4, 9]), np.array([[3, 8, -1], [0, -1, -1]]))


def commit(tmp_path: Path, mined: Negatives = MINED) -> tuple[Storage, NegativeSet]:
    storage = open_storage(str(tmp_path / "workspace"))
    return storage, commit_negatives(storage, "negatives/d/x", mined, INFO, tmp_path / "staged")


def test_they_are_read_as_written(tmp_path: Path) -> None:
    storage, made = commit(tmp_path)
    assert find_negatives(storage, "negatives/d/y") is None
    assert find_negatives(storage, "negatives/d/x") == made and made.info == INFO
    found = open_negatives(storage, made, (7, 3), tmp_path / "cache")
    assert isinstance(found.query_id, np.memmap) and isinstance(found.product, np.memmap)
    np.testing.assert_array_equal(found.query_id, MINED.query_id)
    np.testing.assert_array_equal(found.product, MINED.product)


def test_a_worker_that_dies_while_it_commits_again_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, made = commit(tmp_path)
    monkeypatch.setattr(type(storage), "write_bytes", lambda *_, **__: pytest.fail("killed before the manifest"))
    with pytest.raises(pytest.fail.Exception, match="killed"):
        commit(tmp_path)
    assert find_negatives(storage, "negatives/d/x") == made


def test_those_of_other_data_are_refused(tmp_path: Path) -> None:
    storage, made = commit(tmp_path)
    check_negatives(made, ["one", "two"], storage)
    for sets in (["one", "three"], ["one", "two", "three"], ["two", "one"], ["one"]):
        with pytest.raises(DataError) as caught:
            check_negatives(made, sets, storage)
        assert caught.value.next_command.startswith("trnpipe mine")
    with pytest.raises(DataError, match=r"\(7, 3\)"):
        open_negatives(storage, made, (7, 4), tmp_path / "cache")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    storage, made = commit(tmp_path)
    path = tmp_path / "workspace/negatives/d/x/product.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"product\.npy"):
        open_negatives(storage, made, (7, 3), tmp_path / "cache")
