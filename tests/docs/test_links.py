"""Every link inside our documents leads somewhere."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, Block, anchors, blocks, links, markdown_files

DOCUMENTS = markdown_files()


def problems(path: Path) -> list[str]:
    """What is wrong with the links of one document. Addresses on the web are not looked at."""
    found = []
    for link in links(path):
        where = f"{path.name}:{link.line}"
        if "://" in link.target or link.target.startswith("mailto:"):
            continue
        name, _, anchor = link.target.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            found.append(f"{where}: no file {name}")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            found.append(f"{where}: no heading for #{anchor} in {target.name}")
    return found


def test_the_documents_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert {"README.md", "docs/runbook.md", "docs/design.md", "docs/data.md", "docs/neuron.md"} <= names
    assert not any("node_modules" in name or ".venv" in name for name in names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_anchors_resolve(path: Path) -> None:
    assert problems(path) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_list_of_contents_names_every_part(path: Path) -> None:
    lines = path.read_text().splitlines()
    listed = [line for line in lines if re.fullmatch(r"- \[.*\]\(#.*\)", line)]
    parts = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    if len(listed) > 3:  # a list of contents
        assert [line[3:].partition("](")[0] for line in listed] == parts


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, and `more`\n## Twice\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md#a-heading-and-more) [b](other.md#twice-1) [c](#top) [d](https://example.org/x)\n"
        "```text\n[not a link](nowhere.md)\n```\nand `[nor](this.md)`\n"
        "[e](gone.md) [f](other.md#gone) [g](#gone)\n"
    )
    assert problems(page) == [
        "page.md:7: no file gone.md",
        "page.md:7: no heading for #gone in other.md",
        "page.md:7: no heading for #gone in page.md",
    ]


def test_blocks_are_read_with_their_kind_and_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# T\n```sh aws\nls\n\nls -l\n```\n````text\n```\n````\n- a\n  ```sh\n  ls\n    x\n  ```\n")
    assert blocks(page) == [
        Block(page, 3, "sh aws", "ls\n\nls -l"),
        Block(page, 8, "text", "```"),
        Block(page, 12, "sh", "ls\n  x"),
    ]
    page.write_text("```sh\nls\n")
    with pytest.raises(ValueError, match=r"page.md:1: .* never closed"):
        blocks(page)
