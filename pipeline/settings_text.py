"""Settings as text: the list of flags for --help, and the resolved tree with its sources."""

import json
import textwrap
from collections.abc import Mapping

from pydantic import BaseModel

from pipeline.config_sources import DEFAULT, PIPELINE, Resolved, S
from pipeline.settings import settings_hash
from pipeline.settings_fields import Leaf


def flags_text(fields: Mapping[str, Leaf] = PIPELINE.fields, width: int = 110) -> str:
    """Every flag with what it takes, its help and its default, grouped by section."""
    lines: list[str] = []
    section: type[BaseModel] | None = None
    for leaf in fields.values():
        if leaf.section is not section:
            section = leaf.section
            title = ".".join(leaf.path[:-1]) or "general"
            lines += ["", f"{title}: {(section.__doc__ or '').strip().splitlines()[0]}"]
        lines += _flag_lines(leaf, width)
    return "\n".join(lines).strip("\n")


def table_text(resolved: Resolved[S], fields: Mapping[str, Leaf] = PIPELINE.fields) -> str:
    """One line per value: name, value, source."""
    values = {name: shown(_value(resolved, leaf)) for name, leaf in fields.items()}
    names, widest = max(map(len, values)), min(48, max(map(len, values.values())))
    rows = [f"{name:<{names}}  {values[name]:<{widest}}  {resolved.sources[name]}" for name in fields]
    return "\n".join([*rows, "", f"settings hash {settings_hash(resolved.settings)}"])


def as_json(resolved: Resolved[S]) -> str:
    """The resolved tree, the source of each value that is not a default, and the hash."""
    sources = {name: source for name, source in resolved.sources.items() if source != DEFAULT}
    return json.dumps(
        {
            "settings": resolved.settings.model_dump(mode="json"),
            "sources": sources,
            "settings_hash": settings_hash(resolved.settings),
        },
        indent=2,
    )


def _flag_lines(leaf: Leaf, width: int) -> list[str]:
    default = shown(leaf.field.get_default(call_default_factory=True))
    head = f"  {leaf.flag} {leaf.takes}"
    text = f"{leaf.field.description} [{default}]"
    pad = " " * 44
    if len(head) < len(pad):
        return textwrap.wrap(text, width, initial_indent=head.ljust(len(pad)), subsequent_indent=pad)
    return [head, *textwrap.wrap(text, width, initial_indent=pad, subsequent_indent=pad)]


def _value(resolved: Resolved[S], leaf: Leaf) -> object:
    value: object = resolved.settings
    for word in leaf.path:
        value = getattr(value, word)
    return value


def shown(value: object) -> str:
    """A value as one would type it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return (
            json.dumps([v.model_dump() for v in value])
            if value and isinstance(value[0], BaseModel)
            else ",".join(map(str, value))
        )
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return str(value)
