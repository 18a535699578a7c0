"""Slices and samples of a holdout, and which slices are judged."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63
from pipeline.data.token_sets import SliceInfo, TokenSet, read_token_sets
from pipeline.data.validate import NO_VALUE
from pipeline.evaluate.holdout import Holdout, HoldoutOrder, judged_slices, open_holdout
from pipeline.evaluate.metrics.scored_rows import ScoredRows, SliceColumn
from pipeline.io.storage import open_storage
from tests.data.test_token_sets import commit
from tests.train.rows import make_rows, token_set_info


def token_set(name: str, *names: str) -> TokenSet:
    slices = (SliceInfo(column="kind", names=names),) if names else ()
    made = token_set_info(name).model_copy(update={"slices": slices})
    return TokenSet(f"tokens/{name}", made)


@pytest.fixture
def holdout(tmp_path: Path) -> Holdout:
    rows = make_rows(tmp_path, [(13, 6), (4, 9)])
    order = HoldoutOrder((np.arange(0, 17, 2), np.arange(15)))
    return Holdout("test", [token_set("d1", "b", "c"), token_set("d2", "a", "b")], rows, order, 0)


def test_an_empty_holdout_is_a_data_error(tmp_path: Path) -> None:
    workspace = open_storage(str(tmp_path / "workspace"))
    sets = read_token_sets(workspace, [commit(workspace, tmp_path, day) for day in (1, 2)])
    with pytest.raises(DataError, match="the test split is empty in 2 prepared partition") as caught:
        open_holdout(workspace, sets, "test", tmp_path / "cache", 0)
    assert "--data.test-fraction" in caught.value.next_command
    assert open_holdout(workspace, sets, "train", tmp_path / "cache", 0).order.total == 13


def test_slices_of_all_partitions(holdout: Holdout) -> None:
    arrays = {
        "slice": np.array([[hash63("b")], [NO_VALUE], [hash63("a")], [hash63("c")]]),
        "partition": np.array([0, 0, 1, 1]),
        "query_tokens": np.array([3, 6, 7, 40], dtype=np.int32),
    }
    found = holdout.slices(arrays)
    assert found["kind"].names == ("a", "b", "c")
    assert found["kind"].codes.tolist() == [1, -1, 0, 2]
    assert (found["partition"].names, found["partition"].codes.tolist()) == (("d1", "d2"), [0, 0, 1, 1])
    lengths = found["query_tokens"]
    assert (lengths.names, lengths.codes.tolist()) == (("1-4", "5-8", "9-16", "17+"), [0, 0, 1, 3])


def test_columns_of_the_data_keep_their_names_beside_ours(holdout: Holdout) -> None:
    info = token_set_info("d1").model_copy(
        update={"slices": tuple(SliceInfo(column=name, names=("b", "c")) for name in ("partition", "query_tokens"))}
    )
    both = tuple(TokenSet(f"tokens/{day}", info.model_copy(update={"partition": day})) for day in ("d1", "d2"))
    arrays = {
        "slice": np.array([[hash63("b"), hash63("c")], [hash63("c"), hash63("c")], [hash63("b"), hash63("b")]]),
        "partition": np.array([0, 0, 1]),
        "query_tokens": np.array([3, 6, 40], dtype=np.int32),
    }
    found = replace(holdout, sets=both).slices(arrays)
    assert (found["partition"].names, found["query_tokens"].names) == (("b", "c"), ("b", "c"))
    assert found["trnpipe.partition"].codes.tolist() == [0, 0, 1]
    assert found["trnpipe.query_tokens"].names == ("1-4", "5-8", "9-16", "17+")
    age = SliceColumn(np.array([0, 1, 1]), ("16-25", "26+"))
    judged = judged_slices(rows_with(age=age, **found), {"d2"}).slices
    assert set(judged) == {"age", "trnpipe.age", "partition", "query_tokens", "trnpipe.query_tokens"}
    assert judged["age"] is age and judged["partition"] is found["partition"]
    assert judged["trnpipe.age"].codes.tolist() == [1, 1, 0]


def test_its_name_tells_what_is_scored(holdout: Holdout) -> None:
    assert holdout.name == Holdout("test", holdout.sets, holdout.rows, holdout.order, 0).name
    others = [
        Holdout("valid", holdout.sets, holdout.rows, holdout.order, 0),
        Holdout("test", holdout.sets[:1], holdout.rows, holdout.order, 0),
        Holdout("test", holdout.sets, holdout.rows, holdout.order, 5),
    ]
    assert len({holdout.name, *(other.name for other in others)}) == 4


def rows_with(**slices: SliceColumn) -> ScoredRows:
    return ScoredRows(
        np.arange(3),
        np.zeros(3, dtype=np.int64),
        np.zeros(3),
        np.full((3, 2), 0.5),
        ("a", "b"),
        (0.0, 1.0),
        slices,
    )


def test_partitions_are_judged_as_new_and_old() -> None:
    partitions = SliceColumn(np.array([0, 1, 2]), ("d1", "d2", "d3"))
    found = judged_slices(rows_with(partition=partitions), {"d3"}).slices
    assert list(found) == ["age"]
    assert (found["age"].names, found["age"].codes.tolist()) == (("new", "old"), [1, 1, 0])
    assert judged_slices(rows_with(partition=partitions), {"d1", "d2", "d3"}).slices == {}


def test_a_column_that_tells_nothing_apart_is_not_judged() -> None:
    one = SliceColumn(np.zeros(3, dtype=np.int64), ("only",))
    some = SliceColumn(np.array([0, -1, 0]), ("only",))
    assert list(judged_slices(rows_with(one=one, some=some), ()).slices) == ["some"]
