"""`trnjobs` as it is typed, over a workspace on this machine; the jobs are commands of a few milliseconds."""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from jobs import cli
from jobs.cycle import cycle_store as cycle
from jobs.cycle.job_states import SubmittedJob
from jobs.plan import cycle as plan
from tests.jobs.targets.local.waiting import until, until_no_keepers
from tests.kit.killing import FILE_CHANGES, FORK, killed_at

# Notes what runs, in a journal; waits while there is a file hold-<job>; ends with the code of its try in the file
# exit-<job>[:child], of which the last is that of all later tries. Says what is in the file say-<job>.
CODE = """
import os, sys, time
name = os.environ["TRNJOBS_JOB"]
child = ":".join([name, os.environ.get("TRNJOBS_INDEX", "")]).rstrip(":")
with open("journal", "a") as file:
    file.write(f"{child} {os.environ['TRNJOBS_ATTEMPT']}\\n")
print("this is", child, *sys.argv[1:])
if os.path.exists(f"say-{name}"):
    print(open(f"say-{name}").read())
while os.path.exists(f"hold-{name}"):
    time.sleep(0.01)
codes = open(f"exit-{child}").read().split() if os.path.exists(f"exit-{child}") else ["0"]
sys.exit(int(codes[: int(os.environ["TRNJOBS_ATTEMPT"])][-1]))
"""
ORDER = {"prepare": (), "train": ("prepare",), "embed": ("train",), "report": ("embed",)}
CYCLE = ["--cycle=2026-11-20", "--jobs.embed.workers=2", "--jobs.local-vcpus=4", "--jobs.sla-s=3600"]


@dataclass
class Trnjobs:
    """One workspace; commands of jobs write into the folder above it."""

    place: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> tuple[int, str]:
        """Exit code, and what was printed."""
        code = cli.main([words[0], f"--workspace={self.place / 'workspace'}", *CYCLE, *words[1:]])
        seen = self.capsys.readouterr()
        assert "Traceback" not in seen.err
        return code, seen.out + seen.err

    def expect(self, code: int, seen: str, *words: str) -> str:
        """Run a command that ends with `code` and prints `seen`; return all that was printed."""
        found, text = self(*words)
        assert (found, seen in text) == (code, True), text
        return text

    def status(self) -> dict[str, Any]:
        code, text = self("status", "--json")
        assert code == 0
        found: dict[str, Any] = json.loads(text)
        return found

    def states(self) -> dict[str, str]:
        return {job["name"]: job["state"] for job in self.status()["jobs"]}

    def ran(self) -> list[str]:
        """Since last asked."""
        journal = self.place / "journal"
        lines = sorted(journal.read_text().splitlines()) if journal.exists() else []
        journal.unlink(missing_ok=True)
        return lines

    def ends_with(self, job: str, *codes: int) -> None:
        (self.place / f"exit-{job}").write_text(" ".join(map(str, codes)))

    @property
    def page_file(self) -> Path:
        return self.place / "workspace" / "reports" / "2026-11-20.html"

    def page(self) -> str:
        """As it was written at the end of the cycle. Made again a day later it is the same."""
        written = self.page_file.read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            later = time.time() + 86_400
            patch.setattr("jobs.setup.time.time", lambda: later)
            assert self("report")[0] == 0
        assert self.page_file.read_bytes() == written
        return written.decode()

    def hold(self, job: str) -> Path:
        path = self.place / f"hold-{job}"
        path.touch()
        return path


@pytest.fixture
def trnjobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Trnjobs]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setattr(plan, "AFTER", ORDER)
    monkeypatch.setattr(plan, "ENTRY", (sys.executable, "-S", "-c", CODE))
    yield Trnjobs(tmp_path, capsys)
    for path in tmp_path.glob("hold-*"):
        path.unlink()
    until_no_keepers(tmp_path)


ALL = ["embed:0 1", "embed:1 1", "prepare 1", "report 1", "train 1"]


