"""`python -m bench.table`: the committed results as a short table, the first claim of each and those that fail.

`--write` puts it into README.md, and writes docs/benchmarks.md with every claim and all figures.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.page import page_of
from bench.results import RESULTS, ROOT, Result, load_results
from bench.words import claim_rows, machines_text

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
README, PAGE = Path("README.md"), Path("docs/benchmarks.md")


def table_of(results: Sequence[Result]) -> str:
    """The first target of each result and those that are missed, with links to the page, and the machines. Markdown."""
    claims = [result for result in results if result.target is not None]
    if not claims:
        return "No result yet: `make bench`."
    heading = ["| claim | measured | target | |", "|---|---|---|---|"]
    rows = []
    for result in claims:
        shown = [one for one in result.targets if one is result.target or not result.holds(one)]
        rows += claim_rows(result, f"{PAGE}#{result.bench}", shown)
    all_of_them = [result.holds(one) for result in claims for one in result.targets]
    kept = f"{sum(all_of_them)} of {len(all_of_them)} targets are met; [all of them]({PAGE})."
    return "\n".join([*heading, *rows, "", f"{kept} Measured on {machines_text(claims)}."])


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
