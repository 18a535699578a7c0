"""The runner: order, time limits, failures and stops, whatever a check does."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.core.errors import ConfigError, DataError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.health import check as check_module
from pipeline.health.check import Check, CheckContext, CheckResult, NodeReport, Verdict, run_checks
from pipeline.health.config import HealthConfig
from pipeline.proc.tool import run_tool

QUICK = HealthConfig()
SLEEP = ("sleep", "600")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "POLL_S", 0.01)
    monkeypatch.setattr(check_module, "LEAVE_S", 120.0)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    earlier = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= earlier


def passing(name: str, cost_s: float = 1.0) -> Check:
    return Check(name, lambda ctx: CheckResult(name, Verdict.PASS), cost_s=cost_s)


def raising(error: BaseException, name: str = "broken") -> Check:
    def run(ctx: CheckContext) -> CheckResult:
        raise error

    return Check(name, run)


def run(
    *checks: Check,
    config: HealthConfig = QUICK,
    stop: StopSignal | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> NodeReport:
    return run_checks(checks, config, node_rank=3, host="i-0abc", stop=stop or StopSignal(), clock=clock)


def test_cheap_ones_first_and_all_are_reported_as_they_come() -> None:
    seen: list[str] = []
    checks = [passing("dear", 60.0), passing("cheap", 0.0), passing("usual"), passing("cheap too", 0.0)]
    report = run_checks(
        checks, QUICK, node_rank=3, host="i-0abc", stop=StopSignal(), seen=lambda result: seen.append(result.name)
    )
    assert seen == [result.name for result in report.results] == ["cheap", "cheap too", "usual", "dear"]
    assert (report.node_rank, report.host, report.verdict) == (3, "i-0abc", Verdict.PASS)


def test_several_results_of_one_check_or_none() -> None:
    def two(ctx: CheckContext) -> Iterator[CheckResult]:
        yield CheckResult("one", Verdict.PASS)
        yield CheckResult("two", Verdict.WARN)

    def broken(ctx: CheckContext) -> Iterator[CheckResult]:
        yield CheckResult("three", Verdict.FIX)
        now[0] += 2.5
        raise TransientError("gone")

    now = [10.0]
    report = run(Check("many", two), Check("none", lambda ctx: ()), Check("broken", broken), clock=lambda: now[0])
    found = [(result.name, result.seconds) for result in report.results]
    assert found == [("one", 0.0), ("two", 0.0), ("three", 2.5), ("broken", 0.0)], "time is given once"


def test_what_is_no_text_spoils_neither_terminal_nor_report() -> None:
    rubbish = CheckResult(
        "tool", Verdict.WARN, "a\x1b[31m\nb\ud800" + "x" * 5000, "\x00", figures={"type": "\x07", "n": 1}
    )
    (result,) = run(Check("tool", lambda ctx: rubbish)).results
    assert result.seen.startswith("a?[31m b?xxx") and len(result.seen) == 1000
    assert (result.expected, result.figures) == ("?", {"type": "?", "n": 1})


def test_a_dear_check_is_spared_a_node_that_has_failed() -> None:
    ran = threading.Event()

    def burn(ctx: CheckContext) -> CheckResult:
        ran.set()
        return CheckResult("burn", Verdict.PASS)

    report = run(raising(TransientError("sick")), passing("cheap"), Check("burn", burn, cost_s=60.0))
    assert not ran.is_set()
    assert [(r.name, r.verdict.name) for r in report.results] == [
        ("broken", "RETRY"),
        ("cheap", "PASS"),
        ("burn", "WARN"),
    ]
    assert "not run" in report.results[-1].seen


@pytest.mark.parametrize(
    ("error", "verdict", "seen"),
    [
        (ConfigError("no rights", expected="rights"), Verdict.FIX, "no rights"),
        (DataError("garbage"), Verdict.FIX, "garbage"),
        (TransientError("disk is full"), Verdict.RETRY, "disk is full"),
        (OSError(5, "Input/output error"), Verdict.RETRY, "OSError: [Errno 5] Input/output error (test_check.py:"),
        (ValueError("two\nlines"), Verdict.RETRY, "ValueError: two lines (test_check.py:"),
        (SystemExit(3), Verdict.RETRY, "SystemExit: 3 (test_check.py:"),
        (KeyboardInterrupt(), Verdict.RETRY, "KeyboardInterrupt: (test_check.py:"),
    ],
)
def test_an_exception_is_a_verdict(error: BaseException, verdict: Verdict, seen: str) -> None:
    report = run(raising(error), passing("after"))
    first, after = report.results
    assert (first.name, first.verdict) == ("broken", verdict)
    assert first.seen.startswith(seen)
    assert first.expected == ("rights" if "rights" in seen else "") or verdict is Verdict.RETRY
    assert after.verdict is Verdict.PASS


class Clock:
    """Time passes when a check says what it does, however fast this machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def say(self, ctx: CheckContext, doing: str) -> None:
        ctx.doing = doing
        self.now += 1.0


