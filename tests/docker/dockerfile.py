"""A Dockerfile as its instructions, and what an image built from it would execute."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILES = tuple(sorted((ROOT / "docker").glob("*.Dockerfile")))


@dataclass(frozen=True)
class Instruction:
    """`name` in capitals, `rest` on one line."""

    stage: str
    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """The rest in exec form, a JSON list. ValueError for the shell form."""
        found = json.loads(self.rest)
        if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
            raise ValueError(f"{self.name} {self.rest}: expected a list of words")
        return found


def instructions(path: Path) -> list[Instruction]:
    """In their order; `stage` is empty before the first FROM."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found, stage = [], ""
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.rpartition(" AS ")[2]
        found.append(Instruction(stage, name, rest.strip()))
    return found


def last_stage(path: Path) -> list[Instruction]:
    """Of the image itself, and not of what it was built in."""
    found = instructions(path)
    return [one for one in found if one.stage == found[-1].stage]


def of(found: list[Instruction], *names: str) -> list[Instruction]:
    return [one for one in found if one.name in names]


def environment(found: list[Instruction]) -> dict[str, str]:
    """All of ENV."""
    text = " ".join(one.rest for one in of(found, "ENV"))
    return {name: value.strip('"') for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', text)}


def executed(path: Path, command: list[str] | None = None) -> list[str]:
    """What `docker run IMAGE COMMAND` hands to execve: the entrypoint's words, then the command's or those of CMD."""
    found = last_stage(path)
    [entrypoint] = of(found, "ENTRYPOINT")
    [default] = of(found, "CMD")
    return entrypoint.words + (default.words if command is None else command)
