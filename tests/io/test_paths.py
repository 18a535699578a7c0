"""Paths with ~, and default folders, for a user without a home."""

import os
import pwd
import re
import tempfile
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.io.paths import cache_folder, display_path, temporary_folder, user_path
from pipeline.io.storage import open_storage

ROOT = Path(__file__).parents[2]


def test_a_path_can_be_pasted_where_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    below, beside = f"file://{tmp_path}/a/b.html", f"{tmp_path}x/b.html"
    assert [display_path(one) for one in (below, beside, "s3://a/b")] == ["a/b.html", beside, "s3://a/b"]


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user id that is in no passwd file, without HOME. Returns the folder for temporary files."""

    def nobody(_: object) -> object:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("text", ["~/x", "~nosuchuser/x"])
@pytest.mark.usefixtures("homeless")
def test_a_home_that_is_not_known_is_an_error_of_settings(text: str) -> None:
    for use in (user_path, open_storage):
        with pytest.raises(ConfigError, match=re.escape(f"{text}: {text.partition('/')[0]} has no home folder")):
            use(text)


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="current folder"):
        open_storage("workspace")
    monkeypatch.chdir(tmp_path)
    assert user_path("workspace") == tmp_path / "workspace"


def test_caches_are_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a"
    assert cache_folder({}) == tmp_path / ".cache" / "trnpipe"
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path / "c")}) == tmp_path / "c" / "trnpipe"


@pytest.mark.parametrize("home", [None, "/proc", "/dev/null"])
def test_caches_of_a_user_without_a_home_are_among_the_temporary_files(
    home: str | None, homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home:
        monkeypatch.setenv("HOME", home)  # nothing can be made there
    folder = cache_folder({})
    assert folder == homeless / f"trnpipe-{os.getuid()}"
    assert folder.stat().st_mode & 0o077 == 0
    assert cache_folder({}) == folder
    folder.rmdir()
    folder.symlink_to("/")
    with pytest.raises(ConfigError, match="is not a folder of this user"):
        cache_folder({})


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(ConfigError, match="No usable temporary directory"):
        temporary_folder()


def test_one_helper_asks_for_a_home() -> None:
    """`pathlib` answers with a RuntimeError where there is none."""
    asks = re.compile(r"expanduser\(|Path\.home\(|TemporaryDirectory\((?!.*dir=)|mkdtemp\((?!.*dir=)")
    found = [
        path.relative_to(ROOT).as_posix()
        for package in ("pipeline", "jobs", "trnpipe")
        for path in (ROOT / package).rglob("*.py")
        if asks.search(path.read_text())
    ]
    assert found == ["pipeline/io/paths.py"]
