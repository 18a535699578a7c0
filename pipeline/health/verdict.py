"""What a health check can say, and what a gang of nodes does about it. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median

from pipeline.core.errors import ConfigError, TransientError, TrnpipeError


class Verdict(IntEnum):
    """From harmless to grave; the gravest of a node is the node's."""

    PASS = 0
    WARN = 1
    RETRY = 2
    """This machine is unfit: the same work may pass on another one."""
    FIX = 3
    """No machine would do: settings, image or permissions must change first."""


@dataclass(frozen=True)
class CheckResult:
    """One check on one rank or node."""

    name: str
    verdict: Verdict
    seen: str = ""
    """What was found, one line; empty for a plain pass."""
    expected: str = ""
    next_command: str = ""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """The unit is in the name."""
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeReport:
    """All checks of one node. `host`: instance id, or host name where there is none."""

    node_rank: int
    host: str
    results: tuple[CheckResult, ...]

    @property
    def verdict(self) -> Verdict:
        return max((result.verdict for result in self.results), default=Verdict.PASS)


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


def gang_error(reports: Iterable[NodeReport]) -> TrnpipeError | None:
    """What every node of the gang raises; None when all may work.

    A configuration problem stops the job whatever else is wrong: no other machine would help. Else one unfit node
    sends all back, as a gang is started as a whole. The message names host, check and reason, the gravest first.
    """
    bad = [
        (result.verdict, report, result)
        for report in reports
        for result in report.results
        if result.verdict >= Verdict.RETRY
    ]
    if not bad:
        return None
    bad.sort(key=lambda item: (-item[0], item[1].node_rank))
    worst, report, first = bad[0]
    more = f" (and {len(bad) - 1} more failed checks)" if len(bad) > 1 else ""
    kind = ConfigError if worst is Verdict.FIX else TransientError
    return kind(
        f"node {report.node_rank} ({report.host}), check {first.name}: {first.seen}{more}",
        expected=first.expected,
        next_command=first.next_command or "trnpipe health on that machine; the job itself may be retried elsewhere",
    )
