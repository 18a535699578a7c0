"""Running checks: cheap ones first, each within its time, whatever becomes of it.

A check runs in a daemon thread, not in a child process. A child can be killed, but what hangs on a sick machine hangs
in the kernel (a dead mount, an ioctl of the driver), where nothing can be killed; a spawned child costs seconds of
imports for each check, and a forked one inherits the locks of our threads. What can be killed are the programs that a
check starts: it is told through its stop signal, and what it leaves running is killed here. A thread that stays behind
cannot keep the process from ending.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePath

import psutil

from pipeline.core.errors import Preempted, TrnpipeError
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
from pipeline.health.config import Group, HealthConfig, Profile
from pipeline.health.verdict import CheckResult, NodeReport, Verdict

BOTH: frozenset[Profile] = frozenset(("quick", "full"))
POLL_S = 0.05
LEAVE_S = 5.0  # for a check that is told to stop, of the 15 s that runtime_signals gives the process
KILLED_LEAVE_S = 1.0
EXPENSIVE_S = 10.0
_TEXT_LENGTH = 1000


@dataclass
class CheckContext:
    """What a check is given. It keeps `doing` true, for the message when it hangs."""

    stop: StopSignal
    """Set when the run is stopped, and when the check's time is over."""
    time_limit_s: float
    doing: str = "starting"


@dataclass(frozen=True)
class Check:
    """One thing to look at. `run` returns one result or several; none when it does not apply here."""

    name: str
    run: Callable[[CheckContext], CheckResult | Iterable[CheckResult]]
    group: Group | None = None
    """None: what others need, run always."""
    profiles: frozenset[Profile] = BOTH
    time_limit_s: float | None = None
    """None: as in the settings."""
    cost_s: float = 1.0
    """Seconds it usually takes; the order. From `EXPENSIVE_S` on it is skipped on a node that has failed already."""


@dataclass
class _Call:
    """One run of one check, in a thread of its own."""

    check: Check
    context: CheckContext
    results: tuple[CheckResult, ...] = ()
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)
    earlier: set[psutil.Process] = field(init=False)

    def start(self) -> None:
        self.earlier = set(_children())
        self.thread = threading.Thread(target=self._work, name=f"check {self.check.name}", daemon=True)
        self.thread.start()

    def end(self, reason: str) -> None:
        """Tell it to stop; what it started and did not end is killed."""
        self.context.stop.set(reason)
        self.thread.join(LEAVE_S)
        for process in set(_children()) - self.earlier:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait(KILLED_LEAVE_S)
        self.thread.join(KILLED_LEAVE_S)

    def _work(self) -> None:
        try:
            found = self.check.run(self.context)
            for result in (found,) if isinstance(found, CheckResult) else found:
                self.results = (*self.results, result)
        except BaseException as error:
            self.error = error


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
    """Run the checks of profile and groups; `seen` gets each result as it comes. Only Preempted is raised.

    A check that fails or hangs is a verdict like any other; later checks still run, except expensive ones.
    """
    results: list[CheckResult] = []
    chosen = [check for check in checks if config.profile in check.profiles and config.wants(check.group)]
    for check in sorted(chosen, key=lambda one: one.cost_s):
        stop.raise_if_set(f"before health check {check.name}")
        unfit = any(result.verdict >= Verdict.RETRY for result in results)
        found = _skipped(check) if unfit and check.cost_s >= EXPENSIVE_S else _run(check, config, stop, clock)
        for result in found:
            seen(result)
        results += found
    return NodeReport(node_rank, host, tuple(results))


def _run(check: Check, config: HealthConfig, stop: StopSignal, clock: Callable[[], float]) -> Sequence[CheckResult]:
    """The results of one check; its time is written into the first. Raises Preempted."""
    limit_s = config.check_limit_s if check.time_limit_s is None else check.time_limit_s
    call = _Call(check, CheckContext(StopSignal(), limit_s))
    started = clock()
    call.start()
    while call.thread.is_alive() and not stop.is_set() and clock() - started < limit_s:
        call.thread.join(POLL_S)
    hangs = call.thread.is_alive()
    results, doing = call.results, call.context.doing  # before it is told to stop
    if hangs:
        call.end(stop.reason or "its time limit")
    stop.raise_if_set(f"in health check {check.name}: {doing}")
    if hangs:
        results = (*results, _hung(check.name, limit_s, doing, ended=not call.thread.is_alive()))
    elif isinstance(call.error, Preempted):
        raise call.error
    elif call.error is not None:
        results = (*results, failed(check.name, call.error))
    timed = (replace(one, seconds=clock() - started) if index == 0 else one for index, one in enumerate(results))
    return [_clean(one) for one in timed]


def failed(name: str, error: BaseException) -> CheckResult:
    """The verdict on an exception.

    One of ours says itself whether another machine may do better. Of any other one nobody knows; RETRY, because a
    bug of ours then costs a few attempts of a minute, while FIX on a machine that is sick in a new way costs a night.
    """
    if isinstance(error, TrnpipeError):
        verdict = Verdict.RETRY if error.retry else Verdict.FIX
        return CheckResult(name, verdict, one_line(error.seen), error.expected, error.next_command)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return CheckResult(
        name,
        Verdict.RETRY,
        f"{type(error).__name__}: {one_line(str(error))}{where}",
        expected="an answer of the machine that the check understands",
        next_command="trnpipe health on that machine; if all machines say so, it is a bug of the check",
    )


def _clean(result: CheckResult) -> CheckResult:
    """What tools of a sick machine print may be no text: it must not spoil a terminal or the report."""
    figures = {name: printable(value) if isinstance(value, str) else value for name, value in result.figures.items()}
    return replace(result, seen=printable(result.seen), expected=printable(result.expected), figures=figures)


def printable(text: str) -> str:
    """One line of it, not too long, with a ? for each character that is none."""
    return "".join(char if char.isprintable() else "?" for char in one_line(text)[:_TEXT_LENGTH])


def one_line(text: str) -> str:
    """The text with every run of white space, line ends included, as one space."""
    return " ".join(text.split())


def _hung(name: str, limit_s: float, doing: str, *, ended: bool) -> CheckResult:
    return CheckResult(
        name,
        Verdict.RETRY,
        f"not done after {format_duration(limit_s)}, still {doing}" + ("" if ended else "; it does not end either"),
        expected="an answer within that time",
        next_command="look at dmesg of that machine; raise --health.check-limit-s when it is only slow",
    )


def _skipped(check: Check) -> Sequence[CheckResult]:
    return [CheckResult(check.name, Verdict.WARN, "not run: this node has failed already")]


def _children() -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process().children(recursive=True)
    return []
