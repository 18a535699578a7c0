"""The nodes of one job read each other's reports, and come to one verdict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.core.errors import DataError, TransientError
from pipeline.core.format import format_duration
from pipeline.health.check import one_line
from pipeline.health.report import from_json, to_json
from pipeline.health.verdict import CheckResult, NodeReport, Verdict
from pipeline.health.versions import DRIVER, VERSIONS
from pipeline.io.storage import KeyNotFound, join_key
from pipeline.parallel.nodes import Nodes

NOT_SEEN = "host not known"


def meet(nodes: Nodes, phase: str, mine: NodeReport, wait_s: float) -> tuple[NodeReport, ...]:
    """The reports of all nodes, in rank order, with what only a comparison shows; for core.health.gang_error.

    Nodes may meet again in another phase; who fails in between is known there.

    Every node gets the same ones. A node that does not come, or fails, is in them by its rank, with a RETRY; who finds
    that tells those who still wait. Raises Preempted when stopped, and storage errors: call it in `nodes.telling()`.
    A node alone has nothing to compare.
    """
    if nodes.num_nodes == 1:
        return (mine,)
    texts, absent = _exchange(nodes, phase, to_json(mine), wait_s)
    reports = [_read_report(rank, text) for rank, text in sorted(texts.items())]
    if absent:
        _tell(nodes, next(iter(absent.values())).seen)
        return _with(reports, absent)
    return _with(reports, version_faults(reports))


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


def _exchange(nodes: Nodes, phase: str, text: str, wait_s: float) -> tuple[dict[int, bytes], dict[int, CheckResult]]:
    """(what each node wrote, what is to be said of those that did not)."""
    storage, folder = nodes.storage, nodes.folder
    keys = {rank: join_key(folder, f"{phase}/node-{rank}.json") for rank in range(nodes.num_nodes)}
    storage.write_bytes(keys[nodes.rank], text.encode())
    error: TransientError | None = None
    try:
        nodes.any(phase, False, timeout_s=wait_s)
    except TransientError as failure:
        error = failure
    found = {}
    for rank, key in keys.items():
        try:
            found[rank] = storage.read_bytes(key)
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
            f"a report of each node within {format_duration(min(wait_s, nodes.timeout_s))}",
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


def _read_report(rank: int, text: bytes) -> NodeReport:
    """One that cannot be read was written by another version of us, which is a fault of its own."""
    try:
        return from_json(text, f"the report of node {rank}")
    except DataError as error:
        return NodeReport(rank, NOT_SEEN, (_unreadable(error),))


def _unreadable(error: DataError) -> CheckResult:
    return CheckResult(
        "report",
        Verdict.FIX,
        one_line(error.seen),
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
