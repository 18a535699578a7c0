"""Sync of caches with a storage: what moves, many nodes at once, damaged bytes, kills at every point, full disks."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compile.cache import LOCK_DIR, EntryState, cache_lock, list_entries, repair
from pipeline.compile.sync import SyncReport, place_entry
from pipeline.compile.sync import sync_cache as sync
from pipeline.core.errors import ConfigError, Preempted
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.stop import StopSignal
from pipeline.io.commit import verify_dir
from pipeline.io.storage import DiskFull, Storage
from tests.compile.cache_cases import (
    DONE,
    FILES,
    GRAPH,
    LOCK,
    LOG,
    NEFF,
    NUM_FILES,
    ONE,
    THREE,
    TWO,
    content_of,
    damage,
    done_files,
    entries_of,
    keys_of,
    name_of,
    nobody,
    opened,
    write_entry,
)
from tests.kit.counted import counted, watched
from tests.kit.killing import killed_at, killed_at_byte

ROOT = Path(__file__).parents[2]


def moved(report: SyncReport) -> tuple[list[str], list[str]]:
    """Keys pulled and pushed."""
    return list(report.pulled), list(report.pushed)


def local(root: Path) -> dict[str, EntryState]:
    return {one.key: one.state for one in list_entries(opened(str(root)))}


def test_a_second_machine_with_an_empty_disk_starts_warm(storage: Storage, here: Path, there: Path) -> None:
    write_entry(there, THREE, done_files("c"))
    assert moved(sync(here, storage)) == ([], [ONE, TWO])
    report = sync(there, storage)
    assert moved(report) == ([ONE, TWO], [THREE]), "both ways at once"
    sync(here, storage)
    assert content_of(there) == content_of(here)
    assert (report.in_sync, report.skipped) == (0, ())
    assert "pulled 2" in report.lines()[0] and "pushed 1" in report.lines()[0]
    for name in (ONE, TWO):
        verify_dir(storage, name, deep=True)


def test_only_new_entries_are_sent(storage: Storage, here: Path) -> None:
    sync(here, storage)
    with counted(storage) as idle:
        sync(here, storage)
    assert (idle["put"], idle["get"], idle["head"], idle["delete"]) == (0, 0, 0, 0) and idle["list"] <= 1
    write_entry(here, THREE, done_files("c"))
    with counted(storage) as sent:
        sync(here, storage)
    assert (sent["put"], sent["get"]) == (NUM_FILES + 1, 0), "the files of one entry and its marker"


def test_only_finished_entries_are_sent(storage: Storage, tmp_path: Path) -> None:
    for number, state in enumerate(EntryState):
        write_entry(tmp_path / "here", name_of(number), FILES[state])
    write_entry(tmp_path / "here", name_of(9), {**done_files(), LOCK: b""})
    assert moved(sync(tmp_path / "here", storage)) == ([], [name_of(0), name_of(9)])
    assert not any(LOCK in stat.key for stat in storage.list(""))


@pytest.mark.parametrize("state", [EntryState.FAILED, EntryState.PARTIAL, EntryState.LOCKED])
def test_a_pull_heals_what_is_not_finished_and_leaves_what_is_locked(
    storage: Storage, here: Path, there: Path, state: EntryState
) -> None:
    sync(here, storage)
    write_entry(there, ONE, FILES[state])
    before = content_of(there)
    report = sync(there, storage)
    if state is EntryState.LOCKED:
        assert moved(report) == ([TWO], []) and [key for key, _ in report.skipped] == [ONE]
        assert content_of(there) == {**before, **entries_of(here, TWO)}
    else:
        assert report.skipped == ()
        assert content_of(there) == content_of(here), "finished, and without the log of the failure"


def test_a_compiler_that_starts_during_the_download_keeps_its_entry(storage: Storage, here: Path, there: Path) -> None:
    sync(here, storage)
    write_entry(there, ONE, {GRAPH: b"graph"})
    download = storage.download_dir

    def download_and_lock(prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        download(prefix, local_dir, names)
        write_entry(there, ONE, {LOCK: b""})

    setattr(storage, "download_dir", download_and_lock)  # noqa: B010
    assert [key for key, _ in sync(there, storage).skipped] == [ONE]
    assert set(entries_of(there, ONE)) == {f"{ONE}/{GRAPH}", f"{ONE}/{LOCK}"}


def test_entries_without_checksums_are_not_trusted(storage: Storage, there: Path) -> None:
    for file, data in done_files().items():
        storage.write_bytes(f"{ONE}/{file}", data)
    assert moved(sync(there, storage)) == ([], []) and content_of(there) == {}
    write_entry(there, ONE, done_files())
    assert moved(sync(there, storage))[1] == [ONE]


# Many nodes


@pytest.mark.parametrize("seed", ["a", "another moment"])
def test_two_nodes_that_compiled_the_same_graph_at_once_lose_nothing(
    storage: Storage, storage_uri: str, here: Path, there: Path, seed: str
) -> None:
    """The second node syncs in the middle of the first one's upload, with the same or other bytes for the graph."""
    write_entry(there, ONE, done_files(seed))
    write_entry(there, THREE, done_files("c"))
    other = opened(storage_uri)
    upload, syncs = storage.upload_dir, iter([True])

    def upload_after_the_other(prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        if ONE in prefix and next(syncs, False):
            assert moved(sync(there, other))[1] == [ONE, THREE]
        upload(prefix, local_dir, names)

    setattr(storage, "upload_dir", upload_after_the_other)  # noqa: B010
    report = sync(here, storage)
    assert moved(report)[1] == [TWO] and report.in_sync == 1
    verify_dir(storage, ONE, deep=True)
    assert len(keys_of(storage, ONE)) == NUM_FILES + 1, "what the loser sent is gone"
    for root in (here, there):
        sync(root, storage)
        assert local(root).keys() == {ONE, TWO, THREE}
    third = here.parent / "third"
    assert len(sync(third, storage).pulled) == 3
    assert entries_of(third, ONE) == entries_of(there, ONE), "the first marker counts"


def test_one_sync_or_repair_at_a_time_on_a_root(storage: Storage, stop: StopSignal, here: Path) -> None:
    stop.set("SIGTERM")
    with cache_lock(here, StopSignal()):
        with pytest.raises(Preempted, match="waiting for the lock"):
            sync(here, storage)
        with pytest.raises(Preempted, match="waiting for the lock"):
            repair(opened(str(here), stop), compilers=nobody)


@given(
    owned=st.lists(st.sets(st.integers(0, 4)), min_size=2, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=6),
)
def test_any_order_of_syncs_ends_with_everything_everywhere(
    tmp_path_factory: pytest.TempPathFactory, owned: list[set[int]], order: list[int]
) -> None:
    base = tmp_path_factory.mktemp("order")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        storage = opened(str(base / "storage"))
        for node, numbers in enumerate(owned):
            for number in numbers:
                write_entry(base / f"node{node}", name_of(number), done_files(f"node {node}"))
        rounds = [*(node for node in order if node < len(owned)), *range(len(owned)), *range(len(owned))]
        pushed = [key for node in rounds for key in sync(base / f"node{node}", storage).pushed]
        every = {name_of(number) for number in set().union(*owned)}
        assert sorted(pushed) == sorted(every), "each graph is sent once"
        for node in range(len(owned)):
            assert local(base / f"node{node}").keys() == every


def test_a_storage_is_no_local_cache(tmp_path: Path, here: Path) -> None:
    sync(here, opened(str(tmp_path / "storage")))
    with pytest.raises(ConfigError, match="is itself a storage"):
        sync(tmp_path / "storage", opened(str(tmp_path / "another")))


# Damage


@pytest.mark.fault
@pytest.mark.parametrize("file", [GRAPH, NEFF, MANIFEST_NAME])
def test_a_flipped_byte_in_the_storage_is_found_and_replaced(
    storage: Storage, here: Path, there: Path, file: str
) -> None:
    sync(here, storage)
    damage(storage, ONE, file)
    report = sync(there, storage)
    assert moved(report) == ([TWO], [])
    ((key, reason),) = report.skipped
    assert key == ONE and "withdrawn" in reason and file in reason
    assert entries_of(there, ONE) == {}, "so the compiler makes it"
    write_entry(there, ONE, done_files("compiled again"))
    assert moved(sync(there, storage))[1] == [ONE]
    verify_dir(storage, ONE, deep=True)
    third = here.parent / "third"
    assert len(sync(third, storage).pulled) == 2
    assert content_of(third) == content_of(there)


@pytest.mark.fault
def test_a_node_that_has_the_bytes_heals_the_storage(storage: Storage, here: Path, there: Path) -> None:
    """The same content goes to the same place: every file is sent again, not only those of another size."""
    sync(here, storage)
    damage(storage, ONE, NEFF)
    storage.delete(keys_of(storage, TWO, NEFF))
    assert {key for key, _ in sync(there, storage).skipped} == {ONE, TWO}
    with counted(storage) as sent:
        sync(here, storage)
    assert sent["put"] == 2 * (NUM_FILES + 1)
    assert moved(sync(there, storage)) == ([ONE, TWO], [])
    assert content_of(there) == content_of(here)


# Kills, stops and full disks


def is_usable(root: Path, *originals: Path) -> bool:
    """Every finished entry has the bytes of one of the originals."""
    finished = [key for key, state in local(root).items() if state is EntryState.DONE]
    return all(entries_of(root, key) in [entries_of(one, key) for one in originals] for key in finished)


def killed_everywhere(tmp_path: Path, prepare: Callable[[Path], Callable[[], object]]) -> Iterator[Path]:
    """Run what `prepare` returns for each folder, killed at its first change, its second, and so on to its end."""
    number, exit_code = 0, -signal.SIGKILL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # only a power cut asks for it
        while exit_code == -signal.SIGKILL:
            number += 1
            base = tmp_path / f"case{number}"
            base.mkdir()
            exit_code = killed_at(number, prepare(base))
            yield base
    assert exit_code == 0


@pytest.mark.fault
@pytest.mark.parametrize(
    "before",
    [
        pytest.param({}, id="missing"),
        pytest.param(FILES[EntryState.FAILED], id="failed", marks=pytest.mark.thorough),
        pytest.param({GRAPH: b"graph", DONE: b""}, id="no neff", marks=pytest.mark.thorough),
    ],
)
def test_kill_9_at_every_change_of_a_pull(tmp_path: Path, before: dict[str, bytes]) -> None:
    source, storage = tmp_path / "source", opened(str(tmp_path / "storage"))
    write_entry(source, ONE, {**done_files(), "weights.bin": b"after the NEFF in order"})
    sync(source, storage)

    def pull(root: Path) -> Callable[[], object]:
        if before:
            write_entry(root, ONE, before)
        return partial(sync, root, storage)

    num_partly = 0
    for root in killed_everywhere(tmp_path, pull):
        assert is_usable(root, source)
        num_partly += (root / LOCK_DIR / "staging").exists()
        report = sync(root, storage)
        assert report.skipped == () and content_of(root) == content_of(source)
        assert not (root / LOCK_DIR / "staging").exists(), "nothing is left of the dead one"
        assert verify_dir(storage, ONE, deep=True)
    assert num_partly > 5, "the kills reached the operations"


@pytest.mark.fault
def test_kill_9_while_an_entry_is_placed_over_a_finished_one(tmp_path: Path) -> None:
    """Never called done with files of both."""
    old, new = tmp_path / "old", tmp_path / "new"
    write_entry(old, ONE, {**done_files("old"), "weights.bin": b"old", LOG: b"[ERROR] failed before"})
    write_entry(new, ONE, {**done_files("new"), "weights.bin": b"new"})

    def place(base: Path) -> Callable[[], object]:
        shutil.copytree(old, base / "root")
        shutil.copytree(new / ONE, base / "staged")
        return partial(place_entry, base / "root", ONE, base / "staged")

    unfinished = 0
    for base in killed_everywhere(tmp_path, place):
        assert is_usable(base / "root", old, new)
        unfinished += local(base / "root")[ONE] is not EntryState.DONE
    assert unfinished > 3
    assert content_of(base / "root") == content_of(new), "the log of an earlier failure is gone too"


@pytest.mark.fault
def test_kill_9_at_every_change_of_a_push(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_entry(source, ONE, done_files())

    def push(base: Path) -> Callable[[], object]:
        shutil.copytree(source, base / "here")
        return partial(sync, base / "here", opened(str(base / "storage")))

    num_unpublished = 0
    for base in killed_everywhere(tmp_path, push):
        storage = opened(str(base / "storage"))
        assert content_of(base / "here") == content_of(source)
        early = sync(base / "early", storage)
        assert early.skipped == () and is_usable(base / "early", source)
        num_unpublished += not early.pulled
        sync(base / "here", storage)
        verify_dir(storage, ONE, deep=True)
        assert sync(base / "early", storage).skipped == ()
        assert content_of(base / "early") == content_of(source)
        assert len(keys_of(storage, ONE)) == NUM_FILES + 1
    assert num_unpublished > 10, "the kills reached the operations"


@pytest.mark.fault
@pytest.mark.parametrize("size_bytes", [0, 2999])
def test_kill_at_a_byte_of_a_file(tmp_path: Path, size_bytes: int) -> None:
    """The kernel ends the process when a file grows past the limit: here the NEFF of 3000 bytes."""
    source, root, storage = tmp_path / "source", tmp_path / "root", opened(str(tmp_path / "storage"))
    write_entry(source, ONE, done_files())
    sync(source, storage)
    (root / LOCK_DIR).mkdir(parents=True)
    assert killed_at_byte(size_bytes, partial(sync, root, storage)) == -signal.SIGXFSZ
    assert content_of(root) == {}
    assert moved(sync(root, storage)) == ([ONE], []) and content_of(root) == content_of(source)


CHILD = """
import itertools, os, signal, sys
from pathlib import Path
from pipeline.compile.sync import sync_cache
from tests.compile.cache_cases import opened
from tests.kit.counted import watched

root, uri, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
storage, numbers = opened(uri), itertools.count(1)
with watched(storage, lambda _: next(numbers) == last and os.kill(os.getpid(), signal.SIGKILL)):
    sync_cache(root, storage)
"""


def run_child(root: Path, uri: str, num_requests: int) -> int:
    """A sync in a process that is killed before that request."""
    command = [sys.executable, "-c", CHILD, str(root), uri, str(num_requests)]
    return subprocess.run(command, cwd=ROOT, timeout=300).returncode


@pytest.mark.fault
@pytest.mark.parametrize("num_requests", [8, *(pytest.param(n, marks=pytest.mark.thorough) for n in (4, 13))])
def test_kill_9_of_a_push_and_of_a_pull_on_s3(s3_uri: str, here: Path, there: Path, num_requests: int) -> None:
    assert run_child(here, s3_uri, num_requests) == -signal.SIGKILL
    storage = opened(s3_uri)
    early = sync(there, storage)
    assert early.skipped == () and len(early.pulled) < 2 and is_usable(there, here)
    assert run_child(here, s3_uri, 10_000) == 0, "a child that is not killed"
    assert all(len(keys_of(storage, name)) == NUM_FILES + 1 for name in (ONE, TWO))
    third = there.parent / "third"
    assert run_child(third, s3_uri, num_requests - 1) == -signal.SIGKILL
    assert len(local(third)) < 2 and is_usable(third, here)
    assert sync(third, storage).skipped == () and content_of(third) == content_of(here)


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
        if TWO in prefix:
            raise DiskFull("no space left")
        download(prefix, local_dir, names)

    monkeypatch.setattr(storage, "download_dir", fail)
    with pytest.raises(DiskFull):
        sync(there, storage)
    assert is_usable(there, here) and not (there / LOCK_DIR / "staging").exists()
