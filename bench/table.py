"""`python -m bench.table`: print the claims of the README with what was measured, and every target that is missed.

`--write` puts that table into README.md, and writes docs/results.md (the claims, each with its method in a few lines)
and bench/results/README.md (every figure of every result).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.__main__ import BENCHES
from bench.claims import CLAIMS, METHODS, README_CLAIMS, Claim
from bench.quality import changes
from bench.results import RESULTS, ROOT, Figure, Result, Target, load_results

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
README, SUMMARY, PAGE = Path("README.md"), Path("docs/results.md"), Path("bench/results/README.md")
_HEADING = ["| claim | target | measured | machine | revision |", "|---|---|---|---|---|"]


def readme_table(results: Sequence[Result], claims: Sequence[Claim] = README_CLAIMS) -> str:
    """Return the rows of `claims`, the number of targets met, and every target that is missed, in Markdown."""
    by_bench = {result.bench: result for result in results}
    rows = [_claim_row(claim, by_bench[claim.bench], f"{SUMMARY}#{claim.method}") for claim in claims]
    return "\n".join([*_HEADING, *rows, "", f"{_targets_met(results, PAGE)} [All results]({SUMMARY})."])


def summary_page(results: Sequence[Result], claims: Sequence[Claim] = CLAIMS) -> str:
    """Return docs/results.md: one row per claim, and one paragraph per method."""
    by_bench = {result.bench: result for result in results}
    rows = [_claim_row(claim, by_bench[claim.bench], f"#{claim.method}") for claim in claims]
    page = Path("..") / PAGE
    parts = [_SUMMARY_TOP, "\n".join([*_HEADING, *rows]), _targets_met(results, page)]
    for name in dict.fromkeys(claim.method for claim in claims):
        parts.append(f"## {name}\n\n{METHODS[name]}")
    if changes.BENCH in by_bench:
        parts.append(f"## changes\n\n{changes.page(by_bench[changes.BENCH])}")
    return "\n\n".join(parts) + "\n"


def _claim_row(claim: Claim, result: Result, link: str) -> str:
    figure = result.figure(claim.figure)
    target = next((target for target in result.targets if target.figure == claim.figure), None)
    measured = value_text(figure)
    if target is not None:
        measured += ", met" if result.holds(target) else ", **missed**"
    cells = [f"[{claim.text}]({link})", target_text(result, target) if target else "", measured]
    return f"| {' | '.join([*cells, result.hardware, result.revision])} |"


def _targets_met(results: Sequence[Result], page: Path) -> str:
    """Return how many targets are met over all results, with links to those that are missed."""
    targets = [(result, target) for result in results for target in result.targets]
    missed = [(result, target) for result, target in targets if not result.holds(target)]
    text = f"{len(targets) - len(missed)} of {len(targets)} targets are met."
    if missed:
        text += " Missed: " + "; ".join(
            f"[{result.bench}]({page}#{result.bench}): {result.figure(target.figure).text}"
            f" ({value_text(result.figure(target.figure))},"
            f" target {target_text(result, target)})"
            for result, target in missed
        )
        text += "."
    return text


def replace_table(text: str, table: str) -> str:
    """Return `text` with everything between the marks replaced. Raises ValueError without exactly one pair of marks."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"expected one {START} and, after it, one {END}")
    before, rest = text.split(START)
    return f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}"


def documents(results: Sequence[Result], root: Path = ROOT) -> dict[Path, str]:
    """Return the expected text of each document, by path. Raises ValueError for a README without marks, OSError."""
    readme = root / README
    return {
        readme: replace_table(readme.read_text(encoding="utf-8"), readme_table(results)),
        root / SUMMARY: summary_page(results),
        root / PAGE: page_of(results),
    }


_SUMMARY_TOP = """\
# Results

Written by `python -m bench.table --write` from the files in [bench/results](../bench/results/README.md). That folder
has every figure with its range, its full method and the command that measures it again. `make bench` runs the default
benches (about half an hour on a quiet machine) and writes this page.

A figure is the median of its repeats (the mean over seeds). `revision` is the commit that was measured (one of them
if there were several). Figures of older revisions may have changed since. Nothing has been measured on Trainium."""

_PAGE_TOP = """\
# All figures

Written by `python -m bench.table --write` from the JSON files in this folder, each of which a script in `bench/` wrote.
The short version is [docs/results.md](../../docs/results.md).

A figure is the median of its repeats (the mean over seeds), with the smallest and the largest value."""


