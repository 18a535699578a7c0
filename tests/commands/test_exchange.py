"""`trnpipe import` and `trnpipe export`: from a foreign folder to a trained model and out again."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline import cli
from pipeline.checkpoint.store import open_checkpoint
from pipeline.io.storage import open_storage
from tests.convert.conftest import Folder, source_of

CONFIG, CHECKPOINT = 78, 74
DATA = (
    "--data.buckets=8x12,16x24",
    "--data.num-workers=1",
    "--data.valid-fraction=0.2",
    "--data.synthetic.num-queries=20",
)
MODEL = (
    "--model.hidden-size=16",
    "--model.num-layers=2",
    "--model.num-heads=2",
    "--model.intermediate-size=24",
    "--model.max-positions=32",
    "--model.interaction-size=8",
    "--model.cross-layers=1",
    "--model.mlp-sizes=8",
)
TRAIN = ("--train.max-steps=3", "--train.global-batch-size=16", "--train.micro-batch-size=16", "--backend=cpu")

Ask = Callable[..., tuple[str, str]]


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs one command in a workspace; asserts the exit code. What it printed: (out, err)."""

    def run(*words: str, code: int = 0) -> tuple[str, str]:
        found = cli.main([*words, f"--workspace={tmp_path}/workspace", *MODEL, *DATA])
        out, err = capsys.readouterr()
        assert found == code, f"exit {found}\n{out}\n{err}"
        return out, err

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "theirs")
    made.sentence()
    return made


def uri_in(out: str) -> str:
    (line,) = [line for line in out.splitlines() if line.startswith(("committed: ", "imported already: "))]
    return line.partition(": ")[2]


@pytest.mark.stage
def test_import_train_and_export(ask: Ask, folder: Folder, tmp_path: Path) -> None:
    """Classes and features are those of the prepared data; training goes on from the imported encoder."""
    ask("prepare", f"--data.tokenizer.path={folder.path}/tokenizer.json", "--cycle=c1")
    out, _ = ask("import", str(folder.path), "--cycle=c1")
    start = uri_in(out)
    assert "19 numeric and 0 categorical features: new, from seed 1" in out and "assumed" not in out
    assert "texts of up to 20 tokens" in out and f"--train.start {start}\n" in out, "no model flag is missing"
    assert uri_in(ask("import", str(folder.path), "--cycle=c1")[0]) == start

    out, _ = ask("train", "--cycle=c1", f"--train.start={start}", *TRAIN)
    assert "steps 0 to 3" in out
    workspace = open_storage(f"{tmp_path}/workspace")
    child = open_checkpoint(workspace, "checkpoints/c1/step-3", tmp_path / "cache")
    assert child.state.parent is not None and child.state.parent.uri == start
    assert child.state.max_tokens == 24, "the longest bucket, which is longer than the 20 of the parent"
    name = "bert.encoder.layer.0.output.dense.weight"
    before = folder.weights[name.removeprefix("bert.")]
    moved = (child.weights()[name] - before).abs()
    assert 0 < moved.max() < 0.01, "three steps away from the imported weights"

    _, err = ask("export", f"--out={tmp_path}/out", code=CONFIG)
    assert "relevance has no promoted checkpoint" in err
    ask("registry", "promote", child.prefix, "--force", "a test")
    out, _ = ask("export", "--out", f"{tmp_path}/out", "--format=sentence-transformers")
    assert "step-3 as sentence-transformers, texts of up to 24 tokens" in out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "it was imported from" in card and str(folder.path) in card
    assert "- checkpoints/c1/step-3, data to " in card and "- valid_accuracy: " in card
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(weights[name.removeprefix("bert.")], child.weights()[name])

    out, _ = ask("import", f"{tmp_path}/out")
    assert "features: imported" in out
    back = open_checkpoint(*_place(uri_in(out)), tmp_path / "cache")
    assert all(torch.equal(tensor, child.weights()[name]) for name, tensor in back.weights().items())
    assert back.state.partitions == child.state.partitions != {}
    assert back.state.watermark == child.state.watermark
    shown, _ = ask("registry", "show", uri_in(out))
    assert all(f"checkpoints/{place}" in shown for place in ("c1/step-3", start.partition("checkpoints/")[2]))

    out, _ = ask("export", child.prefix, "--out", f"{tmp_path}/programs", "--format=torchscript", "--batch-size=2")
    files = [path.name for path in (tmp_path / "programs").glob("*.pt")]
    assert files == ["relevance-16x24.pt"], "the data's longest bucket"
    child_of = (f"--train.start={child.prefix}", f"--model.init-from={tmp_path}/gone")  # its weights are the parent's
    ask("prepare", f"--data.tokenizer.path={folder.path}/tokenizer.json", "--cycle=c2")
    ask("train", "--cycle=c2", *child_of, *TRAIN)
    workspace.delete_prefix("tokens")
    ask("export", child.prefix, "--out", f"{tmp_path}/after", "--format=safetensors")
    program = torch.jit.load(tmp_path / "programs" / files[0])  # type: ignore[no-untyped-call]
    assert program.embed_product(torch.ones(2, 24, dtype=torch.int32)).shape == (2, 16)


