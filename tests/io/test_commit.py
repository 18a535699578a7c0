"""Commit, verify and fetch on both storages, and writers killed at any point."""

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, DataError, Preempted
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.io import atomic
from pipeline.io import commit as commit_module
from pipeline.io.commit import commit_dir, fetch_dir, file_record, read_manifest, verify_dir
from pipeline.io.s3 import S3Storage
from pipeline.io.storage import DiskFull, KeyNotFound, Storage, open_storage
from tests.io.conftest import Fault, Proxy
from tests.kit.killing import FILE_CHANGES, FORK, killed_at, killed_at_byte
from tests.kit.storages import FAST

FILES = {"a.bin", "sub/b.txt", "empty"}


def content_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_commit_verify_fetch(storage: Storage, tree: Path, tmp_path: Path) -> None:
    before = content_of(tree)
    manifest = commit_dir(storage, tree, "out/one", kind="tokens", fields={"rows": 3, "share": 0.5, "names": ["ä"]})
    assert set(manifest.files) == FILES
    assert read_manifest(storage, "out/one") == manifest
    assert verify_dir(storage, "out/one", deep=True) == manifest
    folder = fetch_dir(storage, "out/one", tmp_path / "cache")
    after = content_of(folder)
    assert Manifest.from_json(after.pop(MANIFEST_NAME)) == manifest
    assert after == before
    assert manifest.files["a.bin"] == file_record(folder / "a.bin")


def test_the_marker_is_written_last(storage: Storage, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise Preempted("stopped here")

    monkeypatch.setattr(commit_module, "check_sizes", stopped)
    with pytest.raises(Preempted):
        commit_dir(storage, tree, "out", kind="k", fields={})
    assert {stat.key for stat in storage.list("out")} == {f"out/{name}" for name in FILES}
    assert read_manifest(storage, "out") is None
    with pytest.raises(KeyNotFound):
        verify_dir(storage, "out", deep=False)
    assert set(content_of(tree)) == FILES, "the sources are still there for the next try"


def test_commit_again_replaces(storage: Storage, tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tree, other)
    (other / "a.bin").write_bytes(b"changed")
    first = commit_dir(storage, tree, "out", kind="k", fields={})
    second = commit_dir(storage, other, "out", kind="k", fields={})
    assert first.digest != second.digest
    assert verify_dir(storage, "out", deep=True) == second


def test_local_files_are_moved_not_copied(tmp_path: Path, tree: Path) -> None:
    inode = (tree / "a.bin").stat().st_ino
    commit_dir(open_storage(str(tmp_path / "root")), tree, "out", kind="k", fields={})
    assert (tmp_path / "root" / "out" / "a.bin").stat().st_ino == inode
    assert (tmp_path / "root" / "out" / "a.bin").stat().st_nlink == 1
    assert not tree.exists()


def test_commit_in_place(tmp_path: Path, tree: Path) -> None:
    storage = open_storage(str(tmp_path))
    (tree / ".trnpipe-tmp-dead").write_bytes(b"half")
    commit_dir(storage, tree, "made", kind="k", fields={})
    assert set(verify_dir(storage, "made", deep=True).files) == FILES
    again = commit_dir(storage, tree, "made", kind="k", fields={})
    assert set(again.files) == FILES


def test_a_missing_folder_is_a_data_error(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a folder"):
        commit_dir(storage, tmp_path / "nope", "out", kind="k", fields={})
    with pytest.raises(ConfigError):
        commit_dir(storage, tmp_path, "../out", kind="k", fields={})


@pytest.mark.parametrize(
    ("damage", "deep", "name"),
    [
        (lambda s: s.delete(["out/sub/b.txt"]), False, "sub/b.txt is missing"),
        (lambda s: s.write_bytes("out/a.bin", b"short"), False, "a.bin has 5 bytes"),
        (lambda s: s.write_bytes("out/sub/b.txt", b"sEcond"), True, "sub/b.txt has 6 bytes and xxh3_128"),
        (lambda s: s.write_bytes(f"out/{MANIFEST_NAME}", b"{}"), False, MANIFEST_NAME),
    ],
)
def test_damage_is_named(
    storage: Storage, tree: Path, tmp_path: Path, damage: Callable[[Storage], None], deep: bool, name: str
) -> None:
    commit_dir(storage, tree, "out", kind="k", fields={})
    damage(storage)
    with pytest.raises(DataError, match=name):
        verify_dir(storage, "out", deep=deep)
    with pytest.raises(DataError, match=name.split(" ")[0]):
        fetch_dir(storage, "out", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob(MANIFEST_NAME))


def test_a_full_disk_during_the_commit(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path / "root"))
    true_fsync, calls = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > 6:
            raise OSError(28, "No space left on device")
        true_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DiskFull):
        commit_dir(storage, tree, "out", kind="k", fields={})
    monkeypatch.undo()
    assert read_manifest(storage, "out") is None
    assert not list(tmp_path.rglob(".trnpipe-tmp-*"))
    commit_dir(storage, tree, "out", kind="k", fields={})
    verify_dir(storage, "out", deep=True)


