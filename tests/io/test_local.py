"""What only a file system can do wrong."""

import errno
import io
import os
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.storage import DiskFull, LocalStorage, Storage, open_storage, translate_os_error


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "root"))


def everything(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_plain_and_file_uris_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    uris = ("ws", f"{tmp_path}/ws", f"file://{tmp_path}/ws", f"file://localhost{tmp_path}/ws/")
    roots = {open_storage(uri).root for uri in uris}
    assert roots == {f"file://{tmp_path}/ws"}


def test_a_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        open_storage(str(tmp_path / "file"))


def test_an_unwritable_root_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (str(tmp_path / "file" / "below"), "/proc/self/nowhere"):
        with pytest.raises(ConfigError, match=root):
            open_storage(root).write_bytes("a", b"")


@pytest.mark.parametrize("uri", ["s3:/bucket/w", "s3:bucket", "file:/x/y"])
def test_a_uri_without_its_slashes_is_no_local_folder(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"begins with (s3|file):"):
        open_storage(uri)


@pytest.mark.parametrize("failing", ["write", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_object_and_no_temp(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, code: int
) -> None:
    local.write_bytes("key", b"old")
    source = tmp_path / "source"
    source.write_bytes(b"new content")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    if failing == "write":
        monkeypatch.setattr(atomic, "copy_into", fail)
    else:
        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskFull, match="no space left"):
        local.upload(source, "key")
    monkeypatch.undo()
    assert local.read_bytes("key") == b"old"
    assert everything(tmp_path / "root") == ["key"]
    assert DiskFull.retry


@pytest.mark.parametrize(
    ("code", "family"), [(errno.EACCES, ConfigError), (errno.EROFS, ConfigError), (errno.EIO, TransientError)]
)
def test_other_os_errors_have_a_family(code: int, family: type[Exception]) -> None:
    assert isinstance(translate_os_error(OSError(code, "text"), "writing", "file:///x"), family)


def test_data_is_on_the_device_before_it_is_visible(local: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    true_fsync, true_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        order.append("fsync")
        true_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        order.append("rename")
        return true_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    local.write_bytes("key", b"x")
    assert order[-3:] == ["fsync", "rename", "fsync"]


def test_dead_writers_temps_are_hidden_and_swept(local: Storage, tmp_path: Path) -> None:
    root = tmp_path / "root"
    local.write_bytes("a/file", b"x")
    dead = root / "a" / ".trnpipe-tmp-dead"
    dead.write_bytes(b"half")
    assert [stat.key for stat in local.list("")] == ["a/file"]
    atomic.sweep_temps(root / "a")
    assert dead.exists(), "too young to be judged"
    os.utime(dead, (0, 0))
    atomic.sweep_temps(root / "a")
    assert dead.exists(), "nor by the age of its content: it may be a hard link made just now"
    sweep_any_age = pytest.MonkeyPatch()
    sweep_any_age.setattr(atomic, "SWEEP_MIN_AGE_S", -1.0)
    try:
        with atomic.temp_file(root / "a" / "other") as (_, living):
            atomic.sweep_temps(root / "a")
            assert living.exists() and not dead.exists()
    finally:
        sweep_any_age.undo()
    assert everything(root) == ["a/file"]


def test_links_are_followed_but_not_in_circles(local: Storage, tmp_path: Path) -> None:
    local.write_bytes("real/x", b"1")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "root" / "real")
    (tmp_path / "root" / "real" / "back").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "broken").symlink_to(tmp_path / "nothing")
    assert "link/x" in [stat.key for stat in local.list("link")]
    assert "real/x" in [stat.key for stat in local.list("")]


def test_files_have_ordinary_rights(local: Storage, tmp_path: Path) -> None:
    local.write_bytes("key", b"x")
    (tmp_path / "plain").write_bytes(b"x")
    assert (tmp_path / "root" / "key").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_publish_links_or_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"content")
    atomic.publish_file(source, tmp_path / "linked", StopSignal())
    assert (tmp_path / "linked").samefile(source)
    atomic.publish_file(source, tmp_path / "linked", StopSignal())

    def no_links(*_: object) -> None:
        raise OSError(errno.EXDEV, "cross-device")

    monkeypatch.setattr(os, "link", no_links)
    atomic.publish_file(source, tmp_path / "copied", StopSignal())
    assert not (tmp_path / "copied").samefile(source)
    monkeypatch.undo()
    (tmp_path / "copied").unlink()
    (tmp_path / "alias").symlink_to(source)
    atomic.publish_file(tmp_path / "alias", tmp_path / "copied", StopSignal())
    assert not (tmp_path / "copied").is_symlink() and not (tmp_path / "copied").samefile(source)
    assert (tmp_path / "copied").read_bytes() == b"content"
    assert everything(tmp_path) == ["alias", "copied", "linked", "source"]


def test_a_disk_that_fails_while_a_file_is_read_is_worth_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sick(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    storage = open_storage(str(tmp_path))
    storage.write_bytes("a/file", b"12345")
    monkeypatch.setattr(LocalStorage, "open_read", lambda self, key: Sick())
    with pytest.raises(TransientError, match="Input/output error"):
        storage.read_bytes("a/file")
    with pytest.raises(TransientError, match="Input/output error"):
        storage.read_range("a/file", 1, 2)
