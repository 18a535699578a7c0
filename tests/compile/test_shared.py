"""A compile cache that machines share: locks of the dead on S3 are removed by age, programs are copied."""

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from moto.s3.models import s3_backends

from pipeline.compile import cache, neuron_compile
from pipeline.compile.cache import SHARED_LOCK_S, EntryName, list_storage, release_dead_locks, repair, scan
from pipeline.compile.config import CompileConfig
from pipeline.compile.neuron_compile import NeuronCompile, repair_after_run
from pipeline.compile.neuron_tool import use_neuron_cache
from pipeline.compile.shared import Programs, programs_place, shared_compile_cache
from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage
from pipeline.parallel.world import NODE, NUM_NODES, TRACE_FILE
from pipeline.settings import Settings, resolve
from tests.compile.cache_cases import DONE, GRAPH, LOCK, NEFF, ONE, THREE, TWO, opened

ACCOUNT = "123456789012"  # moto's
DEAD_S, YOUNG_S = SHARED_LOCK_S + 60, SHARED_LOCK_S - 60


def put(storage: Storage, name: EntryName, *, lock_age_s: float | None) -> str:
    """Write a traced entry, with a lock of that age by the server's clock. Return the key of the lock."""
    storage.write_bytes(f"{name.key}/{GRAPH}", b"graph")
    lock = f"{name.key}/{LOCK}"
    if lock_age_s is not None:
        storage.write_bytes(lock, b"")
        make_older(storage, lock, lock_age_s)
    return lock


def make_older(storage: Storage, key: str, by_s: float) -> None:
    bucket, _, prefix = storage.root.removeprefix("s3://").partition("/")
    s3_backends[ACCOUNT]["aws"].buckets[bucket].keys[f"{prefix}/{key}"].last_modified -= timedelta(seconds=by_s)


def keys(storage: Storage) -> set[str]:
    return {stat.key for stat in storage.list("")}


@pytest.fixture
def live(s3_uri: str) -> Storage:
    return opened(s3_uri)


# Locks.


@pytest.mark.parametrize("now_s", [0.0, 2e9])
def test_old_locks_go_by_the_clock_of_s3_alone(live: Storage, now_s: float) -> None:
    """Whatever this machine's own clock says."""
    dead, young = put(live, ONE, lock_age_s=DEAD_S), put(live, TWO, lock_age_s=YOUNG_S)
    put(live, THREE, lock_age_s=None)
    assert scan(live, clock=lambda: now_s).stale_locks == (ONE,)
    assert [(one.kind, one.entry) for one in release_dead_locks(live, lambda: now_s)] == [("unlock", ONE.key)]
    assert dead not in keys(live) and young in keys(live)
    assert len(list_storage(live)) == 3


def test_a_repair_does_the_same_and_an_empty_repair_changes_nothing(live: Storage) -> None:
    dead, young = put(live, ONE, lock_age_s=DEAD_S), put(live, TWO, lock_age_s=YOUNG_S)
    assert [one.kind for one in repair(live, dry_run=True).actions] == ["unlock"]
    assert dead in keys(live)
    report = repair(live)
    assert [(one.kind, one.entry) for one in report.actions] == [("unlock", ONE.key)]
    assert [(one.kind, one.entry) for one in report.kept] == [("left alone", TWO.key)]
    assert dead not in keys(live) and young in keys(live)


