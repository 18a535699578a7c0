"""Commands, settings and names in our documents exist; those of the README run."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import trnpipe
from jobs.settings import CycleSettings
from pipeline.settings import resolve
from tests.docs.commands import NEEDS_AWS, RUNS, commands_of, problem_of
from tests.docs.markdown import ROOT, blocks, markdown_files

DOCUMENTS = [path for path in markdown_files() if path.name == "README.md" or path.parent.name == "docs"]
README = ROOT / "README.md"
KINDS = (RUNS, NEEDS_AWS, "text", "csv", "toml", "json", "python")
MADE = {"build/infra.json": "{}"} | {
    name: "" for path in DOCUMENTS for name in re.findall(r"^ *cat > (\S+)", path.read_text(encoding="utf-8"), re.M)
}
"""Files that a command of a document makes, and later ones read."""
QUICK = ("trnjobs plan ",)
"""Commands of the README that take seconds."""
NOT_RUN = ("make test", ". .venv/bin/activate")
"""The first is what runs this; the second is done by the script."""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the files of the checkout are found, and new ones do no harm."""
    for path in ROOT.iterdir():
        if path.name not in (".git", "build", "workspace"):
            (tmp_path / path.name).symlink_to(path)
    for name, text in MADE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(path: Path) -> list[str]:
    found = [(line, words, problem_of(words)) for line, words in commands_of(path)]
    return [f"{path.name}:{line}: {' '.join(words)}: {problem}" for line, words, problem in found if problem]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist(path: Path, checkout: Path) -> None:
    assert problems(path) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("trnpipe trian", "unknown command 'trian'"),
        ("trnpipe train --train.max-stepz 3", "unknown setting"),
        ("trnpipe train --config configs/none.toml", "No such file"),
        ("trnjobs plan --jsno", "jsno"),
        ("trnjobs run --nodes 2 -- sleep 600", "runs sleep on 2 nodes with 1 processes"),
        ("make cycle CYLCE=x", "no CYLCE"),
        ('make train ARGS="--train.epoch 3"', "unknown setting"),
        ("python -m bench.nothing", "no module"),
        ("aws batch describe-jobs --job x", "no option --job"),
        ("trnpipe config && trnpipe confg", "confg"),
        ("trnpipe train \\\n  --train.epoch 3", "unknown setting"),
    ],
)
def test_a_wrong_command_is_found(line: str, reason: str, checkout: Path) -> None:
    page = checkout / "page.md"
    page.write_text(f"```sh\n{line}\n```\n")
    (found,) = problems(page)
    assert reason in found


@pytest.mark.parametrize("path", markdown_files(), ids=lambda path: path.name)
def test_blocks_say_what_they_are(path: Path) -> None:
    """A command in a block of another kind would be seen by no test."""
    assert [f"{path.name}:{block.line}: {block.info!r}" for block in blocks(path) if block.info not in KINDS] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_settings_in_blocks_are_settings(path: Path, tmp_path: Path) -> None:
    for number, block in enumerate(block for block in blocks(path) if block.info in ("toml", "json")):
        file = tmp_path / f"{number}.{block.info}"
        file.write_text(block.text)
        resolve([file], {}, [], model=CycleSettings)


def test_python_in_blocks_compiles_and_names_what_there_is() -> None:
    texts = [block.text for path in markdown_files() for block in blocks(path) if block.info == "python"]
    for text in texts:
        compile(text, "block", "exec")
    names = {name for text in texts for name in re.findall(r"\btrnpipe\.(\w+)", text)}
    calls = {call for text in texts for call in re.findall(r"\b(?:cycle|registry)\.(\w+)\(", text)}
    assert {"Cycle", "Registry", "open_vectors"} <= names
    assert [name for name in names if not hasattr(trnpipe, name)] == []
    assert [call for call in calls if not (hasattr(trnpipe.Cycle, call) or hasattr(trnpipe.Registry, call))] == []


def readme_lines() -> list[str]:
    """The commands of the README for a fresh checkout, as they are typed."""
    text = "\n".join(block.text for block in blocks(README) if block.info == RUNS)
    return [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith(NOT_RUN)]


def run_script(lines: list[str], folder: Path, limit_s: float) -> str:
    """Run commands in one shell in `folder`; what they printed."""
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("make setup has not made .venv here: make would install it anew")
    env = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR", "PYTHONPATH")}
    env |= {"PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=limit_s,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    return ended.stdout


@pytest.mark.stage
@pytest.mark.slow
def test_quick_commands_of_the_readme_run(checkout: Path) -> None:
    lines = [line for line in readme_lines() if line.startswith(QUICK)]
    assert len(lines) >= len(QUICK)
    assert "report" in run_script(lines, checkout, 570)


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.timeout(4 * 3600)
def test_all_commands_of_the_readme_run_in_a_fresh_clone(tmp_path: Path) -> None:
    """What is committed is enough, and each line that is promised is printed. `...` stands for anything."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    folder = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    for name in ("pyproject.toml", "requirements.lock"):
        os.utime(folder / name, (0, 0))  # make installs when these are newer than its stamp
    printed = [" ".join(line.split()) for line in run_script(readme_lines(), folder, 4 * 3600 - 60).splitlines()]
    promised = [
        " ".join(line.split()) for block in blocks(README) if block.info == "text" for line in block.text.splitlines()
    ]
    for line in promised:
        pattern = re.compile(".*".join(map(re.escape, line.split("..."))))
        assert not line or any(map(pattern.fullmatch, printed)), line
