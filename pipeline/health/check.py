"""Run health checks, merge their results across ranks and nodes, and determine the error of the job.

Each check has a time limit, and cheap checks run first. A check runs in a daemon thread instead of a subprocess. On a
faulty machine, a check typically hangs in the kernel (for example because of a dead mount or a driver ioctl), in which
case a subprocess could not be killed either. Besides, spawning a subprocess takes seconds of imports for each check,
and forking one would inherit the locks of other threads. When a check exceeds its limit, its stop signal is set, which
kills any program that it started with `run_tool`. A thread that still hangs does not prevent the process from exiting.

This module does not import torch.
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
    """The verdict of a check, by increasing severity. The verdict of a node is the most severe one of its checks."""

    PASS = 0
    WARN = 1
    RETRY = 2
    """This machine is unfit, but the job may succeed on a different one."""
    FIX = 3
    """The job fails on every machine until the settings, the image or the permissions are changed."""

    @property
    def text(self) -> str:
        """The name that is used in JSON."""
        return self.name.lower()


@dataclass(frozen=True)
class CheckResult:
    """The result of a check on one rank or node."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    verdict: Annotated[
        HealthVerdict,
        BeforeValidator(lambda name: getattr(HealthVerdict, str(name).upper(), "no verdict")),
        PlainSerializer(lambda verdict: verdict.text),
    ]
    seen: str = ""
    """The observation as a single line. It may be empty if the check passed."""
    expected: str = ""
    next_command: str = ""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """Measured values by name. The name includes the unit."""
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeReport:
    """All results of a node."""

    node_rank: int
    host: str
    """The instance id, or the host name outside EC2."""
    results: tuple[CheckResult, ...]

    @property
    def verdict(self) -> HealthVerdict:
        return max((result.verdict for result in self.results), default=HealthVerdict.PASS)


def job_error(reports: Iterable[NodeReport]) -> TrnpipeError | None:
    """Return the error that every node of the job must raise, or None if all nodes are fit.

    A configuration problem takes precedence, because the job would also fail on other machines. Otherwise, a single
    unfit node fails all nodes, because a node group can only be started as a whole. The message describes the most
    severe result.
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
        next_command=first.next_command or "run trnpipe health on that machine, or retry the job on a different one",
    )


_REPORT = TypeAdapter(NodeReport)


def to_json(report: NodeReport) -> str:
    """Serialise a report as indented JSON. Values may be NaN, which is not valid JSON, but Python can read it."""
    fields = _REPORT.dump_python(report)
    return json.dumps({"schema_version": 1, "verdict": report.verdict.text, **fields}, indent=2)


def from_json(text: str | bytes, where: str = "a health report") -> NodeReport:
    """Parse the output of `to_json`. Raises DataError if the text is not a report. `where` is used in the message."""
    try:
        return _REPORT.validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"{where} cannot be read: {error.errors(include_url=False)[0]['msg']}",
            expected="a report written by trnpipe health",
            next_command="run the same version of trnpipe on all nodes",
        ) from error


def report_key(cycle: str, report: NodeReport) -> str:
    """Return the key of a report. It contains the host, so that reports of different machines are all kept."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", report.host) or "unknown"
    return f"cycles/{cycle}/health/{report.node_rank}-{host}.json"


def store_report(workspace: Storage, cycle: str, report: NodeReport) -> None:
    """Store a report in the workspace."""
    workspace.write_bytes(report_key(cycle, report), to_json(report).encode() + b"\n")


def print_report(report: NodeReport, stream: TextIO) -> None:
    """Print the verdict of a node, a line for each check, and how to resolve each problem."""
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
LEAVE_S = 5.0  # time for a check to end after its stop signal. A stopped process has 15 s in total
EXPENSIVE_S = 10.0
_TEXT_LENGTH = 1000


@dataclass
class CheckContext:
    """The context that is passed to each check."""

    stop: StopSignal
    """Set when the run is stopped or the check exceeds its time limit."""
    doing: str = "starting"
    """The current operation. The check updates it, and it is reported if the check hangs."""


