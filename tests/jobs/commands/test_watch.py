"""`trnjobs status --watch`: a cycle as it goes on, and the end of the watching."""

import io
import os
import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rich.console

from jobs import cli
from jobs.commands.watch import Row, View, doing_text, event_text, head_text, live_rows, watch
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import Closed, JobRecord, JobState, change_line
from jobs.cycle.page.gather import PageData
from jobs.plan.spec import JobPlan
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle
from jobs.targets.base import no_log
from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.telemetry.events import EventName
from tests.jobs.commands.test_cycle import CYCLE, Trnjobs, trnjobs
from tests.jobs.cycle.cases import cycle, job, plan
from tests.jobs.cycle.record_cases import bad, good, tried, under_way
from tests.jobs.cycle.test_costs import at, attempt, ledger
from tests.jobs.cycle.test_verdict import VERIFIED, check, evaluation, made
from tests.jobs.cycle.test_verdict import ledger as made_ledger
from tests.kit.screen import Screen

__all__ = ["trnjobs"]
SHAPE = plan(job("prepare"), job("train", "prepare"), job("embed", "train"))
MOMENTS = (
    at(90, EventName.TRAIN_STEPS, step=70, losses=[9.0], samples_per_s=1, eta_s=1),  # of the try before
    at(101, EventName.TRAIN_STARTED, step=60, max_steps=2000),
    at(120, EventName.TRAIN_STEPS, step=120, losses=[0.5, 0.7], samples_per_s=812.4, eta_s=192.0),
)
TRAINS = under_way("train", "RUNNING", tried(75, at=(50.0, 90.0)), attempt(100, None, None))


def test_a_job_that_runs_and_one_that_failed() -> None:
    rows: list[Row] = live_rows(SHAPE, [good("prepare"), TRAINS], MOMENTS, 130.0)
    doing = "attempt 2, step 120/2000, loss 0.600, 812 samples/s, eta 3m12s"
    assert rows[1:] == [("train", "RUNNING", "30s", doing)]
    died = under_way("train", "RUNNING", tried(137, at=(50.0, 121.0)), attempt(122, None, None))
    assert live_rows(SHAPE, [good("prepare"), died], MOMENTS, 130.0)[1] == ("train", "RUNNING", "8s", "attempt 2")
    failed = live_rows(SHAPE, [good("prepare"), bad("train", tried(70, reason="the loss is NaN"))], MOMENTS, 130.0)[1]
    assert failed[:3] == ("train", "FAILED", "1s") and "the loss is NaN, exit code 70" in failed[3]
    children = tuple(under_way(f"embed:{n}", "RUNNING", attempt(10, None, None)) for n in range(2))
    embed = JobRecord(name="embed", id="e", state=JobState.PENDING, created_at=0.0, children=children)
    shown = live_rows(cycle(), [good("train"), embed], (), 20.0, lambda task: f"embed: of {task.name}")
    assert shown[1] == ("embed", "PENDING 0/2", "10s", "of embed:0")


@pytest.mark.parametrize(("now", "words"), [(130.0, "deadline in 57m50s | local: no charge"), (7200.0, "LATE")])
def test_the_head(now: float, words: str) -> None:
    found = ledger(SHAPE, [good("prepare"), TRAINS], MOMENTS, now=now, outcome=None, deadline_at=3600.0)
    text = head_text(SHAPE, found, "local", "under way", now)
    assert text.startswith("cycle 2026-11-20: under way for 2") and "| 1 of 3 jobs done |" in text and words in text


def test_what_a_job_is_doing() -> None:
    events = (at(1, EventName.EMBED_STARTED, parts=8, done=2), *(at(n, EventName.PART_EMBEDDED) for n in (2, 3, 4)))
    assert doing_text("embed", events) == "part 5/8"
    assert doing_text("embed", events[1:]) == ""  # the start is further back than what was read
    assert doing_text("train", ()) == doing_text("verify", events) == ""
    odd = at(1, EventName.TRAIN_STEPS, step="x", losses=["nan"], samples_per_s=None)
    assert doing_text("train", (odd,)) == "step 0, loss -, 0 samples/s"


