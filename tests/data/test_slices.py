"""Slice columns: values by hash with their names beside, the same however the rows are cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63
from pipeline.data.validate import MAX_NAMES, NO_VALUE, codes_of, merge_names, slice_rows

CELLS = st.lists(st.one_of(st.none(), st.binary(max_size=3), st.sampled_from([b" a ", b"b", b"\xff"])), max_size=20)


@given(CELLS, st.integers(0, 20))
def test_codes_name_the_values_however_rows_are_cut(cells: list[bytes | None], cut: int) -> None:
    parts = [slice_rows({"kind": part}, range(len(part))) for part in (cells[:cut], cells[cut:])]
    names = merge_names(part.names for part in parts)["kind"]
    codes = codes_of(np.concatenate([part.values[:, 0] for part in parts]), names)
    texts = [(cell or b"").decode("utf-8", "backslashreplace").strip() for cell in cells]
    assert [names[code] if code >= 0 else "" for code in codes] == texts
    assert list(names) == sorted({text for text in texts if text})


def test_a_column_with_too_many_values_is_refused() -> None:
    with pytest.raises(DataError, match=f"column 'id' has over {MAX_NAMES} different values"):
        merge_names([{"id": [str(i) for i in range(600)]}, {"id": [str(i) for i in range(600, 1100)]}])


def test_a_value_without_a_name_is_refused() -> None:
    with pytest.raises(DataError, match="does not name"):
        codes_of(np.array([hash63("x")]), ("y",))
    with pytest.raises(DataError, match="does not name"):
        codes_of(np.array([5]), ())
    assert codes_of(np.array([NO_VALUE]), ()).tolist() == [-1]
