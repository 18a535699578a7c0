"""`python -m bench.table`: the committed results as a Markdown table; `--write README.md` puts it between the marks."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.results import RESULTS, Figure, Result, load_results

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
_COMPARISONS = {"<=": "at most", "<": "under", ">=": "at least"}


def table_of(results: Sequence[Result]) -> str:
    """One row a bench with its target and its leading figures, then the machine and versions. Markdown."""
    if not results:
        return "No result yet: `make bench`."
    rows = ["| claim | measured | target | |", "|---|---|---|---|"]
    rows += [
        f"| {_claim(result)} | {_measured(result)} | {_target(result)} | {_verdict(result)} |" for result in results
    ]
    return "\n".join([*rows, "", *_footnotes(results)])


def _claim(result: Result) -> str:
    return f"{result.title} ([{result.bench}](bench/results/{result.bench}.json))"


def _measured(result: Result) -> str:
    """The judged figure and those to be shown beside it; without either every figure of the bench."""
    chosen = [result.figure(name) for name in result.also]
    figures = chosen if result.target or chosen else result.figures
    lines = [f"{figure.text}: {figure_text(figure)}" for figure in figures]
    if result.target:
        lines.insert(0, f"**{figure_text(result.figure(result.target.figure))}**")
    return "<br>".join(lines)


def figure_text(figure: Figure) -> str:
    """Value, unit and spread; shares in percent."""
    if figure.unit == "share":
        value, spread, unit = f"{figure.value:.2%}", f"{figure.low:.2%} to {figure.high:.2%}", ""
    else:
        value, spread, unit = f"{figure.value:g}", f"{figure.low:g} to {figure.high:g}", f" {figure.unit}"
    return f"{value}{unit}" + (f" ({spread}, {figure.repeats} repeats)" if figure.repeats > 1 else "")


def _target(result: Result) -> str:
    if result.target is None:
        return "none"
    bound = result.target.value
    unit = result.figure(result.target.figure).unit
    return f"{_COMPARISONS[result.target.comparison]} {f'{100 * bound:g}%' if unit == 'share' else f'{bound:g} {unit}'}"


def _verdict(result: Result) -> str:
    return "" if result.passed is None else "pass" if result.passed else "**fail**"


def _footnotes(results: Sequence[Result]) -> list[str]:
    """Machine, versions and date, each said once for all results that share it."""
    notes: dict[str, list[str]] = {}
    for result in results:
        packages = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        notes.setdefault(f"{result.machine.text}; {packages}; {result.date[:10]}", []).append(result.bench)
    if len(notes) == 1:
        return [f"Measured on {note}." for note in notes]
    return [f"- {', '.join(benches)}: {note}." for note, benches in notes.items()]


def replace_table(text: str, table: str) -> str:
    """`text` with everything between the marks replaced. Raises ValueError without exactly one pair of marks."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"expected one {START} and, after it, one {END}")
    before, rest = text.split(START)
    return f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Print the table, or write it into a file."""
    parser = argparse.ArgumentParser(prog="python -m bench.table", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table in this file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    table = table_of(load_results(arguments.results))
    if arguments.write is None:
        print(table)
        return 0
    try:
        text = replace_table(arguments.write.read_text(encoding="utf-8"), table)
    except (ValueError, OSError) as error:
        print(f"bench.table: {arguments.write}: {error}", file=sys.stderr)
        return 1
    arguments.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
