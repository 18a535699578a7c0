"""Parts that several workers commit: whole or not there, each once, and only those of the same work."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError, TransientError
from pipeline.io.commit import hash_bytes
from pipeline.io.parts import Part, Parts
from pipeline.io.storage import Storage


class Counted(Part):
    rows: int


def parts(storage: Storage, **options: Any) -> Parts[Counted]:
    def names(index: int) -> tuple[str, str]:
        return f"{index}.npy", f"{index}.ids"

    return Parts(storage, records="work/parts-1", files="out", kind=Counted, names=names, **options)


def files(index: int, text: bytes = b"") -> dict[str, bytes]:
    return {f"{index}.npy": b"vectors" + text, f"{index}.ids": b"ids" + text}


def commit(storage: Storage, index: int, text: bytes = b"", **options: Any) -> Counted:
    return parts(storage, **options).commit(Counted(index=index, rows=index), files(index, text))


def test_what_is_committed_is_found_and_read_back(storage: Storage, tmp_path: Path) -> None:
    store = parts(storage)
    assert store.done() == set()
    for index in (3, 0):
        commit(storage, index)
    assert store.done() == {0, 3}
    assert [part.rows for part in store.read_all([3, 0])] == [3, 0]
    assert [path.read_bytes() for path in store.fetch(3, tmp_path / "cache")] == [b"vectors", b"ids"]
    store.delete()
    assert store.done() == set() and not list(storage.list(""))


def test_the_first_that_is_committed_stays(storage: Storage) -> None:
    first = commit(storage, 0)
    assert commit(storage, 0, b" of another worker") == first
    assert storage.read_bytes("out/0.npy") == b"vectors"


def test_the_record_describes_what_a_dead_worker_has_left(storage: Storage) -> None:
    storage.write_bytes("out/0.npy", b"vectors of the dead")
    storage.write_bytes("out/0.ids", b"ids")
    assert parts(storage).done() == set()
    assert commit(storage, 0).files["0.npy"].xxh3_128 == hash_bytes(b"vectors of the dead")


@pytest.mark.parametrize("last", [b"ids of other work", None])
def test_files_of_other_work_are_replaced(storage: Storage, last: bytes | None) -> None:
    storage.write_bytes("out/0.npy", b"other vectors")
    if last is not None:
        storage.write_bytes("out/0.ids", last)
    commit(storage, 0, is_same_work=lambda data: b"other" not in data)
    assert {name: storage.read_bytes(f"out/{name}") for name in files(0)} == files(0)


def test_a_part_whose_file_was_deleted_is_made_again(storage: Storage, tmp_path: Path) -> None:
    commit(storage, 0)
    storage.delete(["out/0.npy"])
    assert parts(storage).done() == set()
    with pytest.raises(TransientError, match=r"0\.npy"):
        parts(storage).fetch(0, tmp_path)
    made = commit(storage, 0, b" anew", is_same_work=lambda data: False)
    assert parts(storage).done() == {0} and parts(storage).read(0) == made


def test_a_part_that_is_missing_or_damaged_is_named(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(TransientError, match=r"00000\.json"):
        parts(storage).read(0)
    commit(storage, 0)
    storage.write_bytes("out/0.ids", b"idz")
    with pytest.raises(DataError, match=r"0\.ids"):
        parts(storage).fetch(0, tmp_path / "cache")
    storage.write_bytes("work/parts-1/00000.json", b"{}")
    with pytest.raises(DataError, match=r"00000\.json"):
        parts(storage).read(0)


def test_killed_at_any_write_it_is_there_once(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    write = type(storage).write_if_absent
    for survived in range(3):
        left = survived

        def dying(self: Any, *args: Any) -> bool:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            return bool(write(self, *args))

        monkeypatch.setattr(type(storage), "write_if_absent", dying)
        with pytest.raises(KeyboardInterrupt):
            commit(storage, 0)
        assert parts(storage).done() == set()
    monkeypatch.undo()
    commit(storage, 0)
    assert parts(storage).done() == {0}
