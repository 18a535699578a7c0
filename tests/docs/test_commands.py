"""Every command in our documents is one that exists: read from the text, held against the programs themselves."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trnpipe
from jobs.settings import CycleSettings
from pipeline.settings import resolve
from tests.docs.markdown import ROOT, Block, blocks, markdown_files
from tests.docs.programs import make_targets, make_variables, problem_of
from tests.docs.shell import KINDS, NEEDS_AWS, RUNS, Command, commands_of, runs, simple_commands

DOCUMENTS = [path for path in markdown_files() if path.name == "README.md" or path.parent.name == "docs"]
OTHERS = [path for path in markdown_files() if path not in DOCUMENTS]
MADE = {"build/infra.json": json.dumps({"workspace": "s3://bucket/relevance", "jobs": {"queue": "relevance-trainium"}})}
"""Files that a command for AWS makes, and later ones read."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the files of the checkout are found, and new ones do no harm."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("build", "workspace"):
            (tmp_path / path.name).symlink_to(path)
    for name, text in MADE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def all_commands(path: Path) -> Iterator[Command]:
    """In the order of the document."""
    for run in runs(path):
        yield from run.commands


def problems(path: Path) -> list[str]:
    """What is wrong with the commands of one document. Files that it writes with `cat > FILE` are written here."""
    found = []
    for command in all_commands(path):
        try:
            every = simple_commands(command)
        except ValueError as error:
            found.append(f"{command.place}: {error}: {command.first_line}")
            continue
        for words in every:
            if problem := problem_of(words):
                found.append(f"{command.place}: {' '.join(words)}: {problem}")
        _make(command, every)
    return found


def _make(command: Command, every: list[list[str]]) -> None:
    """Folders and here-documents, so that later commands find their files."""
    for words in every:
        if words[0] == "mkdir":
            for folder in words[1:]:
                if not folder.startswith("-"):
                    Path(folder).mkdir(parents=True, exist_ok=True)
    if command.here_document and every == [["cat"]]:
        Path(command.first_line.split(">")[1].split("<")[0].strip()).write_text(command.here_document)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(path: Path, place: Path) -> None:
    assert problems(path) == []


@pytest.mark.parametrize("path", [*DOCUMENTS, *OTHERS], ids=lambda path: path.name)
def test_blocks_say_what_they_are(path: Path) -> None:
    """A command in a block of another kind would be seen by no test."""
    wrong = [f"{path.name}:{block.line}: {block.info!r}" for block in blocks(path) if block.info not in KINDS]
    assert not wrong, f"expected one of {', '.join(KINDS)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_settings_in_blocks_are_settings(path: Path, tmp_path: Path) -> None:
    for number, block in enumerate(block for block in blocks(path) if block.info in ("toml", "json")):
        file = tmp_path / f"{number}.{block.info}"
        file.write_text(block.text)
        resolve([file], {}, [], model=CycleSettings)


def test_python_in_blocks_compiles_and_names_what_there_is() -> None:
    texts = [block.text for path in [*DOCUMENTS, *OTHERS] for block in blocks(path) if block.info == "python"]
    names = {name for text in texts for name in re.findall(r"\btrnpipe\.(\w+)", text)}
    assert {"Cycle", "Registry", "open_vectors"} <= names
    for text in texts:
        compile(text, "block", "exec")
    calls = {call for text in texts for call in re.findall(r"\b(?:cycle|registry)\.(\w+)\(", text)}
    assert [name for name in names if not hasattr(trnpipe, name)] == []
    assert [call for call in calls if not (hasattr(trnpipe.Cycle, call) or hasattr(trnpipe.Registry, call))] == []


def test_the_documents_hold_commands_of_both_kinds() -> None:
    found = [command for path in DOCUMENTS for command in all_commands(path)]
    assert {command.kind for command in found} == {RUNS, NEEDS_AWS}
    assert len(found) > 50
    programs = {words[0] for command in found for words in simple_commands(command)}
    assert {"trnpipe", "trnjobs", "make", "aws", "python"} <= programs


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("trnpipe trian", "no command 'trian'"),
        ("trnpipe train --train.max-stepz 3", "unknown setting"),
        ("trnpipe train --train.max-steps -3", "greater than or equal to 0"),
        ("trnpipe train --config configs/none.toml", "No such file"),
        ("trnpipe registry demote", "no action 'demote'"),
        ("trnpipe cache status --hlo", "--hlo"),
        ("trnjobs plann", "plann"),
        ("trnjobs plan --jsno", "jsno"),
        ("trnjobs plan --jobs.train.nodes many", "valid integer"),
        ("trnjobs logs", "job"),
        ("trnjobs run --nodes 2 -- sleep 600", "2 nodes of 1 processes run sleep"),
        ("make nothing", "no target nothing"),
        ("make cycle CYLCE=x", "no variable CYLCE"),
        ("make train CONFIG=configs/none.toml", "No such file"),
        ("make train DATA=nowhere", "no file nowhere"),
        ('make train ARGS="--train.epoch 3"', "unknown setting"),
        ("python -m bench.nothing", "no module"),
        ("python -m bench.table --wrote x", "--wrote"),
        ("python -m pipeline trian", "no command 'trian'"),
        ("aws batch describe-jobz", "no operation"),
        ("aws batch describe-jobs --job x", "no option --job"),
        ("aws bach describe-jobs", "no service"),
        ("terraform -chdir=infra aply", "no command"),
        ("terraform -chdir=infrastructure apply", "no folder"),
        ("terraform -chdir=infra plan -var nam=x", "no variable nam"),
        ("cp infra/none.tfvars x", "no file infra/none.tfvars"),
        ("frobnicate --all", "no test knows"),
        ("cat x | trnjobs stauts", "stauts"),
        ("trnpipe config && trnpipe confg", "confg"),
        ('echo "$(trnjobs stauts)"', "stauts"),
        ("NAME=x trnjobs stauts > file", "stauts"),
    ],
)
def test_a_wrong_command_is_found(line: str, reason: str, place: Path) -> None:
    page = place / "page.md"
    page.write_text(f"```sh\n{line}\n```\n")
    found = problems(page)
    assert len(found) == 1
    assert reason in found[0]


def test_blocks_are_taken_apart(tmp_path: Path) -> None:
    text = "# a comment\nls \\\n  -l  # why\n\ncat > x <<'END'\n# text\nls\nEND\necho a | head -1 > y; ls\n"
    first, second, third = commands_of(Block(tmp_path / "page.md", 10, "sh", text))
    assert (first.line, first.first_line, simple_commands(first)) == (11, "ls -l  # why", [["ls", "-l"]])
    assert (second.line, second.here_document, simple_commands(second)) == (14, "# text\nls\n", [["cat"]])
    assert (third.line, simple_commands(third)) == (18, [["echo", "a"], ["head", "-1"], ["ls"]])


def test_the_makefile_is_read() -> None:
    assert {"cycle", "train", "test", "deploy", "submit", "destroy", "bootstrap"} <= make_targets().keys()
    assert "trnjobs submit" in make_targets()["cycle"]
    assert make_variables()["CYCLE"] == "first"


def test_settings_of_examples_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[data]\nnumberic = []\n")
    with pytest.raises(Exception, match="unknown setting"):
        resolve([file], {}, [], model=CycleSettings)
