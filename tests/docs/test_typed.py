"""The commands of our documents, typed as they are written, print what the documents promise."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.checkout import clone_of_checkout, copy_of_checkout
from tests.docs.esci import write_esci
from tests.docs.markdown import ROOT
from tests.docs.session import missing_lines, type_commands
from tests.docs.shell import RUNS, Command, Run, runs
from tests.docs.test_commands import DOCUMENTS
from tests.docs.typed import LONG, NOT_TYPED, QUICK, lists_of, matches

README = ROOT / "README.md"


def for_a_checkout(path: Path) -> list[Run]:
    """Blocks that need neither AWS nor hardware."""
    return [run for run in runs(path) if run.block.info == RUNS]


def type_document(
    path: Path, folder: Path, lists: Sequence[str], *, limit_s: float, are_forked: bool = False
) -> list[str]:
    """Type the commands of some lists in one session; what went wrong, and what was promised and did not come."""
    write_esci(folder / "esci-data")
    wanted = for_a_checkout(path)
    chosen = [one for run in wanted for one in run.commands if lists_of(one.first_line)[0] in lists]
    session = type_commands(chosen, folder, limit_s=limit_s, are_forked=are_forked)
    if session.code:
        reached = chosen[len(session.outputs) - 1]
        return [f"{reached.place}: {reached.first_line}: exit {session.code}\n{session.last[-3000:]}"]
    outputs = dict(zip([one.line for one in chosen], session.outputs, strict=True))
    found = []
    for run in wanted:
        if run.promised and all(one.line in outputs for one in run.commands):
            output = "".join(outputs[one.line] for one in run.commands)
            for line in missing_lines(run.promised, output):
                found.append(f"{run.commands[-1].place}: promised and not printed: {line}\n{output[-3000:]}")
    return found


def all_of_checkouts() -> list[Command]:
    return [command for path in DOCUMENTS for run in for_a_checkout(path) for command in run.commands]


def test_every_command_is_in_one_list() -> None:
    wrong = {
        c.place: (c.first_line, lists_of(c.first_line)) for c in all_of_checkouts() if len(lists_of(c.first_line)) != 1
    }
    assert not wrong, "put each into one list of tests/docs/typed.py"


def test_the_lists_hold_nothing_else() -> None:
    lines = [command.first_line for command in all_of_checkouts()]
    assert [p for p in (*QUICK, *LONG, *NOT_TYPED) if not any(matches(line, p) for line in lines)] == []


def has(path: Path, name: str) -> bool:
    return any(lists_of(one.first_line) == [name] for run in for_a_checkout(path) for one in run.commands)


@pytest.mark.stage
@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if has(path, "QUICK")], ids=lambda path: path.name)
def test_quick_commands_run_as_written(path: Path, tmp_path: Path) -> None:
    """The README with the scripts that were installed, the other documents without their imports."""
    folder = copy_of_checkout(tmp_path / "checkout")
    assert type_document(path, folder, ["QUICK"], limit_s=570, are_forked=path != README) == []


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if has(path, "LONG")], ids=lambda path: path.name)
def test_all_commands_run_as_written(path: Path, tmp_path: Path) -> None:
    """The README in a fresh clone, as a newcomer has it: what is committed must be enough."""
    folder = tmp_path / "checkout"
    folder = clone_of_checkout(folder) if path == README else copy_of_checkout(folder)
    assert type_document(path, folder, ["QUICK", "LONG"], limit_s=4 * 3600 - 60) == []


@pytest.mark.parametrize(
    ("promised", "output", "missing"),
    [
        ("a b\n...\nc", "x\na   b\ny\n  c\n", []),
        ("loss 0.4... | eta ...", "loss 0.4163 | eta 3s\n", []),
        ("c\na", "a\nc\n", ["a"]),
        ("a b", "a b c\n", ["a b"]),
        ("a+b", "aab\n", ["a+b"]),
        ("exit code ...", "", ["exit code ..."]),
    ],
)
def test_promises_are_held_against_the_output(promised: str, output: str, missing: list[str]) -> None:
    assert missing_lines(promised, output) == missing


def test_a_session_is_one_shell_and_ends_at_the_first_failure(tmp_path: Path) -> None:
    texts = (
        "cd /",
        "X=1",
        "cat > /dev/null <<'E'\nX=2\nE",
        "echo $PWD $X",
        'ls /nowhere || echo "exit code $?"',
        "false",
        "echo no",
    )
    commands = [Command(tmp_path / "page.md", number, RUNS, text) for number, text in enumerate(texts)]
    session = type_commands(commands, tmp_path, limit_s=300)
    assert session.outputs[3] == "/ 1\n"
    assert session.outputs[4].endswith("exit code 2\n")
    assert (len(session.outputs), session.code) == (6, 1)
