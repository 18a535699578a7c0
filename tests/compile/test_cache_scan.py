"""Reports on caches, stale locks, the warning about flags, and file systems that are refused."""

import os
import subprocess
from pathlib import Path

import pytest

from pipeline.compile import cache
from pipeline.compile.cache import (
    CacheReport,
    Compilers,
    EntryState,
    Mount,
    live_compilers,
    mount_of,
    mounted,
    refuse_network_root,
)
from pipeline.compile.cache_sync import sync_cache
from pipeline.compile.config import CompilerFlags, flags_hash
from pipeline.core.errors import ConfigError
from pipeline.core.format import format_bytes
from pipeline.io.storage import Storage
from tests.compile.cache_cases import (
    FILES,
    FLAGS,
    NOW_S,
    OLDER,
    VERSION,
    done_files,
    local_disk,
    name_of,
    nobody,
    opened,
    somebody,
    write_entry,
)

STATES = list(EntryState)


def scan(root: Path, *, compilers: Compilers = nobody, flags: CompilerFlags | None = None) -> CacheReport:
    return cache.scan(opened(str(root)), compilers=compilers, flags=flags, clock=lambda: NOW_S)


def test_counts_sizes_ages_and_versions(tmp_path: Path) -> None:
    for number, state in enumerate(STATES):
        write_entry(tmp_path, name_of(number), FILES[state], age_s=60.0 * (number + 1))
    write_entry(tmp_path, name_of(9, OLDER, "e30acd3a"), done_files("b"), age_s=3600)
    (tmp_path / VERSION / "MODULE_8+3cc9a3cb").mkdir()
    (tmp_path / "graphs.json").write_text("{}")
    (tmp_path / "another folder" / "MODULE_1+3cc9a3cb").mkdir(parents=True)
    report = scan(tmp_path)
    assert report.counts == {
        EntryState.DONE: 2,
        EntryState.FAILED: 1,
        EntryState.LOCKED: 1,
        EntryState.COLLECTED: 1,
        EntryState.INCOMPLETE: 2,
    }
    files = [FILES[state] for state in STATES] + [done_files("b")]
    size_bytes = sum(len(data) for one in files for data in one.values())
    text = "\n".join([*report.lines(), *report.warnings])
    assert f"compiler {OLDER}: 1 entries" in text and f"compiler {VERSION}: 6 entries" in text
    assert "flags e30acd3a: 1 entries" in text
    assert f"7 entries, {format_bytes(size_bytes)}" in text and "age 1m00s to 1h00m" in text
    assert "done 2 | failed 1 | locked 1 | collected 1 | incomplete 2" in text
    assert f"failed {name_of(1).key}" in text and f"incomplete {VERSION}/MODULE_8+3cc9a3cb" in text
    assert "flags 3cc9a3cb: 6 entries, --target=trn1 --model-type=transformer" in text
    assert "1 failed compiles are reused as failures for ever: trnpipe cache repair" in text


def test_a_missing_root_is_an_empty_cache(tmp_path: Path) -> None:
    report = scan(tmp_path / "none", flags=CompilerFlags())
    assert report.entries == () and report.warnings == []
    assert not (tmp_path / "none").exists()


def test_a_damaged_flags_file_is_no_text(tmp_path: Path) -> None:
    write_entry(tmp_path, name_of(1), {**done_files(), "compile_flags.json": b"[\xff"})
    assert scan(tmp_path).flags_text == {}
    write_entry(tmp_path, name_of(2), done_files())
    assert scan(tmp_path).flags_text == {FLAGS: "--target=trn1 --model-type=transformer"}


@pytest.mark.parametrize(
    ("age_s", "compilers", "is_stale"),
    [(601.0, nobody, True), (599.0, nobody, False), (601.0, somebody, False), (1e6, somebody, False)],
)
def test_a_lock_is_stale_when_it_is_old_and_no_compiler_lives(
    tmp_path: Path, age_s: float, compilers: Compilers, is_stale: bool
) -> None:
    write_entry(tmp_path, name_of(1), FILES[EntryState.LOCKED], age_s=age_s)
    report = scan(tmp_path, compilers=compilers)
    assert report.stale_locks == ((name_of(1),) if is_stale else ())
    assert bool(report.warnings) is is_stale
    text = "\n".join(report.lines())
    assert (f"stale lock {name_of(1).key}" in text) is is_stale
    assert ("compiling now: walrus_driver (pid 4711)" in text) is (compilers is somebody)


def test_a_stale_lock_beside_a_result_is_shown_too(tmp_path: Path) -> None:
    write_entry(tmp_path, name_of(1), {**done_files(), "model.hlo_module.pb.lock": b""}, age_s=9e3)
    assert any(line.startswith("stale lock") for line in scan(tmp_path).lines())


