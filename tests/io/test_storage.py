"""One suite for both storages: what holds for file:// holds for s3://."""

import io
import secrets
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.core.errors import ConfigError, DataError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound, Storage, list_names, open_storage, update_file

PARTS = st.lists(st.sampled_from(["a", "b", "dt=2026-01-01", "ä b", "z.txt", "a-"]), min_size=1, max_size=3)


def keys_of(storage: Storage, prefix: str = "") -> list[str]:
    return [stat.key for stat in storage.list(prefix)]


def test_write_then_read(storage: Storage) -> None:
    storage.write_bytes("deep/er/key.bin", b"first")
    storage.write_bytes("deep/er/key.bin", b"second one")
    assert storage.read_bytes("deep/er/key.bin") == b"second one"
    stat = storage.stat("deep/er/key.bin")
    assert stat is not None and (stat.key, stat.size_bytes) == ("deep/er/key.bin", 10)
    assert storage.uri("deep/er/key.bin") == f"{storage.root}/deep/er/key.bin"


def test_missing_keys(storage: Storage, tmp_path: Path) -> None:
    storage.write_bytes("folder/file", b"x")
    assert storage.stat("nope") is None
    assert storage.stat("folder") is None
    for read in (
        lambda: storage.read_bytes("nope"),
        lambda: storage.read_bytes("folder"),
        lambda: storage.read_range("nope", 0, 1),
        lambda: storage.open_read("nope"),
        lambda: storage.download("nope", tmp_path / "copy"),
        lambda: storage.download_dir("folder", tmp_path / "out", ["file", "nope"]),
    ):
        with pytest.raises(KeyNotFound) as caught:
            read()
        assert storage.root in str(caught.value)
    assert isinstance(caught.value, DataError)
    assert not (tmp_path / "copy").exists()
    storage.delete(["nope", "folder/nope"])
    storage.delete_prefix("nowhere")
    assert list(storage.list("nowhere")) == []
    assert storage.list_dirs("nowhere") == []


@pytest.mark.parametrize("key", ["", "/abs", "a//b", "../up", "a/../b", "a/", ".", "a/.trnpipe-tmp-1", "a\0b"])
def test_bad_keys_are_refused(storage: Storage, key: str) -> None:
    with pytest.raises(ConfigError):
        storage.write_bytes(key, b"x")


@pytest.mark.parametrize(("start", "length"), [(0, 4), (3, 5), (8, 100), (10, 1), (50, 5), (2, 0), (0, 10)])
def test_ranges(storage: Storage, start: int, length: int) -> None:
    storage.write_bytes("ten", b"0123456789")
    assert storage.read_range("ten", start, length) == b"0123456789"[start : start + length]


def test_open_read_seeks(storage: Storage) -> None:
    data = secrets.token_bytes(100_000)
    storage.write_bytes("data", data)
    with storage.open_read("data") as file:
        assert file.seekable()
        assert file.read(10) == data[:10]
        assert file.seek(-8, io.SEEK_END) == len(data) - 8
        assert file.read() == data[-8:]
        assert file.read(1) == b""
        file.seek(500)
        file.seek(5, io.SEEK_CUR)
        assert file.read(3) == data[505:508]
        file.seek(0)
        assert file.read() == data


def test_conditional_create(storage: Storage) -> None:
    assert storage.write_if_absent("lock/claim", b"mine")
    assert not storage.write_if_absent("lock/claim", b"theirs")
    assert storage.read_bytes("lock/claim") == b"mine"


def test_conditional_replace(storage: Storage) -> None:
    assert not storage.write_if_match("pointer", b"new", '"0000"')
    storage.write_bytes("pointer", b"one")
    stat = storage.stat("pointer")
    assert stat is not None
    assert storage.write_if_match("pointer", b"two", stat.etag)
    assert not storage.write_if_match("pointer", b"three", stat.etag)
    assert storage.read_bytes("pointer") == b"two"


def test_one_of_racing_creators_wins(storage: Storage, storage_uri: str) -> None:
    barrier = threading.Barrier(8)

    def create(number: int) -> bool:
        own = open_storage(storage_uri)
        barrier.wait()
        return own.write_if_absent("claim", f"writer {number}".encode())

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert storage.read_bytes("claim") == f"writer {won.index(True)}".encode()


def test_conditional_replace_loses_no_increment(storage: Storage, storage_uri: str) -> None:
    storage.write_bytes("count", b"0")

    def increment(_: int) -> None:
        own = open_storage(storage_uri)
        for _try in range(1000):
            stat = own.stat("count")
            assert stat is not None
            value = int(own.read_bytes("count"))
            if own.write_if_match("count", str(value + 1).encode(), stat.etag):
                return
        raise AssertionError("never won")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(12)))
    # A stale value under a fresh etag is refused, so no increment is lost; a fresh value under a stale etag too.
    assert int(storage.read_bytes("count")) == 12


