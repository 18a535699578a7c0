"""Where settings come from: defaults < TOML files < environment < command line, with the source of every value kept.

All sources are brought to one flat form, dotted name -> (value, source); the last one wins whole values (a list or
mapping is replaced, not merged). Unknown keys are refused in each source before anything is validated.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.core.errors import ConfigError
from pipeline.settings import Settings
from pipeline.settings_fields import ENV_PREFIX, Leaf, leaves, nearest

DEFAULT = "default"
FIELDS: dict[str, Leaf] = leaves(Settings)
_SECTIONS = frozenset(".".join(leaf.path[:depth]) for leaf in FIELDS.values() for depth in range(1, len(leaf.path)))
_HELP = "trnpipe config --help"


@dataclass(frozen=True)
class Given:
    """A value somebody set, and where."""

    value: Any
    source: str


Layer = dict[str, Given]


@dataclass(frozen=True)
class Resolved:
    """The validated tree, and the source of each leaf by dotted name."""

    settings: Settings
    sources: Mapping[str, str]


def resolve(files: Sequence[Path], env: Mapping[str, str], flags: Sequence[tuple[str, str | None]]) -> Resolved:
    """Bring the sources together and validate once.

    Args:
        files: TOML files, later ones win.
        env: environment; only names starting with `TRNPIPE_` are looked at.
        flags: (flag as typed without its value, value or None) in order, later ones win.

    Raises:
        ConfigError: an unknown key, or a value of a wrong type or out of bounds, with its source.
    """
    given: Layer = {}
    for layer in (*map(read_toml, files), read_env(env), read_flags(flags)):
        given.update(layer)
    try:
        settings = Settings.model_validate(_nested(given))
    except ValidationError as error:
        raise _explain(error, given) from None
    except ConfigError as error:  # a component's own check; it cannot know where the value came from
        raise ConfigError(
            f"{error.seen} ({_blame(given)})", expected=error.expected, next_command=error.next_command
        ) from None
    return Resolved(settings, {name: given[name].source if name in given else DEFAULT for name in FIELDS})


def read_toml(path: Path) -> Layer:
    """The leaves one TOML file sets. Raises ConfigError for an unreadable file or an unknown key."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", expected="a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", next_command=f"edit {path}") from None
    return dict(_walk(tree, "", str(path)))


def read_env(env: Mapping[str, str]) -> Layer:
    """The leaves that `TRNPIPE_...` variables set; `__` separates levels, `TRNPIPE_DATA__FILTER__column=x` one key."""
    layer: Layer = {}
    for variable in sorted(key for key in env if key.startswith(ENV_PREFIX)):
        source = f"env {variable}"
        leaf, key = _locate(variable.removeprefix(ENV_PREFIX).replace("__", "."), source)
        _set_text(layer, leaf, key, env[variable], source)
    return layer


def read_flags(flags: Sequence[tuple[str, str | None]]) -> Layer:
    """The leaves that flags set: `--a.b-c value`; a boolean also as a bare `--a.b` or `--no-a.b`."""
    layer: Layer = {}
    for flag, text in flags:
        name, source = flag.removeprefix("--"), f"flag {flag}"
        switch = FIELDS.get(_spelled(name.removeprefix("no-")))
        if text is None and switch is not None and switch.is_bool:
            layer[switch.name] = Given(not name.startswith("no-"), source)
            continue
        leaf, key = _locate(name, source)
        if text is None:
            raise ConfigError(f"{flag} has no value", expected=f"{flag} {leaf.takes}", next_command=_HELP)
        _set_text(layer, leaf, key, text, source)
    return layer


def _locate(name: str, source: str) -> tuple[Leaf, str | None]:
    """The leaf of a name in any spelling, and the key inside it when it is a mapping. Raises ConfigError."""
    spelled = _spelled(name)
    if spelled in FIELDS:
        return FIELDS[spelled], None
    parent, _, key = name.rpartition(".")
    leaf = FIELDS.get(_spelled(parent))
    if leaf is not None and leaf.container is dict:
        return leaf, key
    if spelled in _SECTIONS:
        raise ConfigError(
            f"{name} ({source}) is a section", expected=f"one of its keys: {_keys_of(spelled)}", next_command=_HELP
        )
    raise _unknown(name, source)


