"""docs/benchmarks.md: every committed result, with all its figures, how it was measured, and on what."""

from collections.abc import Iterator, Sequence

from bench.results import Result, Target
from bench.words import claim_rows, script_of, spread_text, target_text, value_text, where_text

_TOP = """\
# Benchmarks

Made by `python -m bench.table --write` from the files in [bench/results](../bench/results), which scripts in `bench/`
wrote; nothing here is written by hand. `make bench` runs the default benches again on your machine (about half an hour;
`python -m bench --help` lists all) and rewrites this page; the command of each is below its figures.

A figure is the median of its repeats, over seeds the mean, with the smallest and the largest beside it. Nothing was
measured on Trainium."""


def page_of(results: Sequence[Result]) -> str:
    """The whole page. Markdown."""
    return "\n\n".join([_TOP, *_contents(results), *(_section(result) for result in results)]) + "\n"


def _contents(results: Sequence[Result]) -> Iterator[str]:
    rows = ["| claim | measured | target | |", "|---|---|---|---|"]
    for result in results:
        rows += claim_rows(result, f"#{result.bench}", result.targets)
    yield "\n".join(rows)
    others = [f"- [{result.title}](#{result.bench})" for result in results if result.target is None]
    if others:
        yield "\n".join(["Measured without a target:\n", *others])


def _verdict(result: Result, target: Target) -> str:
    judged, met = result.figure(target.figure), "pass" if result.holds(target) else "**fail**"
    what = "" if target is result.target else f" ({judged.text})"
    return f"\n\nTarget{what}: {target_text(result, target)}. Measured: {value_text(judged)}, {met}."


def _section(result: Result) -> str:
    judged = "".join(_verdict(result, target) for target in result.targets)
    rows = ["| figure | value | range | repeats |", "|---|---|---|---|"]
    rows += [f"| {one.text} | {value_text(one)} | {spread_text(one)} | {one.repeats} |" for one in result.figures]
    notes = [f"How: {result.method}", f"Measured on {where_text(result)}. Again: `{script_of(result.bench)}`."]
    if result.settings:
        told = ", ".join(f"{name} {value}" for name, value in result.settings.items())
        notes.insert(1, f"Settings: {told}.")
    return "\n\n".join([f"## {result.bench}\n\n{result.title}.{judged}", "\n".join(rows), *notes])
