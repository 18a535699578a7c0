"""What a node makes of the reports of its ranks, and a gang of those of its nodes. Without torch.

Each rank leaves its results in a folder of its node; the nodes read each other's reports through the workspace.
"""

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from pipeline.core.errors import DataError, TrnpipeError
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
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

BURN, ROUND = "burn", "fastest_round_s"
SHARED = "shares_host_cpu"
NOT_SEEN = "host not known"
ELSEWHERE = "this job elsewhere; take the machine out of service if it fails again"
_SO_FAR = "-so-far"
_RANK_ROUND = re.compile(rf"rank_(\d+)_{ROUND}")


# The ranks of this node.


def write_rank_report(folder: Path, report: NodeReport, *, is_finished: bool) -> None:
    """Put the report of rank `report.node_rank` there, or what it has done so far."""
    name = f"rank-{report.node_rank}{'' if is_finished else _SO_FAR}.json"
    atomic.write_bytes_atomic(folder / name, to_json(report).encode())


def results_of(folder: Path, ranks: Iterable[int]) -> tuple[CheckResult, ...]:
    """What the ranks of a node have left in `folder`, as results of the node: who ended on the way is named, too.

    One line for each check that all ranks passed, one for each rank that did not.
    """
    by_name: dict[str, dict[int, CheckResult]] = {}
    merged: list[CheckResult] = []
    for rank in ranks:
        if (report := _read(folder / f"rank-{rank}.json")) is None:
            report = _read(folder / f"rank-{rank}{_SO_FAR}.json")
            last = f" after check {report.results[-1].name}" if report and report.results else ""
            merged.append(
                CheckResult(
                    "ranks",
                    Verdict.RETRY,
                    f"rank {rank} of this node ended without a word{last}",
                    "a report of each rank",
                    "look at the last lines of that rank, and at dmesg for the out-of-memory killer",
                )
            )
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


def with_slow_ranks(reports: Iterable[NodeReport], ratio: float) -> tuple[NodeReport, ...]:
    """The same reports, annotated where a rank ran slower than its peers on all nodes."""
    reports = tuple(reports)
    rounds: list[dict[int, float]] = []  # of the ranks of each node
    for report in reports:
        figures = {name: value for one in report.results if one.name == BURN for name, value in one.figures.items()}
        found = ((_RANK_ROUND.fullmatch(name), value) for name, value in figures.items())
        rounds.append({int(match[1]): float(value) for match, value in found if match})
    slow = slow_ranks({rank: round_s for node in rounds for rank, round_s in node.items()}, ratio)
    annotated = []
    for report, node in zip(reports, rounds, strict=True):
        # "Cores" that are this host's share its processors with each other and with whatever else runs.
        shared = any(one.figures.get(SHARED) for one in report.results)
        results = [
            CheckResult(
                "slow core",
                Verdict.WARN if shared else Verdict.RETRY,
                f"rank {rank} takes {slow[rank]:.1f} times as long as its peers for the same products",
                f"at most {ratio:g} times",
                "this job elsewhere; look for throttling and for other processes on that machine",
            )
            for rank in sorted(node.keys() & slow.keys())
        ]
        annotated.append(replace(report, results=(*report.results, *results)))
    return tuple(annotated)


def slow_ranks(round_s: Mapping[int, float], ratio: float) -> dict[int, float]:
    """Ranks that need more than `ratio` times the median of their peers for the same work, with that multiple.

    Give it each rank's fastest round: noise makes a round slower, never faster. Two ranks are each other's only peer.
    """
    slow = {}
    for rank, mine in round_s.items():
        peers = [other for peer, other in round_s.items() if peer != rank]
        if peers and mine > ratio * median(peers):
            slow[rank] = mine / median(peers)
    return slow


# An operation that is less exact than expected: a defect of one core, or all that such cores can do.
#
# A sick core is wrong in its own way. Where all ranks, given equal inputs, come to the same error, no core is sick: the
# expectation is wrong, or what compiles for them.

OPERATIONS_CHECK = "operations"
BEYOND = "beyond_tolerance"
"""The figure of a result that names the operations whose error is beyond their tolerance."""
GROSS_ERROR = 0.1
"""More than rounding can make of any of these operations: bf16 has 8 bits of mantissa, so errors of 2^-9."""