@pytest.mark.parametrize(
    ("stage", "line", "shown"),
    [
        ("compile", "compile: graph 3 of about 16, a.py:330 | 12s so far", "graph 3 of about 16, a.py:330"),
        ("embed", "embed 9k/36k rows | 812 texts/s | idle 1% | eta 3s", "9k/36k rows, 812 texts/s, eta 3s"),
        ("evaluate", "scoring: 1.2k/3.0k rows | 41 rows/s", "scoring: 1.2k/3.0k rows, 41 rows/s"),
        ("train", "\x1b[31mred\x1b[0m\x1b[2K\a", "red"),
    ],
)
def test_what_a_job_has_written_last_says_what_it_does(stage: str, line: str, shown: str) -> None:
    assert doing_text(stage, (), line) == shown


def test_the_newest_event() -> None:
    saved = at(150, EventName.CHECKPOINT_SAVED, step=120, seconds=0.1)
    assert event_text((*MOMENTS, saved), 153.4) == "3s ago: checkpoint saved, step 120"
    assert event_text(MOMENTS[:1], 153.0) == ""


@dataclass
class Target:
    """Tells one thing after the other."""

    looks: list[Any]
    name: str = "batch"

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, BaseException):
            raise look
        return tuple(look)

    def logs(self, record: JobRecord, *, attempt: int, node: int) -> Iterator[str]:
        raise no_log(record, attempt, node)

    def newest_line(self, record: JobRecord) -> str:
        return f"of {record.name} | \x1b[2Ka line"