def _set_text(layer: Layer, leaf: Leaf, key: str | None, text: str, source: str) -> None:
    if key is None:
        layer[leaf.name] = Given(_decode(leaf, text, source), source)
    else:  # one entry of a mapping, beside those that the same source set before
        earlier = layer[leaf.name].value if leaf.name in layer else {}
        layer[leaf.name] = Given({**earlier, key: text}, source)


def _decode(leaf: Leaf, text: str, source: str) -> Any:
    """Text to the value that is then validated. Lists: JSON or `a,b`; mappings: JSON or `k=v,k=v`; `null`: none."""
    if text == "null" and leaf.optional:
        return None
    if leaf.container is None:
        return text
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{leaf.name} = {text!r} ({source}) is not JSON: {error}", expected=leaf.takes) from None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if leaf.container is tuple:
        return parts
    if bad := [part for part in parts if "=" not in part]:
        raise ConfigError(f"{leaf.name} = {text!r} ({source}): {bad[0]!r} has no '='", expected=leaf.takes)
    return dict(part.split("=", 1) for part in parts)


def _walk(tree: Mapping[str, Any], parent: str, source: str) -> Iterator[tuple[str, Given]]:
    for key, value in tree.items():
        name = f"{parent}.{key}" if parent else key
        if name in FIELDS:
            yield name, Given(value, source)
        elif name not in _SECTIONS:
            raise _unknown(name, source)
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r} ({source})", expected=f"a table [{name}] with {_keys_of(name)}")
        else:
            yield from _walk(value, name, source)


def _nested(layer: Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, given in layer.items():
        *sections, last = name.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = given.value
    return tree


def _unknown(name: str, source: str) -> ConfigError:
    known = nearest(name, FIELDS)
    return ConfigError(
        f"unknown setting {name} ({source})",
        expected=f"a known setting; the nearest is {known} ({FIELDS[known].flag})" if known else "a known setting",
        next_command=_HELP,
    )


def _explain(error: ValidationError, given: Layer) -> ConfigError:
    """All that validation refused, one line each: name, value seen, source, what is wrong."""
    lines, expected = [], ""
    for problem in error.errors(include_url=False):
        words = [str(part) for part in problem["loc"]]
        name = next(
            (name for n in range(len(words), 0, -1) if (name := ".".join(words[:n])) in FIELDS), ".".join(words)
        )
        inside = "".join(f"[{word}]" for word in words[name.count(".") + 1 :])
        reason = problem["msg"][:1].lower() + problem["msg"][1:]
        lines.append(f"{name}{inside} = {problem['input']!r} ({_source(name, given)}): {reason}")
        expected = f"{FIELDS[name].takes} - {FIELDS[name].field.description}" if name in FIELDS else ""
    return ConfigError(
        "\n  ".join(lines),
        expected=expected if len(lines) == 1 else "",
        next_command="correct it there; trnpipe config shows every value with its source",
    )


def _source(name: str, given: Layer) -> str:
    """Of a leaf, or of everything given in a section (a check over several values)."""
    below = [f"{key} from {value.source}" for key, value in given.items() if key.startswith(f"{name}.")]
    return given[name].source if name in given else ", ".join(below) or DEFAULT


def _blame(given: Layer) -> str:
    """The one given value without which the rest is valid, with its source."""
    for name in given:
        try:
            Settings.model_validate(_nested({key: value for key, value in given.items() if key != name}))
        except (ValidationError, ConfigError):
            continue
        return f"{name} from {given[name].source}"
    return "settings"


def _keys_of(section: str) -> str:
    below = (name.removeprefix(f"{section}.") for name in FIELDS if name.startswith(f"{section}."))
    return ", ".join(dict.fromkeys(name.partition(".")[0] for name in below))


def _spelled(name: str) -> str:
    return name.replace("-", "_").lower()
