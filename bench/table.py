"""`python -m bench.table`: the committed results as a short table; `--write` puts it into README.md, one line a claim,
and writes docs/benchmarks.md with all figures."""

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
    """One row a target, with a link to its section of the page, and the machines below. Markdown."""
    claims = [result for result in results if result.target is not None]
    if not claims:
        return "No result yet: `make bench`."
    rows = [row for result in claims for row in claim_rows(result, f"{PAGE}#{result.bench}")]
    heading = ["| claim | measured | target | |", "|---|---|---|---|"]
    return "\n".join([*heading, *rows, "", f"Measured on {machines_text(claims)}."])


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
