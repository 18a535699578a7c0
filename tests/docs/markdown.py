"""The parts of our Markdown files that tests look at: headings, links, fenced blocks."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>.*)$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^()\s]+(?:\([^()]*\))?)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *#*$")
_NOT_OURS = {
    ".git",
    ".venv",
    ".venv-native",
    ".venv-scan",
    ".pytest_cache",
    ".terraform",
    "build",
    "workspace",
    "node_modules",
    "esci-data",
}


@dataclass(frozen=True)
class Block:
    """A fenced block. `line`: of its first line of text, from 1."""

    file: Path
    line: int
    info: str
    text: str


@dataclass(frozen=True)
class Link:
    """A link in running text, as written."""

    file: Path
    line: int
    target: str


def markdown_files(root: Path = ROOT) -> list[Path]:
    """Every Markdown file of the checkout."""
    found = list[Path]()
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _NOT_OURS]
        found += [Path(folder, name) for name in files if name.endswith(".md")]
    return sorted(found)


def blocks(path: Path) -> list[Block]:
    """All fenced blocks, in order, those of list items without their indent. Raises ValueError for one left open."""
    found: list[Block] = []
    opened: re.Match[str] | None = None
    first, held = 0, list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = _FENCE.match(line)
        if opened is None:
            opened, first, held = match, number + 1, []
        elif match and match["fence"] == opened["fence"] and not match["info"]:
            found.append(Block(path, first, opened["info"].strip(), "\n".join(held)))
            opened = None
        else:
            held.append(line.removeprefix(opened["indent"]))
    if opened is not None:
        raise ValueError(f"{path}:{first - 1}: a block that is never closed")
    return found


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines outside of fenced blocks, without inline code."""
    inside = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = _FENCE.match(line)
        if match and (not inside or match["fence"] == inside):
            inside = "" if inside else match["fence"]
        elif not inside:
            yield number, line


def links(path: Path) -> list[Link]:
    """Every link in running text."""
    return [
        Link(path, number, match["target"])
        for number, line in prose(path)
        for match in _LINK.finditer(re.sub(r"`[^`]*`", "`code`", line))
    ]


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a file's headings."""
    found: set[str] = set()
    for _, line in prose(path):
        if match := _HEADING.match(line):
            slug = slug_of(match["text"])
            number = 0
            while (name := f"{slug}-{number}" if number else slug) in found:
                number += 1
            found.add(name)
    return found


def slug_of(heading: str) -> str:
    """Lower case, letters, digits, hyphens and underscores; spaces become hyphens."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
