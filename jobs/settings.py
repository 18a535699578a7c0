"""The settings of `trnjobs`: those of the pipeline, and `[jobs]` beside them."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from jobs.config import JobsConfig
from pipeline.core.fingerprint import fingerprint
from pipeline.settings import Settings, leaves, resolve


class CycleSettings(Settings):
    """Everything a cycle of jobs can be told."""

    program: ClassVar[str] = "trnjobs"
    other_programs: ClassVar[frozenset[str]] = frozenset()
    jobs: JobsConfig = Field(JobsConfig())


_PER_JOB = {"cycle", "workspace", "launch", "scratch"}


def of_all_jobs(settings: CycleSettings) -> dict[str, Any]:
    """Return what all jobs of a cycle share, as a JSON file for `--config`.

    Without what differs between jobs or places: they get it by variable or flag.
    """
    return settings.model_dump(mode="json", exclude=_PER_JOB)


def pipeline_fingerprint(settings: CycleSettings) -> str:
    """Names the work; what `[jobs]` makes of it is in the plan itself."""
    return fingerprint(settings.model_dump(mode="json", exclude=_PER_JOB | {"jobs"}))


def values_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a tree holds, by dotted name."""
    found = dict[str, Any]()
    for name in leaves(CycleSettings):
        value: Any = tree
        for word in name.split("."):
            if not isinstance(value, Mapping) or word not in value:
                break
            value = value[word]
        else:
            found[name] = value
    return found


def with_values(tree: Mapping[str, Any], values: Mapping[str, Any]) -> CycleSettings:
    """Return the settings of a tree as `of_all_jobs` makes it, with other values by dotted name.

    Raises ConfigError for a setting that this version does not know, or a value out of bounds.
    """
    changed = dict(tree)
    for name, value in values.items():
        table, (*sections, last) = changed, name.split(".")
        for section in sections:
            table[section] = dict(table.get(section, {}))
            table = table[section]
        table[last] = value
    return resolve((), {}, model=CycleSettings, given=changed).settings


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the places in which two trees differ, as (dotted name, before, now)."""
    if before == now:
        return
    left, right = _table(before), _table(now)
    if left is None or right is None:
        yield name, before, now
        return
    for key in dict.fromkeys((*left, *right)):
        yield from differences(left.get(key), right.get(key), f"{name}.{key}" if name else key)


def _table(value: Any) -> Mapping[str, Any] | None:
    """Return a mapping, or a list of named tables by their names."""
    if isinstance(value, list) and value and all(isinstance(one, Mapping) and "name" in one for one in value):
        return {str(one["name"]): one for one in value}
    return value if isinstance(value, Mapping) else None