def test_listing_is_by_folder(storage: Storage) -> None:
    for key in ("tok/b", "tok/a/1", "tok-2/x", "tok.txt", "top"):
        storage.write_bytes(key, b"x")
    assert keys_of(storage, "tok") == ["tok/a/1", "tok/b"]
    assert keys_of(storage, "tok/") == ["tok/a/1", "tok/b"]
    assert keys_of(storage) == sorted(["tok/b", "tok/a/1", "tok-2/x", "tok.txt", "top"])
    assert storage.list_dirs("") == ["tok", "tok-2"]
    assert storage.list_dirs("tok") == ["a"]
    storage.delete_prefix("tok")
    assert keys_of(storage) == ["tok-2/x", "tok.txt", "top"]
    assert storage.list_dirs("") == ["tok-2"]
    storage.delete(["tok-2/x", "tok-2/never"])
    assert storage.list_dirs("") == []


def test_another_worker_deletes_the_folder_at_the_same_moment(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write_bytes("tok/a", b"x")
    is_dir = Path.is_dir

    def gone_after(path: Path) -> bool:
        found = is_dir(path)
        shutil.rmtree(path, ignore_errors=True)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", gone_after)
        storage.delete_prefix("tok")
        assert list_names(storage, "tok") == set()


def test_the_root_cannot_be_deleted(storage: Storage) -> None:
    storage.write_bytes("x", b"x")
    with pytest.raises(ConfigError):
        storage.delete_prefix("/")
    assert keys_of(storage) == ["x"]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(PARTS.map("/".join), min_size=1, max_size=6, unique=True), data=st.data())
def test_like_a_dictionary(storage: Storage, names: list[str], data: st.DataObject) -> None:
    # A file system cannot hold both `a` and `a/b`.
    names = [name for name in names if not any(other.startswith(f"{name}/") for other in names)]
    base = f"case-{secrets.token_hex(4)}"
    model = {f"{base}/{name}": secrets.token_bytes(3) for name in names}
    for key, value in model.items():
        storage.write_bytes(key, value)
    gone = data.draw(st.lists(st.sampled_from(sorted(model)), unique=True))
    storage.delete(gone)
    left = {key: value for key, value in model.items() if key not in gone}
    assert keys_of(storage, base) == sorted(left, key=str.encode)
    assert {key: storage.read_bytes(key) for key in left} == left


def test_upload_and_download(storage: Storage, tmp_path: Path, tree: Path) -> None:
    storage.upload(tree / "a.bin", "up/a.bin")
    storage.download("up/a.bin", tmp_path / "new" / "a.bin")
    assert (tmp_path / "new" / "a.bin").read_bytes() == (tree / "a.bin").read_bytes()
    names = ["a.bin", "sub/b.txt", "empty"]
    storage.upload_dir("dir", tree, names)
    assert keys_of(storage, "dir") == ["dir/a.bin", "dir/empty", "dir/sub/b.txt"]
    storage.download_dir("dir", tmp_path / "back", names)
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (tree / name).read_bytes()
    with pytest.raises(KeyNotFound):
        storage.upload(tree / "nope", "up/nope")
    assert keys_of(storage, "up") == ["up/a.bin"]


def test_a_stop_ends_transfers(storage: Storage, stop: StopSignal, tmp_path: Path, tree: Path) -> None:
    storage.upload(tree / "a.bin", "a.bin")
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="SIGTERM"):
        storage.upload_dir("more", tree, ["a.bin", "sub/b.txt"])
    with pytest.raises(Preempted):
        storage.download_dir("", tmp_path / "back", ["a.bin"])
    assert not list((tmp_path / "back").rglob("*"))


@pytest.mark.parametrize(
    "uri", ["https://user:hunter2@host/x", "gs://bucket", "file://host/x", "", "s3://", "s3://id:hunter2@b/x"]
)
def test_other_uris_are_refused_without_their_secrets(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage(uri)
    assert "hunter2" not in str(caught.value)


def test_a_folder_that_cannot_be_looked_at_is_an_error_of_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_storage(str(tmp_path / ("x" * 300)))


def test_an_update_loses_nothing_and_gives_up_if_the_file_never_stands_still(storage: Storage) -> None:
    others = iter(range(3))

    def added() -> bytes:
        seen = storage.read_bytes("x") if storage.stat("x") else b""
        if (number := next(others, None)) is not None:
            storage.write_bytes("x", seen + b"%d" % number)
        return seen + b"+"

    update_file(storage, "x", added, "again")
    assert storage.read_bytes("x") == b"012+"
    others = iter(range(1000))
    with pytest.raises(TransientError, match="next: again"):
        update_file(storage, "x", added, "again")
