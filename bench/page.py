"""docs/benchmarks.md: every committed result, with all its figures, how it was measured, and on what."""

from collections.abc import Iterator, Sequence

from bench.results import Result
from bench.words import script_of, spread_text, target_text, value_text, verdict_text, where_text

_TOP = """\
# Benchmarks

Made by `python -m bench.table --write` from the files in [bench/results](../bench/results), which scripts in `bench/`
wrote; nothing here is written by hand. `make bench` measures most of them again on your machine (about half an hour)
and rewrites this page; the command of each is below its figures.

A figure is the median of its repeats, with the smallest and the largest beside it. Nothing was measured on Trainium."""


def page_of(results: Sequence[Result]) -> str:
    """The whole page. Markdown."""
    return "\n\n".join([_TOP, *_contents(results), *(_section(result) for result in results)]) + "\n"


def _contents(results: Sequence[Result]) -> Iterator[str]:
    rows = ["| claim | measured | target | |", "|---|---|---|---|"]
    for result in results:
        if result.target is not None:
            rows.append(
                f"| [{result.title}](#{result.bench}) | {value_text(result.figure(result.target.figure))} "
                f"| {target_text(result)} | {verdict_text(result)} |"
            )
    yield "\n".join(rows)
    others = [f"- [{result.title}](#{result.bench})" for result in results if result.target is None]
    if others:
        yield "\n".join(["Measured without a target:\n", *others])


def _section(result: Result) -> str:
    judged = ""
    if result.target is not None:
        measured = value_text(result.figure(result.target.figure))
        judged = f"\n\nTarget: {target_text(result)}. Measured: {measured}, {verdict_text(result)}."
    rows = ["| figure | value | range | repeats |", "|---|---|---|---|"]
    rows += [f"| {one.text} | {value_text(one)} | {spread_text(one)} | {one.repeats} |" for one in result.figures]
    notes = [f"How: {result.method}", f"Measured on {where_text(result)}. Again: `{script_of(result.bench)}`."]
    if result.settings:
        told = ", ".join(f"{name} {value}" for name, value in result.settings.items())
        notes.insert(1, f"Settings: {told}.")
    return "\n\n".join([f"## {result.bench}\n\n{result.title}.{judged}", "\n".join(rows), *notes])
