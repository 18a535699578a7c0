"""`trnjobs diff`, which shows how the settings, data and metrics of two cycles differ."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.cycle.cycle_store import CycleStore, claims_by_age
from jobs.cycle.tables import value_text
from jobs.cycle.verdict import metric_name
from jobs.settings import differences
from jobs.setup import open_newest
from pipeline.context import Figure, load_result
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.format import aligned, format_count, shortened
from pipeline.core.progress import Say
from pipeline.data.token_sets import token_set_prefixes
from pipeline.evaluate.report import EvaluationReport, load_report

_DATA = ("rows", "rows_bad", "queries_train", "queries_valid", "queries_test", "labels", "partitions_prepared")
"""Figures of the prepare stage that describe the data."""
_MAIN_METRICS = ("ndcg@10", "retrieval_ndcg@10", "retrieval_recall@100", "macro_f1", "accuracy", "ece")
_MAX_CHARACTERS = 30
_SAME = 5e-5
"""Smaller differences are not shown, because metrics are printed with four decimals."""


def run_diff(arguments: argparse.Namespace, say: Say) -> int:
    """Print the differences between two cycles, which are the newest two by default.

    Raises ConfigError if a cycle does not exist.
    """
    base = open_newest(arguments.settings, say)
    names = arguments.cycles or list(claims_by_age(base.store))[-2:]
    if len(names) != 2:
        raise ConfigError(
            f"{len(names)} cycle(s) to compare: {', '.join(names) or 'none'}",
            expected="two cycles",
            next_command="trnjobs history, and then trnjobs diff A B",
        )
    first, second = (base.other(name).store for name in names)
    for name in names:
        base.other(name).plan()  # raises an error if the cycle was not submitted
    say(f"{first.cycle} -> {second.cycle}")
    for title, lines in (
        ("settings", _changed(_settings(first), _settings(second))),
        ("data of all prepared days", _changed(_data(first), _data(second))),
        ("metrics", _metrics(*(load_report(store.storage, store.cycle) for store in (first, second)))),
    ):
        say(f"{title}:" + ("" if lines else " no difference"))
        for line in lines:
            say(f"  {line}")
    return EXIT_OK


def _settings(store: CycleStore) -> Mapping[str, Any]:
    return store.settings() or {}


def _data(store: CycleStore) -> Mapping[str, Figure]:
    result = load_result(store.storage, store.cycle, "prepare")
    if result is None:
        return {}
    sets = {"partitions": len(token_set_prefixes(result.outputs))}
    return {name: result.figures[name] for name in _DATA if name in result.figures} | sets


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    rows = [(name, _text(name, old), "->", _text(name, new)) for name, old, new in differences(before, now)]
    return aligned(rows, left=(0, 1, 2, 3)) if rows else []


def _text(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return shortened(value_text(name, value), _MAX_CHARACTERS)


def _metrics(before: EvaluationReport | None, now: EvaluationReport | None) -> list[str]:
    """Format the changes in the main metrics, with a note if they were measured on different test rows."""
    if before is None or now is None:
        return [f"the {'first' if before is None else 'second'} cycle was not evaluated"]
    old, new = before.candidate.figures, now.candidate.figures
    rows: list[Sequence[str]] = [
        (metric_name(name), f"{old[name]:.4f}", "->", f"{new[name]:.4f}", f"{new[name] - old[name]:+.4f}")
        for name in _MAIN_METRICS
        if name in old and name in new and abs(new[name] - old[name]) > _SAME
    ]
    lines = aligned(rows, left=(0, 2)) if rows else []
    sizes = [f"{format_count(report.holdout.queries)} queries" for report in (before, now)]
    if lines and before.inputs.get("data") != now.inputs.get("data"):
        lines.append(f"measured on different test rows ({sizes[0]}, {sizes[1]}), which may explain some of the change")
    return lines
