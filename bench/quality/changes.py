"""Changes of the recipe that were tried on valid, each beside what it changes: one row each in docs/results.md."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.quality.part import OURS, PartResult, provenance
from bench.quality.sides import Table
from bench.results import Figure, Result, figure

BENCH = "quality_changes"
_METRICS = ("ndcg@10", "recall@100", "accuracy", "f1")
_METHOD = """
One seed each on the validation split, the same number of steps, weights and data as the settings it changes, without
which a row would be 0. A change that was not kept has left no code."""


class Change(NamedTuple):
    """A variant, what it is, the variant that it changes, and whether the recipe has it now."""

    variant: str
    text: str
    against: str
    kept: bool = False


TRIED = (Change("cand2", "two products per query and batch instead of four", "base", kept=True),)


def changes_table(parts: Sequence[PartResult], tried: Sequence[Change] = TRIED) -> Table | None:
    """Return the differences in each metric between every change and what it changes, if there are any."""
    ran = {(part.task, part.steps, part.variant): part for part in parts if part.part == OURS and part.split == "valid"}
    figures, used = list[Figure](), list[PartResult]()
    for change in tried:
        for (task, steps, variant), part in sorted(ran.items()):
            before = ran.get((task, steps, change.against))
            if variant != change.variant or before is None:
                continue
            used += [part, before]
            text = f"{change.text}{' (kept)' if change.kept else ''}, {task}"
            figures += [
                figure(f"{task}:{variant}:{name}", part.figures[name] - before.figures[name], "", f"{text}: {name}")
                for name in _METRICS
                if name in part.figures and name in before.figures
            ]
    title = "What each change of the recipe does on valid, after 32,000 pairs"
    return Table(BENCH, title, _METHOD, figures, (), dict(provenance(used))) if figures else None


def changes_page(result: Result) -> str:
    """Return a Markdown table with a row for each change and data set."""
    return "\n".join(
        ["| change | data | " + " | ".join(_METRICS) + " |", "|---" * (2 + len(_METRICS)) + "|", *_rows(result)]
    )


def _rows(result: Result) -> Iterator[str]:
    rows: dict[str, dict[str, float]] = {}
    for each in result.figures:
        row, _, name = each.text.rpartition(": ")
        rows.setdefault(row, {})[name] = each.value
    for row, values in rows.items():
        text, _, task = row.rpartition(", ")
        cells = [f"{values[name]:+.3f}" if name in values else "" for name in _METRICS]
        yield f"| {text} | {task} | {' | '.join(cells)} |"