def test_a_whole_cycle(trnjobs: Trnjobs) -> None:
    assert "array of 2" in trnjobs.expect(0, "no earlier cycle", "plan")
    text = trnjobs.expect(0, "cycle 2026-11-20: succeeded", "submit")
    assert "train        RUNNING    attempt 1  workspace/cycles/2026-11-20/jobs/local/attempts/" in text
    assert text.splitlines()[-1] == "  page: workspace/reports/2026-11-20.html"
    assert set(filter(lambda one: not one.isprintable(), text)) == {"\n"}, "no control characters on a pipe"
    assert trnjobs.ran() == ALL

    assert "nothing ran. To start a new cycle, use --cycle NAME" in trnjobs.expect(
        0, "2026-11-20 already succeeded", "submit"
    )
    assert trnjobs.ran() == []

    assert trnjobs.states() == dict.fromkeys(ORDER, "SUCCEEDED")
    assert trnjobs.status()["closed"]["outcome"] == "succeeded"
    assert trnjobs.expect(0, "SUCCEEDED 2/2", "status").splitlines()[-1] == "cycle 2026-11-20: succeeded"

    for more in ([], ["-f"], ["--tail=1"], ["--tail=5", "--follow"]):
        assert trnjobs("logs", "train", *more) == (0, "this is train trnpipe train\n")
    assert trnjobs("logs", "embed:1") == (0, "this is embed:1 trnpipe embed --embed.workers 2\n")
    assert trnjobs("reconcile")[0] == 0
    assert trnjobs("cancel")[0] == 0  # there is nothing left to end
    assert trnjobs.status()["closed"]["outcome"] == "succeeded"
    text = trnjobs.expect(0, "succeeded", "history")
    assert text.splitlines()[1].split()[:2] == ["2026-11-20", "local"] and "4/4" in text
    trnjobs.expect(0, "5 of 5 jobs in 5 attempts", "cost")
    assert json.loads(trnjobs("cost", "--json")[1])["cycles"][0]["outcome"] == "succeeded"
    assert "expected" in trnjobs("plan", "--cycle=2026-11-21", "--jobs.vcpu-usd-per-hour=1")[1]  # of the next one
    assert trnjobs.ran() == []

    trnjobs.expect(78, "has no failed jobs", "retry")
    text = trnjobs.expect(78, "jobs.train.attempts: 3 -> 7\n", "submit", "--jobs.train.attempts=7")  # another plan
    assert "with --fresh" not in text
    assert trnjobs.ran() == []


def test_a_job_that_fails_and_is_run_again(trnjobs: Trnjobs) -> None:
    """What its first submission cost stays with the cycle."""
    trnjobs.ends_with("embed:1", 75, 65)
    text = trnjobs.expect(65, "  embed: exit code 65 (DataError)", "submit")
    assert "cycle 2026-11-20: failed in " in text and "embed:1 failed, attempt 2:\n" in text
    assert trnjobs.ran() == ["embed:0 1", "embed:1 1", "embed:1 2", "prepare 1", "train 1"]
    assert trnjobs.states() == {"prepare": "SUCCEEDED", "train": "SUCCEEDED", "embed": "FAILED", "report": "FAILED"}
    assert trnjobs.status()["jobs"][-1]["status_reason"] == "not run: embed failed"
    before = json.loads(trnjobs("cost", "--json")[1])["cycles"][0]
    assert trnjobs("submit")[0] == 65
    assert trnjobs.ran() == []

    trnjobs.ends_with("embed:1", 0)
    trnjobs.expect(0, "cycle 2026-11-20: succeeded", "retry")
    assert trnjobs.ran() == ["embed:0 1", "embed:1 1", "report 1"]
    assert trnjobs("history")[1].splitlines()[1].split()[-1] == "8"
    after = json.loads(trnjobs("cost", "--json")[1])["cycles"][0]
    assert (before["total"]["tries"], after["total"]["tries"]) == (5, 8)
    assert [one for one in after["entries"] if one in before["entries"]] == before["entries"]
    assert (after["began_at"], after["succeeded"], after["failed"]) == (before["began_at"], 5, 0)
    assert json.loads(trnjobs.page_file.with_suffix(".json").read_text())["ledger"]["began_at"] == before["began_at"]


