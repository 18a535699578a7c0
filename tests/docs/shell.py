"""Commands in the blocks of our documents: found, taken apart, never run here."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.markdown import Block, blocks

RUNS, NEEDS_AWS, OUTPUT = "sh", "sh aws", "text"
KINDS = (RUNS, NEEDS_AWS, OUTPUT, "toml", "json", "python")
"""Info strings that our documents use: commands for a fresh checkout, commands that need an AWS account or hardware,
what is printed or drawn, settings."""

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(?P<end>\w+)\1")
_SUBSTITUTION = re.compile(r"\$\((?P<inner>[^()]*)\)")
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_REDIRECTION = re.compile(r"^[<>]+&?$")


@dataclass(frozen=True)
class Command:
    """One command as typed, with the lines that belong to it."""

    file: Path
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.file.name}:{self.line}"

    @property
    def first_line(self) -> str:
        """Without the lines of a here-document, and with continued lines joined."""
        lines = self.text.splitlines()
        joined = lines[0]
        for line in lines[1:]:
            if not joined.endswith("\\"):
                break
            joined = f"{joined[:-1].rstrip()} {line.strip()}"
        return joined

    @property
    def here_document(self) -> str:
        """The lines fed to it; empty without."""
        if _HEREDOC.search(self.first_line) is None:
            return ""
        return "".join(f"{line}\n" for line in self.text.splitlines()[1:-1])


@dataclass(frozen=True)
class Run:
    """The commands of one block, and the output that the document promises right after it."""

    block: Block
    commands: tuple[Command, ...]
    promised: str


def runs(path: Path) -> list[Run]:
    """All blocks with commands of a document."""
    every = blocks(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for index, block in enumerate(every):
        if block.info not in (RUNS, NEEDS_AWS):
            continue
        after = every[index + 1] if index + 1 < len(every) else None
        end = block.line + len(block.text.splitlines())  # line of the closing fence
        follows = after is not None and after.info == OUTPUT and not "".join(lines[end : after.line - 2]).strip()
        found.append(Run(block, tuple(commands_of(block)), after.text if after and follows else ""))
    return found


def commands_of(block: Block) -> Iterator[Command]:
    """The commands of a block; comments between them are passed over."""
    lines = block.text.splitlines()
    number = 0
    while number < len(lines):
        first = number
        while lines[number].endswith("\\"):
            number += 1
        text = "\n".join(lines[first : number + 1])
        if heredoc := _HEREDOC.search(text):
            while lines[number].strip() != heredoc["end"]:
                number += 1
            text = "\n".join(lines[first : number + 1])
        number += 1
        if text.strip() and not text.lstrip().startswith("#"):
            yield Command(block.file, block.line + first, block.info, text)


def simple_commands(command: Command) -> list[list[str]]:
    """The words of every program it starts: pipes, lists and `$(...)` taken apart, redirections left out."""
    line = command.first_line
    inner = [words for match in _SUBSTITUTION.finditer(line) for words in _split(match["inner"])]
    return [*inner, *_split(_SUBSTITUTION.sub("SUBSTITUTED", line))]


def _split(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    target_follows = False
    for word in lexer:
        if target_follows:
            target_follows = False
        elif _REDIRECTION.match(word):
            target_follows = True
        elif set(word) <= set("();|&"):
            found.append([])
        else:
            found[-1].append(word)
    return [stripped for words in found if (stripped := _without_assignments(words))]


def _without_assignments(words: list[str]) -> list[str]:
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    return words