@pytest.mark.parametrize("name", ["neuronx-cc", "walrus_driver"])
def test_a_running_compiler_is_seen(tmp_path: Path, name: str) -> None:
    program = tmp_path / name
    program.write_text("#!/bin/sh\nread line\n")
    program.chmod(0o755)
    with subprocess.Popen([program, "compile"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert (process.pid, name) in {(found.pid, found.name) for found in live_compilers()}
        finally:
            process.kill()
    assert process.pid not in {found.pid for found in live_compilers()}


def test_this_process_is_no_compiler() -> None:
    assert os.getpid() not in {found.pid for found in live_compilers()}


FLAGS_2 = CompilerFlags(optlevel=2)


def test_warns_when_the_cache_holds_only_other_flags(tmp_path: Path) -> None:
    write_entry(tmp_path, name_of(1), done_files())
    write_entry(tmp_path, name_of(2, flags="0a0a0a0a"), FILES[EntryState.COLLECTED])
    (warning,) = scan(tmp_path, flags=FLAGS_2).warnings
    predicted = flags_hash(FLAGS_2.tokens(), compiler="2.24.8799.0", target="trn1")
    assert predicted in warning and "0a0a0a0a" in warning
    assert "3cc9a3cb (--target=trn1 --model-type=transformer)" in warning
    assert not scan(tmp_path).warnings, "without flags nothing is predicted"
    write_entry(tmp_path, name_of(3, flags=predicted), done_files())
    assert not scan(tmp_path, flags=FLAGS_2).warnings
    assert "trn2" in cache.scan(opened(str(tmp_path)), flags=FLAGS_2, target="trn2").flags_warning


def test_the_hash_is_that_of_each_compiler(tmp_path: Path) -> None:
    """The rule of the hash changed with the compiler: what is right for one is wrong for another."""
    old = "neuronxcc-2.14.227.0+2d4f85be"
    hashed = flags_hash(FLAGS_2.tokens(), compiler="2.14.227.0", target="trn1")
    write_entry(tmp_path, name_of(1, old, hashed), done_files())
    assert not scan(tmp_path, flags=FLAGS_2).warnings
    write_entry(tmp_path / "other", name_of(1, VERSION, hashed), done_files())
    assert len(scan(tmp_path / "other", flags=FLAGS_2).warnings) == 1


def test_a_storage_that_the_compiler_wrote_itself(storage: Storage, tmp_path: Path) -> None:
    for number, state in enumerate(STATES):
        for file, data in FILES[state].items():
            storage.write_bytes(f"{name_of(number).key}/{file}", data)
    storage.write_bytes("graphs.json", b"{}")
    storage.write_bytes(f"above/{name_of(77).key}/model.log", b"of another prefix")
    report = cache.scan(storage, flags=FLAGS_2, compilers=somebody, clock=lambda: NOW_S)
    assert set(report.counts.values()) == {1} and len(report.entries) == len(STATES)
    assert report.stale_locks == () and len(report.warnings) == 2
    assert any("failed" in line and name_of(1).key in line for line in report.lines())


def test_a_storage_that_was_synced(storage: Storage, tmp_path: Path) -> None:
    write_entry(tmp_path / "cache", name_of(1), done_files())
    sync_cache(tmp_path / "cache", storage, mounts=local_disk)
    storage.write_bytes(f"{name_of(2).key}/{'0' * 32}/model.neff", b"half an upload")
    assert [entry.state for entry in cache.list_storage(storage)] == [EntryState.DONE, EntryState.INCOMPLETE]


def test_a_neff_that_lost_its_bytes_is_no_result(tmp_path: Path) -> None:
    write_entry(tmp_path, name_of(1), {**done_files(), "model.neff": b""})
    assert scan(tmp_path).counts[EntryState.INCOMPLETE] == 1


MOUNTS = [
    Mount("/", "ext4"),
    Mount("/home", "nfs4"),
    Mount("/home/user/disk", "xfs"),
    Mount("/scratch", "xfs"),
    Mount("/scratch", "lustre"),  # mounted over the one before
    Mount("/mnt/s3", "fuse.mountpoint-s3"),
    Mount("/var/lib/containers", "fuse.fuse-overlayfs"),
]


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/var/tmp/neuron-compile-cache", "ext4"),
        ("/home/user/cache", "nfs4"),
        ("/homes/cache", "ext4"),
        ("/home/user/disk/cache", "xfs"),
        ("/home/user/disk/../cache", "nfs4"),
        ("/scratch/cache", "lustre"),
        ("/mnt/s3/cache", "fuse.mountpoint-s3"),
        ("/var/lib/containers/x/cache", "fuse.fuse-overlayfs"),
    ],
)
def test_the_file_system_below_a_root(folder: str, expected: str) -> None:
    mount = mount_of(Path(folder), MOUNTS)
    assert mount is not None and mount.file_system == expected
    if expected in ("ext4", "xfs", "fuse.fuse-overlayfs"):
        refuse_network_root(Path(folder), mounts=lambda: MOUNTS)
    else:
        with pytest.raises(ConfigError, match=f"lies on {expected}"):
            refuse_network_root(Path(folder), mounts=lambda: MOUNTS)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "NFS4", "lustre", "efs", "fuse.s3fs", "fuse.sshfs", "cifs"])
def test_network_file_systems(kind: str) -> None:
    assert Mount("/", kind).is_network


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs", ""])
def test_local_file_systems(kind: str) -> None:
    assert not Mount("/", kind).is_network


def test_a_link_does_not_hide_the_network(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    mounts = [Mount("/", "ext4"), Mount(str(tmp_path.resolve() / "far"), "efs")]
    with pytest.raises(ConfigError, match="efs"):
        refuse_network_root(tmp_path / "near" / "cache", mounts=lambda: mounts)


def test_the_mounts_of_this_host() -> None:
    assert mount_of(Path("/"), mounted()) is not None