def test_a_lock_that_was_taken_anew_since_the_listing_stays(live: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = put(live, ONE, lock_age_s=DEAD_S)
    listed = list_storage(live)
    live.write_bytes(lock, b"")
    monkeypatch.setattr(cache, "list_storage", lambda *words: listed)
    assert release_dead_locks(live) == []
    assert lock in keys(live)


def settings_of(workspace: str, **compile_settings: str) -> Settings:
    return resolve([], {}, given={"workspace": workspace, "backend": "auto", "compile": compile_settings}).settings


XLA = {"PJRT_DEVICE": "NEURON"}


@pytest.mark.parametrize(
    ("env", "released"),
    [
        (XLA, True),
        (XLA | {NUM_NODES: "2", NODE: "0"}, True),
        (XLA | {NUM_NODES: "2", NODE: "1"}, False),  # the main node does it
        (XLA | {"WORLD_SIZE": "2"}, False),  # its launcher has done it
        (XLA | {TRACE_FILE: "/f"}, False),
        ({"PJRT_DEVICE": "CPU"}, False),
    ],
)
def test_the_main_node_removes_them_before_a_stage(s3_uri: str, env: dict[str, str], released: bool) -> None:
    live, said = opened(f"{s3_uri}/compile-cache"), list[str]()
    lock = put(live, ONE, lock_age_s=DEAD_S)
    with shared_compile_cache(settings_of(s3_uri), StopSignal(), said.append, env):
        assert (lock not in keys(live)) is released
    assert any(ONE.key in line for line in said) is released


def test_a_cache_on_a_disk_is_left_to_repairs(tmp_path: Path) -> None:
    lock = tmp_path / "compile-cache" / ONE.key / LOCK
    lock.parent.mkdir(parents=True)
    lock.touch()
    with shared_compile_cache(settings_of(str(tmp_path)), StopSignal(), print, XLA):
        assert lock.exists()


def driver_of(live: Storage, command: list[str], scratch: Path, said: list[str], *, limit_s: float) -> NeuronCompile:
    return NeuronCompile(
        command,
        CompileConfig(time_limit_s=limit_s, max_retries=1, parallel=1),
        cache_root=live.root,
        scratch=scratch,
        repair=repair_after_run,
        stop=StopSignal(),
        say=said.append,
    )


def when(is_due: Callable[[], bool], act: Callable[[], None]) -> None:
    """Do something as soon as that is so, beside the caller."""

    def watch() -> None:
        until = time.monotonic() + 200
        while not is_due() and time.monotonic() < until:
            time.sleep(0.02)
        act()

    threading.Thread(target=watch, daemon=True).start()


def finish(live: Storage) -> None:
    """What another machine's compiler leaves of ONE."""
    for file in (NEFF, DONE):
        live.write_bytes(f"{ONE.key}/{file}", b"NEFF")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A neuron_parallel_compile that only runs the trial run, which finds every graph locked and skips it."""
    program = tmp_path / "bin" / "neuron_parallel_compile"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor word; do script=$word; done\n"$script"\necho "No todo hlos found in cache"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setattr(neuron_compile, "OTHERS_POLL_S", 0.05)
    return tmp_path


def test_a_compile_goes_on_when_a_lock_of_the_dead_has_become_old(live: Storage, tools: Path) -> None:
    """It is young when the compile begins to wait."""
    lock, said = put(live, ONE, lock_age_s=0.0), list[str]()
    when(lambda: any("removed here when" in line for line in said), lambda: make_older(live, lock, DEAD_S))
    when(lambda: lock not in keys(live), lambda: finish(live))
    command = ["echo", f"Using a cached neff at {live.root}/{ONE.key}/{NEFF}"]
    result = driver_of(live, command, tools / "scratch", said, limit_s=200).run()
    assert result.graphs == (ONE.key,)
    text = "\n".join(said)
    assert f"waiting for 1 graphs that another process compiles: {ONE.key.partition('/')[2]}" in text
    assert "removed here when it is older than 1h00m" in text
    assert f"unlock {ONE.key}" in text


def test_a_trial_run_that_waits_for_a_lock_of_the_dead_goes_on(live: Storage, tools: Path) -> None:
    lock, said, flag = put(live, ONE, lock_age_s=DEAD_S), list[str](), tools / "compiled"

    def compile_it() -> None:
        finish(live)
        flag.touch()

    when(lambda: lock not in keys(live), compile_it)
    wait = f"echo 'Another process must be compiling {live.root}/{ONE.key}/{GRAPH}, been waiting for: 1 minutes'"
    found = f"echo 'Using a cached neff at {live.root}/{ONE.key}/{NEFF}'"
    script = f"while [ ! -e {flag} ]; do {wait}; sleep 0.2; done; {found}"
    result = driver_of(live, ["sh", "-c", script], tools / "scratch", said, limit_s=200).run()
    assert result.graphs == (ONE.key,) and any(line.startswith(f"unlock {ONE.key}") for line in said)


def test_a_living_lock_is_never_removed(live: Storage, tools: Path) -> None:
    lock = put(live, ONE, lock_age_s=0.0)
    command = ["echo", f"Using a cached neff at {live.root}/{ONE.key}/{NEFF}"]
    with pytest.raises(TransientError, match="locked by another process"):
        driver_of(live, command, tools / "scratch", [], limit_s=3.0).run()
    assert lock in keys(live)


# Programs of the native device.

PROGRAM = "ab/cd/abcd01.neff"
OTHERS = {"ab/cd/abcd01.neff.tmp.77": b"half", "notes.txt": b"x", "ee/ff/eeff02.neff": b""}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_programs_go_from_one_machine_to_the_next(storage: Storage, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write(here, {PROGRAM: b"NEFF"} | OTHERS)
    first = Programs(storage, here)
    first.push()
    first.push()
    assert first.num_pushed == 1 and keys(storage) == {PROGRAM}
    assert Programs(storage, there).pull() == 1
    assert [path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()] == [PROGRAM]
    write(there, {"12/34/1234.neff": b"new"})
    second = Programs(storage, there)
    second.push()
    assert second.num_pushed == 1
    assert [Programs(storage, here).pull() for _ in range(2)] == [1, 0]
    assert (here / "12/34/1234.neff").read_bytes() == b"new"


def test_where_programs_are_exchanged() -> None:
    assert programs_place(CompileConfig(), "s3://bucket/ws/compile-cache") == "s3://bucket/ws/compile-cache/neff"
    assert programs_place(CompileConfig(sync_url="s3://bucket/x/"), "/disk") == "s3://bucket/x/neff"
    assert programs_place(CompileConfig(), "/disk") == ""


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """An environment in which the backend is the native device."""
    for name in ("pipeline.compile.shared", "pipeline.compile.neuron_tool"):
        monkeypatch.setattr(f"{name}.compiled_cache", lambda backend: "TORCH_NEURONX_NEFF_CACHE_DIR")
        monkeypatch.setattr(f"{name}.has_graph_tool", lambda backend, env: False)
    return {"TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path / "local")}


def test_a_stage_downloads_first_and_uploads_at_its_end(s3_uri: str, native: dict[str, str], tmp_path: Path) -> None:
    settings, local, shared = settings_of(s3_uri), tmp_path / "local", opened(f"{s3_uri}/compile-cache/neff")
    assert use_neuron_cache(settings.compile, settings.workspace, "neuron", native) == ""
    assert native == {"TORCH_NEURONX_NEFF_CACHE_DIR": str(local)}, "S3 is no folder: the machine's own stays"
    shared.write_bytes(PROGRAM, b"NEFF")
    with shared_compile_cache(settings, StopSignal(), print, native):
        assert (local / PROGRAM).read_bytes() == b"NEFF"
        write(local, {"12/34/1234.neff": b"new"})
    assert shared.read_bytes("12/34/1234.neff") == b"new"
    write(local, {"56/78/5678.neff": b"of a stage that failed"})
    with pytest.raises(KeyError), shared_compile_cache(settings, StopSignal(), print, native):
        raise KeyError
    assert "56/78/5678.neff" in keys(shared)


def test_a_machine_that_is_lost_has_left_what_it_had_compiled(
    s3_uri: str, native: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.compile.shared.PUSH_EVERY_S", 0.02)
    shared, until = opened(f"{s3_uri}/compile-cache/neff"), time.monotonic() + 200
    with shared_compile_cache(settings_of(s3_uri), StopSignal(), print, native):
        write(tmp_path / "local", {PROGRAM: b"NEFF"})
        while not keys(shared) and time.monotonic() < until:
            time.sleep(0.02)
        assert keys(shared) == {PROGRAM}, "while the stage still works"


@pytest.mark.parametrize("more", [{"WORLD_SIZE": "2"}, {TRACE_FILE: "/f"}])
def test_ranks_leave_it_to_their_launcher(
    s3_uri: str, native: dict[str, str], tmp_path: Path, more: dict[str, str]
) -> None:
    opened(f"{s3_uri}/compile-cache/neff").write_bytes(PROGRAM, b"NEFF")
    with shared_compile_cache(settings_of(s3_uri), StopSignal(), print, native | more):
        assert not (tmp_path / "local").exists()


def test_a_stop_ends_without_an_upload(s3_uri: str, native: dict[str, str], tmp_path: Path) -> None:
    stop = StopSignal()
    with shared_compile_cache(settings_of(s3_uri), stop, print, native):
        write(tmp_path / "local", {PROGRAM: b"NEFF"})
        stop.set("SIGTERM")
    assert keys(opened(s3_uri)) == set()


def test_what_cannot_be_shared_does_not_fail_the_stage(
    s3_uri: str, native: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()

    def refused(programs: Programs) -> None:
        raise TransientError("S3 is not there")

    monkeypatch.setattr(Programs, "push", refused)
    with shared_compile_cache(settings_of(s3_uri), StopSignal(), said.append, native):
        pass
    assert said == ["compile cache: compiled programs could not be shared: S3 is not there"]