def test_a_gate_that_refuses_after_a_try_that_was_repeated(trnjobs: Trnjobs) -> None:
    trnjobs.ends_with("prepare", 75, 0)
    trnjobs.ends_with("train", 80)
    text = trnjobs.expect(80, "  train: exit code 80 (GateRefused)", "submit")
    assert "cycle 2026-11-20: refused in " in text
    assert "prepare      RUNNABLE   attempt 1 ended with exit code 75; retrying" in text
    assert trnjobs.ran() == ["prepare 1", "prepare 2", "train 1"]
    assert trnjobs("logs", "prepare", "--attempt=1")[0] == 0


def test_a_page_that_cannot_be_written_changes_no_end_and_is_told_of(
    trnjobs: Trnjobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trnjobs.page_file.parent
    folder.parent.mkdir()
    folder.write_text("in the way")
    trnjobs.ends_with("train", 80)
    text = trnjobs.expect(80, "failed to write its page: ConfigError: ", "submit")
    assert "next: trnjobs report --cycle 2026-11-20" in text and trnjobs.status()["closed"]["outcome"] == "refused"
    folder.unlink()
    assert trnjobs("report")[0] == 0
    assert "refused" in trnjobs.page()

    trnjobs.ends_with("train", 0)
    monkeypatch.setattr("jobs.cycle.page.publish.page", lambda *_: "".index("x"))
    trnjobs.expect(0, "failed to write its page: ValueError: substring not found", "retry")
    assert trnjobs.status()["closed"]["outcome"] == "succeeded"


def submitting(trnjobs: Trnjobs) -> ForkProcess:
    """In a process of its own, until train runs."""
    trnjobs.hold("train")
    process = FORK.Process(target=lambda: sys.exit(trnjobs("submit")[0]))
    process.start()
    plan_file = trnjobs.place / "workspace" / "cycles" / "2026-11-20" / "jobs" / "plan.json"
    until(lambda: plan_file.exists() and trnjobs.states().get("train") == "RUNNING", "the second job")
    return process


def test_a_cycle_under_way_is_cancelled(trnjobs: Trnjobs) -> None:
    process = submitting(trnjobs)
    assert trnjobs.states() == {"prepare": "SUCCEEDED", "train": "RUNNING", "embed": "PENDING", "report": "PENDING"}
    assert trnjobs("status")[1].splitlines()[-1] == "cycle 2026-11-20: under way"
    trnjobs.expect(78, "is under way", "retry")
    assert "under way" in trnjobs("history")[1]
    trnjobs.expect(0, "under way", "reconcile")
    text = trnjobs.expect(0, "cycle 2026-11-20: cancelled in ", "cancel", "--reason=wrong data")
    assert "\n  train: cancelled: wrong data" in text
    process.join()
    assert process.exitcode == 143
    page = trnjobs.page()
    assert 'class="cancelled">cancelled' in page and "train: cancelled: wrong data" in page and "RUNNING" not in page
    cancelled = {job["name"]: (job["state"], job["status_reason"]) for job in trnjobs.status()["jobs"]}
    assert cancelled.pop("prepare")[0] == "SUCCEEDED"
    assert cancelled == dict.fromkeys(("train", "embed", "report"), ("CANCELLED", "cancelled: wrong data"))
    assert trnjobs.status()["closed"]["outcome"] == "cancelled"
    assert "cancelled" in trnjobs("history")[1] and "failed" not in trnjobs("history")[1]
    assert trnjobs.ran() == ["prepare 1", "train 1"]
    assert trnjobs("submit")[0] == 143
    assert trnjobs.ran() == []
    (trnjobs.place / "hold-train").unlink()
    assert trnjobs("retry")[0] == 0
    assert trnjobs.ran() == ["embed:0 1", "embed:1 1", "report 1", "train 1"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_cycle_says_so_and_names_the_command_that_goes_on(how: signal.Signals, trnjobs: Trnjobs) -> None:
    process = submitting(trnjobs)
    assert "under way" in trnjobs("status")[1] and "interrupted" not in trnjobs("history")[1]
    assert process.pid is not None
    os.kill(process.pid, how)
    process.join()
    go_on = f"resume: trnjobs retry --workspace {trnjobs.place / 'workspace'} --cycle 2026-11-20"
    for words in (["status"], ["history"], ["reconcile"], ["status", "--watch", "--every", "0.1"]):
        code, text = trnjobs(*words)
        assert "cycle 2026-11-20: interrupted " in text and go_on in text, words
        assert "under way" not in text and "cost unknown" not in text, words
        assert code == (143 if "--watch" in words else 0), words
    (trnjobs.place / "hold-train").unlink()
    if how == signal.SIGKILL:  # the keeper of train lives, and its try goes on
        assert trnjobs("submit")[0] == 0
        assert trnjobs.ran() == ALL
    else:
        assert trnjobs(*shlex.split(go_on.partition("trnjobs ")[2]))[0] == 0
        assert trnjobs.ran()[:3] == ["embed:0 1", "embed:1 1", "prepare 1"]
    assert trnjobs.states() == dict.fromkeys(ORDER, "SUCCEEDED")


HOSTILE = """before <b>all</b>
trnpipe train: DataError: <script>alert(1)</script> is no `label`
  expected: one of its columns
  next: --data.columns.label
"""


def test_a_failed_job_shows_its_error_wherever_somebody_looks(trnjobs: Trnjobs) -> None:
    """The error and a command that shows the whole log: as text on terminals, escaped on the page."""
    trnjobs.ends_with("train", 65)
    (trnjobs.place / "say-train").write_text(HOSTILE)
    block = (
        "train failed, attempt 1:\n  DataError: <script>alert(1)</script> is no `label`\n"
        "    expected: one of its columns\n    next: --data.columns.label\n  log: "
    )
    command = f"trnjobs logs train --workspace {trnjobs.place / 'workspace'} --cycle 2026-11-20"
    for words in (["submit"], ["submit"], ["retry"], ["status"], ["status", "--watch"], ["history"]):
        code, text = trnjobs(*words)
        assert block + command in text, words
        assert text.count("is no `label`") == 1, "the error is shown once"
        assert "before" not in text and ("train failed\n" in text or words not in (["status"], ["retry"])), words
        assert code == (0 if words in (["status"], ["history"]) else 65), words
    closed = trnjobs.status()["closed"]
    assert closed["reason"] == "train: exit code 65 (DataError): <script>alert(1)</script> is no `label`"
    page = trnjobs.page()
    assert "<script>alert" not in page and "DataError: &lt;script&gt;alert(1)&lt;/script&gt; is no `label`" in page
    assert "next: --data.columns.label" in page and command in page
    assert trnjobs(*shlex.split(command)[1:])[1].splitlines()[1:] == [*HOSTILE.splitlines(), ""]


@pytest.mark.parametrize(
    ("last", "left"), [("embed", {"prepare", "train"}), ("train", {"prepare"}), ("prepare", set())]
)
def test_a_cycle_submitted_half_is_cancelled_and_run_again(
    last: str, left: set[str], trnjobs: Trnjobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = cycle.CycleStore.save_submitted

    def interrupted(store: cycle.CycleStore, submission: int, submitted_job: SubmittedJob) -> None:
        if submitted_job.job == last:
            raise KeyboardInterrupt
        save(store, submission, submitted_job)

    with monkeypatch.context() as patched:
        patched.setattr(cycle.CycleStore, "save_submitted", interrupted)
        assert trnjobs("submit")[0] == 143
    assert "cycle 2026-11-20: interrupted" in trnjobs("status")[1]
    assert "cycle 2026-11-20: cancelled" in trnjobs("cancel", "--reason=too late")[1]
    page = trnjobs.page()
    assert 'class="cancelled">cancelled' in page and "too late" in page
    assert f"0 of {len(left)} job" in page
    assert trnjobs.states() == dict.fromkeys(left, "CANCELLED")
    assert trnjobs.status()["closed"]["outcome"] == "cancelled"
    assert trnjobs("submit")[0] == 143
    assert trnjobs.ran() == []
    assert trnjobs("retry")[0] == 0
    assert trnjobs.ran() == ALL


@pytest.mark.fault
@pytest.mark.parametrize("calls", [(1, 4, 8, 12), (2, 16, 20, 30), (6, 10, 25, 60)])
def test_killed_at_any_change_every_job_still_runs_once(
    calls: tuple[int, ...], trnjobs: Trnjobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`submit` is killed just before the n-th change of a file, start of a process or signal of each life."""
    monkeypatch.setattr(cycle, "LEASE_S", 0.0)  # else the next one has to wait for that of the dead
    changes = FILE_CHANGES | {"subprocess.Popen", "os.kill"}
    ends = [killed_at(number, lambda: trnjobs("submit"), changes) for number in calls]
    assert -signal.SIGKILL in ends
    code, text = trnjobs("submit")
    assert code == 0, text
    assert trnjobs.ran() == ALL
    assert trnjobs.states() == dict.fromkeys(ORDER, "SUCCEEDED")
    assert "5 of 5 jobs succeeded" in trnjobs.page()


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["logs", "tarin"], "no job 'tarin' (did you mean train?)"),
        (["logs", "embed"], "embed is an array of 2"),
        (["logs", "report"], "report has no attempt 1"),
        (["logs", "train", "--attempt=2"], "train has no attempt 2"),
        (["logs", "train", "--node=1"], "train: no log of attempt 1, node 1"),
        (["logs"], "the following arguments are required: job"),
        (["status", "--cycle=2026-11-21"], "cycle 2026-11-21 has no jobs"),
        *(([name, "--cycle=2026-11-21"], "cycle 2026-11-21 has no jobs") for name in ("cancel", "retry", "reconcile")),
        (["cost", "--last=0"], "argument --last"),
        (["cost", "--last=some"], "argument --last: invalid count value: 'some'"),
        (["status", "--watch", "--every=x"], "argument --every: invalid seconds value: 'x'"),
        (["status", "--watch", "--json"], "--watch and --json are both set"),
        (["submit", "--target=moon"], "invalid choice: 'moon'"),
        (["submit", "--cycle=2026-11-21", "--jobs.train.vcpus=5"], "1 jobs need more than this machine has"),
        (["submit", "today"], "unrecognized arguments: today"),
        (["submti"], "unknown command 'submti' (did you mean submit?)"),
    ],
)
def test_rubbish_is_refused_with_what_was_expected(
    words: list[str], seen: str, half_done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main([words[0], f"--workspace={half_done}", *CYCLE, *words[1:]])
    err = capsys.readouterr().err
    assert (code, seen in err, "Traceback" in err) == (78, True, False), err
    assert "expected: " in err


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a cycle in which embed failed; nothing here changes it."""
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(place)
        monkeypatch.setattr(plan, "AFTER", ORDER)
        monkeypatch.setattr(plan, "ENTRY", (sys.executable, "-S", "-c", CODE))
        (place / "exit-embed:0").write_text("65")
        assert cli.main(["submit", f"--workspace={place / 'workspace'}", *CYCLE]) == 65
    return place / "workspace"
