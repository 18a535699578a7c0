"""Run health checks, merge their results over ranks and nodes, and derive the job's error. Does not import torch.

Cheap checks run first, each with a time limit. A check runs in a daemon thread rather than a child process, because on
a faulty machine it hangs in the kernel (a dead mount, an ioctl of the driver), where a process cannot be killed either.
A spawned child would take seconds to import for each check, and a forked one inherits the locks of other threads. The
stop signal of a check kills the programs that it started with `run_tool`. A thread that still hangs does not keep the
process from exiting.
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
    """Verdicts by severity. The verdict of a node is the most severe one of its checks."""

    PASS = 0
    WARN = 1
    RETRY = 2
    """This machine is unfit, but the job may succeed on another one."""
    FIX = 3
    """No machine is fit until settings, image or permissions are changed."""

    @property
    def text(self) -> str:
        """The name in JSON."""
        return self.name.lower()


@dataclass(frozen=True)
class CheckResult:
    """The result of one check on one rank or node."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    verdict: Annotated[
        HealthVerdict,
        BeforeValidator(lambda name: getattr(HealthVerdict, str(name).upper(), "no verdict")),
        PlainSerializer(lambda verdict: verdict.text),
    ]
    seen: str = ""
    """The observation, one line. Empty for a plain pass."""
    expected: str = ""
    next_command: str = ""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """Measured values. Units are in the names."""
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeReport:
    """All results of one node. `host`: instance id, or host name outside EC2."""

    node_rank: int
    host: str
    results: tuple[CheckResult, ...]

    @property
    def verdict(self) -> HealthVerdict:
        return max((result.verdict for result in self.results), default=HealthVerdict.PASS)


def job_error(reports: Iterable[NodeReport]) -> TrnpipeError | None:
    """Return the error that every node of the job raises, or None if all nodes are fit.

    A configuration problem takes precedence, because no other machine would help. Otherwise one unfit node fails all
    nodes, because a node group is started as a whole. The message has host, check and reason of the most severe result.
    """
    bad = [(report, result) for report in reports for result in report.results if result.verdict >= HealthVerdict.RETRY]
    if not bad:
        return None
    report, first = min(bad, key=lambda pair: (-pair[1].verdict, pair[0].node_rank))
    more = f" (and {len(bad) - 1} more failed checks)" if len(bad) > 1 else ""
    kind = ConfigError if first.verdict is HealthVerdict.FIX else TransientError
    return kind(
        f"node {report.node_rank} ({report.host}), check {first.name}: {first.seen}{more}",
        expected=first.expected,
        next_command=first.next_command or "run trnpipe health on that machine, or retry the job on another one",
    )


_REPORT = TypeAdapter(NodeReport)


def to_json(report: NodeReport) -> str:
    """Serialise a report as indented JSON. Values may be NaN, which Python's json module reads."""
    fields = _REPORT.dump_python(report)
    return json.dumps({"schema_version": 1, "verdict": report.verdict.text, **fields}, indent=2)


def from_json(text: str | bytes, where: str = "a health report") -> NodeReport:
    """Parse the output of `to_json`. Raises DataError, mentioning `where`, if the text is not a report."""
    try:
        return _REPORT.validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"{where} cannot be read: {error.errors(include_url=False)[0]['msg']}",
            expected="a report written by trnpipe health",
            next_command="run the same version of trnpipe on all nodes",
        ) from error


