"""Health checks: their verdicts, the error that follows from them, and how they are run.

Cheap ones first, each within its time limit. A check runs in a daemon thread, not in a child: what hangs on a sick
machine hangs in the kernel (a dead mount, an ioctl of the driver), where nothing can be killed; a spawned child costs
seconds of imports for each check, and a forked one inherits the locks of our threads. The programs that a check starts
with `run_tool` can be killed: the stop signal of the check ends them. A thread that stays behind cannot keep the
process from ending.
"""

import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import PurePath
from typing import Annotated, ClassVar, Literal, TextIO

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from pipeline.core.errors import ConfigError, DataError, Preempted, TransientError, TrnpipeError
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
from pipeline.health.config import Group, HealthConfig
from pipeline.io.storage import Storage


class Verdict(IntEnum):
    """From harmless to grave; the gravest of a node is the node's."""

    PASS = 0
    WARN = 1
    RETRY = 2
    """This machine is unfit: the same work may pass on another one."""
    FIX = 3
    """No machine would do: settings, image or permissions must change first."""

    @property
    def text(self) -> str:
        return self.name.lower()


def _verdict(value: object) -> object:
    """From its name in JSON."""
    return next((one for one in Verdict if one.text == value), "no verdict") if isinstance(value, str) else value


Named = Annotated[Verdict, BeforeValidator(_verdict), PlainSerializer(lambda verdict: verdict.text)]
# Not a number is a figure, too: it is written as NaN, which Python's readers take.
_STORED = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True)
class CheckResult:
    """One check on one rank or node."""

    __pydantic_config__: ClassVar[ConfigDict] = _STORED

    name: str
    verdict: Named
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
    def verdict(self) -> Verdict:
        return max((result.verdict for result in self.results), default=Verdict.PASS)


def gang_error(reports: Iterable[NodeReport]) -> TrnpipeError | None:
    """Return the error that every node of the job raises; None if all may work.

    A configuration problem stops the job whatever else is wrong: no other machine would help. Else one unfit node
    sends all back, as a node group is started as a whole. The message names host, check and reason, the gravest first.
    """
    bad = [(report, result) for report in reports for result in report.results if result.verdict >= Verdict.RETRY]
    if not bad:
        return None
    report, first = min(bad, key=lambda one: (-one[1].verdict, one[0].node_rank))
    more = f" (and {len(bad) - 1} more failed checks)" if len(bad) > 1 else ""
    kind = ConfigError if first.verdict is Verdict.FIX else TransientError
    return kind(
        f"node {report.node_rank} ({report.host}), check {first.name}: {first.seen}{more}",
        expected=first.expected,
        next_command=first.next_command or "trnpipe health on that machine; the job itself may be retried elsewhere",
    )


class _StoredReport(BaseModel):
    model_config = _STORED

    schema_version: Literal[1] = 1
    node_rank: int = Field(ge=0)
    host: str
    verdict: Named
    results: tuple[CheckResult, ...]


def to_json(report: NodeReport) -> str:
    """Return the report as indented JSON, verdicts by name."""
    stored = _StoredReport(node_rank=report.node_rank, host=report.host, verdict=report.verdict, results=report.results)
    return stored.model_dump_json(indent=2)


def from_json(text: str | bytes, where: str = "a health report") -> NodeReport:
    """Read what `to_json` wrote. Raises DataError naming `where`."""
    try:
        stored = _StoredReport.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"{where} cannot be read: {error.errors(include_url=False)[0]['msg']}",
            expected="a report written by trnpipe health",
            next_command="run the same version of trnpipe on all nodes",
        ) from error
    return NodeReport(stored.node_rank, stored.host, stored.results)


def report_key(cycle: str, report: NodeReport) -> str:
    """Return the key of a report, with rank and host: that of another machine of an earlier attempt is kept."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", report.host) or "unknown"
    return f"cycles/{cycle}/health/{report.node_rank}-{host}.json"


def store_report(workspace: Storage, cycle: str, report: NodeReport) -> str:
    """Write the report below the cycle (atomic). Return its key."""
    key = report_key(cycle, report)
    workspace.write_bytes(key, to_json(report).encode() + b"\n")
    return key


def show(report: NodeReport, stream: TextIO) -> None:
    """Print `node 0 (i-0abc): retry`, a line for each check, and what to do about those that are no plain pass."""
    lines = [f"node {report.node_rank} ({report.host}): {report.verdict.text}"]
    width = max((len(result.name) for result in report.results), default=0)
    for result in report.results:
        figures = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in result.figures.items()
        )
        parts = (f"  {result.verdict.text:<5}  {result.name:<{width}}", result.seen or figures)
        lines.append(f"{'  '.join(part for part in parts if part)} ({format_duration(result.seconds)})")
        if result.verdict is not Verdict.PASS:
            lines += [f"         expected: {result.expected}"] if result.expected else []
            lines += [f"         next: {result.next_command}"] if result.next_command else []
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
        if check.cost_s >= EXPENSIVE_S and any(result.verdict >= Verdict.RETRY for result in results):
            found = [CheckResult(check.name, Verdict.WARN, "not run: this node has failed already")]
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
        found.append(CheckResult(check.name, Verdict.RETRY, seen, "an answer within that time", advice))
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
        verdict = Verdict.RETRY if error.retry else Verdict.FIX
        return CheckResult(name, verdict, one_line(error.seen), error.expected, error.next_command)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    seen = f"{type(error).__name__}: {one_line(str(error))}{where}"
    advice = "trnpipe health on that machine; if all machines report it, it is a bug of the check"
    return CheckResult(name, Verdict.RETRY, seen, "an answer of the machine that the check understands", advice)


def _clean(result: CheckResult) -> CheckResult:
    """Make texts printable: what tools of a sick machine print must not spoil a terminal or the report."""

    def printable(text: str) -> str:
        return "".join(char if char.isprintable() else "?" for char in one_line(text)[:_TEXT_LENGTH])

    figures = {name: printable(value) if isinstance(value, str) else value for name, value in result.figures.items()}
    return replace(result, seen=printable(result.seen), expected=printable(result.expected), figures=figures)


def one_line(text: str) -> str:
    """Return the text with every run of white space, line ends included, as one space."""
    return " ".join(text.split())