def watched(
    looks: list[Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, *, terminal: bool = False
) -> tuple[int, str, list[str]]:
    """Exit code, what was drawn, and the plain lines."""
    now = [100.0]
    store = CycleStore(open_storage(str(tmp_path), stop=StopSignal()), "2026-11-20", lambda: now[0])
    shape = plan(job("prepare"), job("train", "prepare"))
    monkeypatch.setattr(CycleStore, "plan", lambda store: shape)
    monkeypatch.setattr("jobs.setup.open_target", lambda *given: Target(looks))
    out, lines = io.StringIO(), list[str]()
    console = rich.console.Console(file=out, force_terminal=terminal, width=120)
    opened = OpenCycle(CycleSettings(), store, lines.append, StopSignal())

    def sleep(seconds: float) -> None:
        now[0] += seconds

    code = watch(opened, 16.0, console=console, sleep=sleep)
    return code, out.getvalue(), lines


START = [under_way("prepare", "RUNNABLE")]
RUNS = [good("prepare"), under_way("train", "RUNNING", tried(None, at=(50.0, 60.0)))]


def test_until_it_has_ended(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = [good("prepare"), good("train")]
    looks = [START, TransientError("ThrottlingException"), RUNS, RUNS, done]
    code, out, lines = watched(looks, tmp_path, monkeypatch)
    assert (code, out) == (0, "")
    assert lines == [
        "cycle 2026-11-20: under way for 1m40s | 0 of 2 jobs done | $0.00",
        "prepare      RUNNABLE",
        "warning: ThrottlingException",
        "prepare      SUCCEEDED",
        "train        RUNNING    attempt 1",
        "train        RUNNING    1m22s  of train, a line",
        "train        RUNNING    1m38s  of train, a line",
        "train        SUCCEEDED",
        "cycle 2026-11-20: succeeded in 1s, cost unknown",
    ]


def test_other_ends_of_the_watching(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched([START, KeyboardInterrupt()], tmp_path, monkeypatch)[0] == 0, "that of the watching alone"
    failed = [good("prepare"), bad("train", tried(70, reason="[red]NaN[/red]"))]
    code, out, lines = watched([START, RUNS, failed], tmp_path, monkeypatch, terminal=True)
    assert code == 70 and "[red]NaN[/red], exit code 70" in out, "what jobs say is no markup"
    assert lines[0] == "cycle 2026-11-20: failed in 1s, cost unknown" and "[red]NaN[/red]" in lines[1]
    assert lines[2] == "train failed, attempt 1:" and "logs train" in lines[4]
    monkeypatch.setattr(CycleStore, "closed", lambda self: Closed(outcome="cancelled", at=50.0, reason="by hand"))
    code, _, lines = watched([START], tmp_path, monkeypatch)
    assert (code, lines[-1]) == (143, "  by hand")


def test_as_it_is_typed(trnjobs: Trnjobs) -> None:
    assert trnjobs("status", "--watch")[0] == 78
    trnjobs.ends_with("train", 80)
    trnjobs("submit")
    code, text = trnjobs("status", "--watch", "--every", "0.5")
    assert code == 80 and "train        FAILED     attempt 1 ended with exit code 80" in text
    assert trnjobs("status", "--watch", "--every", "0")[0] == 78


# On a terminal of 80 columns, at 130 s on a clock that stands still.

RUNNING = under_way("train", "RUNNING", attempt(100, None, None))
WAITS = under_way("embed", "PENDING")


@pytest.mark.parametrize(
    ("records", "is_stopping", "expected"),
    [
        (
            [good("prepare"), RUNNING, WAITS],
            False,
            [
                "cycle 2026-11-20: under way for 2m10s | 1 of 3 jobs done | local: no charge",
                "job      state      ran",
                "prepare  SUCCEEDED  1s",
                "train    RUNNING    30s  step 120/2000, loss 0.600, 812 samples/s, eta 3m12s",
                "embed    PENDING    -",
                "29s ago: train started, step 60",
            ],
        ),
        (
            [good("prepare"), TRAINS, WAITS],
            True,
            [
                "cycle 2026-11-20: under way for 2m10s | 1 of 3 jobs done | local: no charge",
                "job      state      ran",
                "prepare  SUCCEEDED  1s",
                "train    RUNNING    30s  attempt 2, step 120/2000, loss 0.600, 812 samples/s,",
                "                         eta 3m12s",
                "embed    PENDING    -",
                "29s ago: train started, step 60",
                "stopping: saving state (press Ctrl-C again to exit immediately)",
            ],
        ),
        (
            [good("prepare"), good("train", tried(at=(50.0, 90.0)), stopped_at=90.0), bad("embed", tried(80))],
            False,
            [
                "cycle 2026-11-20: refused in 1m30s | 2 of 3 jobs done | local: no charge",
                "job      state      ran",
                "prepare  SUCCEEDED  1s",
                "train    SUCCEEDED  40s",
                "embed    FAILED     1s   exit code 80 (GateRefused)",
            ],
        ),
        (
            [good("prepare"), bad("train", tried(143, at=(50.0, 90.0)), why="cancelled: by hand", stopped_at=90.0)],
            False,
            [
                "cycle 2026-11-20: cancelled in 1m30s | 1 of 3 jobs done | local: no charge",
                "job      state      ran",
                "prepare  SUCCEEDED  1s",
                "train    CANCELLED  40s  cancelled: by hand, exit code 143 (Preempted)",
            ],
        ),
        (
            [good("prepare"), good("train", tried(at=(50.0, 90.0)), stopped_at=90.0), good("embed")],
            False,
            [
                "cycle 2026-11-20: succeeded in 1m30s | 3 of 3 jobs done | local: no charge",
                "job      state      ran",
                "prepare  SUCCEEDED  1s",
                "train    SUCCEEDED  40s",
                "embed    SUCCEEDED  1s",
            ],
        ),
        (
            [good("prepare"), bad("train", tried(65, at=(50.0, 90.0)), stopped_at=90.0), bad("embed")],
            False,
            [
                "cycle 2026-11-20: failed in 1m30s | 1 of 3 jobs done | local: no charge",
                "job      state      ran",
                "prepare  SUCCEEDED  1s",
                "train    FAILED     40s  exit code 65 (DataError)",
                "embed    NOT RUN    -    a failed",
            ],
        ),
    ],
    ids=["running", "resumed, and stopped again", "refused", "cancelled", "succeeded", "failed"],
)
def test_the_picture(
    records: list[JobRecord],
    is_stopping: bool,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = CycleStore(open_storage(str(tmp_path), stop=StopSignal()), "2026-11-20", lambda: 130.0)
    monkeypatch.setattr("jobs.commands.watch.read_cycle_events", lambda *_, **__: MOMENTS)
    out = io.StringIO()
    console = rich.console.Console(file=out, force_terminal=True, width=80, height=24)
    stop = StopSignal()
    target: Any = Target([], name="local")
    with View(OpenCycle(CycleSettings(), store, print, stop), SHAPE, console) as view:
        view.draw(target, records[:1])
        view.say(change_line(records[0]))
        view.say("a line \x1b[2Kof a target")
        if is_stopping:
            stop.set("SIGINT")
        view.draw(target, records, is_stopping=is_stopping)
        assert (view.live is None) == is_stopping, "from Ctrl-C on in lines"
    shown = Screen(out.getvalue())
    assert [line.rstrip() for line in shown.lines] == ["a line of a target", *expected, ""]
    assert shown.has_cursor


def test_a_line_waits_until_the_live_table_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CycleStore(open_storage(str(tmp_path), stop=StopSignal()), "2026-11-20", lambda: 130.0)
    said = list[str]()
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    view = View(OpenCycle(CycleSettings(), store, said.append, StopSignal()), SHAPE, console)
    speaker = threading.Thread(target=view.say, args=("a line",))
    with view:
        assert view.live is not None
        stop_live = view.live.stop

        def stop_slowly() -> None:
            speaker.start()
            speaker.join(0.1)
            assert said == [], "sys.stdout is still being replaced"
            stop_live()

        monkeypatch.setattr(view.live, "stop", stop_slowly)
    speaker.join()
    assert said == ["a line"]


def in_terminal(trnjobs: Trnjobs, *words: str, until: Callable[[Screen], bool] = lambda screen: False) -> "Terminal":
    """Start a command in a terminal of its own; return once `until` is true of what stands there, or it has ended."""
    pid, terminal = pty.fork()
    if pid == 0:
        code, sys.stdout, sys.stderr = 1, os.fdopen(1, "w"), os.fdopen(2, "w")
        try:
            code = cli.main([words[0], f"--workspace={trnjobs.place / 'workspace'}", *CYCLE, *words[1:]])
            sys.stdout.flush()
        finally:
            os._exit(code)
    started = Terminal(pid, terminal)
    started.read(until)
    return started


@dataclass
class Terminal:
    pid: int
    terminal: int
    output: str = ""

    @property
    def screen(self) -> Screen:
        return Screen(self.output.replace("\r\n", "\n"))

    def read(self, until: Callable[[Screen], bool] = lambda screen: False) -> None:
        while not until(self.screen):
            try:
                self.output += os.read(self.terminal, 65536).decode()
            except OSError:  # it has ended
                break

    def end(self) -> int:
        self.read()
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def starts(screen: Screen, *words: str) -> bool:
    return any(line.split()[: len(words)] == [*words] for line in screen.lines)


def test_submit_in_a_terminal_is_stopped_and_goes_on(trnjobs: Trnjobs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "PYTHONUNBUFFERED": "1"}.items():
        monkeypatch.setenv(name, value)
    held = trnjobs.hold("train")
    events = trnjobs.place / "workspace" / "cycles" / "2026-11-20" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text('{"time": "2026-11-20T02:00:00Z", "event": "stage_started", "stage": "train"}\n')
    runs = re.compile(r"train +RUNNING +\S+  this is train trnpipe train")
    first = in_terminal(trnjobs, "submit", until=lambda screen: any(map(runs.fullmatch, screen.lines)))
    assert starts(first.screen, "prepare", "SUCCEEDED") and starts(first.screen, "embed", "PENDING", "0/2")
    os.write(first.terminal, b"\x03")
    assert first.end() == 143
    text = "\n".join(first.screen.lines)
    assert text.count("under way for") == text.count("job ") == text.count("stopping: saving state") == 1, text
    assert "train        RUNNABLE   attempt 1 ended with exit code 143: Interrupted" in text
    assert "Preempted: stopped by SIGINT" in text and first.screen.has_cursor
    held.unlink()
    second = in_terminal(trnjobs, "retry")
    assert second.end() == 0
    assert all(starts(second.screen, name, "SUCCEEDED") for name in ("prepare", "train", "embed", "report"))
    assert second.screen.lines[-2] == "  page: workspace/reports/2026-11-20.html"
    assert second.screen.lines[-3].startswith("cycle 2026-11-20: succeeded in ")
    assert all(len(line) <= 80 for line in (*first.screen.lines, *second.screen.lines))


# The end.

REFUSED = bad("evaluate", tried(80).model_copy(update={"error": "GateRefused: no\n  checks"}))
BROKEN = bad("train", tried(65).model_copy(update={"error": "DataError: no column"}))
SEARCH = check(metric="ndcg@10", outcome="fail", candidate=0.9, incumbent=0.952, low=-0.07, high=-0.04)


@pytest.mark.parametrize(
    ("outcome", "record", "reason", "evaluated", "expected"),
    [
        ("succeeded", good("evaluate"), "", evaluation(check()), ["  36,000 vectors embedded and verified", "PAGE"]),
        (
            "refused",
            REFUSED,
            "evaluate: exit code 80",
            evaluation(SEARCH, promote=False),
            ["  refused: nDCG@10 0.900, production 0.952, -0.052 [-0.070, -0.040]", "PAGE", "  log: LOGS evaluate"],
        ),
        (
            "failed",
            BROKEN,
            "train: exit code 65 (DataError): no column",
            None,
            [
                "cycle second: failed in 24m06s, local: no charge",
                "  train: exit code 65 (DataError)",
                "PAGE",
                "train failed, attempt 1:",
                "  DataError: no column",
                "  log: LOGS train",
            ],
        ),
        ("cancelled", bad("train", why="cancelled: by hand"), "by hand", None, ["  by hand", "PAGE"]),
    ],
    ids=["promoted", "refused", "failed", "cancelled"],
)
def test_the_end_is_the_verdict_its_page_and_what_failed(
    outcome: Any,
    record: JobRecord,
    reason: str,
    evaluated: Any,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jobs.setup.program", lambda: "trnjobs")
    store = CycleStore(open_storage(str(tmp_path / "w"), stop=StopSignal()), "second", lambda: 100.0)
    store.storage.write_bytes("reports/second.html", b"a page")
    with store.submitting(SHAPE, "local", "me"):
        pass
    figures = {"evaluate": {"promoted": outcome == "succeeded"}}
    data = made(PageData, ledger=made_ledger(outcome), evaluation=evaluated, figures=figures, vectors=VERIFIED)
    closed = Closed(outcome=outcome, at=100.0, reason=reason)
    lines = OpenCycle(CycleSettings(), store, print, StopSignal()).end_lines(SHAPE, [record], closed, data)
    if outcome == "succeeded":
        assert lines[0] == "cycle second: promoted in 24m06s, local: no charge"
    logs = f"trnjobs logs {record.name} --workspace {tmp_path}/w --cycle second"
    names = {"PAGE": "  page: w/reports/second.html", f"  log: LOGS {record.name}": f"  log: {logs}"}
    assert lines[-len(expected) :] == [names.get(line, line) for line in expected]
