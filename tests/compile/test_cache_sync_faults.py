"""Sync of caches under damaged bytes, kills at every point, stops and full disks."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from pipeline.compile.cache import LOCK_DIR, EntryState, list_local
from pipeline.compile.cache_sync import place_entry
from pipeline.core.errors import Preempted
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.stop import StopSignal
from pipeline.io.commit import verify_dir
from pipeline.io.storage import DiskFull, Storage
from tests.compile.cache_cases import (
    DONE,
    FILES,
    GRAPH,
    LOG,
    NEFF,
    NUM_FILES,
    ONE,
    TWO,
    content_of,
    damage,
    done_files,
    entries_of,
    keys_of,
    moved,
    opened,
    requests_of,
    sync,
    write_entry,
)
from tests.counted import watched
from tests.killing import killed_at, killed_at_byte

ROOT = Path(__file__).parents[2]


# Damage


@pytest.mark.fault
@pytest.mark.parametrize("file", [GRAPH, NEFF, MANIFEST_NAME])
def test_a_flipped_byte_in_the_storage_is_found_and_replaced(
    storage: Storage, here: Path, there: Path, file: str
) -> None:
    sync(here, storage)
    damage(storage, ONE, file)
    report = sync(there, storage)
    assert moved(report) == ([TWO.key], [])
    (left,) = report.left_out
    assert (left.entry, left.side) == (ONE.key, "storage") and "withdrawn" in left.action
    assert file in left.reason
    assert entries_of(there, ONE) == {}, "so the compiler makes it"
    write_entry(there, ONE, done_files("compiled again"))
    assert moved(sync(there, storage))[1] == [ONE.key]
    verify_dir(storage, ONE.key, deep=True)
    third = here.parent / "third"
    assert len(sync(third, storage).pulled) == 2
    assert content_of(third) == content_of(there)


@pytest.mark.fault
def test_a_node_that_has_the_bytes_heals_the_storage(storage: Storage, here: Path, there: Path) -> None:
    """The same content goes to the same place: every file is sent again, not only those of another size."""
    sync(here, storage)
    damage(storage, ONE, NEFF)
    sync(there, storage)
    assert requests_of(storage, lambda: sync(here, storage))["put"] == NUM_FILES + 1
    assert moved(sync(there, storage)) == ([ONE.key], [])
    assert content_of(there) == content_of(here)


@pytest.mark.fault
def test_a_missing_file_in_the_storage_is_found(storage: Storage, here: Path, there: Path) -> None:
    sync(here, storage)
    storage.delete(keys_of(storage, ONE, NEFF))
    (left,) = sync(there, storage).left_out
    assert left.entry == ONE.key and NEFF in left.reason
    assert moved(sync(here, storage))[1] == [ONE.key]


@pytest.mark.fault
def test_a_pull_changes_nothing_in_the_storage(storage: Storage, here: Path, there: Path) -> None:
    sync(here, storage)
    damage(storage, ONE, NEFF)
    counts = requests_of(storage, lambda: sync(there, storage, direction="pull"))
    assert (counts["put"], counts["delete"]) == (0, 0)
    (left,) = sync(there, storage, direction="pull").left_out
    assert left.entry == ONE.key and "left there" in left.action


# Kills, stops and full disks


def is_usable(root: Path, *originals: Path) -> bool:
    """Every finished entry has the bytes of one of the originals."""
    for entry in list_local(root):
        if entry.state is EntryState.DONE:
            mine = entries_of(root, entry.name)
            if not any(mine == entries_of(original, entry.name) for original in originals):
                return False
    return True


@pytest.mark.fault
@pytest.mark.parametrize(
    "before",
    [
        pytest.param({}, id="missing"),
        pytest.param(FILES[EntryState.FAILED], id="failed", marks=pytest.mark.thorough),
        pytest.param(FILES[EntryState.INCOMPLETE], id="no marker", marks=pytest.mark.thorough),
        pytest.param({GRAPH: b"graph", DONE: b""}, id="no neff", marks=pytest.mark.thorough),
    ],
)
def test_kill_9_at_every_change_of_a_pull(
    tmp_path: Path, before: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # only a power cut asks for it
    source, storage = tmp_path / "source", opened(str(tmp_path / "storage"))
    write_entry(source, ONE, {**done_files(), "weights.bin": b"after the NEFF in order"})
    sync(source, storage)
    number, exit_code, num_partly = 0, -signal.SIGKILL, 0
    while exit_code == -signal.SIGKILL:
        number += 1
        root = tmp_path / f"case{number}"
        if before:
            write_entry(root, ONE, before)
        exit_code = killed_at(number, partial(sync, root, storage))
        assert is_usable(root, source)
        num_partly += (root / LOCK_DIR / "staging").exists()
        report = sync(root, storage)
        assert report.left_out == () and content_of(root) == content_of(source)
        assert not (root / LOCK_DIR / "staging").exists(), "nothing is left of the dead one"
        assert verify_dir(storage, ONE.key, deep=True)
    assert exit_code == 0
    assert number > 15 and num_partly > 5, "the kills reached the operations"


@pytest.mark.fault
def test_kill_9_while_an_entry_is_placed_over_a_finished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never called done with files of both."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    old, new = tmp_path / "old", tmp_path / "new"
    write_entry(old, ONE, {**done_files("old"), "weights.bin": b"old", LOG: b"[ERROR] failed before"})
    write_entry(new, ONE, {**done_files("new"), "weights.bin": b"new"})
    number, exit_code, unfinished = 0, -signal.SIGKILL, 0
    while exit_code == -signal.SIGKILL:
        number += 1
        root, staged = tmp_path / f"case{number}", tmp_path / f"staged{number}"
        shutil.copytree(old, root)
        shutil.copytree(new / ONE.key, staged)
        exit_code = killed_at(number, partial(place_entry, root, ONE, staged))
        assert is_usable(root, old, new)
        unfinished += list_local(root)[0].state is not EntryState.DONE
    assert exit_code == 0 and unfinished > 3
    assert content_of(root) == content_of(new), "the log of an earlier failure is gone too"


@pytest.mark.fault
def test_kill_9_at_every_change_of_a_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    source = tmp_path / "source"
    write_entry(source, ONE, done_files())
    number, exit_code, num_unpublished = 0, -signal.SIGKILL, 0
    while exit_code == -signal.SIGKILL:
        number += 1
        base = tmp_path / f"case{number}"
        shutil.copytree(source, base / "here")
        storage = opened(str(base / "storage"))
        exit_code = killed_at(number, partial(sync, base / "here", storage))
        assert content_of(base / "here") == content_of(source)
        early = sync(base / "early", storage, direction="pull")
        assert early.left_out == () and is_usable(base / "early", source)
        num_unpublished += not early.pulled
        sync(base / "here", storage)
        verify_dir(storage, ONE.key, deep=True)
        assert sync(base / "early", storage).left_out == ()
        assert content_of(base / "early") == content_of(source)
        assert len(keys_of(storage, ONE)) == NUM_FILES + 1
    assert exit_code == 0
    assert num_unpublished > 10, "the kills reached the operations"


@pytest.mark.fault
@pytest.mark.parametrize("size_bytes", [0, 1, 2999])
def test_kill_at_a_byte_of_a_file(tmp_path: Path, size_bytes: int) -> None:
    """The kernel ends the process when a file grows past the limit: here the NEFF of 3000 bytes."""
    source, root, storage = tmp_path / "source", tmp_path / "root", opened(str(tmp_path / "storage"))
    write_entry(source, ONE, done_files())
    sync(source, storage)
    (root / LOCK_DIR).mkdir(parents=True)
    assert killed_at_byte(size_bytes, partial(sync, root, storage)) == -signal.SIGXFSZ
    assert content_of(root) == {}
    assert moved(sync(root, storage)) == ([ONE.key], []) and content_of(root) == content_of(source)


CHILD = """
import itertools, os, signal, sys
from pathlib import Path
from pipeline.compile.cache_sync import sync_cache
from tests.compile.cache_cases import local_disk, opened
from tests.counted import watched

