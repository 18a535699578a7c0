"""`python -m bench.table`: the committed results as a short table, what a newcomer asks first and every miss.

`--write` puts it into README.md, and writes docs/benchmarks.md with every claim and all figures.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.page import page_of
from bench.results import RESULTS, ROOT, Result, load_results
from bench.words import claim_rows, machines_text, value_text

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
README, PAGE = Path("README.md"), Path("docs/benchmarks.md")
SHOWN: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "chaos": ("jobs_finished",),
        "embed": ("ratio",),
        "graphs": ("small_fused_graphs",),
        "peer_speed": ("fp32_cpu_ratio",),
        "quality_pricerunner_97536_cuda": ("ahead_of_best_peer", "bm25_low"),
        "resume": ("xla_total",),
        "trainer_ratio": ("ratio",),
    }
)
"""Figures by bench that the README shows whatever they are, with their targets where they have one."""


def table_of(results: Sequence[Result], shown: Mapping[str, Sequence[str]] = SHOWN) -> str:
    """The figures `shown` and all targets that are missed, with links to the page, and their machines. Markdown."""
    claims = [result for result in results if result.target is not None]
    if not claims:
        return "No result yet: `make bench`."
    by_result = [(result, _rows(result, shown.get(result.bench, ()))) for result in results]
    rows = [row for _, rows in by_result for row in rows]
    verdicts = [result.holds(one) for result in claims for one in result.targets]
    told = f"{sum(verdicts)} of {len(verdicts)} targets are met; every missed one is in this table."
    machines = machines_text([result for result, rows in by_result if rows])
    heading = ["| claim | measured | target | |", "|---|---|---|---|"]
    return "\n".join([*heading, *rows, "", f"{told} [All figures]({PAGE}). Measured on {machines}."])


def _rows(result: Result, names: Sequence[str]) -> list[str]:
    section = f"{PAGE}#{result.bench}"
    rows = claim_rows(result, section, [one for one in result.targets if one.figure in names or not result.holds(one)])
    judged = [one.figure for one in result.targets]
    others = [result.figure(name) for name in names if name not in judged]
    return rows + [f"| [{result.title}: {one.text}]({section}) | {value_text(one)} | | |" for one in others]


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
