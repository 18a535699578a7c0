"""Must hold 8: bad input gives one clear error and its exit code, and nothing that was there is written over."""

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import cli
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import train_tokenizer
from tests.fault.harness import TINY, Place, copy_of_prepared, forget

pytestmark = [pytest.mark.stage, pytest.mark.timeout(300)]

LABELS = ("bad", "fair", "good")
SPLIT = ("query", "title", "label", "split")
Row = dict[str, str]


def good_rows(count: int) -> list[Row]:
    return [
        {"query": f"lamp {i // 4}", "title": f"desk lamp {i} led", "label": LABELS[i % 3], "gain": str(i % 3 / 2)}
        for i in range(count)
    ]


def csv_of(rows: list[Row], columns: tuple[str, ...] = ("query", "title", "label", "gain")) -> str:
    return "\n".join([",".join(columns), *(",".join(row[column] for column in columns) for row in rows)]) + "\n"


def contents(folder: Path) -> dict[str, str]:
    """sha256 of all that a workspace holds, without the log and the scratch folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".scratch" not in path.parts)
    found = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {name: digest for name, digest in found.items() if not name.endswith("events.jsonl")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A finished cycle c1. Tests copy it."""
    place = copy_of_prepared(tmp_path_factory.mktemp("trained"), "cpu", (*TINY, "--train.max-steps=10"))
    place.run("train")
    yield place
    forget()


@pytest.fixture
def workspace(trained: Place, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained.path, tmp_path / "workspace"))


