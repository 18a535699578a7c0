"""Entries of a cache and their states, what a repair deletes and leaves alone, and the report on all of it."""

from collections import namedtuple
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.compile import cache
from pipeline.compile.cache import (
    LOCK_DIR,
    CacheEntry,
    CacheFile,
    Compilers,
    EntryState,
    entry_state,
    list_entries,
    refuse_network_root,
    release_locks,
    repair,
    status_lines,
)
from pipeline.compile.config import CompilerFlags
from pipeline.core.errors import ConfigError
from pipeline.core.manifest import MANIFEST_NAME
from tests.compile.cache_cases import (
    FILES,
    GRAPH,
    LOCK,
    LOG,
    NEFF,
    ONE,
    VERSION,
    content_of,
    done_files,
    entries_of,
    name_of,
    nobody,
    opened,
    somebody,
    write_entry,
)

OLD_S = 3700.0
DONE, FAILED, LOCKED, PARTIAL = (name_of(number) for number in range(len(EntryState)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One old entry of each state, numbered as the states are."""
    for number, state in enumerate(EntryState):
        write_entry(tmp_path / "cache", name_of(number), FILES[state], age_s=OLD_S)
    return tmp_path / "cache"


def done(root: Path | str, compilers: Compilers = nobody) -> list[tuple[str, str]]:
    found = [line.rpartition(" ") for line in repair(opened(str(root)), compilers=compilers)]
    return [(kind, entry) for kind, _, entry in found]


D, F, L, P = EntryState


@pytest.mark.parametrize(
    ("neff", "done", "log", "lock", "expected"),
    [
        (1, 1, 1, 1, D),  # compiled in the end; the lock was left over
        (1, 0, 1, 0, F),
        (0, 0, 1, 1, L),  # a failure that is tried again
        (1, 0, 0, 0, P),
        (0, 1, 1, 0, P),
    ],
)
def test_state_by_the_files_that_are_there(neff: int, done: int, log: int, lock: int, expected: EntryState) -> None:
    present = {"model.neff": neff, "model.done": done, "model.log": log, LOCK: lock}
    assert (
        entry_state({GRAPH, "compile_flags.json", *(name for name, is_there in present.items() if is_there)})
        is expected
    )


def test_states_of_torn_and_of_published_entries() -> None:
    def state(**files: int) -> EntryState:
        return CacheEntry(ONE, {name.replace("__", "/"): CacheFile(size) for name, size in files.items()}).state

    assert state(**{"model.neff": 0, "model.done": 0}) is P, "a power cut keeps a name and loses the bytes"
    published = f"{'0' * 32}/model.neff"
    sizes: list[tuple[int | None, EntryState]] = [(None, P), (0, P), (300, D)]  # half uploaded, withdrawn, published
    for marker, expected in sizes:
        assert state(**{published: 10} | ({} if marker is None else {MANIFEST_NAME: marker})) is expected


@pytest.mark.parametrize(
    ("key", "is_entry"),
    [
        ("neuronxcc-2.24.8799.0+6f62ff7c/MODULE_18108742649528384371+839ddec0", True),
        ("neuronxcc-2.24.8799.0+6f62ff7c/MODULE_0a1b2c3d4e5f60718293+e30acd3a", True),  # of torch_neuronx.trace
        ("neuronxcc-2.9.0/MODULE_1+d41d8cd9", True),
        ("neuronxcc-2.24.8799.0+6f62ff7c/MODULE_1+e30acd3", False),
        ("xla-2.9.0+cpu/MODULE_1+d41d8cd9", False),
        (f"{LOCK_DIR}/MODULE_1+e30acd3a", False),
    ],
)
def test_names_of_entries(tmp_path: Path, key: str, is_entry: bool) -> None:
    write_entry(tmp_path, key, {NEFF: b"x"})
    assert [one.key for one in list_entries(opened(str(tmp_path)))] == ([key] if is_entry else [])


def test_repair_deletes_what_is_failed_or_stale(root: Path) -> None:
    kept = entries_of(root, DONE)
    write_entry(root, name_of(7), {**done_files(), LOCK: b""}, age_s=OLD_S)
    expected = [("drop failed", FAILED), ("drop locked", LOCKED), ("drop partial", PARTIAL), ("unlock", name_of(7))]
    assert done(root) == expected
    assert content_of(root) == kept | {f"{name_of(7)}/{name}": data for name, data in done_files().items()}
    assert done(root) == [], "a second repair finds nothing to do"
    assert done(root / "none") == [] and not (root / "none").exists(), "a missing root is empty"


@pytest.mark.parametrize(("age_s", "compilers"), [(OLD_S, somebody), (500.0, nobody)])
def test_what_a_living_compiler_may_write_stays(root: Path, age_s: float, compilers: Compilers) -> None:
    for key, state in ((LOCKED, L), (PARTIAL, P)):
        write_entry(root, key, FILES[state], age_s=age_s)
    kept = entries_of(root, DONE, LOCKED, PARTIAL)
    assert done(root, compilers) == [("drop failed", FAILED)], "nobody works on an unlocked failure"
    assert content_of(root) == kept
    assert release_locks(opened(str(root)), stale_s=600.0, compilers=compilers) == []


def test_an_entry_that_changes_after_the_listing_is_judged_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = list_entries(opened(str(root)))
    write_entry(root, FAILED, {LOCK: b""})
    with monkeypatch.context() as patch:
        patch.setattr(cache, "list_entries", lambda storage, key="": list_entries(storage, key) if key else listed)
        assert [entry for _, entry in done(root)] == [LOCKED, PARTIAL]
    assert (root / FAILED / LOG).exists()


Partition = namedtuple("Partition", ("mountpoint", "fstype"))  # as psutil gives it


@pytest.mark.parametrize(
    ("kinds", "is_refused"),
    [
        (["nfs4"], True),
        (["ext4", "fuse.s3fs"], True),
        (["nfs4", "ext4"], False),  # mounted later at the same place
        (["fuse.fuse-overlayfs"], False),
        ([], False),
    ],
)
def test_network_file_systems_are_refused(
    root: Path, kinds: Collection[str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [Partition("/", "ext4"), *(Partition(str(root.parent), kind) for kind in kinds)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    if not is_refused:
        refuse_network_root(root)
        return
    before = content_of(root)
    with pytest.raises(ConfigError, match="network file system"):
        repair(opened(str(root)), compilers=nobody)
    assert content_of(root) == before


def test_status_names_what_needs_a_look(root: Path) -> None:
    before = content_of(root)
    lines = status_lines(opened(str(root)), CompilerFlags(), nobody)
    assert content_of(root) == before and not (root / LOCK_DIR).exists(), "status changes nothing"
    assert lines[0].startswith(f"compile cache file://{root} | 4 entries, ") and "age 1h0" in lines[0]
    assert lines[1] == "done 1 | failed 1 | locked 1 | partial 1"
    assert f"{VERSION}: 4 entries" in lines
    assert f"flags 3cc9a3cb: 4 entries, {CompilerFlags().text()}" in lines
    assert [line.split(" | ")[0] for line in lines[4:7]] == [
        f"failed {FAILED}",
        f"locked {LOCKED}",
        f"partial {PARTIAL}",
    ]
    assert lines[-1].startswith("warning: ") and lines[-1].endswith("trnpipe cache repair")
    assert "compiling now: walrus_driver (pid 4711)" in status_lines(opened(str(root)), CompilerFlags(), somebody)


def test_status_warns_of_a_cache_made_with_other_flags(tmp_path: Path) -> None:
    write_entry(tmp_path, ONE, done_files())
    assert "warning" not in "".join(status_lines(opened(str(tmp_path)), CompilerFlags(), nobody))
    (warning,) = [
        line
        for line in status_lines(opened(str(tmp_path)), CompilerFlags(optlevel=2), nobody)
        if line.startswith("warning")
    ]
    assert "--optlevel=2" in warning and "will recompile all graphs" in warning


def test_flags_have_one_spelling_in_one_order() -> None:
    """The cache key hashes the text."""
    text = CompilerFlags(auto_cast="all", optlevel=2).text()
    assert text == "--model-type=transformer --auto-cast=all --auto-cast-type=bf16 --optlevel=2"


@given(st.text(max_size=60))
def test_any_name_is_read_or_passed_over(text: str) -> None:
    entry = CacheEntry(text, {text: CacheFile(1, None)})
    assert entry.state in EntryState and entry.age_s is None
