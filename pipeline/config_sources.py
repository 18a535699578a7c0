"""Where settings come from: defaults < files < environment < command line, with the source of every value kept.

All sources are brought to one flat form, dotted name -> (value, source); the last one wins whole values (a list or
mapping is replaced, not merged). Unknown keys are refused in each source before anything is validated.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from pipeline.core.errors import ConfigError
from pipeline.settings import Settings
from pipeline.settings_fields import ENV_PREFIX, Leaf, leaves, nearest

DEFAULT = "default"
RETIRED = frozenset({"health.max_clock_skew_s", "health.nccom_across_nodes"})
"""Settings of earlier versions: files that were stored with a cycle may still name them, and they do nothing."""
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Given:
    """A value somebody set, and where."""

    value: Any
    source: str


Layer = dict[str, Given]


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """The validated tree, and the source of each leaf by dotted name."""

    settings: S
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Schema(Generic[S]):
    """Which settings there are. Those below `foreign` sections belong to another program: passed over unread."""

    model: type[S]
    program: str = "trnpipe"
    foreign: frozenset[str] = frozenset()

    @cached_property
    def fields(self) -> dict[str, Leaf]:
        return leaves(self.model)

    @cached_property
    def sections(self) -> frozenset[str]:
        """Dotted names of all tables."""
        paths = [leaf.path for leaf in self.fields.values()]
        return frozenset(".".join(path[:depth]) for path in paths for depth in range(1, len(path)))

    @property
    def help(self) -> str:
        return f"{self.program} config --help"

    def resolve(
        self, files: Sequence[Path], env: Mapping[str, str], flags: Sequence[tuple[str, str | None]]
    ) -> Resolved[S]:
        """Bring the sources together and validate once.

        Args:
            files: TOML files, or JSON files of the same shape; later ones win.
            env: environment; only names starting with `TRNPIPE_` are looked at.
            flags: (flag as typed without its value, value or None) in order, later ones win.

        Raises:
            ConfigError: an unknown key, or a value of a wrong type or out of bounds, with its source.
        """
        given: Layer = {}
        for layer in (*map(self._read_file, files), self._read_env(env), self._read_flags(flags)):
            given.update(layer)
        try:
            settings = self.model.model_validate(_nested(given))
        except ValidationError as error:
            raise self._explain(error, given) from None
        except ConfigError as error:  # a component's own check; it cannot know where the value came from
            raise ConfigError(
                f"{error.seen} ({self._blame(given)})", expected=error.expected, next_command=error.next_command
            ) from None
        return Resolved(settings, {name: given[name].source if name in given else DEFAULT for name in self.fields})

    def _read_file(self, path: Path) -> Layer:
        """The leaves one file sets. Raises ConfigError for an unreadable file or an unknown key."""
        kind, parse, broken = _PARSERS.get(path.suffix, _PARSERS[".toml"])
        try:
            tree = parse(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--config {path}: {error.strerror}", expected=f"a readable {kind} file") from None
        except (broken, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not {kind}: {error}", next_command=f"edit {path}") from None
        if not isinstance(tree, Mapping):
            raise ConfigError(f"{path} holds no table", expected="sections with keys", next_command=f"edit {path}")
        return dict(self._walk({key: value for key, value in tree.items() if key not in self.foreign}, "", str(path)))

    def _read_env(self, env: Mapping[str, str]) -> Layer:
        """The leaves of `TRNPIPE_...` variables; `__` separates levels, `TRNPIPE_DATA__FILTER__column=x` one key."""
        layer: Layer = {}
        for variable in sorted(key for key in env if key.startswith(ENV_PREFIX)):
            source, name = f"env {variable}", variable.removeprefix(ENV_PREFIX).replace("__", ".")
            if name.partition(".")[0].lower() in self.foreign:
                continue
            leaf, key = self._locate(name, source)
            _set_text(layer, leaf, key, env[variable], source)
        return layer

    def _read_flags(self, flags: Sequence[tuple[str, str | None]]) -> Layer:
        """The leaves that flags set: `--a.b-c value`; a boolean also as a bare `--a.b` or `--no-a.b`."""
        layer: Layer = {}
        for flag, text in flags:
            name, source = flag.removeprefix("--"), f"flag {flag}"
            switch = self.fields.get(_spelled(name.removeprefix("no-")))
            if text is None and switch is not None and switch.is_bool:
                layer[switch.name] = Given(not name.startswith("no-"), source)
                continue
            leaf, key = self._locate(name, source)
            if text is None:
                raise ConfigError(f"{flag} has no value", expected=f"{flag} {leaf.takes}", next_command=self.help)
            _set_text(layer, leaf, key, text, source)
        return layer

    def _locate(self, name: str, source: str) -> tuple[Leaf, str | None]:
        """The leaf of a name in any spelling, and the key inside it when it is a mapping. Raises ConfigError."""
        spelled = _spelled(name)
        if spelled in self.fields:
            return self.fields[spelled], None
        words = name.split(".")
        for depth in range(len(words) - 1, 0, -1):  # a key may have dots itself, such as the name of a setting
            leaf = self.fields.get(_spelled(".".join(words[:depth])))
            if leaf is not None and leaf.container is dict:
                return leaf, ".".join(words[depth:])
        if spelled in self.sections:
            keys = self._keys_of(spelled)
            raise ConfigError(
                f"{name} ({source}) is a section", expected=f"one of its keys: {keys}", next_command=self.help
            )
        raise self._unknown(name, source)

    def _walk(self, tree: Mapping[str, Any], parent: str, source: str) -> Iterator[tuple[str, Given]]:
        for key, value in tree.items():
            name = f"{parent}.{key}" if parent else key
            if name in self.fields:
                yield name, Given(value, source)
            elif name in RETIRED:
                continue
            elif name not in self.sections:
                raise self._unknown(name, source)
            elif not isinstance(value, Mapping):
                expected = f"a table [{name}] with {self._keys_of(name)}"
                raise ConfigError(f"{name} = {value!r} ({source})", expected=expected)
            else:
                yield from self._walk(value, name, source)

    def _unknown(self, name: str, source: str) -> ConfigError:
        known = nearest(name, self.fields)
        near = f"; the nearest is {known} ({self.fields[known].flag})" if known else ""
        return ConfigError(
            f"unknown setting {name} ({source})", expected=f"a known setting{near}", next_command=self.help
        )

    def _explain(self, error: ValidationError, given: Layer) -> ConfigError:
        """All that validation refused, one line each: name, value seen, source, what is wrong."""
        lines, expected = [], ""
        for problem in error.errors(include_url=False):
            words = [str(part) for part in problem["loc"]]
            name = next(
                (name for n in range(len(words), 0, -1) if (name := ".".join(words[:n])) in self.fields),
                ".".join(words),
            )
            inside = "".join(f"[{word}]" for word in words[name.count(".") + 1 :])
            reason = problem["msg"][:1].lower() + problem["msg"][1:]
            lines.append(f"{name}{inside} = {problem['input']!r} ({_source(name, given)}): {reason}")
            leaf = self.fields.get(name)
            expected = f"{leaf.takes} - {leaf.field.description}" if leaf else ""
        return ConfigError(
            "\n  ".join(lines),
            expected=expected if len(lines) == 1 else "",
            next_command=f"correct it there; {self.program} config shows every value with its source",
        )

    def _blame(self, given: Layer) -> str:
        """The one given value without which the rest is valid, with its source."""
        for name in given:
            try:
                self.model.model_validate(_nested({key: value for key, value in given.items() if key != name}))
            except (ValidationError, ConfigError):
                continue
            return f"{name} from {given[name].source}"
        return "settings"

    def _keys_of(self, section: str) -> str:
        below = (name.removeprefix(f"{section}.") for name in self.fields if name.startswith(f"{section}."))
        return ", ".join(dict.fromkeys(name.partition(".")[0] for name in below))


PIPELINE = Schema(Settings, foreign=frozenset({"jobs"}))  # one file may serve both trnpipe and trnjobs
resolve = PIPELINE.resolve

_PARSERS: Mapping[str, tuple[str, Callable[[str], Any], type[ValueError]]] = {
    ".toml": ("TOML", tomllib.loads, tomllib.TOMLDecodeError),
    ".json": ("JSON", json.loads, json.JSONDecodeError),
}


def _set_text(layer: Layer, leaf: Leaf, key: str | None, text: str, source: str) -> None:
    if key is None:
        layer[leaf.name] = Given(decode(leaf, text, source), source)
    else:  # one entry of a mapping, beside those that the same source set before
        earlier = layer[leaf.name].value if leaf.name in layer else {}
        layer[leaf.name] = Given({**earlier, key: text}, source)


def decode(leaf: Leaf, text: str, source: str) -> Any:
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


def _nested(layer: Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, given in layer.items():
        *sections, last = name.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = given.value
    return tree


def _source(name: str, given: Layer) -> str:
    """Of a leaf, or of everything given in a section (a check over several values)."""
    below = [f"{key} from {value.source}" for key, value in given.items() if key.startswith(f"{name}.")]
    return given[name].source if name in given else ", ".join(below) or DEFAULT


def _spelled(name: str) -> str:
    return name.replace("-", "_").lower()
