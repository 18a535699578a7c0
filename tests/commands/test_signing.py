"""The commands with keys: the model of a cycle is signed, and each command that takes it out refuses another."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.checkpoint.store import WEIGHTS, open_checkpoint
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.io.commit import file_record
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.model import read_pair
from pipeline.registry.records import read_pointer
from pipeline.registry.signing import SIGNATURE
from tests.convert.conftest import Folder
from tests.embed.catalogues import products, write_catalogue
from tests.embed.checkpoints import make_checkpoint

pytest.importorskip("cryptography")
from tests.kit.keys import key_pair

pytestmark = pytest.mark.stage
CONFIG, CHECKPOINT = 78, 74
PLACE = "checkpoints/c0/step-1"
Ask = Callable[..., str]


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs one command in a folder with the keys a and b; asserts the exit code. What it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in "ab":
        key_pair(tmp_path, name)
    write_catalogue(tmp_path / "in", [products(range(40))])
    (tmp_path / "texts").write_text("red shoes\n")

    def run(*words: str, code: int = 0) -> str:
        flags = [f"--workspace={tmp_path}/workspace", "--backend=cpu", "--data.num-workers=1"]
        found = cli.main([*words, *flags, "--embed.catalogue.path=in"])
        out, err = capsys.readouterr()
        assert found == code, f"exit {found}\n{out}\n{err}"
        return out + err

    return run


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    """With a checkpoint that is not promoted."""
    storage = open_storage(f"{tmp_path}/workspace")
    make_checkpoint(storage, tmp_path, promoted=False)
    return storage


SIGN, VERIFY = "--registry.sign-key=a.pem", "--registry.verify-key=a.pub"
READERS = (
    ("embed", "--cycle=c2"),
    ("embed", "verify", "--cycle=c1"),
    ("encode", "texts"),
    ("export", "--out=out"),
    ("export", PLACE, "--out=out"),
    ("registry", "promote", PLACE, "--force", "a test"),
)


def moved(workspace: Storage) -> tuple[object, object]:
    return read_pointer(workspace, "relevance"), read_pair(workspace, "relevance")


def test_a_signed_model_goes_all_the_way(ask: Ask, workspace: Storage, tmp_path: Path) -> None:
    ask("registry", "promote", PLACE, "--force", "a test", SIGN, VERIFY)
    (tmp_path / "a.pem").rename(tmp_path / "elsewhere.pem")
    for action in ([], ["verify"]):
        ask("embed", *action, "--cycle=c1", SIGN, VERIFY)
    assert json.loads(ask("encode", "texts", VERIFY))["text"] == "red shoes"
    assert "no key, because registry.sign_key is empty" in ask("export", "--out=out", "--sign", VERIFY, code=CONFIG)
    ask("export", "--out=out", "--sign", "--registry.sign-key=elsewhere.pem", VERIFY)
    out = ask("import", "out", VERIFY)
    uri = next(line for line in out.splitlines() if line.startswith("committed: ")).partition(": ")[2]
    back = open_checkpoint(workspace, uri.removeprefix(f"{workspace.root}/"), tmp_path / "cache")
    ask("export", "--out=again", VERIFY)
    ask("import", "again", VERIFY, code=CHECKPOINT)
    ask("registry", "promote", back.prefix, "--force", "a test", VERIFY, code=CHECKPOINT)


def unsign(folder: Path) -> None:
    (folder / SIGNATURE).unlink()


def swap_all(folder: Path) -> None:
    """Another model, with its own signature."""
    for path in (folder.parents[1] / "other/step-1").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


def swap_both(folder: Path) -> None:
    """The weights, in a manifest that fits them."""
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)
    manifest = Manifest.from_json((folder / MANIFEST_NAME).read_bytes())
    files = {**manifest.files, WEIGHTS: file_record(folder / WEIGHTS)}
    (folder / MANIFEST_NAME).write_bytes(manifest.model_copy(update={"files": files}).to_json())


@pytest.mark.fault
@pytest.mark.parametrize("swap", [unsign, swap_both, swap_all])
def test_any_other_is_refused(ask: Ask, workspace: Storage, tmp_path: Path, swap: Callable[[Path], None]) -> None:
    make_checkpoint(workspace, tmp_path, "other", 2, promoted=False)
    ask("registry", "promote", "checkpoints/other/step-1", "--force", "a test", SIGN, VERIFY)
    ask("registry", "promote", PLACE, "--force", "a test", SIGN, VERIFY)
    for cycle in ("c0", "c1"):
        for action in ([], ["verify"]):
            ask("embed", *action, f"--cycle={cycle}", VERIFY)
    before = moved(workspace)
    swap(tmp_path / "workspace" / PLACE)
    # By name, a signed model is what it is.
    named = [words for words in READERS if PLACE in words and swap is swap_all]
    for words in (*READERS, ("serving", "rollback", "--reason", "a test")):
        if words in named:
            continue
        said = ask(*words, VERIFY, code=CHECKPOINT)
        assert "CheckpointError" in said and "next: " in said, words
    assert moved(workspace) == before


@pytest.mark.fault
def test_a_lost_or_rotated_key(ask: Ask, workspace: Storage, tmp_path: Path) -> None:
    make_checkpoint(workspace, tmp_path, "c9", 2, promoted=False)
    ask("registry", "promote", PLACE, "--force", "a test", SIGN, VERIFY)
    ask("embed", "--cycle=c1", VERIFY)
    before = moved(workspace)
    promote = ("registry", "promote", "checkpoints/c9/step-1", "--force", "a test")
    assert "gone.pem does not exist" in ask(*promote, "--registry.sign-key=gone.pem", code=CONFIG)
    for words in READERS:
        assert "gone.pub does not exist" in ask(*words, "--registry.verify-key=gone.pub", code=CONFIG), words
    assert "b.pem belongs to none of the keys" in ask(*promote, "--registry.sign-key=b.pem", VERIFY, code=CONFIG)
    for words in READERS:
        assert "was not made by any of the keys b.pub" in ask(*words, "--registry.verify-key=b.pub", code=CHECKPOINT)
    assert moved(workspace) == before
    for words in READERS[2:]:
        ask(*words, "--registry.verify-key=b.pub,a.pub")


def test_an_import_is_signed_by_model_signing(ask: Ask, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    from model_signing.signing import Config

    folder = Folder(tmp_path / "theirs")
    folder.sentence()
    weights = f"{folder.path}/model.safetensors"
    assert "theirs has no signature" in ask("import", str(folder.path), VERIFY, code=CHECKPOINT)
    Config().use_elliptic_key_signer(private_key=tmp_path / "a.pem").sign(folder.path, folder.path / SIGNATURE)
    ask("import", str(folder.path), VERIFY)
    ask("import", str(folder.path), "--registry.verify-key=b.pub", code=CHECKPOINT)
    model = (
        "--model.hidden-size=16", "--model.num-layers=2", "--model.num-heads=2", "--model.intermediate-size=24",
        "--model.max-positions=32", f"--data.tokenizer.path={folder.path}/tokenizer.json",
    )  # fmt: skip
    ask("import", weights, *model, VERIFY)

    modules = folder.path / "modules.json"
    content = modules.read_bytes()
    modules.write_bytes(content + b"\n")
    assert "modules.json has SHA-256" in ask("import", str(folder.path), VERIFY, code=CHECKPOINT)
    modules.unlink()  # another pooling would be used
    assert "modules.json is missing" in ask("import", str(folder.path), VERIFY, code=CHECKPOINT)
    modules.write_bytes(content)
    data = bytearray(Path(weights).read_bytes())
    data[-1] ^= 1
    Path(weights).write_bytes(data)
    for source in (str(folder.path), weights):
        assert "model.safetensors has SHA-256" in ask("import", source, *model, VERIFY, code=CHECKPOINT)


def test_an_export_satisfies_model_signing(ask: Ask, workspace: Storage, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    from model_signing.verifying import Config

    ask("registry", "promote", PLACE, "--force", "a test", SIGN)
    ask("export", "--out=out", "--sign", SIGN)
    out = tmp_path / "out"
    Config().use_elliptic_key_verifier(public_key=tmp_path / "a.pub").verify(out, out / SIGNATURE)


def test_the_package_is_named(ask: Ask, workspace: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pipeline.registry.keys", None)
    said = ask("registry", "promote", PLACE, "--force", "a test", SIGN, code=CONFIG)
    assert "pip install 'cryptography>=44'" in said and read_pointer(workspace, "relevance") is None


def test_key_files_of_a_project_are_relative_to_it(
    ask: Ask, workspace: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trnpipe.toml").write_text('[registry]\nsign_key = "a.pem"\nverify_key = ["b.pub", "a.pub"]\n')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    ask("registry", "promote", PLACE, "--force", "a test")
    assert workspace.stat(f"{PLACE}/{SIGNATURE}") is not None