def beyond_tolerance(errors: Mapping[str, float], tolerances: Mapping[str, float]) -> CheckResult:
    """What a rank says of the operations in `tolerances`, each with an error beyond it. `errors`: of all operations."""
    wrong = {name: errors[name] for name in tolerances}
    seen, flag = _told(wrong)
    at_most = ", ".join(f"{tolerance:g} ({name})" for name, tolerance in tolerances.items())
    hint = "" if max(wrong.values()) > GROSS_ERROR else f"; if all machines say so: {flag}"
    figures = error_figures(errors) | {BEYOND: ", ".join(wrong)}
    expected = f"at most {at_most} against float64"
    return CheckResult(OPERATIONS_CHECK, Verdict.RETRY, seen, expected, f"{ELSEWHERE}{hint}", figures)


def error_figures(errors: Mapping[str, float]) -> dict[str, float | int | str]:
    """Three digits: equal ones on equal cores."""
    return {f"{name.replace(' ', '_')}_error": float(f"{value:.3g}") for name, value in errors.items()}


def with_shared_errors(reports: Sequence[NodeReport], num_ranks: int) -> tuple[NodeReport, ...]:
    """The same reports; where all `num_ranks` have the same errors beyond tolerances, with one softer result a node.

    One rank alone cannot tell: its verdict stays.
    """
    beyond = [one.figures for report in reports for one in report.results if _is_beyond(one)]
    found = [
        {name: float(figures[f"{name.replace(' ', '_')}_error"]) for name in str(figures[BEYOND]).split(", ")}
        for figures in beyond
    ]
    if num_ranks < 2 or len(found) != num_ranks or any(one != found[0] for one in found):
        return tuple(reports)
    seen, flag = _told(found[0])
    same = f"{seen}; the same on all {num_ranks} ranks"
    if max(found[0].values()) > GROSS_ERROR:
        verdict, seen = Verdict.FIX, f"{same}: no core but what runs on them"
        advice = "compiler and its flags as in docs/neuron.md; then trnpipe parity against the CPU"
    else:
        verdict, seen = Verdict.WARN, f"{same}: a tolerance, not a defect"
        advice = f"{flag}, once trnpipe parity passes"
    shared = []
    for report in reports:
        first = next((one for one in report.results if _is_beyond(one)), None)
        rest = [one for one in report.results if one is first or not _is_beyond(one)]
        soft = [replace(one, verdict=verdict, seen=seen, next_command=advice) if one is first else one for one in rest]
        shared.append(replace(report, results=tuple(soft)))
    return tuple(shared)


def _is_beyond(result: CheckResult) -> bool:
    return result.name == OPERATIONS_CHECK and BEYOND in result.figures


def _told(errors: Mapping[str, float]) -> tuple[str, str]:
    """Errors as text, and the setting that lets them pass, with room for other inputs."""
    seen = "; ".join(f"{name}: relative error {error:.2g}" for name, error in errors.items())
    values = ",".join(f"{name}={2 * error:.1g}" for name, error in errors.items())
    return seen, f"--health.tolerances '{values}'"


# The nodes of one job read each other's reports, and come to one verdict.


def store_own(workspace: Storage, cycle: str, report: NodeReport) -> None:
    """Raises what the host checks say of a workspace that cannot be written: it says more than the failing write."""
    try:
        store_report(workspace, cycle, report)
    except TrnpipeError:
        show(report, sys.stdout)
        if (error := gang_error([report])) is not None:
            raise error from None
        raise


class TimeLimit(StopSignal):
    """Set with the outer signal, and when all ranks together take too long."""

    def __init__(self, outer: StopSignal, limit_s: float) -> None:
        super().__init__()
        self._outer, self._end = outer, time.monotonic() + limit_s

    def is_set(self) -> bool:
        if self._outer.is_set() or time.monotonic() > self._end:
            self._event.set()
        return super().is_set()

    def wait(self, timeout_s: float) -> bool:
        self._outer.wait(max(0.0, min(timeout_s, self._end - time.monotonic())))
        return self.is_set()


def exchange_reports(nodes: Nodes, phase: str, mine: NodeReport, wait_s: float) -> tuple[NodeReport, ...]:
    """The reports of all nodes, in rank order. Nodes may meet again in another phase; it hears who failed in between.

    Every node gets the same ones. A node that does not come, or fails, is in them by its rank, with a RETRY; who finds
    that tells those who still wait. Raises Preempted when stopped, and storage errors: call it in `nodes.telling()`.
    """
    if nodes.num_nodes == 1:
        return (mine,)
    texts, absent = nodes.exchange(phase, to_json(mine).encode(), timeout_s=wait_s)
    reports: dict[int, NodeReport] = {}
    for rank, text in texts.items():
        try:
            reports[rank] = from_json(text, f"the report of node {rank}")
        except DataError as error:  # another version of us has written it, which is a fault of its own
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
