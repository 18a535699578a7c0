"""What a node makes of the reports of its ranks, and all nodes of those of each other. Without torch.

Each rank leaves its results in a folder of its node; the nodes read each other's reports through the workspace.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from pipeline.core.errors import DataError, TrnpipeError
from pipeline.core.format import format_duration
from pipeline.health.check import (
    CheckResult,
    NodeReport,
    Verdict,
    from_json,
    gang_error,
    one_line,
    show,
    store_report,
    to_json,
)
from pipeline.io import atomic
from pipeline.io.storage import Storage
from pipeline.parallel.node_barrier import Nodes

OPERATIONS_CHECK = "operations"
BURN, ROUND = "burn", "fastest_round_s"
SHARED = "shares_host_cpu"
NOT_SEEN = "host not known"
ELSEWHERE = "this job elsewhere; take the machine out of service if it fails again"
_SO_FAR = "-so-far"
_RANK_ROUND = re.compile(rf"rank_(\d+)_{ROUND}")


# The ranks of this node.


def write_rank_report(folder: Path, report: NodeReport, *, is_finished: bool) -> None:
    """Write the report of rank `report.node_rank`, or what it has done so far."""
    name = f"rank-{report.node_rank}{'' if is_finished else _SO_FAR}.json"
    atomic.write_bytes_atomic(folder / name, to_json(report).encode())


def results_of(folder: Path, ranks: Iterable[int]) -> tuple[CheckResult, ...]:
    """Merge the results that the ranks of a node left in `folder`; a rank that ended early is named, too.

    One line for each check that all ranks passed, one for each rank that did not.
    """
    by_name: dict[str, dict[int, CheckResult]] = {}
    merged: list[CheckResult] = []
    for rank in ranks:
        if (report := _read(folder / f"rank-{rank}.json")) is None:
            report = _read(folder / f"rank-{rank}{_SO_FAR}.json")
            last = f" after check {report.results[-1].name}" if report and report.results else ""
            seen = f"rank {rank} of this node ended without a word{last}"
            advice = "look at the last lines of that rank, and at dmesg for the out-of-memory killer"
            merged.append(CheckResult("ranks", Verdict.RETRY, seen, "a report of each rank", advice))
        for result in report.results if report else ():
            by_name.setdefault(result.name, {})[rank] = result
    for found in by_name.values():
        bad = {rank: result for rank, result in found.items() if result.verdict > Verdict.PASS}
        merged += [replace(result, seen=f"rank {rank}: {result.seen}") for rank, result in bad.items()]
        if not bad:
            first = next(iter(found.values()))
            rounds = {f"rank_{rank}_{ROUND}": one.figures[ROUND] for rank, one in found.items() if ROUND in one.figures}
            seen = first.seen or "right"
            merged.append(
                replace(
                    first,
                    seen=f"{len(found)} x {seen}" if len(found) > 1 else seen,
                    figures={**first.figures, **rounds},
                    seconds=max(one.seconds for one in found.values()),
                )
            )
    return tuple(merged)


def _read(path: Path) -> NodeReport | None:
    try:
        return from_json(path.read_bytes(), str(path))
    except (OSError, DataError):
        return None


# Ranks of all nodes against each other: pace.


def with_slow_ranks(reports: Sequence[NodeReport], ratio: float) -> tuple[NodeReport, ...]:
    """Add a result for each rank that is more than `ratio` times slower than the median of the others.

    Each rank's fastest round counts, because noise makes a round slower, never faster.
    """
    rounds = [
        {int(match[1]): float(value) for name, value in burn.figures.items() if (match := _RANK_ROUND.fullmatch(name))}
        for report in reports
        for burn in [next((one for one in report.results if one.name == BURN), CheckResult(BURN, Verdict.PASS))]
    ]
    round_s = {rank: seconds for node in rounds for rank, seconds in node.items()}
    annotated = []
    for report, node in zip(reports, rounds, strict=True):
        # "Cores" that are this host's share its processors with each other and with whatever else runs.
        shared = any(one.figures.get(SHARED) for one in report.results)
        slow = []
        for rank, seconds in sorted(node.items()):
            others = [other for peer, other in round_s.items() if peer != rank]
            if others and seconds > ratio * median(others):
                seen = f"rank {rank} takes {seconds / median(others):.1f} times as long as the others for one product"
                do = "this job elsewhere; look for throttling and for other processes on that machine"
                verdict = Verdict.WARN if shared else Verdict.RETRY
                slow.append(CheckResult("slow core", verdict, seen, f"at most {ratio:g} times", do))
        annotated.append(replace(report, results=(*report.results, *slow)))
    return tuple(annotated)


# The nodes of one job read each other's reports, and come to one verdict.


def store_own(workspace: Storage, cycle: str, report: NodeReport) -> None:
    """Store a report. Raises the error of the host checks if they explain why the workspace cannot be written."""
    try:
        store_report(workspace, cycle, report)
    except TrnpipeError:
        show(report, sys.stdout)
        if (error := gang_error([report])) is not None:
            raise error from None
        raise


def exchange_reports(nodes: Nodes, phase: str, own: NodeReport, wait_s: float) -> tuple[NodeReport, ...]:
    """Return the reports of all nodes, in rank order, the same ones on every node.

    A node that does not come, or fails, is in them by its rank, with a RETRY. Raises Preempted when stopped, and
    storage errors: call it in `nodes.telling()`.
    """
    if nodes.num_nodes == 1:
        return (own,)
    texts, absent = nodes.exchange(phase, to_json(own).encode(), timeout_s=wait_s)
    reports: dict[int, NodeReport] = {}
    for rank, text in texts.items():
        try:
            reports[rank] = from_json(text, f"the report of node {rank}")
        except DataError as error:  # written by another version, which is a fault
            expected = "a report as this version writes it"
            advice = "name the image by its digest, so that all nodes run the same version"
            fault = CheckResult("report", Verdict.FIX, one_line(error.seen), expected, advice)
            reports[rank] = NodeReport(rank, NOT_SEEN, (fault,))
    for rank, reason in absent.items():
        report, seen = reports.get(rank, NodeReport(rank, NOT_SEEN, ())), one_line(f"no report, {reason}")
        expected = f"a report of each node within {format_duration(min(wait_s, nodes.timeout_s))}"
        advice = f"look at the log of node {rank}, and whether its machine is alive"
        fault = CheckResult("report", Verdict.RETRY, seen, expected, advice)
        reports[rank] = replace(report, results=(*report.results, fault))
    if absent:
        nodes.fail(one_line(f"no report, {next(iter(absent.values()))}"))
    return tuple(reports[rank] for rank in sorted(reports))