root, uri, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
storage, numbers = opened(uri), itertools.count(1)
with watched(storage, lambda _: next(numbers) == last and os.kill(os.getpid(), signal.SIGKILL)):
    sync_cache(root, storage, mounts=local_disk)
"""


def run_child(root: Path, uri: str, num_requests: int) -> int:
    """A sync in a process that is killed before that request."""
    command = [sys.executable, "-c", CHILD, str(root), uri, str(num_requests)]
    return subprocess.run(command, cwd=ROOT, timeout=300).returncode


@pytest.mark.fault
@pytest.mark.parametrize("num_requests", [8, *(pytest.param(n, marks=pytest.mark.thorough) for n in (4, 13))])
def test_kill_9_of_a_push_to_s3(s3_uri: str, here: Path, there: Path, num_requests: int) -> None:
    assert run_child(here, s3_uri, num_requests) == -signal.SIGKILL
    storage = opened(s3_uri)
    early = sync(there, storage)
    assert early.left_out == () and len(early.pulled) < 2 and is_usable(there, here)
    sync(here, storage)
    assert sync(there, storage).left_out == () and content_of(there) == content_of(here)
    assert all(len(keys_of(storage, name)) == NUM_FILES + 1 for name in (ONE, TWO))


@pytest.mark.fault
@pytest.mark.parametrize("num_requests", [7, *(pytest.param(n, marks=pytest.mark.thorough) for n in (3, 12))])
def test_kill_9_of_a_pull_from_s3(s3_uri: str, here: Path, there: Path, num_requests: int) -> None:
    storage = opened(s3_uri)
    sync(here, storage)
    assert run_child(there, s3_uri, num_requests) == -signal.SIGKILL
    assert len(list_local(there)) < 2 and is_usable(there, here)
    report = sync(there, storage)
    assert report.left_out == () and content_of(there) == content_of(here)


def test_a_sync_that_is_not_killed(s3_uri: str, here: Path) -> None:
    """So that the kills above are kills, not crashes of the child."""
    assert run_child(here, s3_uri, 10_000) == 0
    assert len(sync(here, opened(s3_uri)).pushed) == 0


def test_a_stop_while_it_uploads_ends_it(storage: Storage, stop: StopSignal, here: Path, storage_uri: str) -> None:
    with watched(storage, lambda kind: stop.set("SIGTERM") if kind == "put" else None), pytest.raises(Preempted):
        sync(here, storage)
    another_try = opened(storage_uri)
    assert not any(MANIFEST_NAME in stat.key for stat in another_try.list(""))
    assert len(sync(here, another_try).pushed) == 2


@pytest.mark.fault
def test_a_full_disk_leaves_a_usable_cache(
    storage: Storage, here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync(here, storage)
    download = storage.download_dir

    def fail(prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        if TWO.key in prefix:
            raise DiskFull("no space left")
        download(prefix, local_dir, names)

    monkeypatch.setattr(storage, "download_dir", fail)
    with pytest.raises(DiskFull):
        sync(there, storage)
    assert is_usable(there, here) and not (there / LOCK_DIR / "staging").exists()
