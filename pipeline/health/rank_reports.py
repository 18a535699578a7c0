"""What a node makes of the checks of its ranks: each leaves its results in a folder of the node.

Without torch: the process that starts the ranks needs none.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.health.report import from_json, to_json
from pipeline.health.verdict import CheckResult, NodeReport, Verdict, slow_ranks
from pipeline.io import atomic

BURN, ROUND = "burn", "fastest_round_s"
SHARED = "shares_host_cpu"
_RANK_ROUND = re.compile(rf"rank_(\d+)_{ROUND}")


def leave(folder: Path, report: NodeReport, *, is_finished: bool) -> None:
    """Put the report of rank `report.node_rank` there, or what it has done so far."""
    atomic.write_bytes_atomic(_place(folder, report.node_rank, is_finished), to_json(report).encode())


def results_of(folder: Path, ranks: Iterable[int]) -> tuple[CheckResult, ...]:
    """What the ranks of a node have left in `folder`, as results of the node: who ended on the way is named, too."""
    reports: dict[int, NodeReport] = {}
    silent: list[CheckResult] = []
    for rank in ranks:
        if (report := _read(_place(folder, rank, True))) is not None:
            reports[rank] = report
            continue
        last = ""
        if (before := _read(_place(folder, rank, False))) is not None:
            reports[rank] = before
            last = f" after check {before.results[-1].name}" if before.results else ""
        silent.append(
            CheckResult(
                "ranks",
                Verdict.RETRY,
                f"rank {rank} of this node ended without a word{last}",
                "a report of each rank",
                "look at the last lines of that rank, and at dmesg for the out-of-memory killer",
            )
        )
    return (*silent, *_merged(reports))


def _place(folder: Path, rank: int, is_finished: bool) -> Path:
    return folder / (f"rank-{rank}.json" if is_finished else f"rank-{rank}-so-far.json")


def _read(path: Path) -> NodeReport | None:
    try:
        return from_json(path.read_bytes(), str(path))
    except (OSError, DataError):
        return None


def _merged(reports: Mapping[int, NodeReport]) -> tuple[CheckResult, ...]:
    """One line for each check that all ranks passed, one for each rank that did not."""
    by_name: dict[str, dict[int, CheckResult]] = {}
    for rank, report in reports.items():
        for result in report.results:
            by_name.setdefault(result.name, {})[rank] = result
    merged: list[CheckResult] = []
    for found in by_name.values():
        bad = {rank: result for rank, result in found.items() if result.verdict > Verdict.PASS}
        merged += [replace(result, seen=f"rank {rank}: {result.seen}") for rank, result in bad.items()]
        if not bad:
            first = next(iter(found.values()))
            rounds = {f"rank_{rank}_{ROUND}": one.figures[ROUND] for rank, one in found.items() if ROUND in one.figures}
            merged.append(
                replace(
                    first,
                    seen=f"{len(found)} x {first.seen or 'right'}" if len(found) > 1 else first.seen or "right",
                    figures={**first.figures, **rounds},
                    seconds=max(one.seconds for one in found.values()),
                )
            )
    return tuple(merged)


def with_slow_ranks(reports: Iterable[NodeReport], ratio: float) -> tuple[NodeReport, ...]:
    """The same reports, with a word where a rank burned slower than its peers on all nodes."""
    reports = tuple(reports)
    rounds: dict[int, float] = {}
    for report in reports:
        for result in report.results:
            for name, value in result.figures.items() if result.name == BURN else ():
                if match := _RANK_ROUND.fullmatch(name):
                    rounds[int(match[1])] = float(value)
    slow = slow_ranks(rounds, ratio)
    return tuple(
        replace(report, results=(*report.results, *_slow(report, slow, ratio))) if slow else report
        for report in reports
    )


def _slow(report: NodeReport, slow: Mapping[int, float], ratio: float) -> Iterator[CheckResult]:
    # "Cores" that are this host's share its processors with each other and with whatever else runs.
    shared = any(one.figures.get(SHARED) for one in report.results)
    own = {int(match[1]) for one in report.results for name in one.figures if (match := _RANK_ROUND.fullmatch(name))}
    for rank in sorted(own & slow.keys()):
        yield CheckResult(
            "slow core",
            Verdict.WARN if shared else Verdict.RETRY,
            f"rank {rank} takes {slow[rank]:.1f} times as long as its peers for the same products",
            f"at most {ratio:g} times",
            "this job elsewhere; look for throttling and for other processes on that machine",
        )
