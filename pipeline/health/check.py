"""Health checks: their verdicts, the error that follows from them, and how they are run. Without torch.

Cheap ones first, each within its time limit. A check runs in a daemon thread, not in a child: what hangs on a sick
machine hangs in the kernel (a dead mount, an ioctl of the driver), where nothing can be killed; a spawned child costs
seconds of imports for each check, and a forked one inherits the locks of our threads. The programs that a check starts
with `run_tool` can be killed: the stop signal of the check ends them. A thread that stays behind cannot keep the
process from ending.
"""

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path, PurePath
from statistics import median
from typing import Annotated, ClassVar, TextIO

from pydantic import BeforeValidator, ConfigDict, PlainSerializer, TypeAdapter, ValidationError

from pipeline.core.errors import ConfigError, DataError, Preempted, TransientError, TrnpipeError
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
from pipeline.health.config import SLOW_RATIO, Group, HealthConfig
from pipeline.io import atomic
from pipeline.io.storage import Storage
from pipeline.parallel.world import Nodes


class HealthVerdict(IntEnum):
    """From harmless to grave; the gravest of a node is the node's."""

    PASS = 0
    WARN = 1
    RETRY = 2
    """This machine is unfit: the same work may pass on another one."""
    FIX = 3
    """No machine would do: settings, image or permissions must change first."""

    @property
    def text(self) -> str:
        """Its name in JSON."""
        return self.name.lower()


@dataclass(frozen=True)
class CheckResult:
    """One check on one rank or node."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    verdict: Annotated[
        HealthVerdict,
        BeforeValidator(lambda name: getattr(HealthVerdict, str(name).upper(), "no verdict")),
        PlainSerializer(lambda verdict: verdict.text),
    ]
    seen: str = ""
    """What was found, one line; empty for a plain pass."""
    expected: str = ""
    next_command: str = ""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """The unit is in the name."""
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeReport:
    """All checks of one node. `host`: instance id, or host name without one."""

    node_rank: int
    host: str
    results: tuple[CheckResult, ...]

    @property
    def verdict(self) -> HealthVerdict:
        return max((result.verdict for result in self.results), default=HealthVerdict.PASS)


def job_error(reports: Iterable[NodeReport]) -> TrnpipeError | None:
    """Return the error that every node of the job raises; None if all may work.

    A configuration problem stops the job whatever else is wrong: no other machine would help. Else one unfit node
    sends all back, as a node group is started as a whole. The message names host, check and reason, the gravest first.
    """
    bad = [(report, result) for report in reports for result in report.results if result.verdict >= HealthVerdict.RETRY]
    if not bad:
        return None
    report, first = min(bad, key=lambda one: (-one[1].verdict, one[0].node_rank))
    more = f" (and {len(bad) - 1} more failed checks)" if len(bad) > 1 else ""
    kind = ConfigError if first.verdict is HealthVerdict.FIX else TransientError
    return kind(
        f"node {report.node_rank} ({report.host}), check {first.name}: {first.seen}{more}",
        expected=first.expected,
        next_command=first.next_command or "trnpipe health on that machine; the job itself may be retried elsewhere",
    )


_REPORT = TypeAdapter(NodeReport)


def to_json(report: NodeReport) -> str:
    """Return the report as indented JSON, verdicts by name. A figure may be NaN, which Python's readers take."""
    fields = _REPORT.dump_python(report)
    return json.dumps({"schema_version": 1, "verdict": report.verdict.text, **fields}, indent=2)


def from_json(text: str | bytes, where: str = "a health report") -> NodeReport:
    """Read what `to_json` wrote. Raises DataError naming `where`."""
    try:
        return _REPORT.validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"{where} cannot be read: {error.errors(include_url=False)[0]['msg']}",
            expected="a report written by trnpipe health",
            next_command="run the same version of trnpipe on all nodes",
        ) from error


def report_key(cycle: str, report: NodeReport) -> str:
    """Return the key of a report, with rank and host: that of another machine of an earlier attempt is kept."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", report.host) or "unknown"
    return f"cycles/{cycle}/health/{report.node_rank}-{host}.json"


def store_report(workspace: Storage, cycle: str, report: NodeReport) -> None:
    """Write the report below the cycle (atomic)."""
    workspace.write_bytes(report_key(cycle, report), to_json(report).encode() + b"\n")


def show(report: NodeReport, stream: TextIO) -> None:
    """Print `node 0 (i-0abc): retry`, a line for each check, and what to do about those that are no plain pass."""
    lines = [f"node {report.node_rank} ({report.host}): {report.verdict.text}"]
    width = max((len(result.name) for result in report.results), default=0)
    for result in report.results:
        figures = result.figures.items()
        seen = result.seen or ", ".join(
            f"{name} {one:.4g}" if isinstance(one, float) else f"{name} {one}" for name, one in figures
        )
        seconds = format_duration(result.seconds)
        lines.append(f"  {result.verdict.text:<5}  {result.name:<{width}}  {seen} ({seconds})")
        if result.verdict is not HealthVerdict.PASS:
            advice = {"expected": result.expected, "next": result.next_command}
            lines += [f"         {name}: {text}" for name, text in advice.items() if text]
    stream.writelines(f"{line}\n" for line in lines)
    stream.flush()


POLL_S = 0.05
LEAVE_S = 5.0  # for a check that is asked to stop, of the 15 s that a stopped process has
EXPENSIVE_S = 10.0
_TEXT_LENGTH = 1000


@dataclass
class CheckContext:
    """Given to a check, which sets `doing` to its current operation: it is reported if the check hangs."""

    stop: StopSignal
    """Set when the run is stopped, and when the check's time is over."""
    doing: str = "starting"