@dataclass(frozen=True)
class Check:
    """A health check. `run` may return several results, or none if the check does not apply."""

    name: str
    run: Callable[[CheckContext], CheckResult | Iterable[CheckResult]]
    group: Group | None = None
    """The group by which the check can be selected. None if it must always run, because others depend on it."""
    time_limit_s: float | None = None
    """Defaults to `check_limit_s` of the settings."""
    cost_s: float = 1.0
    """Typical duration. Checks run in this order, and checks from `EXPENSIVE_S` on are skipped after a failure."""


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
    """Run the checks of the selected groups, and call `on_result` with each result.

    A check that hangs or raises an exception is reported as a result, and later checks still run unless they are
    expensive. The only exception that is propagated is Preempted.
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
    """Run a check in a thread, and record its duration in the first result. Raises Preempted."""
    limit_s = config.check_limit_s if check.time_limit_s is None else check.time_limit_s
    context = CheckContext(StopSignal())
    results: list[CheckResult] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            returned = check.run(context)
            for result in (returned,) if isinstance(returned, CheckResult) else returned:
                results.append(result)  # if the check raises an exception, its earlier results are kept
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=f"check {check.name}", daemon=True)
    started = clock()
    thread.start()
    while thread.is_alive() and not stop.is_set() and clock() - started < limit_s:
        thread.join(POLL_S)
    hangs, final, doing = thread.is_alive(), [*results], context.doing  # the stop signal may change them
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
    """Convert an exception that a check raised to a result.

    A TrnpipeError specifies whether the job may succeed on a different machine. Any other exception is reported as
    RETRY. If the cause is a bug, this only costs a few attempts of about a minute each. In contrast, reporting FIX for
    a machine with an unknown fault would stop the job until an engineer intervenes, which may take a whole night.
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
    """Replace unprintable characters, so that the output of a tool cannot corrupt a terminal or the report."""

    def printable(text: str) -> str:
        return "".join(char if char.isprintable() else "?" for char in one_line(text)[:_TEXT_LENGTH])

    figures = {name: printable(value) if isinstance(value, str) else value for name, value in result.figures.items()}
    return replace(result, seen=printable(result.seen), expected=printable(result.expected), figures=figures)


def one_line(text: str) -> str:
    """Replace each sequence of whitespace characters, including newlines, with a single space."""
    return " ".join(text.split())


# Each rank writes its results to a folder on its node. They are merged by the process that started the ranks.

OPERATIONS_CHECK = "operations"
BURN, ROUND = "burn", "fastest_round_s"
SHARED = "shares_host_cpu"
UNKNOWN_HOST = "unknown host"
USE_ANOTHER_MACHINE = "retry the job on a different machine, and take this one out of service if it fails again"
_SO_FAR = "-so-far"
_RANK_ROUND = re.compile(rf"rank_(\d+)_{ROUND}")


def write_rank_report(folder: Path, report: NodeReport, *, is_finished: bool) -> None:
    """Write the report of rank `report.node_rank`, which is either final or the results so far."""
    name = f"rank-{report.node_rank}{'' if is_finished else _SO_FAR}.json"
    atomic.write_bytes_atomic(folder / name, to_json(report).encode())


def merge_rank_results(folder: Path, ranks: Iterable[int]) -> tuple[CheckResult, ...]:
    """Merge the reports that the ranks of a node wrote to `folder`.

    If all ranks passed a check, their results are merged into a single one. Otherwise, there is a separate result for
    each rank that failed it. There is also a result for each rank that exited without a report.
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


# The nodes of a job exchange their reports through the workspace, so that all of them reach the same verdict.


def add_slow_ranks(reports: Sequence[NodeReport]) -> tuple[NodeReport, ...]:
    """Add a result for each rank that is more than SLOW_RATIO times slower than the median of the other ranks.

    The fastest round of each rank is compared, because noise can only make a round slower.
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
        # The cores of a host CPU are shared with other processes, so a slow rank is only a warning.
        is_shared = any(result.figures.get(SHARED) for result in report.results)
        slow = []
        for rank, seconds in sorted(node.items()):
            others = [other_s for times in rounds for other, other_s in times.items() if other != rank]
            if others and seconds > SLOW_RATIO * median(others):
                seen = f"rank {rank} is {seconds / median(others):.1f} times slower than the others at matrix products"
                advice = "retry the job on a different machine, and check this one for throttling and other processes"
                verdict = HealthVerdict.WARN if is_shared else HealthVerdict.RETRY
                slow.append(CheckResult("slow core", verdict, seen, f"at most {SLOW_RATIO:g} times", advice))
        annotated.append(replace(report, results=(*report.results, *slow)))
    return tuple(annotated)


def store_local_report(workspace: Storage, cycle: str, report: NodeReport) -> None:
    """Store the report of this node.

    If the report cannot be stored but contains a failed check, which may be the cause, the error of that check is
    raised.
    """
    try:
        store_report(workspace, cycle, report)
    except TrnpipeError:
        print_report(report, sys.stdout)
        if (error := job_error([report])) is not None:
            raise error from None
        raise


def exchange_reports(nodes: Nodes, phase: str, report: NodeReport, wait_s: float) -> tuple[NodeReport, ...]:
    """Exchange reports with all nodes and return them in rank order. The result is the same on every node.

    A node that is missing or has failed is included with a RETRY result. Must be called within
    `nodes.report_failure()`, because it may raise Preempted or a storage error.
    """
    if nodes.num_nodes == 1:
        return (report,)
    texts, absent = nodes.exchange(phase, to_json(report).encode(), timeout_s=wait_s)
    reports: dict[int, NodeReport] = {}
    for rank, text in texts.items():
        try:
            reports[rank] = from_json(text, f"the report of node {rank}")
        except DataError as error:
            advice = "specify the image by its digest, which ensures that all nodes run the same version"
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