def report_key(cycle: str, report: NodeReport) -> str:
    """Return the key of a report. It contains the host, so that the report of another machine is not overwritten."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", report.host) or "unknown"
    return f"cycles/{cycle}/health/{report.node_rank}-{host}.json"


def store_report(workspace: Storage, cycle: str, report: NodeReport) -> None:
    """Write the report of a cycle atomically."""
    workspace.write_bytes(report_key(cycle, report), to_json(report).encode() + b"\n")


def print_report(report: NodeReport, stream: TextIO) -> None:
    """Print `node 0 (i-0abc): retry`, a line per check, and the expected state and next step of each problem."""
    lines = [f"node {report.node_rank} ({report.host}): {report.verdict.text}"]
    width = max((len(result.name) for result in report.results), default=0)
    for result in report.results:
        figures = result.figures.items()
        seen = result.seen or ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures
        )
        seconds = format_duration(result.seconds)
        lines.append(f"  {result.verdict.text:<5}  {result.name:<{width}}  {seen} ({seconds})")
        if result.verdict is not HealthVerdict.PASS:
            advice = {"expected": result.expected, "next": result.next_command}
            lines += [f"         {name}: {text}" for name, text in advice.items() if text]
    stream.writelines(f"{line}\n" for line in lines)
    stream.flush()


POLL_S = 0.05
LEAVE_S = 5.0  # for a check to end after its stop signal, of the 15 s that a stopped process has
EXPENSIVE_S = 10.0
_TEXT_LENGTH = 1000


@dataclass
class CheckContext:
    """Passed to a check, which sets `doing` to its current operation. It is reported if the check hangs."""

    stop: StopSignal
    """Set when the run is stopped or the check exceeds its time limit."""
    doing: str = "starting"


@dataclass(frozen=True)
class Check:
    """One check. `run` returns one result or several, or none if the check does not apply."""

    name: str
    run: Callable[[CheckContext], CheckResult | Iterable[CheckResult]]
    group: Group | None = None
    """None: the check always runs, because others depend on it."""
    time_limit_s: float | None = None
    """None: `check_limit_s` of the settings."""
    cost_s: float = 1.0
    """Typical seconds, by which checks are ordered. Above `EXPENSIVE_S` a check is skipped after a failure."""


def run_checks(
    checks: Iterable[Check],
    config: HealthConfig,
    *,
    node_rank: int,
    host: str,
    stop: StopSignal,
    clock: Callable[[], float] = time.monotonic,
    on_result: Callable[[CheckResult], object] = lambda result: None,
) -> NodeReport:
    """Run the checks of the selected groups and call `on_result` with each result. Raises only Preempted.

    A check that raises or hangs also gives a result. Later checks still run, except expensive ones.
    """
    results: list[CheckResult] = []
    selected = [check for check in checks if config.includes(check.group)]
    for check in sorted(selected, key=lambda check: check.cost_s):
        stop.raise_if_set(f"before health check {check.name}")
        if check.cost_s >= EXPENSIVE_S and any(result.verdict >= HealthVerdict.RETRY for result in results):
            new = [CheckResult(check.name, HealthVerdict.WARN, "skipped, because an earlier check failed")]
        else:
            new = _run(check, config, stop, clock)
        for result in new:
            on_result(result)
        results += new
    return NodeReport(node_rank, host, tuple(results))


def _run(check: Check, config: HealthConfig, stop: StopSignal, clock: Callable[[], float]) -> list[CheckResult]:
    """Run one check in a thread. The first result has the time of the check. Raises Preempted."""
    limit_s = config.check_limit_s if check.time_limit_s is None else check.time_limit_s
    context = CheckContext(StopSignal())
    results: list[CheckResult] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            returned = check.run(context)
            for result in (returned,) if isinstance(returned, CheckResult) else returned:
                results.append(result)  # one by one, so that results before an exception are kept
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=f"check {check.name}", daemon=True)
    started = clock()
    thread.start()
    while thread.is_alive() and not stop.is_set() and clock() - started < limit_s:
        thread.join(POLL_S)
    hangs, final, doing = thread.is_alive(), [*results], context.doing  # before its stop signal is set
    if hangs:
        context.stop.set(stop.reason or "its time limit")
        thread.join(LEAVE_S)
    stop.raise_if_set(f"in health check {check.name}: {doing}")
    if hangs:
        still = " and ignoring its stop signal" if thread.is_alive() else ""
        seen = f"timed out after {format_duration(limit_s)}, still {doing}{still}"
        advice = "check dmesg on that machine, or raise --health.check-limit-s if it is only slow"
        final.append(CheckResult(check.name, HealthVerdict.RETRY, seen, "a result within that time", advice))
    elif errors:
        if isinstance(errors[0], Preempted):
            raise errors[0]
        final.append(_error_result(check.name, errors[0]))
    if final:
        final[0] = replace(final[0], seconds=clock() - started)
    return [_clean(result) for result in final]


def _error_result(name: str, error: BaseException) -> CheckResult:
    """Return the result for an exception.

    A TrnpipeError knows whether another machine may succeed. Any other exception is a RETRY, because a bug then costs
    a few attempts of a minute, while FIX for a machine with an unknown fault would cost a night.
    """
    if isinstance(error, TrnpipeError):
        verdict = HealthVerdict.RETRY if error.retry else HealthVerdict.FIX
        return CheckResult(name, verdict, one_line(error.seen), error.expected, error.next_command)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    seen = f"{type(error).__name__}: {one_line(str(error))}{where}"
    advice = "trnpipe health on that machine (if all machines report it, the check has a bug)"
    return CheckResult(name, HealthVerdict.RETRY, seen, "no exception in the check", advice)


def _clean(result: CheckResult) -> CheckResult:
    """Make texts printable, so that the output of tools cannot corrupt a terminal or the report."""

    def printable(text: str) -> str:
        return "".join(char if char.isprintable() else "?" for char in one_line(text)[:_TEXT_LENGTH])

    figures = {name: printable(value) if isinstance(value, str) else value for name, value in result.figures.items()}
    return replace(result, seen=printable(result.seen), expected=printable(result.expected), figures=figures)


def one_line(text: str) -> str:
    """Replace every run of white space, line ends included, with one space."""
    return " ".join(text.split())


# Results of the ranks of a node, which each rank writes to a folder of the node.

OPERATIONS_CHECK = "operations"
BURN, ROUND = "burn", "fastest_round_s"
SHARED = "shares_host_cpu"
UNKNOWN_HOST = "unknown host"
USE_ANOTHER_MACHINE = "retry the job on another machine, and take this one out of service if it fails again"
_SO_FAR = "-so-far"
_RANK_ROUND = re.compile(rf"rank_(\d+)_{ROUND}")


def write_rank_report(folder: Path, report: NodeReport, *, is_finished: bool) -> None:
    """Write the final or intermediate report of rank `report.node_rank`."""
    name = f"rank-{report.node_rank}{'' if is_finished else _SO_FAR}.json"
    atomic.write_bytes_atomic(folder / name, to_json(report).encode())


def merge_rank_results(folder: Path, ranks: Iterable[int]) -> tuple[CheckResult, ...]:
    """Merge the reports of a node's ranks in `folder`.

    Returns one result per check that all ranks passed, and one per rank that failed a check or ended without a report.
    """
    by_name: dict[str, dict[int, CheckResult]] = {}
    merged: list[CheckResult] = []
    for rank in ranks:
        finished, so_far = (_read(folder / f"rank-{rank}{ending}.json") for ending in ("", _SO_FAR))
        report = finished or so_far
        if finished is None:
            last = f" after check {report.results[-1].name}" if report and report.results else ""
            seen = f"rank {rank} of this node exited without a report{last}"
            advice = "check the last log lines of that rank, and dmesg for the out-of-memory killer"
            merged.append(CheckResult("ranks", HealthVerdict.RETRY, seen, "a report from each rank", advice))
        for result in report.results if report else ():
            by_name.setdefault(result.name, {})[rank] = result
    for by_rank in by_name.values():
        results = [
            replace(result, seen=f"rank {rank}: {result.seen}") for rank, result in by_rank.items() if result.verdict
        ]
        if not results:
            first = next(iter(by_rank.values()))
            rounds = {f"rank_{rank}_{ROUND}": r.figures[ROUND] for rank, r in by_rank.items() if ROUND in r.figures}
            seen = f"{len(by_rank)} x {first.seen or 'passed'}" if len(by_rank) > 1 else first.seen or "passed"
            seconds = max(result.seconds for result in by_rank.values())
            results = [replace(first, seen=seen, figures={**first.figures, **rounds}, seconds=seconds)]
        merged += results
    return tuple(merged)


def _read(path: Path) -> NodeReport | None:
    try:
        return from_json(path.read_bytes(), str(path))
    except (OSError, DataError):
        return None


# The nodes of a job exchange their reports through the workspace and derive the same verdict.


def add_slow_ranks(reports: Sequence[NodeReport]) -> tuple[NodeReport, ...]:
    """Add a result for each rank that is more than SLOW_RATIO times slower than the median of the others.

    Compares the fastest round of each rank, because noise only makes rounds slower.
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
        # Cores of the host CPU are shared with other processes.
        is_shared = any(result.figures.get(SHARED) for result in report.results)
        slow = []
        for rank, seconds in sorted(node.items()):
            others = [other_s for times in rounds for other, other_s in times.items() if other != rank]
            if others and seconds > SLOW_RATIO * median(others):
                seen = f"rank {rank} takes {seconds / median(others):.1f} times as long as the others for one product"
                advice = "retry the job on another machine, and check this one for throttling and other processes"
                verdict = HealthVerdict.WARN if is_shared else HealthVerdict.RETRY
                slow.append(CheckResult("slow core", verdict, seen, f"at most {SLOW_RATIO:g} times", advice))
        annotated.append(replace(report, results=(*report.results, *slow)))
    return tuple(annotated)


