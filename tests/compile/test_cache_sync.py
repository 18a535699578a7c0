"""Sync of caches with a storage: what moves, what never does, and many nodes at once."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compile import cache_sync
from pipeline.compile.cache import LOCK_DIR, EntryState, Mount, cache_lock, list_local, repair, scan
from pipeline.compile.cache_sync import Direction, LeftOut, SyncReport, sync_cache
from pipeline.core.errors import ConfigError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage
from tests.compile.cache_cases import (
    FILES,
    GRAPH,
    LOCK,
    LOG,
    NUM_FILES,
    OLDER,
    ONE,
    THREE,
    TWO,
    VERSION,
    content_of,
    done_files,
    entries_of,
    keys_of,
    moved,
    name_of,
    nobody,
    opened,
    requests_of,
    sync,
    write_entry,
)


def test_a_second_machine_with_an_empty_disk_starts_warm(storage: Storage, here: Path, there: Path) -> None:
    assert moved(sync(here, storage)) == ([], [ONE.key, TWO.key])
    report = sync(there, storage)
    assert moved(report) == ([ONE.key, TWO.key], [])
    assert content_of(there) == content_of(here)
    assert {entry.state for entry in list_local(there)} == {EntryState.DONE}
    assert (report.in_step, report.left_out) == (0, ())
    size_bytes = sum(len(data) for data in done_files().values())
    assert [one.size_bytes for one in report.pulled] == [size_bytes] * 2
    assert "pulled 2" in report.lines()[0] and "pushed 0" in report.lines()[0]
    for name in (ONE, TWO):
        verify_dir(storage, name.key, deep=True)


def test_only_new_entries_are_sent(storage: Storage, here: Path) -> None:
    sync(here, storage)
    idle = requests_of(storage, lambda: sync(here, storage))
    assert (idle["put"], idle["get"], idle["head"], idle["delete"]) == (0, 0, 0, 0) and idle["list"] <= 1
    write_entry(here, THREE, done_files("c"))
    sent = requests_of(storage, lambda: sync(here, storage))
    assert sent["put"] == NUM_FILES + 1, "the files of one entry and its marker"
    assert sent["get"] == 0


def test_both_ways_at_once(storage: Storage, here: Path, there: Path) -> None:
    write_entry(there, THREE, done_files("c"))
    sync(here, storage)
    report = sync(there, storage)
    assert moved(report) == ([ONE.key, TWO.key], [THREE.key])
    report = sync(here, storage)
    assert moved(report) == ([THREE.key], []) and report.in_step == 2
    assert content_of(here) == content_of(there)


@pytest.mark.parametrize(("direction", "expected"), [("pull", ([ONE.key], [])), ("push", ([], [THREE.key]))])
def test_one_way(
    storage: Storage, tmp_path: Path, there: Path, direction: Direction, expected: tuple[list[str], list[str]]
) -> None:
    write_entry(tmp_path / "first", ONE, done_files())
    sync(tmp_path / "first", storage)
    write_entry(there, THREE, done_files("c"))
    assert moved(sync(there, storage, direction=direction)) == expected


def test_only_finished_entries_are_sent(storage: Storage, tmp_path: Path) -> None:
    for number, state in enumerate(EntryState):
        write_entry(tmp_path / "here", name_of(number), FILES[state])
    write_entry(tmp_path / "here", name_of(9), {**done_files(), LOCK: b""})
    (tmp_path / "here" / "graphs.json").write_text("{}")
    report = sync(tmp_path / "here", storage)
    assert moved(report) == ([], [name_of(0).key, name_of(9).key])
    assert not any(LOCK in stat.key or "graphs.json" in stat.key for stat in storage.list(""))


def test_chosen_compiler_versions(storage: Storage, here: Path, there: Path) -> None:
    write_entry(here, name_of(1, OLDER), done_files())
    assert moved(sync(here, storage, compiler_versions=[VERSION]))[1] == [ONE.key, TWO.key]
    sync(here, storage)
    assert moved(sync(there, storage, compiler_versions=["2.21.33363.0"]))[0] == [name_of(1, OLDER).key]


@pytest.mark.parametrize("state", [EntryState.FAILED, EntryState.COLLECTED, EntryState.INCOMPLETE])
def test_a_pull_heals_what_is_not_finished(storage: Storage, here: Path, there: Path, state: EntryState) -> None:
    sync(here, storage)
    write_entry(there, ONE, FILES[state])
    assert sync(there, storage).left_out == ()
    assert content_of(there) == content_of(here), "finished, and without the log of the failure"


def test_a_pull_leaves_a_locked_entry_to_its_compiler(storage: Storage, here: Path, there: Path) -> None:
    sync(here, storage)
    write_entry(there, ONE, FILES[EntryState.LOCKED])
    before = content_of(there)
    report = sync(there, storage)
    assert moved(report) == ([TWO.key], [])
    assert [(one.entry, one.side, one.reason) for one in report.left_out] == [(ONE.key, "local", "locked")]
    assert content_of(there) == {**before, **entries_of(here, TWO)}


def test_a_compiler_that_starts_during_the_download_keeps_its_entry(storage: Storage, here: Path, there: Path) -> None:
    sync(here, storage)
    write_entry(there, ONE, FILES[EntryState.COLLECTED])
    download = storage.download_dir

    def download_and_lock(prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        download(prefix, local_dir, names)
        write_entry(there, ONE, {LOCK: b""})

    setattr(storage, "download_dir", download_and_lock)  # noqa: B010
    (left,) = sync(there, storage).left_out
    assert (left.entry, left.reason) == (ONE.key, "locked meanwhile")
    assert set(entries_of(there, ONE)) == {f"{ONE.key}/{GRAPH}", f"{ONE.key}/{LOCK}"}


def test_entries_without_checksums_are_not_trusted(storage: Storage, there: Path) -> None:
    for file, data in done_files().items():
        storage.write_bytes(f"{ONE.key}/{file}", data)
    report = sync(there, storage)
    assert [one.entry for one in report.left_out] == [ONE.key] and content_of(there) == {}
    assert "has no checksums" in report.lines()[1]
    write_entry(there, ONE, done_files())
    assert moved(sync(there, storage))[1] == [ONE.key]


# Many nodes


def test_two_nodes_that_compiled_the_same_graph_at_once_lose_nothing(
    storage: Storage, storage_uri: str, here: Path, there: Path
) -> None:
    """The second node syncs in the middle of the first one's upload, with other bytes for the same graph."""
    write_entry(there, ONE, done_files("another moment"))
    write_entry(there, THREE, done_files("c"))
    other = opened(storage_uri)
    upload, syncs = storage.upload_dir, iter([True])

    def upload_after_the_other(prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        if ONE.key in prefix and next(syncs, False):
            assert moved(sync(there, other))[1] == [ONE.key, THREE.key]
        upload(prefix, local_dir, names)

    setattr(storage, "upload_dir", upload_after_the_other)  # noqa: B010
    report = sync(here, storage)
    assert moved(report)[1] == [TWO.key] and report.in_step == 1
    verify_dir(storage, ONE.key, deep=True)
    assert len(keys_of(storage, ONE)) == NUM_FILES + 1, "what the loser sent is gone"
    for root in (here, there):
        sync(root, storage)
        assert {entry.name for entry in list_local(root)} == {ONE, TWO, THREE}
    third = here.parent / "third"
    assert len(sync(third, storage).pulled) == 3
    assert entries_of(third, ONE) == entries_of(there, ONE), "the first marker counts"


def test_two_nodes_with_the_same_bytes_at_once(storage: Storage, storage_uri: str, here: Path, there: Path) -> None:
    write_entry(there, ONE, done_files("a"))
    other, upload, syncs = opened(storage_uri), storage.upload_dir, iter([True])

    def upload_after_the_other(prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        if ONE.key in prefix and next(syncs, False):
            sync(there, other)
        upload(prefix, local_dir, names)

    setattr(storage, "upload_dir", upload_after_the_other)  # noqa: B010
    assert moved(sync(here, storage))[1] == [TWO.key]
    verify_dir(storage, ONE.key, deep=True)
    assert len(keys_of(storage, ONE)) == NUM_FILES + 1


def test_an_entry_published_since_the_listing_is_not_sent(
    storage: Storage, here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync(here, storage)
    write_entry(there, ONE, done_files("another moment"))
    with monkeypatch.context() as patch:
        patch.setattr(cache_sync, "list_storage", lambda _: [])
        counts = requests_of(storage, lambda: moved(sync(there, storage)) == ([], []) or pytest.fail("won"))
    assert counts["put"] == 0
    assert sync(there, storage).in_step == 1


def test_one_sync_or_repair_at_a_time_on_a_root(storage: Storage, stop: StopSignal, here: Path) -> None:
    stop.set("SIGTERM")
    with cache_lock(here, StopSignal()):
        with pytest.raises(Preempted, match="waiting for the lock"):
            sync(here, storage)
        with pytest.raises(Preempted, match="waiting for the lock"):
            repair(opened(str(here), stop), compilers=nobody)


def test_syncs_in_parallel(storage_uri: str, storage: Storage, tmp_path: Path) -> None:
    """Three nodes, and two processes on the first: all at once, then once more."""
    roots = [tmp_path / name for name in ("node0", "node1", "node2")]
    for node, root in enumerate(roots):
        write_entry(root, ONE, done_files(f"bytes of node {node}"))
        write_entry(root, name_of(10 + node), done_files("own"))
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(root: Path) -> None:
        try:
            mine = opened(storage_uri)
            barrier.wait()
            sync(root, mine)
        except BaseException as error:  # handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(root,)) for root in [*roots, roots[0]]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for root in roots:
        assert sync(root, storage).left_out == ()
        assert {entry.name for entry in list_local(root)} == {ONE, *(name_of(10 + node) for node in range(3))}
    for name in (ONE, *(name_of(10 + node) for node in range(3))):
        verify_dir(storage, name.key, deep=True)
        assert len(keys_of(storage, name)) == NUM_FILES + 1


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
        pushed = [one.entry for node in rounds for one in sync(base / f"node{node}", storage).pushed]
        every = {name_of(number) for number in set().union(*owned)}
        assert sorted(pushed) == sorted(name.key for name in every), "each graph is sent once"
        for node in range(len(owned)):
            assert {entry.name for entry in list_local(base / f"node{node}")} == every


# Roots that are refused


def test_a_network_root_is_refused(storage: Storage, there: Path) -> None:
    with pytest.raises(ConfigError, match="efs"):
        sync_cache(there, storage, mounts=lambda: [Mount("/", "efs")])
    assert not there.exists()


def test_a_storage_is_no_local_cache(tmp_path: Path, here: Path) -> None:
    storage = opened(str(tmp_path / "storage"))
    sync(here, storage)
    for root, target in (
        (tmp_path / "storage", opened(str(tmp_path / "another"))),
        (tmp_path / "fresh", opened(str(tmp_path / "fresh"))),
    ):
        with pytest.raises(ConfigError, match="is the storage"):
            sync(root, target)


def test_lines_say_what_was_left_out() -> None:
    left = LeftOut(ONE.key, "storage", "model.neff has 3 bytes", "withdrawn there")
    report = SyncReport("file:///var/tmp/cache", "s3://bucket/compile-cache", (), (), (left,), 12)
    assert report.lines() == [
        "cache sync file:///var/tmp/cache <-> s3://bucket/compile-cache | pulled 0 (0 B) | pushed 0 (0 B) | in step 12"
        " | left out 1",
        f"left out (storage) {ONE.key}: model.neff has 3 bytes; withdrawn there",
    ]


def test_a_synced_cache_scans_as_healthy(storage: Storage, here: Path, there: Path) -> None:
    sync(here, storage)
    sync(there, storage)
    report = scan(opened(str(there)), compilers=nobody)
    assert report.warnings == [] and report.counts[EntryState.DONE] == 2 == len(report.entries)
    assert LOG not in "\n".join(report.lines())


def test_what_the_version_before_has_written_is_pulled(storage: Storage, there: Path) -> None:
    """A sync before this one kept checksums beside the cache, and may have withdrawn an entry."""
    folder = there / LOCK_DIR / ONE.version_dir
    folder.mkdir(parents=True)
    (folder / f"{ONE.key.partition('/')[2]}.json").write_text("{}")
    storage.write_bytes(f"{ONE.key}/MANIFEST.json", b"")
    write_entry(there, ONE, done_files())
    assert moved(sync(there, storage))[1] == [ONE.key]
    verify_dir(storage, ONE.key, deep=True)
