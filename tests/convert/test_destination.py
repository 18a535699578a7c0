"""Where exports go: whole or not at all, and never over files of others."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.convert.exporting import CLAIM, destination
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage, open_parent
from tests.convert.conftest import RETRY


@pytest.fixture
def target(storage_uri: str) -> str:
    return f"{storage_uri}/out"


@pytest.fixture
def place(target: str) -> tuple[Storage, str]:
    return open_parent(target, retry=RETRY, stop=StopSignal())


@contextmanager
def writing(target: str, tmp_path: Path) -> Iterator[Path]:
    scratch = tmp_path / f"scratch-{secrets.token_hex(4)}"
    with destination(target, retry=RETRY, stop=StopSignal(), scratch=scratch, fields={"a": 1}) as new:
        yield new


def put(target: str, tmp_path: Path, *names: str) -> None:
    with writing(target, tmp_path) as new:
        for name in names:
            (new / name).parent.mkdir(exist_ok=True)
            (new / name).write_text(name)


def names_in(place: tuple[Storage, str]) -> set[str]:
    """Names of a folder that verifies against its manifest."""
    storage, name = place
    manifest = verify_dir(storage, name, deep=True)
    assert (manifest.kind, manifest.fields) == ("export", {"a": 1})
    found = {stat.key.removeprefix(f"{name}/") for stat in storage.list(name)}
    assert found == {*manifest.files, "MANIFEST.json"}
    return set(manifest.files)


def test_written_and_replaced_where_a_link_leads(target: str, place: tuple[Storage, str], tmp_path: Path) -> None:
    put(target, tmp_path, "one", "deep/two")
    assert names_in(place) == {"one", "deep/two"}
    again = target
    if target.startswith("file://"):
        again = str(tmp_path / "link")
        (tmp_path / "link").symlink_to(target.removeprefix("file://"))
    put(again, tmp_path, "three")
    assert names_in(place) == {"three"} and Path(again).is_symlink() == (again != target)


@pytest.mark.parametrize("requests", [1, 2, 3, 4])
def test_killed_while_it_is_replaced_and_run_again(
    requests: int, target: str, place: tuple[Storage, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(target, tmp_path, "one", "deep/two")
    left = requests

    def killing(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*given: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise TransientError("killed")
            change(*given)

        return changed

    with monkeypatch.context() as patched, pytest.raises(TransientError, match="killed"):
        for name in ("delete", "write_bytes", "upload_dir"):
            patched.setattr(type(place[0]), name, killing(getattr(type(place[0]), name)))
        put(target, tmp_path, "three")
    put(target, tmp_path, "three")
    assert names_in(place) == {"three"}


def test_files_of_others_are_left_alone(target: str, place: tuple[Storage, str], tmp_path: Path) -> None:
    storage, name = place
    with pytest.raises(ConfigError), writing(target, tmp_path) as new:
        (new / "one").write_text("one")
        storage.write_bytes(f"{name}/notes.txt", b"it appeared meanwhile")
    assert [stat.key for stat in storage.list(name)] == [f"{name}/notes.txt"]
    with pytest.raises(ConfigError, match=r"has notes.txt, which trnpipe export did not write"):
        put(target, tmp_path, "one")
    storage.delete_prefix(name)
    put(target, tmp_path, "one")
    for content in (b"{}", b"not JSON"):
        storage.write_bytes(f"{name}/MANIFEST.json", content)
        with pytest.raises(ConfigError, match=r"has (MANIFEST.json|one)"):
            put(target, tmp_path, "two")
    assert storage.read_bytes(f"{name}/one") == b"one"
    with pytest.raises(ConfigError, match="one is a file"):
        put(f"{target}/one", tmp_path, "one")


@pytest.mark.fault
def test_an_export_that_fails_leaves_the_earlier_one(target: str, place: tuple[Storage, str], tmp_path: Path) -> None:
    put(target, tmp_path, "one")
    with pytest.raises(ZeroDivisionError), writing(target, tmp_path) as new:
        (new / "two").write_text("half")
        raise ZeroDivisionError
    assert names_in(place) == {"one"}
    with pytest.raises(TransientError, match="ENOSPC"), writing(str(tmp_path / "full"), tmp_path):
        raise OSError(28, "No space left on device")
    assert not (tmp_path / "full").exists() and not list(tmp_path.rglob(".trnpipe-tmp-*"))


@pytest.mark.fault
def test_an_interrupted_export_may_simply_run_again(target: str, place: tuple[Storage, str], tmp_path: Path) -> None:
    storage, name = place
    storage.write_bytes(f"{name}/{CLAIM}", b"")  # where a kill before the last file leaves it
    storage.write_bytes(f"{name}/half", b"")
    with pytest.raises(DataError):
        names_in(place)
    put(target, tmp_path, "one")
    assert names_in(place) == {"one"}
