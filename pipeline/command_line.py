"""Takes a command line apart; nothing is interpreted yet."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.command_table import Tool
from pipeline.core.errors import ConfigError


@dataclass(frozen=True)
class Arguments:
    """A command line taken apart; nothing is interpreted yet."""

    files: tuple[Path, ...]
    flags: tuple[tuple[str, str | None], ...]
    switches: frozenset[str]
    options: Mapping[str, str] = field(default_factory=dict)


def take_action(name: str, tool: Tool, words: Sequence[str], *, required: bool) -> str:
    """The action that stands first; empty where there is none. Raises ConfigError for a missing or unknown one."""
    given = words[0] if words and not words[0].startswith("-") else ""
    if given in tool.actions or not tool.actions:
        return given if tool.actions else ""
    if not given and not required:
        return ""
    seen = f"trnpipe {name} has no action {given!r}{hint(given, tool.actions)}" if given else "no action is given"
    raise ConfigError(
        seen, expected=f"one of {', '.join(tool.actions)}, before the flags", next_command=f"trnpipe {name} --help"
    )


def take_arguments(name: str, wanted: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The words before the first flag, one for each of `wanted`. Raises ConfigError when some are missing."""
    given: list[str] = []
    for word in words[: len(wanted)]:
        if word.startswith("-"):
            break
        given.append(word)
    needed = [one for one in wanted if not one.startswith("[")]
    if len(given) < len(needed):
        raise ConfigError(
            f"{len(given)} of {len(needed)} arguments are given",
            expected=f"trnpipe {name} {' '.join(wanted)}, before the flags",
            next_command=f"trnpipe {name.split()[0]} --help",
        )
    return tuple(given)


def hint(word: str, known: Iterable[str]) -> str:
    """What may have been meant; empty when nothing is near."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def parse(words: Sequence[str], switches: Collection[str], options: Collection[str] = ()) -> Arguments:
    """Split into --config files, flags, switches and options.

    `--flag value`, `--flag=value` and a bare `--flag` are taken; `options` must have a value. Raises ConfigError for
    words that belong to no flag.
    """
    files: list[Path] = []
    flags: list[tuple[str, str | None]] = []
    seen: set[str] = set()
    given: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in switches:
            seen.add(word)
            continue
        if not word.startswith("--") or word == "--":
            raise ConfigError(
                f"unexpected argument {word!r}", expected="--section.key value", next_command="trnpipe --help"
            )
        flag, equals, text = word.partition("=")
        value = text if equals else rest.pop(0) if rest and not rest[0].startswith("--") else None
        if flag != "--config" and flag not in options:
            flags.append((flag, value))
        elif not value:
            expected = "--config FILE.toml" if flag == "--config" else f"{flag} VALUE"
            raise ConfigError(f"{flag} has no value", expected=expected)
        elif flag in options:
            given[flag] = value
        else:
            files.append(Path(value))
    return Arguments(tuple(files), tuple(flags), frozenset(seen), given)