def page_of(results: Sequence[Result]) -> str:
    """Return bench/results/README.md: every result with all its figures, how and where it was measured."""
    return "\n\n".join([_PAGE_TOP, *_contents(results), *(_section(result) for result in results)]) + "\n"


def _contents(results: Sequence[Result]) -> Iterator[str]:
    rows = ["| claim | measured | target | |", "|---|---|---|---|"]
    for result in results:
        rows += claim_rows(result)
    yield "\n".join(rows)
    others = [f"[{result.title}](#{result.bench})" for result in results if result.target is None]
    if others:
        yield f"Measured without a target: {'; '.join(others)}."


def _verdict(result: Result, target: Target) -> str:
    judged, met = result.figure(target.figure), "pass" if result.holds(target) else "**fail**"
    what = "" if target is result.target else f" ({judged.text})"
    return f"\n\nTarget{what}: {target_text(result, target)}. Measured: {value_text(judged)}, {met}."


def _section(result: Result) -> str:
    judged = "".join(_verdict(result, target) for target in result.targets)
    rows = ["| figure | value | range | repeats |", "|---|---|---|---|"]
    rows += [
        f"| {figure.text} | {value_text(figure)} | {spread_text(figure)} | {figure.repeats} |"
        for figure in result.figures
    ]
    notes = [f"Method: {result.method}", f"Measured on {where_text(result)}. Again: `{script_of(result.bench)}`."]
    if result.settings:
        settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
        notes.insert(1, f"Settings: {settings}.")
    return "\n\n".join([f"## {result.bench}\n\n{result.title}.{judged}", "\n".join(rows), *notes])


# Results in words.

_COMPARISONS = {"<=": "at most", "<": "under", ">=": "at least", ">": "above"}


def value_text(figure: Figure) -> str:
    """Return value and unit, and shares in percent."""
    return f"{figure.value:.2%}" if figure.unit == "share" else f"{_number(figure.value)} {figure.unit}".rstrip()


def spread_text(figure: Figure) -> str:
    """Return the smallest and the largest of the repeats, or an empty string if there was one."""
    if figure.repeats == 1:
        return ""
    if figure.unit == "share":
        return f"{figure.low:.2%} to {figure.high:.2%}"
    return f"{_number(figure.low)} to {_number(figure.high)}"


def _number(value: float) -> str:
    """Return four significant digits, with commas and without an exponent from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def target_text(result: Result, target: Target) -> str:
    """Return the bound on the judged figure in its unit."""
    bound, unit = target.value, result.figure(target.figure).unit
    shown = f"{100 * bound:g}%" if unit == "share" else f"{bound:,g} {unit}".rstrip()
    return f"{_COMPARISONS[target.comparison]} {shown}"


def claim_rows(result: Result) -> list[str]:
    """Return one row of a Markdown table per target: claim, measured, target, verdict."""
    rows = []
    for target in result.targets:
        judged = result.figure(target.figure)
        title = result.title if target is result.target else f"{result.bench}: {judged.text}"
        verdict = "pass" if result.holds(target) else "**fail**"
        rows.append(
            f"| [{title}](#{result.bench}) | {value_text(judged)} | {target_text(result, target)} | {verdict} |"
        )
    return rows


def where_text(result: Result) -> str:
    """Return machine, versions and date of one result."""
    packages = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{result.machine.text}; {packages}; {result.date[:10]}"


def script_of(bench: str) -> str:
    """Return the command that measures it again, or `--help` of the script if it takes arguments."""
    if bench in BENCHES:
        return f"python -m bench --only {bench}"
    folder = ROOT / "bench"
    names = sorted(
        [path.stem for path in folder.glob("*.py")] + [path.parent.name for path in folder.glob("*/__main__.py")]
    )
    scripts = [name for name in names if bench.startswith(name)]
    return f"python -m bench.{scripts[-1] if scripts else bench} --help"


def main() -> int:
    """Print the table, or write the documents."""
    parser = argparse.ArgumentParser(prog="python -m bench.table", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {README}, {SUMMARY} and {PAGE}")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the documents")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    results = load_results(arguments.results)
    if not arguments.write:
        print(readme_table(results))
        return 0
    try:
        for path, text in documents(results, arguments.root).items():
            path.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"bench.table: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
