"""A compile cache that machines share: locks of the dead on S3 are removed by age, programs are copied."""

import time
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import pytest
from moto.s3.models import s3_backends

from pipeline.compile.cache import SHARED_LOCK_S, release_locks, repair
from pipeline.compile.config import CompileConfig
from pipeline.compile.neuron import use_neuron_cache
from pipeline.compile.sync import Programs, programs_uri, shared_compile_cache
from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage
from pipeline.parallel.world import NODE, NUM_NODES, TRACE_FILE
from pipeline.settings import Settings, resolve
from tests.compile.cache_cases import GRAPH, LOCK, LOG, ONE, THREE, TWO, name_of, opened

ACCOUNT = "123456789012"  # moto's
DEAD_S, YOUNG_S = SHARED_LOCK_S + 60, SHARED_LOCK_S - 60


def put(storage: Storage, name: str, *, lock_age_s: float | None) -> str:
    """Write a traced entry, with a lock of that age by the server's clock. Return the key of the lock."""
    storage.write_bytes(f"{name}/{GRAPH}", b"graph")
    lock = f"{name}/{LOCK}"
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


def test_a_repair_and_a_release_go_by_the_clock_of_s3(live: Storage) -> None:
    dead, young = put(live, ONE, lock_age_s=DEAD_S), put(live, TWO, lock_age_s=YOUNG_S)
    put(live, THREE, lock_age_s=None)
    assert release_locks(live) == [f"unlock {ONE}"]
    assert dead not in keys(live) and young in keys(live) and f"{ONE}/{GRAPH}" in keys(live)
    put(live, ONE, lock_age_s=DEAD_S)
    live.write_bytes(f"{name_of(4)}/{LOG}", b"failed")
    assert repair(live) == [f"unlock {ONE}", f"drop failed {name_of(4)}"]
    make_older(live, f"{ONE}/{GRAPH}", DEAD_S)
    assert repair(live) == [], "a traced graph may be waiting for another machine's compiler"
    assert {key.rpartition("/")[0] for key in keys(live)} == {ONE, TWO, THREE}


def settings_of(workspace: str, **compile_settings: str) -> Settings:
    return resolve([], {}, overrides={"workspace": workspace, "backend": "auto", "compile": compile_settings}).settings


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
    """From S3; a cache on a disk is left to repairs."""
    live, said = opened(f"{s3_uri}/compile-cache"), list[str]()
    lock = put(live, ONE, lock_age_s=DEAD_S)
    with shared_compile_cache(settings_of(s3_uri), StopSignal(), said.append, env):
        assert (lock not in keys(live)) is released
    assert any(ONE in line for line in said) is released


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
    assert programs_uri(CompileConfig(), "s3://bucket/ws/compile-cache") == "s3://bucket/ws/compile-cache/neff"
    assert programs_uri(CompileConfig(sync_url="s3://bucket/x/"), "/disk") == "s3://bucket/x/neff"
    assert programs_uri(CompileConfig(), "/disk") == ""


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """An environment in which the backend is the native device."""
    for name in ("pipeline.compile.sync", "pipeline.compile.neuron"):
        monkeypatch.setattr(f"{name}.compiled_cache_variable", lambda backend: "TORCH_NEURONX_NEFF_CACHE_DIR")
        monkeypatch.setattr(f"{name}.has_graph_tool", lambda backend, env: False)
    return {"TORCH_NEURONX_NEFF_CACHE_DIR": str(tmp_path / "local")}


def stage(workspace: str, env: dict[str, str], stop: StopSignal | None = None) -> AbstractContextManager[None]:
    return shared_compile_cache(settings_of(workspace), stop or StopSignal(), print, env)


def test_a_stage_downloads_first_and_uploads_at_its_end(s3_uri: str, native: dict[str, str], tmp_path: Path) -> None:
    settings, local, shared = settings_of(s3_uri), tmp_path / "local", opened(f"{s3_uri}/compile-cache/neff")
    assert use_neuron_cache(settings.compile, settings.workspace, "neuron", native) == ""
    assert native == {"TORCH_NEURONX_NEFF_CACHE_DIR": str(local)}, "S3 is no folder: the machine's own stays"
    shared.write_bytes(PROGRAM, b"NEFF")
    for more in ({"WORLD_SIZE": "2"}, {TRACE_FILE: "/f"}):
        with stage(s3_uri, native | more):
            assert not local.exists(), "ranks leave it to their launcher"
    with stage(s3_uri, native):
        assert (local / PROGRAM).read_bytes() == b"NEFF"
        write(local, {"12/34/1234.neff": b"new"})
    assert shared.read_bytes("12/34/1234.neff") == b"new"
    write(local, {"56/78/5678.neff": b"of a stage that failed"})
    with pytest.raises(KeyError), stage(s3_uri, native):
        raise KeyError
    assert "56/78/5678.neff" in keys(shared)


def test_a_machine_that_is_lost_has_left_what_it_had_compiled(
    s3_uri: str, native: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.compile.sync.PUSH_EVERY_S", 0.02)
    shared, until = opened(f"{s3_uri}/compile-cache/neff"), time.monotonic() + 200
    with stage(s3_uri, native):
        write(tmp_path / "local", {PROGRAM: b"NEFF"})
        while not keys(shared) and time.monotonic() < until:
            time.sleep(0.02)
        assert keys(shared) == {PROGRAM}, "while the stage still works"


def test_a_stop_ends_without_an_upload_and_one_that_fails_does_not_fail_the_stage(
    s3_uri: str,
    native: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = StopSignal()
    with stage(s3_uri, native, stop):
        write(tmp_path / "local", {PROGRAM: b"NEFF"})
        stop.set("SIGTERM")
    assert keys(opened(s3_uri)) == set()

    def refused(programs: Programs) -> None:
        raise TransientError("S3 is not there")

    monkeypatch.setattr(Programs, "push", refused)
    with stage(s3_uri, native):
        pass
    assert capsys.readouterr().out == "compile cache: compiled programs could not be shared: S3 is not there\n"