def _place(uri: str) -> tuple[Any, str]:
    root, _, name = uri.rpartition("/")
    return open_storage(root), name


def test_an_import_without_data_says_what_it_assumes(ask: Ask, folder: Folder) -> None:
    out, _ = ask("import", str(folder.path))
    assert "the classes are assumed, because no data was prepared and data.labels is empty" in out
    out, _ = ask("import", str(folder.path), "--data.labels=bad,good", "--train.seed=4", "--model.pooling=cls")
    assert "head of 2 classes (bad: 0, good: 1)" in out and "seed 4" in out and "assumed" not in out
    assert out.rstrip().endswith("step-0 --model.pooling mean"), "the flag that the settings lack"


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (("import",), "the following arguments are required: PATH"),
        (("import", "nowhere"), "nowhere does not exist"),
        (("import", "s3://bucket"), "does not name a folder or file"),
        (("export", "checkpoints/none/step-1"), "--out is not set"),
        (("export", "--out=x", "--format=pickle"), "--format pickle"),
        (("export", "--out=x", "--bucket=8x12"), "--bucket does not apply to format sentence-transformers"),
        (("export", "--out=x", "--format=safetensors", "--batch-size=2"), "--batch-size does not apply to format safe"),
    ],
)
def test_wrong_calls(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any, seen: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert seen in ask(*words, code=CONFIG)[1]


def test_wrong_numbers_and_places(ask: Ask, folder: Folder, tmp_path: Path) -> None:
    uri = uri_in(ask("import", str(folder.path))[0])
    out = f"{tmp_path}/out"
    for words, seen in (
        (("--max-tokens=33",), "texts of 33 tokens"),
        (("--max-tokens=many",), "--max-tokens 'many'"),
        (("--format=torchscript", "--batch-size=0"), "--batch-size '0'"),
        (("--format=torchscript", "--bucket=8x64"), "texts of 20 and 8 and 64 tokens"),
        ((f"--out={folder.path}",), "which trnpipe export did not write"),
    ):
        assert seen in ask("export", uri, f"--out={out}", *words, code=CONFIG)[1]
    assert not Path(out).exists()
    assert "is not a committed checkpoint" in ask("export", f"{tmp_path}/x/step-1", f"--out={out}", code=CHECKPOINT)[1]
    for name in (uri, uri.removeprefix("file://"), uri.partition("workspace/")[2]):
        ask("export", name, f"--out={out}", "--format=safetensors", "--max-tokens=9")
    assert json.loads((Path(out) / "trnpipe.json").read_text())["max_tokens"] == 9
    assert source_of(out).manifest is not None


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_hostile_weights_end_the_import_with_nothing_done(ask: Ask, folder: Folder, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    (folder.path / "model.safetensors").unlink()
    torch.save({**folder.weights, "extra": Hostile(mark)}, folder.path / "pytorch_model.bin")
    _, err = ask("import", str(folder.path), code=CHECKPOINT)
    assert "would run posix.mkdir" in err and "Traceback" not in err
    assert not mark.exists() and not (tmp_path / "workspace" / "checkpoints").exists()
