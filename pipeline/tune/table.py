"""What a search has found so far: its table, best first, for people and for machines."""

from collections.abc import Mapping, Sequence

from pydantic import Field, JsonValue

from pipeline.core.format import UNKNOWN, format_duration
from pipeline.core.record import Record
from pipeline.tune.journal import State, TrialRecord
from pipeline.tune.space import Space, best_toml


class TrialRow(Record):
    """One trial."""

    trial: int
    state: State
    metric: float | None = Field(description="At the last step of a full trial; null for one that did not get there")
    metric_by_step: dict[int, float] = Field(description="On the valid split, by rung")
    settings: dict[str, JsonValue]
    seconds: float = Field(description="Of work, over all attempts; what a kill cost since the last rung is not in it")
    reason: str = Field(description="Why it failed")


class StudyTable(Record):
    """A search, its trials best first: complete ones by metric, then those that got furthest."""

    name: str
    metric: str
    space: dict[str, str]
    seed: int
    rungs: tuple[int, ...] = Field(description="Steps at which trials are scored on valid")
    num_trials: int = Field(description="To be done in all")
    settings_hash: str
    code_version: str
    trials: tuple[TrialRow, ...]

    @property
    def best(self) -> TrialRow | None:
        """The complete trial with the highest metric; the earlier one of two that are equal."""
        return next((row for row in self.trials if row.metric is not None), None)

    @property
    def num_running(self) -> int:
        return sum(row.state == "running" for row in self.trials)


def rows_of(records: Sequence[TrialRecord], space: Space, max_steps: int) -> tuple[TrialRow, ...]:
    """Rows, best first."""
    rows = (
        TrialRow(
            trial=record.number,
            state=record.state,
            metric=record.metric_by_step[max_steps] if record.state == "complete" else None,
            metric_by_step=dict(record.metric_by_step),
            settings=space.typed(record.values),
            seconds=record.seconds,
            reason=record.reason,
        )
        for record in records
    )
    return tuple(sorted(rows, key=_rank))


def _rank(row: TrialRow) -> tuple[int, int, float, int]:
    order: Mapping[State, int] = {"complete": 0, "running": 1, "pruned": 1, "failed": 2}
    step = max(row.metric_by_step, default=0)
    return order[row.state], -step, -row.metric_by_step.get(step, 0.0), row.trial


def lines_of(table: StudyTable) -> list[str]:
    """The table as text: a heading, then a line a trial."""
    names = _short(list(table.space))
    heading = ["trial", "state", *(f"step {step}" for step in table.rungs), "time", *names]
    cells = [heading]
    for row in table.trials:
        metrics = (row.metric_by_step.get(step) for step in table.rungs)
        settings = (row.settings.get(name) for name in table.space)
        cells.append(
            [
                str(row.trial),
                row.state,
                *(UNKNOWN if value is None else f"{value:.4f}" for value in metrics),
                format_duration(row.seconds),
                *(shown(value) for value in settings),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    reasons = [f"trial {row.trial} failed: {row.reason}" for row in table.trials if row.reason]
    return [f"search {table.name}: {table.metric} on valid, best first", *lines, *reasons]


def best_settings(table: StudyTable, best: TrialRow) -> str:
    """The best trial's values as a file for `--config`."""
    comments = (
        f"Trial {best.trial} of search {table.name}, the best of {len(table.trials)} by {table.metric} on valid:",
        f"{best.metric:.6f} after {table.rungs[-1]} steps. For --config, after the files of the search.",
    )
    return best_toml(best.settings, comments)


def _short(names: Sequence[str]) -> list[str]:
    """The last word of each name where no other has the same."""
    last = [name.rpartition(".")[2] for name in names]
    return [name if last.count(word) > 1 else word for name, word in zip(names, last, strict=True)]


def shown(value: JsonValue) -> str:
    """A setting's value, numbers to three figures."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return ",".join(map(str, value)) if isinstance(value, list) else UNKNOWN if value is None else str(value)