@dataclass(frozen=True)
class Check:
    """One check. `run` returns one result or several; none if it does not apply here."""

    name: str
    run: Callable[[CheckContext], CheckResult | Iterable[CheckResult]]
    group: Group | None = None
    """None: others depend on it, so it is run always."""
    time_limit_s: float | None = None
    """None: as in the settings."""
    cost_s: float = 1.0
    """Seconds it usually takes; the order. From `EXPENSIVE_S` on it is skipped on a node that has failed already."""


def run_checks(
    checks: Iterable[Check],
    config: HealthConfig,
    *,
    node_rank: int,
    host: str,
    stop: StopSignal,
    clock: Callable[[], float] = time.monotonic,
    seen: Callable[[CheckResult], object] = lambda result: None,
) -> NodeReport:
    """Run the checks of the chosen groups; `seen` is called with each result. Raises Preempted only.

    A check that fails or hangs is a verdict like any other; later checks still run, except expensive ones.
    """
    results: list[CheckResult] = []
    chosen = [check for check in checks if config.wants(check.group)]
    for check in sorted(chosen, key=lambda one: one.cost_s):
        stop.raise_if_set(f"before health check {check.name}")
        if check.cost_s >= EXPENSIVE_S and any(result.verdict >= HealthVerdict.RETRY for result in results):
            found = [CheckResult(check.name, HealthVerdict.WARN, "not run: this node has failed already")]
        else:
            found = _run(check, config, stop, clock)
        for result in found:
            seen(result)
        results += found
    return NodeReport(node_rank, host, tuple(results))


def _run(check: Check, config: HealthConfig, stop: StopSignal, clock: Callable[[], float]) -> list[CheckResult]:
    """Return the results of one check, the first with its time. Raises Preempted."""
    limit_s = config.check_limit_s if check.time_limit_s is None else check.time_limit_s
    context = CheckContext(StopSignal())
    results: list[CheckResult] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found = check.run(context)
            for result in (found,) if isinstance(found, CheckResult) else found:
                results.append(result)  # one by one: results before a failure are kept
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=f"check {check.name}", daemon=True)
    started = clock()
    thread.start()
    while thread.is_alive() and not stop.is_set() and clock() - started < limit_s:
        thread.join(POLL_S)
    hangs, found, doing = thread.is_alive(), [*results], context.doing  # before it is asked to stop
    if hangs:
        context.stop.set(stop.reason or "its time limit")
        thread.join(LEAVE_S)
    stop.raise_if_set(f"in health check {check.name}: {doing}")
    if hangs:
        still = "; it does not end either" if thread.is_alive() else ""
        seen = f"not done after {format_duration(limit_s)}, still {doing}{still}"
        advice = "look at dmesg of that machine; raise --health.check-limit-s if it is only slow"
        found.append(CheckResult(check.name, HealthVerdict.RETRY, seen, "an answer within that time", advice))
    elif errors:
        if isinstance(errors[0], Preempted):
            raise errors[0]
        found.append(_failed(check.name, errors[0]))
    timed = (replace(one, seconds=clock() - started) if index == 0 else one for index, one in enumerate(found))
    return [_clean(one) for one in timed]


def _failed(name: str, error: BaseException) -> CheckResult:
    """Return the verdict on an exception.

    Our own errors know whether another machine may do better. Any other one is a RETRY: a bug of ours then costs a few
    attempts of a minute, while FIX on a machine that is sick in a new way costs a night.
    """
    if isinstance(error, TrnpipeError):
        verdict = HealthVerdict.RETRY if error.retry else HealthVerdict.FIX
        return CheckResult(name, verdict, one_line(error.seen), error.expected, error.next_command)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    seen = f"{type(error).__name__}: {one_line(str(error))}{where}"
    advice = "trnpipe health on that machine; if all machines report it, it is a bug of the check"
    return CheckResult(name, HealthVerdict.RETRY, seen, "an answer of the machine that the check understands", advice)


def _clean(result: CheckResult) -> CheckResult:
    """Make texts printable: what tools of a sick machine print must not spoil a terminal or the report."""

    def printable(text: str) -> str:
        return "".join(char if char.isprintable() else "?" for char in one_line(text)[:_TEXT_LENGTH])

    figures = {name: printable(value) if isinstance(value, str) else value for name, value in result.figures.items()}
    return replace(result, seen=printable(result.seen), expected=printable(result.expected), figures=figures)


def one_line(text: str) -> str:
    """Return the text with every run of white space, line ends included, as one space."""
    return " ".join(text.split())


