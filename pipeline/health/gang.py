"""The nodes of one job read each other's reports, and come to one verdict.

Clocks are compared by what must have happened before what, not by when something arrived. In each round every node
writes down its time and then waits until all have done so. Its time in the next round is therefore later, in truth,
than everybody's in this one; clocks that say otherwise are apart by at least the difference. However slow storage or a
node is, this accuses no right clock; what it may miss is a skew below the length of the shortest round. The times that
storage keeps would be no better: they are those of the arrival, and on a local file system the node's own.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.core.errors import DataError, TransientError
from pipeline.core.format import format_duration
from pipeline.core.health import CheckResult, NodeReport, Verdict
from pipeline.graphs.node_barrier import Nodes
from pipeline.health.check import one_line
from pipeline.health.config import HealthConfig
from pipeline.health.report import from_json, to_json
from pipeline.health.versions import DRIVER, VERSIONS
from pipeline.io.errors import KeyNotFound
from pipeline.io.keys import join_key

CLOCK_ROUNDS = 2
"""After that of the reports. The first takes as long as nodes left the one before apart (up to 10 s of polling)."""
CLOCK_WAIT_S = 60.0  # all nodes were there a moment ago
NOT_SEEN = "host not known"

Stamps = Mapping[int, float]
"""Seconds since 1970 by node, each on its own clock."""


class _Letter(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    written_s: float
    report: str


def meet(
    nodes: Nodes, mine: NodeReport, config: HealthConfig, wall: Callable[[], float] = time.time
) -> tuple[NodeReport, ...]:
    """The reports of all nodes, in rank order, with what only a comparison shows; for core.health.gang_error.

    Every node gets the same ones. A node that does not come, or fails, is in them by its rank, with a RETRY; who finds
    that tells those who still wait. Raises Preempted when stopped, and storage errors: call it in `nodes.telling()`.
    A node alone has nothing to compare.
    """
    if nodes.num_nodes == 1:
        return (mine,)
    letter = _Letter(written_s=wall(), report=to_json(mine))
    texts, absent = _exchange(nodes, "reports", letter.model_dump_json(), config.nodes_wait_s)
    reports, first = _read_reports(texts)
    stamps = [first]
    for number in range(CLOCK_ROUNDS):
        if absent:
            break
        texts, absent = _exchange(nodes, f"clock-{number}", json.dumps(wall()), CLOCK_WAIT_S)
        stamps.append({rank: float(json.loads(text)) for rank, text in texts.items()})
    if absent:
        _tell(nodes, next(iter(absent.values())).seen)
        return _with(reports, absent)
    return _with(reports, version_faults(reports), clock_faults(stamps, config.max_clock_skew_s))


def version_faults(reports: Sequence[NodeReport]) -> dict[int, CheckResult]:
    """What is to be said of the nodes whose versions are not those of most (of the lowest rank when it is a draw)."""
    found = {
        report.node_rank: {name: str(value) for name, value in result.figures.items()}
        for report in sorted(reports, key=lambda one: one.node_rank)
        for result in report.results
        if result.name == VERSIONS and result.figures
    }
    parts = sorted({part for versions in found.values() for part in versions})
    # Counter keeps the order of first appearance among equals, here that of ranks.
    usual = {part: Counter(one.get(part, "none") for one in found.values()).most_common(1)[0] for part in parts}
    faults = {}
    for rank, versions in found.items():
        if other := [part for part in parts if versions.get(part, "none") != usual[part][0]]:
            faults[rank] = _version_fault(other, versions, usual, len(found))
    return faults


def clock_faults(stamps: Sequence[Stamps], max_skew_s: float) -> dict[int, CheckResult]:
    """What is to be said of the nodes whose clocks are surely more than `max_skew_s` from another's.

    `stamps`: one for each round, of the same nodes. Blamed is who disagrees with most, of equals the highest rank.
    """
    certain = {
        pair: skew
        for pair in combinations(sorted(set.intersection(*(set(stamp) for stamp in stamps))), 2)
        if abs(skew := certain_skew_s(stamps, *pair)) > max_skew_s
    }
    faults: dict[int, CheckResult] = {}
    while certain:
        counts = Counter(rank for pair in certain for rank in pair)
        worst = max(counts, key=lambda rank: (counts[rank], rank))
        pair, skew = next((pair, skew) for pair, skew in certain.items() if worst in pair)
        other = pair[0] if pair[1] == worst else pair[1]
        ahead_s = skew if pair[1] == worst else -skew
        faults[worst] = CheckResult(
            "clock",
            Verdict.RETRY,
            f"its clock is at least {format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"
            f" that of node {other}",
            f"at most {format_duration(max_skew_s)}",
            "chronyc tracking on that machine",
            {"clock_ahead_at_least_s": round(ahead_s, 3)},
        )
        certain = {pair: skew for pair, skew in certain.items() if worst not in pair}
    return faults


def certain_skew_s(stamps: Sequence[Stamps], one: int, other: int) -> float:
    """By how many seconds the clock of `other` is ahead of that of `one` at least; negative: behind; 0: not known.

    With a, b the times of a round and A, B those of the next, a was before B and b before A in truth: the skew is
    within [b - A, B - a].
    """
    bounds = [(now[other] - then[one], then[other] - now[one]) for now, then in pairwise(stamps)]
    low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
    return max(low, 0.0) or min(high, 0.0)


def _exchange(nodes: Nodes, phase: str, text: str, timeout_s: float) -> tuple[dict[int, str], dict[int, CheckResult]]:
    """(what each node wrote, what is to be said of those that did not)."""
    storage, folder = nodes.storage, nodes.folder
    keys = {rank: join_key(folder, f"{phase}/node-{rank}.json") for rank in range(nodes.num_nodes)}
    storage.write_bytes(keys[nodes.rank], text.encode())
    error: TransientError | None = None
    try:
        nodes.any(phase, False, timeout_s=timeout_s)
    except TransientError as failure:
        error = failure
    found = {}
    for rank, key in keys.items():
        try:
            found[rank] = storage.read_bytes(key).decode()
        except KeyNotFound:
            if error is None:
                raise
    absent = set(keys) - set(found)
    if error is None or not absent:  # the last one came while we gave up
        return found, {}
    reasons = {rank: reason for rank in absent if (reason := _reason(nodes, rank))}
    return found, {
        rank: CheckResult(
            "report",
            Verdict.RETRY,
            one_line(f"no report, it failed: {reasons[rank]}" if reasons else f"no report: {error.seen}"),
            f"a report of each node within {format_duration(min(timeout_s, nodes.timeout_s))}",
            f"look at the log of node {rank}, and whether its machine is alive",
        )
        for rank in (reasons or absent)
    }


def _reason(nodes: Nodes, rank: int) -> str:
    """Why a node has failed; empty when it has not said so."""
    try:
        return nodes.storage.read_bytes(_failed_key(nodes, rank)).decode(errors="replace")
    except KeyNotFound:
        return ""


def _tell(nodes: Nodes, reason: str) -> None:
    """End the wait of the others as an error in `nodes.telling()` does."""
    nodes.storage.write_bytes(_failed_key(nodes, nodes.rank), reason.encode())


def _failed_key(nodes: Nodes, rank: int) -> str:
    return join_key(nodes.folder, f"node-{rank}.failed")


def _read_reports(texts: Mapping[int, str]) -> tuple[list[NodeReport], Stamps]:
    """Reports and stamps. One that cannot be read was written by another version of us, which is a fault of its own."""
    reports, stamps = [], {}
    for rank, text in sorted(texts.items()):
        try:
            letter = _Letter.model_validate_json(text)
            reports.append(from_json(letter.report, f"the report of node {rank}"))
            stamps[rank] = letter.written_s
        except (DataError, ValidationError) as error:
            reports.append(NodeReport(rank, NOT_SEEN, (_unreadable(error),)))
    return reports, stamps


def _unreadable(error: DataError | ValidationError) -> CheckResult:
    return CheckResult(
        "report",
        Verdict.FIX,
        one_line(error.seen if isinstance(error, DataError) else "it wrote something else than a report"),
        "a report as this version writes it",
        "name the image by its digest, so that all nodes run the same version",
    )


def _version_fault(
    parts: Sequence[str], versions: Mapping[str, str], usual: Mapping[str, tuple[str, int]], num_nodes: int
) -> CheckResult:
    """The driver belongs to the machine; everything else comes with the image and the job, which must change."""
    only_driver = list(parts) == [DRIVER]
    return CheckResult(
        VERSIONS,
        Verdict.RETRY if only_driver else Verdict.FIX,
        "; ".join(f"{part} {versions.get(part, 'none')}" for part in parts),
        "; ".join(f"{part} {usual[part][0]} ({usual[part][1]} of {num_nodes} nodes)" for part in parts),
        "pin the AMI of the compute environment; machines of the old one go when they are idle"
        if only_driver
        else "name the image by its digest, so that all nodes pull the same one, and give all the same settings",
    )


def _with(reports: Sequence[NodeReport], *faults: Mapping[int, CheckResult]) -> tuple[NodeReport, ...]:
    """The reports with these faults added, and one for each rank that has none."""
    known = {report.node_rank: report for report in reports}
    for rank in sorted(set().union(*faults)):
        report = known.get(rank, NodeReport(rank, NOT_SEEN, ()))
        known[rank] = replace(report, results=(*report.results, *(one[rank] for one in faults if rank in one)))
    return tuple(known[rank] for rank in sorted(known))
