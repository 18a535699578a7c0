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
from pipeline.health.check import Check, CheckContext, CheckResult, HealthVerdict, NodeReport, run_checks
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
    return Check(name, lambda ctx: CheckResult(name, HealthVerdict.PASS), cost_s=cost_s)


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
    stop = StopSignal()
    report = run_checks(
        checks, QUICK, node_rank=3, host="i", stop=stop, on_result=lambda result: seen.append(result.name)
    )
    assert seen == [result.name for result in report.results] == ["cheap", "cheap too", "usual", "dear"]


def test_several_results_of_one_check_or_none() -> None:
    def two(ctx: CheckContext) -> Iterator[CheckResult]:
        yield CheckResult("one", HealthVerdict.PASS)
        yield CheckResult("two", HealthVerdict.WARN)

    def broken(ctx: CheckContext) -> Iterator[CheckResult]:
        yield CheckResult("three", HealthVerdict.FIX)
        now[0] += 2.5
        raise TransientError("gone")

    now = [10.0]
    report = run(Check("many", two), Check("none", lambda ctx: ()), Check("broken", broken), clock=lambda: now[0])
    found = [(result.name, result.seconds) for result in report.results]
    assert found == [("one", 0.0), ("two", 0.0), ("three", 2.5), ("broken", 0.0)], "time is given once"


def test_what_is_no_text_spoils_neither_terminal_nor_report() -> None:
    rubbish = CheckResult(
        "tool", HealthVerdict.WARN, "a\x1b[31m\nb\ud800" + "x" * 5000, "\x00", figures={"type": "\x07", "n": 1}
    )
    (result,) = run(Check("tool", lambda ctx: rubbish)).results
    assert result.seen.startswith("a?[31m b?xxx") and len(result.seen) == 1000
    assert (result.expected, result.figures) == ("?", {"type": "?", "n": 1})


def test_a_dear_check_is_spared_a_node_that_has_failed() -> None:
    dear = Check("burn", lambda ctx: pytest.fail("it was run"), cost_s=60.0)
    report = run(raising(TransientError("sick")), passing("cheap"), dear)
    assert [one.verdict for one in report.results] == [HealthVerdict.RETRY, HealthVerdict.PASS, HealthVerdict.WARN]
    assert "skipped" in report.results[-1].seen


@pytest.mark.parametrize(
    ("error", "verdict", "seen"),
    [
        (ConfigError("no rights", expected="rights"), HealthVerdict.FIX, "no rights"),
        (DataError("garbage"), HealthVerdict.FIX, "garbage"),
        (TransientError("disk is full"), HealthVerdict.RETRY, "disk is full"),
        (ValueError("two\nlines"), HealthVerdict.RETRY, "ValueError: two lines (test_check.py:"),
        (SystemExit(3), HealthVerdict.RETRY, "SystemExit: 3 (test_check.py:"),
    ],
)
def test_an_exception_is_a_verdict(error: BaseException, verdict: HealthVerdict, seen: str) -> None:
    report = run(raising(error), passing("after"))
    first, after = report.results
    assert (first.name, first.verdict) == ("broken", verdict)
    assert first.seen.startswith(seen)
    assert first.expected == ("rights" if "rights" in seen else "") or verdict is HealthVerdict.RETRY
    assert after.verdict is HealthVerdict.PASS


def test_a_check_that_hangs_is_sent_back_with_what_it_was_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaf to everything: the thread stays behind, and the others are run. Time passes when it says what it does."""
    monkeypatch.setattr(check_module, "LEAVE_S", 0.2)

    def deaf(ctx: CheckContext) -> CheckResult:
        ctx.doing = "asking the driver"
        now[0] += 1.0
        released.wait()
        return CheckResult("driver", HealthVerdict.PASS)

    released, now = threading.Event(), [0.0]
    try:
        checks = Check("driver", deaf, time_limit_s=0.1), passing("after")
        hung, after = run(*checks, clock=lambda: now[0]).results
        assert (hung.name, hung.verdict, after.verdict) == ("driver", HealthVerdict.RETRY, HealthVerdict.PASS)
        assert hung.seen == "timed out after 0.1s, still asking the driver and ignoring its stop signal"
    finally:
        released.set()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_check_that_hears_may_clean_up(tmp_path: Path, is_stopped: bool) -> None:
    """One over its time is told so by its stop signal, which is no Preempted of ours; a stop ends the run as well."""
    stop, now = StopSignal(), [0.0]

    def polite(ctx: CheckContext) -> CheckResult:
        (tmp_path / "probe").touch()
        ctx.doing = "waiting for an answer"
        if is_stopped:
            stop.set("SIGTERM")
        now[0] += 1.0
        try:
            run_tool(SLEEP, timeout_s=600, stop=ctx.stop)
        finally:
            (tmp_path / "probe").unlink()
        return CheckResult("tool", HealthVerdict.PASS)

    def ran() -> NodeReport:
        return run(Check("tool", polite), config=HealthConfig(check_limit_s=0.05), clock=lambda: now[0], stop=stop)

    if is_stopped:
        with pytest.raises(Preempted, match="SIGTERM while in health check tool: waiting for an answer"):
            ran()
    else:
        (hung,) = ran().results
        assert (hung.verdict, hung.seen) == (HealthVerdict.RETRY, "timed out after 0.1s, still waiting for an answer")
    assert list(tmp_path.iterdir()) == []


def test_a_stop_before_the_first_check_and_one_from_a_check_are_no_verdict() -> None:
    stop = StopSignal()
    stop.set("SIGINT")
    with pytest.raises(Preempted, match="SIGINT"):
        run(passing("disk"), stop=stop)
    with pytest.raises(Preempted, match="elsewhere"):
        run(raising(Preempted("stopped elsewhere")))