class Refused:
    """Runs a command in a workspace that must come out unchanged, and keeps what was said."""

    def __init__(self, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.workspace, self._capsys = workspace, capsys

    def __call__(self, stage: str, *flags: str, code: int, cycle: str = "c2", workspace: str = "") -> str:
        before = contents(self.workspace)
        where = workspace or str(self.workspace)
        words = {flag.partition("=")[0]: flag for flag in (*TINY, "--backend=cpu", *flags)}
        assert cli.main([stage, f"--workspace={where}", f"--cycle={cycle}", *words.values()]) == code
        said = self._capsys.readouterr().err
        assert said.startswith(f"trnpipe {stage}: "), said
        assert "Traceback" not in said
        assert said.count(f"trnpipe {stage}: ") == 1, "one error"
        assert {name: digest for name, digest in contents(self.workspace).items() if name in before} == before
        return said


@pytest.fixture
def refused(workspace: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(workspace, capsys)


def bad_titles(rows: list[Row]) -> list[Row]:
    return [row | {"title": ""} if n < len(rows) * 0.3 else row for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("text", "flags", "code", "seen"),
    [
        (None, ("--data.nmae=x",), 78, ("nmae", "data.name")),
        (None, ("--data.path=none.parquet",), 65, ("none.parquet does not exist",)),
        (csv_of(good_rows(40), ("query", "label")), (), 65, ("title", "rows.csv")),
        ("query,title,label\n", (), 65, ("rows.csv",)),
        ("", (), 65, ("rows.csv",)),
        (
            csv_of(good_rows(60)),
            ("--data.labels=fair,good",),
            65,
            ("unknown label (20)", "20 of 60", '"label": "bad"', "the labels fair, good (data.labels)"),
        ),
        (
            csv_of([row | {"split": "tran"} for row in good_rows(60)], SPLIT),
            (f"--data.labels={','.join(LABELS)}",),
            65,
            ('"split": "tran"', "train, valid"),
        ),
        (csv_of([row | {"query": "sofá"} for row in good_rows(60)]), (), 65, ("query is not UTF-8", "iconv -f LATIN1")),
        (csv_of([row | {"label": "good"} for row in good_rows(60)]), (), 65, ("1 relevance classes (good)",)),
        (csv_of(good_rows(60)), ("--data.buckets=16x1000",), 78, ("longest bucket has 1000",)),
        (None, ("--evaluate.golden=none.toml",), 65, ("none.toml does not exist", "--evaluate.golden")),
        (None, (f"--cycle={'x' * 101}",), 78, ("at most 100",)),
        (None, ("--data.workers=2",), 78, ("worker unknown of 2", "TRNJOBS_INDEX from 0 to 1")),
        (csv_of(bad_titles(good_rows(200))), (), 65, ("60 of 200 rows are bad (30.0%)", "empty title (60)")),
    ],
)
def test_input_that_cannot_be_used(
    refused: Refused, tmp_path: Path, text: str | None, flags: tuple[str, ...], code: int, seen: tuple[str, ...]
) -> None:
    if text is not None:
        (tmp_path / "rows.csv").write_text(text, encoding="latin1")
        flags = (f"--data.path={tmp_path}/rows.csv", *flags)
    said = refused("prepare", *flags, code=code)
    assert all(word in said for word in seen), said


def test_one_percent_of_bad_rows_is_put_aside(workspace: Path, tmp_path: Path) -> None:
    rows = good_rows(600)
    for row in rows[::100]:
        row["query"] = ""
    (path := tmp_path / "rows.csv").write_text(csv_of(rows))
    flags = [flag for flag in TINY if not flag.startswith("--data.name=")]
    words = [f"--workspace={workspace}", "--cycle=c2", f"--data.path={path}", "--data.name=other", *flags]
    before = contents(workspace)
    assert cli.main(["prepare", *words]) == 0
    (quarantine,) = workspace.glob("tokens/other/*/quarantine.jsonl")
    lines = quarantine.read_text().splitlines()
    assert len(lines) == 6 and all("empty query" in line for line in lines)
    assert before.items() <= contents(workspace).items()


@pytest.mark.parametrize(
    ("prepared", "flags", "code", "seen"),
    [
        (("--data.tokenizer.vocab-size=300",), ("step-10",), 78, "tokenised with"),
        ((), ("step-10", "--model.hidden-size=64"), 78, "model.hidden_size 32"),
        ((), ("step-9",), 74, "is not a committed checkpoint"),
    ],
)
def test_a_parent_that_does_not_fit(
    refused: Refused, workspace: Path, prepared: tuple[str, ...], flags: tuple[str, ...], code: int, seen: str
) -> None:
    words = {flag.partition("=")[0]: flag for flag in (*TINY, *prepared)}
    assert cli.main(["prepare", f"--workspace={workspace}", "--cycle=c2", *words.values()]) == 0
    start = f"--train.start={workspace}/checkpoints/c1/{flags[0]}"
    assert seen in refused("train", start, *prepared, *flags[1:], code=code)


def test_other_settings_for_a_cycle_that_is_done(refused: Refused) -> None:
    said = refused("train", "--model.hidden-size=64", code=78, cycle="c1")
    assert "model.hidden_size" in said and "--cycle" in said


@pytest.mark.parametrize(
    ("changes", "rows", "code", "seen"),
    [
        ({"config.json": b'{"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]}'}, 0, 78, "deberta-v2"),
        ({"model.safetensors": None}, 0, 74, "has no weights"),
        ({"model.safetensors": b"not a file of tensors"}, 0, 74, "model.safetensors"),
        ({"tokenizer.json": None}, 300, 74, "word_embeddings.weight has shape [300, 32], but the tokenizer has 400"),
        ({"tokenizer.json": b"train"}, 0, 78, "differs from the tokenizer of the data (400 tokens)"),
    ],
)
def test_weights_to_start_from_that_do_not_fit(
    refused: Refused, workspace: Path, tmp_path: Path, changes: dict[str, bytes | None], rows: int, code: int, seen: str
) -> None:
    """An unknown model type, missing weights, a tokenizer of another vocabulary: one line, and what to do."""
    assert cli.main(["prepare", f"--workspace={workspace}", "--cycle=c2", *TINY]) == 0
    folder = Path(shutil.copytree(workspace / "checkpoints/c1/step-10", tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    encoder = {name: one for name, one in weights.items() if name.startswith("bert.")}
    if rows:
        name = "bert.embeddings.word_embeddings.weight"
        encoder[name] = encoder[name][:rows].clone()
    save_file(encoder, folder / "model.safetensors")
    for name, content in changes.items():
        if content == b"train":
            texts = [row["title"] for row in good_rows(40)] + [f"word{n}" for n in range(400)]
            content = train_tokenizer(texts, TokenizerConfig(vocab_size=300))
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
    said = refused("train", f"--model.init-from={folder}", code=code)
    assert seen in said.splitlines()[0] and "next:" in said


def test_tables_filled_up_beyond_the_vocabulary(workspace: Path, tmp_path: Path) -> None:
    """As published ones are: the rows that no token has are left out, where the tokenizer is the model's."""
    assert cli.main(["prepare", f"--workspace={workspace}", "--cycle=c2", *TINY]) == 0
    folder = Path(shutil.copytree(workspace / "checkpoints/c1/step-10", tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    name = "bert.embeddings.word_embeddings.weight"
    filled = torch.cat([weights[name], torch.full((24, weights[name].shape[1]), 9.0)])
    encoder = {key: one for key, one in weights.items() if key.startswith("bert.")}
    save_file({**encoder, name: filled}, folder / "model.safetensors")
    words = {flag.partition("=")[0]: flag for flag in (*TINY, "--train.max-steps=2", f"--model.init-from={folder}")}
    assert cli.main(["train", f"--workspace={workspace}", "--cycle=c2", "--backend=cpu", *words.values()]) == 0
    trained = load_file(workspace / "checkpoints/c2/step-2/model.safetensors")[name]
    assert trained.shape == weights[name].shape
    assert float((trained - weights[name]).abs().max()) < 0.1


def test_training_without_prepared_data(refused: Refused) -> None:
    assert "trnpipe prepare" in refused("train", code=65, cycle="c9")


def test_a_workspace_below_a_file(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for stage in ("prepare", "train"):
        assert "file" in refused(stage, code=78, workspace=f"{tmp_path}/file/workspace")


def test_a_read_only_workspace(refused: Refused, workspace: Path) -> None:
    for command in (["mount", "--bind"], ["mount", "-o", "remount,bind,ro"]):
        target = [str(workspace)] * (2 if "--bind" in command else 1)
        if subprocess.run([*command, *target], capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")
    try:
        assert str(workspace) in refused("prepare", code=78)
    finally:
        subprocess.run(["umount", "-l", str(workspace)], check=True)


@pytest.mark.usefixtures("aws")
def test_a_bucket_that_is_not_there(refused: Refused, tmp_path: Path) -> None:
    for stage in ("prepare", "train"):
        said = refused(stage, f"--scratch={tmp_path}/scratch", code=78, workspace="s3://not-there/models")
        assert "bucket not-there does not exist" in said