def store_local_report(workspace: Storage, cycle: str, report: NodeReport) -> None:
    """Store this node's report. If that fails, raises the error of the host checks if they explain the failure."""
    try:
        store_report(workspace, cycle, report)
    except TrnpipeError:
        print_report(report, sys.stdout)
        if (error := job_error([report])) is not None:
            raise error from None
        raise


def exchange_reports(nodes: Nodes, phase: str, report: NodeReport, wait_s: float) -> tuple[NodeReport, ...]:
    """Return the reports of all nodes, in rank order and the same on every node.

    A missing or failed node is included with a RETRY. Raises Preempted and storage errors, so it must be called in
    `nodes.report_failure()`.
    """
    if nodes.num_nodes == 1:
        return (report,)
    texts, absent = nodes.exchange(phase, to_json(report).encode(), timeout_s=wait_s)
    reports: dict[int, NodeReport] = {}
    for rank, text in texts.items():
        try:
            reports[rank] = from_json(text, f"the report of node {rank}")
        except DataError as error:
            advice = "reference the image by its digest, so that all nodes run the same version"
            result = CheckResult("report", HealthVerdict.FIX, one_line(error.seen), "a report of this version", advice)
            reports[rank] = NodeReport(rank, UNKNOWN_HOST, (result,))
    for rank, reason in absent.items():
        seen = one_line(f"no report, {reason}")
        expected = f"a report from each node within {format_duration(min(wait_s, nodes.timeout_s))}"
        advice = f"check the log of node {rank}, and whether its machine is running"
        result = CheckResult("report", HealthVerdict.RETRY, seen, expected, advice)
        reports[rank] = NodeReport(rank, UNKNOWN_HOST, (result,))
    if absent:
        nodes.fail(one_line(f"no report, {next(iter(absent.values()))}"))
    return tuple(reports[rank] for rank in sorted(reports))
