"""`python -m bench.table`: the committed results as a short table, what a newcomer asks first and every miss.

`--write` puts it into README.md, and writes docs/benchmarks.md with every claim and all figures.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.__main__ import BENCHES
from bench.results import RESULTS, ROOT, Figure, Result, Target, load_results

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
README, PAGE = Path("README.md"), Path("docs/benchmarks.md")
SHOWN: Mapping[str, str] = MappingProxyType(
    {"embed": "ratio", "quality_pricerunner_97536_cuda": "ahead_of_best_peer", "chaos": "jobs_finished"}
)
"""Figures by bench that the README shows, with their targets."""


def table_of(results: Sequence[Result], shown: Mapping[str, str] = SHOWN) -> str:
    """The figures `shown`, every target that is missed, with links to the page, and the machines. Markdown."""
    claims = [result for result in results if result.target is not None]
    if not claims:
        return "No result yet: `make bench`."
    by_bench = {result.bench: result for result in results}
    rows = list[str]()
    for bench, name in shown.items():
        result = by_bench[bench]
        result.figure(name)
        targets = [one for one in result.targets if one.figure == name]
        rows += claim_rows(result, f"{PAGE}#{bench}", targets)
    missed = [(result, one) for result in claims for one in result.targets if not result.holds(one)]
    verdicts = sum(len(result.targets) for result in claims)
    told = f"{verdicts - len(missed)} of {verdicts} targets are met"
    if missed:
        told += "; missed: " + ", ".join(
            f"[{result.bench}]({PAGE}#{result.bench}) ({value_text(result.figure(one.figure))},"
            f" asked {target_text(result, one)})"
            for result, one in missed
        )
    machines = machines_text([by_bench[bench] for bench in shown])
    heading = ["| claim | measured | target | |", "|---|---|---|---|"]
    return "\n".join([*heading, *rows, "", f"{told}. [All figures]({PAGE}). Measured on {machines}."])


def replace_table(text: str, table: str) -> str:
    """`text` with everything between the marks replaced. Raises ValueError without exactly one pair of marks."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"expected one {START} and, after it, one {END}")
    before, rest = text.split(START)
    return f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}"


def documents(results: Sequence[Result], root: Path = ROOT) -> dict[Path, str]:
    """What the documents should hold, by path. Raises ValueError for a README without marks, OSError."""
    readme = root / README
    return {
        readme: replace_table(readme.read_text(encoding="utf-8"), table_of(results)),
        root / PAGE: page_of(results),
    }


# docs/benchmarks.md: every committed result, with all its figures, how it was measured, and on what.

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


# Results in words.

_COMPARISONS = {"<=": "at most", "<": "under", ">=": "at least", ">": "above"}


def value_text(figure: Figure) -> str:
    """Value and unit; shares in percent."""
    return f"{figure.value:.2%}" if figure.unit == "share" else f"{_number(figure.value)} {figure.unit}".rstrip()


def spread_text(figure: Figure) -> str:
    """From the smallest to the largest of the repeats; empty for one."""
    if figure.repeats == 1:
        return ""
    if figure.unit == "share":
        return f"{figure.low:.2%} to {figure.high:.2%}"
    return f"{_number(figure.low)} to {_number(figure.high)}"


def _number(value: float) -> str:
    """Four significant digits; large ones with commas and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def target_text(result: Result, target: Target) -> str:
    """The bound on the judged figure, in its unit."""
    bound, unit = target.value, result.figure(target.figure).unit
    shown = f"{100 * bound:g}%" if unit == "share" else f"{bound:,g} {unit}".rstrip()
    return f"{_COMPARISONS[target.comparison]} {shown}"


def claim_rows(result: Result, section: str, targets: Sequence[Target]) -> list[str]:
    """Rows of a Markdown table, one a target: claim, measured, target, verdict. `section`: link to the figures."""
    rows = []
    for target in targets:
        judged = result.figure(target.figure)
        title = result.title if target is result.target else f"{result.bench}: {judged.text}"
        verdict = "pass" if result.holds(target) else "**fail**"
        rows.append(f"| [{title}]({section}) | {value_text(judged)} | {target_text(result, target)} | {verdict} |")
    return rows


def where_text(result: Result) -> str:
    """Machine, versions and date of one result."""
    packages = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{result.machine.text}; {packages}; {result.date[:10]}"


def machines_text(results: Sequence[Result]) -> str:
    """The machines of several results, each once."""
    return "; ".join(dict.fromkeys(result.machine.text for result in results))


def script_of(bench: str) -> str:
    """The command that measures it again, or the script that does, with arguments of its own."""
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
    parser.add_argument("--write", action="store_true", help=f"write {README} and {PAGE}")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the two documents")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    results = load_results(arguments.results)
    if not arguments.write:
        print(table_of(results))
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
