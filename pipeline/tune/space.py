"""The searched settings, held against the tree of settings: what may be searched, and a trial's values as settings."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue, ValidationError

from pipeline.core.errors import ConfigError
from pipeline.settings import Leaf, Settings, leaves, nearest
from pipeline.tune.config import Choices, Floats, Integers, Range, Value, ends_of, parse_range

_SECTIONS = ("train", "model")
_SET_BY_THE_SEARCH = frozenset(
    f"train.{name}"
    for name in (
        "start", "epochs", "max_steps", "evaluate_every", "evaluate_rows", "metric", "patience", "deadline",
        "on_deadline", "collective_timeout_s",
    )
)  # fmt: skip
"""The same for every trial, or trials could not be compared."""
_EXAMPLE = '--tune.space.train.optimizer.learning_rate "log 1e-5 1e-3"'


@dataclass(frozen=True)
class Space:
    """Settings to search by dotted name, in the order of names, over the settings they are searched in."""

    base: Settings
    ranges: Mapping[str, Range]

    def apply(self, values: Mapping[str, Value]) -> Settings:
        """The settings with these values over them. Raises ValidationError for one out of bounds."""
        tree: dict[str, Any] = self.base.model_dump()
        for name, value in values.items():
            *sections, last = name.split(".")
            table = tree
            for section in sections:
                table = table[section]
            table[last] = leaves(Settings)[name].decode(value) if isinstance(value, str) else value
        return Settings.model_validate(tree)

    def typed(self, values: Mapping[str, Value]) -> dict[str, JsonValue]:
        tree = self.apply(values).model_dump(mode="json")
        return {name: _leaf(tree, name) for name in values}

    def start(self) -> dict[str, Value]:
        """What the settings have already, of those that lie in their range: what the first trial has."""
        tree, found = self.base.model_dump(mode="json"), dict[str, Value]()
        for name, allowed in self.ranges.items():
            now = _leaf(tree, name)
            if isinstance(allowed, Choices):
                same = [text for text in allowed.texts if self.typed({name: text})[name] == now]
                if same:
                    found[name] = same[0]
            elif isinstance(now, int | float) and allowed.low <= now <= allowed.high:
                found[name] = now
        return found


def open_space(settings: Settings) -> Space:
    """The space that `tune.space` names. Raises ConfigError for one that is empty, or naming what is wrong in it."""
    texts = settings.tune.space
    if not texts:
        raise ConfigError("tune.space is empty", expected="settings to search", next_command=f"trnpipe tune {_EXAMPLE}")
    space = Space(settings, {name: parse_range(texts[name]) for name in sorted(texts)})
    for name, allowed in space.ranges.items():
        leaf = _searchable(name)
        kinds, right = leaf.takes.split("|"), ""
        if isinstance(allowed, Floats) and "float" not in kinds:
            right = "int LOW HIGH, or one of A B ..." if "int" in kinds else "one of A B ..."
        elif isinstance(allowed, Integers) and not {"int", "float"} & set(kinds):
            right = "one of A B ..."
        elif isinstance(allowed, Choices) and "null" in allowed.texts:
            right = "values that a TOML file can hold, which null is not"
        if right:
            raise ConfigError(f"tune.space {name} = {texts[name]!r}: the setting is {leaf.takes}", expected=right)
        for value in ends_of(allowed):
            try:
                space.apply({name: value})
            except ValidationError as error:
                reason = error.errors(include_url=False)[0]["msg"]
                raise ConfigError(
                    f"tune.space {name} = {texts[name]!r}: {value}: {reason[:1].lower()}{reason[1:]}",
                    expected=f"{leaf.takes} - {leaf.field.description}",
                    next_command=f"correct it under [tune.space], or --tune.space.{name}",
                ) from None
    return space


def best_toml(values: Mapping[str, JsonValue], comments: Sequence[str]) -> str:
    """A settings file for `--config` with these values by dotted name."""
    sections: dict[str, list[str]] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        # JSON is TOML for numbers, booleans, texts and lists of them.
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    tables = ["\n".join([f"[{section}]", *lines]) for section, lines in sections.items()]
    return "\n\n".join(["\n".join(f"# {line}" for line in comments), *tables]) + "\n"


def _searchable(name: str) -> Leaf:
    """The setting of that name. Raises ConfigError when there is none, or a search cannot vary it."""
    leaf = leaves(Settings).get(name)
    known = [key for key in leaves(Settings) if key.startswith(tuple(f"{one}." for one in _SECTIONS))]
    if leaf is None:
        near = nearest(name, known)
        raise ConfigError(
            f"tune.space names {name}, which is no setting",
            expected=f"a setting of {' or '.join(_SECTIONS)}" + (f"; the nearest is {near}" if near else ""),
            next_command="trnpipe tune --help",
        )
    if name not in known:
        raise ConfigError(
            f"tune.space names {name}",
            expected=f"a setting of {' or '.join(_SECTIONS)}: a trial trains on the data as it is prepared",
            next_command="prepare the other data in another cycle, and search there",
        )
    if name in _SET_BY_THE_SEARCH:
        raise ConfigError(
            f"tune.space names {name}, which is the same for every trial",
            expected=f"none of {', '.join(sorted(_SET_BY_THE_SEARCH))}",
            next_command="take it out; tune.steps, tune.min_steps and tune.metric say how trials are trained",
        )
    return leaf


def _leaf(tree: Mapping[str, Any], name: str) -> Any:
    value: Any = tree
    for word in name.split("."):
        value = value[word]
    return value