def test_a_check_that_hangs_is_sent_back_with_what_it_was_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaf to everything: the thread stays behind, and the others are run."""
    monkeypatch.setattr(check_module, "LEAVE_S", 0.2)

    def deaf(ctx: CheckContext) -> CheckResult:
        clock.say(ctx, "asking the driver")
        released.wait()
        return CheckResult("driver", Verdict.PASS)

    released, clock = threading.Event(), Clock()
    try:
        report = run(Check("driver", deaf, time_limit_s=0.1), passing("after"), clock=clock)
        hung, after = report.results
        assert (hung.name, hung.verdict, after.verdict) == ("driver", Verdict.RETRY, Verdict.PASS)
        assert hung.seen == "not done after 0.1s, still asking the driver; it does not end either"
        assert hung.seconds >= 0.1
    finally:
        released.set()


def test_a_check_that_hears_may_clean_up(tmp_path: Path) -> None:
    """One over its time is told so by its stop signal, which is no Preempted of ours."""
    probe, clock = tmp_path / "probe", Clock()

    def polite(ctx: CheckContext) -> CheckResult:
        probe.touch()
        clock.say(ctx, "waiting for an answer")
        try:
            run_tool(SLEEP, timeout_s=600, stop=ctx.stop)
        finally:
            probe.unlink()
        return CheckResult("tool", Verdict.PASS)

    (hung,) = run(Check("tool", polite), config=HealthConfig(check_limit_s=0.05), clock=clock).results
    assert (hung.verdict, hung.seen) == (Verdict.RETRY, "not done after 0.1s, still waiting for an answer")
    assert list(tmp_path.iterdir()) == []


def test_a_stop_ends_the_check_and_leaves_nothing(tmp_path: Path) -> None:
    stop, probe = StopSignal(), tmp_path / "probe"
    ran_after = threading.Event()

    def long(ctx: CheckContext) -> CheckResult:
        probe.touch()
        ctx.doing = "burning in"
        stop.set("SIGTERM")
        try:
            run_tool(SLEEP, timeout_s=600, stop=ctx.stop)
        finally:
            probe.unlink()
        return CheckResult("burn", Verdict.PASS)

    def after(ctx: CheckContext) -> CheckResult:
        ran_after.set()
        return CheckResult("after", Verdict.PASS)

    with pytest.raises(Preempted, match="SIGTERM while in health check burn: burning in"):
        run(Check("burn", long), Check("after", after), stop=stop)
    assert list(tmp_path.iterdir()) == []
    assert not ran_after.is_set()


def test_a_stop_before_the_first_check_and_one_from_a_check_are_no_verdict() -> None:
    stop = StopSignal()
    stop.set("SIGINT")
    with pytest.raises(Preempted, match="SIGINT"):
        run(passing("disk"), stop=stop)
    with pytest.raises(Preempted, match="elsewhere"):
        run(raising(Preempted("stopped elsewhere")))
