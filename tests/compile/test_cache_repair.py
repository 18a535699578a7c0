"""Repairs of a cache: what is deleted, what is left alone, and what is said of it."""

import fcntl
import os
from pathlib import Path

import pytest

from pipeline.compile import cache
from pipeline.compile.cache import (
    LOCK_DIR,
    CacheEntry,
    CompilerProcess,
    Compilers,
    EntryName,
    EntryState,
    RepairReport,
    list_entry,
)
from pipeline.compile.cache_sync import sync_cache
from pipeline.core.errors import ConfigError, Preempted
from pipeline.core.stop import StopSignal
from tests.compile.cache_cases import (
    FILES,
    GRAPH,
    LOCK,
    LOG,
    NEFF,
    NOW_S,
    OLDER,
    VERSION,
    content_of,
    done_files,
    entries_of,
    local_disk,
    name_of,
    nobody,
    opened,
    somebody,
    write_entry,
)

OLD_S = 3600.0


def repair(
    root: Path, *, compilers: Compilers = nobody, keep_versions: list[str] | None = None, dry_run: bool = False
) -> RepairReport:
    return cache.repair(
        opened(str(root)), compilers=compilers, keep_versions=keep_versions, dry_run=dry_run, clock=lambda: NOW_S
    )


def done(report: RepairReport) -> list[tuple[str, str]]:
    return [(action.kind, action.entry) for action in report.actions]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One old entry of each state, numbered as the states are."""
    for number, state in enumerate(EntryState):
        write_entry(tmp_path / "cache", name_of(number), FILES[state], age_s=OLD_S)
    return tmp_path / "cache"


DONE, FAILED, LOCKED, COLLECTED, INCOMPLETE = (name_of(number) for number in range(len(EntryState)))


def test_repairs_each_state(root: Path) -> None:
    kept = entries_of(root, DONE, COLLECTED)
    report = repair(root)
    assert done(report) == [("drop failed", FAILED.key), ("unlock", LOCKED.key), ("drop incomplete", INCOMPLETE.key)]
    assert report.kept == ()
    assert content_of(root) == {**kept, f"{LOCKED.key}/{GRAPH}": b"graph"}
    failed, half = FILES[EntryState.FAILED], FILES[EntryState.INCOMPLETE]
    freed_bytes = sum(len(data) for files in (failed, half) for data in files.values())
    assert sum(action.freed_bytes for action in report.actions) == freed_bytes
    text = "\n".join(report.lines())
    assert "3 actions" in text and f"drop failed {FAILED.key}" in text and "stale lock: no compiler is alive" in text
    assert cache.scan(opened(str(root)), compilers=nobody, clock=lambda: NOW_S).warnings == []
    assert repair(root).actions == (), "a second repair finds nothing to do"


def test_a_dry_run_says_the_same_and_changes_nothing(root: Path) -> None:
    write_entry(root, name_of(7), {GRAPH: b"graph", LOG: b"error", LOCK: b""}, age_s=OLD_S)
    before = content_of(root)
    report = repair(root, dry_run=True, keep_versions=[VERSION])
    assert content_of(root) == before and not (root / LOCK_DIR).exists()
    assert done(repair(root, keep_versions=[VERSION])) == done(report)


def test_a_live_compiler_keeps_its_lock(root: Path) -> None:
    write_entry(root, name_of(7), {GRAPH: b"graph", NEFF: b"being writ", LOG: b"of before", LOCK: b""}, age_s=OLD_S)
    kept = entries_of(root, DONE, LOCKED, COLLECTED, INCOMPLETE, name_of(7))
    report = repair(root, compilers=somebody)
    assert done(report) == [("drop failed", FAILED.key)], "nobody works on an unlocked failure"
    assert content_of(root) == kept
    assert {one.entry for one in report.kept} == {LOCKED.key, INCOMPLETE.key, name_of(7).key}
    assert all("walrus_driver (pid 4711) is alive" in one.reason for one in report.kept)
    assert f"left alone {LOCKED.key}" in "\n".join(report.lines())


def test_young_locks_and_halves_stay(tmp_path: Path) -> None:
    write_entry(tmp_path, LOCKED, FILES[EntryState.LOCKED], age_s=599)
    write_entry(tmp_path, INCOMPLETE, FILES[EntryState.INCOMPLETE], age_s=599)
    before = content_of(tmp_path)
    report = repair(tmp_path)
    assert report.actions == () and len(report.kept) == 2 and content_of(tmp_path) == before


def test_a_lock_that_a_process_holds_stays(tmp_path: Path) -> None:
    folder = write_entry(tmp_path, LOCKED, FILES[EntryState.LOCKED], age_s=OLD_S)
    descriptor = os.open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (kept,) = repair(tmp_path).kept
        assert kept.reason == "a process holds the lock" and (folder / LOCK).exists()
    finally:
        os.close(descriptor)
    assert done(repair(tmp_path)) == [("unlock", LOCKED.key)]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({GRAPH: b"graph", LOG: b"killed", LOCK: b""}, ["unlock", "drop failed"]),
        ({GRAPH: b"graph", NEFF: b"hal", LOCK: b""}, ["unlock", "drop incomplete"]),
        ({**done_files(), LOCK: b""}, ["unlock"]),
        ({LOCK: b""}, ["unlock", "drop incomplete"]),
        ({"model.hlo.pb": b"graph", "model.hlo.pb.lock": b""}, ["unlock"]),
    ],
)
def test_what_lies_under_a_stale_lock_is_treated_too(
    tmp_path: Path, files: dict[str, bytes], expected: list[str]
) -> None:
    write_entry(tmp_path, name_of(1), files, age_s=OLD_S)
    assert [kind for kind, _ in done(repair(tmp_path, dry_run=True))] == expected
    assert [kind for kind, _ in done(repair(tmp_path))] == expected
    assert repair(tmp_path).actions == ()


def test_prunes_other_compilers(root: Path) -> None:
    write_entry(root, name_of(1, OLDER), done_files(), age_s=OLD_S)
    write_entry(root, name_of(2, OLDER), FILES[EntryState.COLLECTED], age_s=OLD_S)
    report = repair(root, keep_versions=["2.24.8799.0"])
    assert [action.entry for action in report.actions if action.kind == "prune"] == [
        name_of(1, OLDER).key,
        name_of(2, OLDER).key,
    ]
    assert not (root / OLDER).exists()
    assert entries_of(root, DONE) == {f"{DONE.key}/{file}": data for file, data in done_files().items()}


def test_pruning_spares_what_a_live_compiler_makes(tmp_path: Path) -> None:
    write_entry(tmp_path, name_of(1), done_files())
    write_entry(tmp_path, name_of(1, OLDER), FILES[EntryState.LOCKED], age_s=OLD_S)
    write_entry(tmp_path, name_of(2, OLDER), FILES[EntryState.INCOMPLETE], age_s=OLD_S)
    write_entry(tmp_path, name_of(3, OLDER), {**done_files(), LOCK: b""}, age_s=OLD_S)
    before = content_of(tmp_path)
    report = repair(tmp_path, compilers=somebody, keep_versions=[VERSION])
    assert report.actions == () and len(report.kept) == 3 and content_of(tmp_path) == before
    repair(tmp_path, keep_versions=[VERSION])
    assert {path.name for path in tmp_path.iterdir()} == {VERSION, LOCK_DIR}


@pytest.mark.parametrize("keep", [[], ["2.24"], ["neuronxcc-9.9.9"]])
def test_never_prunes_everything(root: Path, keep: list[str]) -> None:
    before = content_of(root)
    with pytest.raises(ConfigError, match="no entry") as caught:
        repair(root, keep_versions=keep)
    assert VERSION in caught.value.expected and content_of(root) == before


def test_an_entry_that_comes_to_life_meanwhile_is_left_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def look(folder: Path, name: EntryName) -> CacheEntry:
        nonlocal looks
        if name == FAILED:
            looks += 1
            if looks == 3:  # listed, judged, and once more before it is removed
                write_entry(root, FAILED, {LOCK: b""})
        return list_entry(folder, name)

    monkeypatch.setattr(cache, "list_entry", look)
    report = repair(root)
    assert [one.reason for one in report.kept] == ["changed meanwhile"]
    assert (root / FAILED.key / LOG).exists()


def test_a_compiler_that_starts_meanwhile_is_noticed(tmp_path: Path) -> None:
    """Asked before each entry, not once: repairing thousands of entries takes a while."""
    for number in range(3):
        write_entry(tmp_path, name_of(number), FILES[EntryState.LOCKED], age_s=OLD_S)
    answers = iter([[], [CompilerProcess(1, "neuronx-cc")], [CompilerProcess(1, "neuronx-cc")]])
    report = repair(tmp_path, compilers=lambda: next(answers))
    assert done(report) == [("unlock", name_of(0).key)] and len(report.kept) == 2


def test_a_missing_root_needs_no_repair(tmp_path: Path) -> None:
    assert repair(tmp_path / "none", keep_versions=["1"]).actions == ()
    assert not (tmp_path / "none").exists()


def test_stops_between_entries(root: Path) -> None:
    stop, before = StopSignal(), content_of(root)
    stop.set("SIGTERM")
    with pytest.raises(Preempted):
        cache.repair(opened(str(root), stop), compilers=nobody, clock=lambda: NOW_S)
    assert content_of(root) == before


def test_a_storage(s3_uri: str, tmp_path: Path) -> None:
    storage = opened(s3_uri)
    write_entry(tmp_path / "cache", name_of(1), done_files())
    write_entry(tmp_path / "cache", name_of(1, OLDER), done_files())
    sync_cache(tmp_path / "cache", storage, mounts=local_disk)
    for file, data in FILES[EntryState.FAILED].items():
        storage.write_bytes(f"{name_of(2).key}/{file}", data)
    storage.write_bytes(f"{name_of(3).key}/{LOCK}", b"")
    storage.write_bytes(f"{name_of(4).key}/{'0' * 32}/{NEFF}", b"half an upload")
    before = [stat.key for stat in storage.list("")]
    dry = cache.repair(storage, keep_versions=[VERSION], dry_run=True)
    assert [stat.key for stat in storage.list("")] == before
    report = cache.repair(storage, keep_versions=[VERSION])
    assert report.actions == dry.actions
    assert done(report) == [("prune", name_of(1, OLDER).key), ("drop failed", name_of(2).key)]
    assert {one.entry for one in report.kept} == {name_of(3).key, name_of(4).key}
    left = {stat.key.split("/")[1] for stat in storage.list("")}
    assert left == {name_of(number).key.split("/")[1] for number in (1, 3, 4)}
    with pytest.raises(ConfigError):
        cache.repair(storage, keep_versions=["1.0"])