@pytest.mark.fault
@pytest.mark.parametrize(
    "existing",
    [pytest.param(False, id="new", marks=pytest.mark.thorough), pytest.param(True, id="over-a-committed-one")],
)
def test_kill_9_at_every_file_operation_of_a_local_commit(
    tmp_path: Path, tree: Path, existing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a power cut asks for fsync; after a kill the kernel still has every write. Saves 10 s.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    kept = content_of(tree)
    number = 0
    exit_code = -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        number += 1
        base = tmp_path / f"case{number}"
        shutil.copytree(tree, base / "made")
        storage = open_storage(str(base / "root"))
        if existing:
            shutil.copytree(tree, base / "older")
            (base / "older" / "a.bin").write_bytes(b"older")
            commit_dir(storage, base / "older", "out", kind="k", fields={})
        commit = partial(commit_dir, storage, base / "made", "out", kind="k", fields={"n": 1})
        exit_code = killed_at(number, commit, FILE_CHANGES | {"open"})
        manifest = read_manifest(storage, "out")
        if manifest is not None:
            assert verify_dir(storage, "out", deep=True) == manifest, "a marker never covers a half artefact"
        if manifest is None or "n" not in manifest.fields:
            assert content_of(base / "made") == kept
            commit()
        assert set(verify_dir(storage, "out", deep=True).files) == FILES
        assert not any(".trnpipe" in stat.key for stat in storage.list(""))
    assert exit_code == 0
    assert number > 20, "the kills reached the operations"


@pytest.mark.fault
@pytest.mark.parametrize("size_bytes", [1, 4096, 9 * 2**20 + 1])
def test_kill_9_at_a_byte_of_the_copy(tmp_path: Path, size_bytes: int) -> None:
    """The kernel ends the process (SIGXFSZ) when a file grows past the limit: a death at exactly that byte."""
    source = tmp_path / "source"
    source.write_bytes(b"x" * (10 * 2**20))
    storage = open_storage(str(tmp_path / "root"))
    storage.write_bytes("key", b"")
    assert killed_at_byte(size_bytes, partial(storage.upload, source, "key")) == -signal.SIGXFSZ
    assert storage.read_bytes("key") == b""
    assert [stat.key for stat in storage.list("")] == ["key"]


@pytest.mark.fault
def test_kill_9_at_every_request_of_an_s3_commit(aws: str, s3_uri: str, tree: Path) -> None:
    storage = open_storage(s3_uri, retry=FAST)
    exit_code, number = -signal.SIGKILL, 0
    while exit_code == -signal.SIGKILL:
        number += 1
        commit = partial(commit_dir, storage, tree, f"out{number}", kind="k", fields={})
        exit_code = killed_at(number, commit, frozenset({"http.client.send"}))
        if read_manifest(storage, f"out{number}") is None:
            commit()
        # A kill may also come while the last request is on its way: then the marker is there, and all is.
        assert set(verify_dir(storage, f"out{number}", deep=True).files) == FILES
    assert exit_code == 0 and number > 5


def test_fetch_downloads_once_and_resumes(s3: Storage, proxy: Proxy, tree: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    commit_dir(s3, tree, "out", kind="k", fields={})
    proxy.faults = [Fault("denied", "GET", "out/sub/b.txt")]
    with pytest.raises(ConfigError):
        fetch_dir(s3, "out", cache)
    assert not list(cache.rglob(MANIFEST_NAME)), "not committed"
    proxy.seen.clear()
    folder = fetch_dir(s3, "out", cache)
    assert not any("out/a.bin" in path for method, path in proxy.seen if method == "GET"), "already here and verified"
    proxy.seen.clear()
    assert fetch_dir(s3, "out", cache) == folder
    assert [path for _, path in proxy.seen if MANIFEST_NAME not in path] == []
    (folder / "a.bin").write_bytes((folder / "a.bin").read_bytes()[::-1])
    fetch_dir(s3, "out", cache)
    assert (folder / "a.bin").read_bytes() == (tree / "a.bin").read_bytes(), "flipped bits are got again"


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kept", [b"", b"other bytes"])
def test_what_a_dead_fetch_left_is_proved_by_its_bytes(
    s3: Storage, tree: Path, tmp_path: Path, marked: bool, kept: bytes
) -> None:
    """Sizes are trusted only where the marker says that all was checked once."""
    manifest = commit_dir(s3, tree, "out", kind="k", fields={})
    good = (tree / "a.bin").read_bytes()
    left = (kept * len(good))[: len(good)] if kept else b"short"
    folder = tmp_path / "cache" / manifest.digest
    fetch_dir(s3, "out", tmp_path / "cache")
    (folder / "a.bin").write_bytes(left)
    if not marked:
        (folder / MANIFEST_NAME).unlink()
    assert fetch_dir(s3, "out", tmp_path / "cache", deep=False) == folder
    assert (folder / "a.bin").read_bytes() == (left if marked and kept else good)
    assert (folder / MANIFEST_NAME).exists()
    fetch_dir(s3, "out", tmp_path / "cache")
    assert (folder / "a.bin").read_bytes() == good


def test_a_folder_on_this_machine_is_read_where_it_lies(tmp_path: Path, tree: Path) -> None:
    storage = open_storage(str(tmp_path / "workspace"))
    commit_dir(storage, tree, "out", kind="k", fields={})
    assert fetch_dir(storage, "out", tmp_path / "cache") == tmp_path / "workspace" / "out"
    assert not (tmp_path / "cache").exists()
    with (tmp_path / "workspace" / "out" / "a.bin").open("r+b") as file:
        file.write(b"flipped")
    fetch_dir(storage, "out", tmp_path / "cache", deep=False)
    with pytest.raises(DataError):
        fetch_dir(storage, "out", tmp_path / "cache")


def test_what_is_no_part_of_a_commit_stays_where_it_was(storage: Storage, tree: Path) -> None:
    """What dead writers left in the folder, and the folders that hold it."""
    (tree / "sub" / ".trnpipe-tmp-dead").write_bytes(b"half")
    assert set(commit_dir(storage, tree, "out", kind="k", fields={}).files) == FILES
    assert (tree / "sub" / ".trnpipe-tmp-dead").exists()


@pytest.mark.fault
def test_processes_that_fetch_together_download_once(s3_uri: str, proxy: Proxy, tree: Path, tmp_path: Path) -> None:
    commit_dir(open_storage(s3_uri, retry=FAST), tree, "out", kind="k", fields={})
    proxy.seen.clear()

    def child() -> None:
        fetch_dir(open_storage(s3_uri, retry=FAST), "out", tmp_path / "cache")

    processes = [FORK.Process(target=child) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert sum("out/a.bin" in path for method, path in proxy.seen if method == "GET") == 1
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert {name for name in content_of(folder) if name != MANIFEST_NAME} == FILES


@pytest.mark.fault
def test_a_fetch_killed_while_it_writes(s3_uri: str, aws: str, tree: Path, tmp_path: Path) -> None:
    storage = open_storage(s3_uri, retry=FAST)
    manifest = commit_dir(storage, tree, "out", kind="k", fields={})
    cache = tmp_path / "cache"
    exit_code, number = -signal.SIGKILL, 0
    while exit_code == -signal.SIGKILL:
        number += 1
        shutil.rmtree(cache, ignore_errors=True)
        exit_code = killed_at(
            number, lambda: fetch_dir(open_storage(s3_uri, retry=FAST), "out", cache), frozenset({"os.rename"})
        )
        marker = cache / manifest.digest / MANIFEST_NAME
        assert not marker.exists() or exit_code == 0
        assert set(content_of(fetch_dir(storage, "out", cache))) - {MANIFEST_NAME} >= FILES
    assert exit_code == 0 and number == len(FILES) + 2


@pytest.mark.fault
def test_a_storage_survives_a_fork(s3: Storage) -> None:
    """Parent and children use one storage object; a shared connection would mix their answers."""
    assert isinstance(s3, S3Storage)
    s3.write_bytes("shared", b"x" * 100_000)
    client, parent, parents_raw = s3._client, os.getpid(), s3._client.raw

    def child(number: int) -> None:
        assert (client.raw is parents_raw) == (os.getpid() == parent)
        for turn in range(3):
            s3.write_bytes(f"child{number}", str(turn).encode())
            assert s3.read_bytes("shared") == b"x" * 100_000

    processes = [FORK.Process(target=child, args=(number,)) for number in range(2)]
    for process in processes:
        process.start()
    child(9)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert {s3.read_bytes(f"child{number}") for number in (0, 1, 9)} == {b"2"}


def test_a_removed_folder_is_swept_only_when_its_remover_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path / "root"))
    storage.write_bytes("old/x", b"1")
    seen: list[list[Path]] = []
    true_rmtree = shutil.rmtree
    monkeypatch.setattr(atomic, "SWEEP_MIN_AGE_S", -1.0)

    def rmtree(path: Path) -> None:
        assert storage.list_dirs("") == []
        if not seen:
            atomic.sweep_temps(tmp_path / "root")
            seen.append(list((tmp_path / "root").iterdir()))
        else:
            true_rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    storage.delete_prefix("old")
    assert len(seen[0]) == 1, "its remover was alive"
    atomic.sweep_temps(tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