# What a node makes of the results of its ranks, which each of them leaves in a folder of the node.

OPERATIONS_CHECK = "operations"
BURN, ROUND = "burn", "fastest_round_s"
SHARED = "shares_host_cpu"
NOT_SEEN = "host not known"
ELSEWHERE = "this job elsewhere; take the machine out of service if it fails again"
_SO_FAR = "-so-far"
_RANK_ROUND = re.compile(rf"rank_(\d+)_{ROUND}")


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
        finished, so_far = (_read(folder / f"rank-{rank}{ending}.json") for ending in ("", _SO_FAR))
        report = finished or so_far
        if finished is None:
            last = f" after check {report.results[-1].name}" if report and report.results else ""
            seen = f"rank {rank} of this node ended without a word{last}"
            advice = "look at the last lines of that rank, and at dmesg for the out-of-memory killer"
            merged.append(CheckResult("ranks", HealthVerdict.RETRY, seen, "a report of each rank", advice))
        for result in report.results if report else ():
            by_name.setdefault(result.name, {})[rank] = result
    for found in by_name.values():
        bad = [replace(one, seen=f"rank {rank}: {one.seen}") for rank, one in found.items() if one.verdict]
        if not bad:
            first = next(iter(found.values()))
            rounds = {f"rank_{rank}_{ROUND}": one.figures[ROUND] for rank, one in found.items() if ROUND in one.figures}
            seen = f"{len(found)} x {first.seen or 'right'}" if len(found) > 1 else first.seen or "right"
            seconds = max(one.seconds for one in found.values())
            bad = [replace(first, seen=seen, figures={**first.figures, **rounds}, seconds=seconds)]
        merged += bad
    return tuple(merged)


def _read(path: Path) -> NodeReport | None:
    try:
        return from_json(path.read_bytes(), str(path))
    except (OSError, DataError):
        return None


# The nodes of one job read each other's reports through the workspace, and come to one verdict.


def with_slow_ranks(reports: Sequence[NodeReport]) -> tuple[NodeReport, ...]:
    """Add a result for each rank that is more than SLOW_RATIO times slower than the median of the others.

    Each rank's fastest round counts, because noise makes a round slower, never faster.
    """
    rounds = [
        {
            int(match[1]): float(value)
            for result in report.results
            for name, value in result.figures.items()
            if (match := _RANK_ROUND.fullmatch(name))
        }
        for report in reports
    ]
    annotated = []
    for report, node in zip(reports, rounds, strict=True):
        # "Cores" that are this host's share its processors with each other and with whatever else runs.
        shared = any(one.figures.get(SHARED) for one in report.results)
        slow = []
        for rank, seconds in sorted(node.items()):
            others = [other for each in rounds for peer, other in each.items() if peer != rank]
            if others and seconds > SLOW_RATIO * median(others):
                seen = f"rank {rank} takes {seconds / median(others):.1f} times as long as the others for one product"
                do = "this job elsewhere; look for throttling and for other processes on that machine"
                verdict = HealthVerdict.WARN if shared else HealthVerdict.RETRY
                slow.append(CheckResult("slow core", verdict, seen, f"at most {SLOW_RATIO:g} times", do))
        annotated.append(replace(report, results=(*report.results, *slow)))
    return tuple(annotated)


def store_own(workspace: Storage, cycle: str, report: NodeReport) -> None:
    """Store a report. Raises the error of the host checks if they explain why the workspace cannot be written."""
    try:
        store_report(workspace, cycle, report)
    except TrnpipeError:
        show(report, sys.stdout)
        if (error := job_error([report])) is not None:
            raise error from None
        raise


def exchange_reports(nodes: Nodes, phase: str, own: NodeReport, wait_s: float) -> tuple[NodeReport, ...]:
    """Return the reports of all nodes, in rank order, the same ones on every node.

    A node that does not come, or fails, is in them by its rank, with a RETRY. Raises Preempted when stopped, and
    storage errors: call it in `nodes.report_failure()`.
    """
    if nodes.num_nodes == 1:
        return (own,)
    texts, absent = nodes.exchange(phase, to_json(own).encode(), timeout_s=wait_s)
    reports: dict[int, NodeReport] = {}
    for rank, text in texts.items():
        try:
            reports[rank] = from_json(text, f"the report of node {rank}")
        except DataError as error:
            advice = "name the image by its digest, so that all nodes run the same version"
            fault = CheckResult("report", HealthVerdict.FIX, one_line(error.seen), "a report of this version", advice)
            reports[rank] = NodeReport(rank, NOT_SEEN, (fault,))
    for rank, reason in absent.items():
        seen = one_line(f"no report, {reason}")
        expected = f"a report of each node within {format_duration(min(wait_s, nodes.timeout_s))}"
        advice = f"look at the log of node {rank}, and whether its machine is alive"
        reports[rank] = NodeReport(
            rank, NOT_SEEN, (CheckResult("report", HealthVerdict.RETRY, seen, expected, advice),)
        )
    if absent:
        nodes.fail(one_line(f"no report, {next(iter(absent.values()))}"))
    return tuple(reports[rank] for rank in sorted(reports))
