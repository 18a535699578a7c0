"""What is said of a change of state."""

import pytest

from jobs.cycle.job_records import AttemptRecord, JobRecord, JobState
from jobs.cycle.job_states import EXITED, HOST_TERMINATED, INTERRUPTED, TIMED_OUT, change_line

LOG = "cycles/c/jobs/local/attempts/x/1/node-0/log.txt"


def attempt(code: int | None = None, status_reason: str = "", reason: str = "") -> AttemptRecord:
    return AttemptRecord(exit_code=code, status_reason=status_reason, reason=reason, log_streams=(LOG, "other"))


@pytest.mark.parametrize(
    ("state", "status_reason", "attempts", "expected"),
    [
        ("PENDING", "", [], ""),
        ("STARTING", "", [attempt()], "attempt 1"),
        ("RUNNING", "", [attempt(75, EXITED), attempt()], f"attempt 2  {LOG}"),
        ("RUNNABLE", EXITED, [attempt(75, EXITED)], "attempt 1 ended with exit code 75; tried again"),
        (
            "RUNNABLE",
            HOST_TERMINATED,
            [attempt(None, HOST_TERMINATED)],
            f"attempt 1 ended: {HOST_TERMINATED}; tried again",
        ),
        (
            "RUNNABLE",
            HOST_TERMINATED,
            [attempt(137, HOST_TERMINATED, "Killed from outside")],
            f"attempt 1 ended with exit code 137: {HOST_TERMINATED}, Killed from outside; tried again",
        ),
        ("RUNNABLE", INTERRUPTED, [attempt(143, INTERRUPTED)], f"attempt 1 ended with exit code 143: {INTERRUPTED}"),
        ("FAILED", TIMED_OUT, [attempt(143, TIMED_OUT)], f"attempt 1 ended with exit code 143: {TIMED_OUT}"),
        ("FAILED", EXITED, [attempt(65, EXITED)], "attempt 1 ended with exit code 65"),
        ("FAILED", "not run: prepare failed", [], "not run: prepare failed"),
        ("CANCELLED", "cancelled: by hand", [attempt(75, EXITED)], "cancelled: by hand"),
    ],
)
def test_one_line_a_change(state: str, status_reason: str, attempts: list[AttemptRecord], expected: str) -> None:
    record = JobRecord(
        name="train",
        id="x",
        state=JobState(state),
        status_reason=status_reason,
        created_at=0.0,
        attempts=tuple(attempts),
    )
    assert change_line(record) == f"train        {state:<9}  {expected}".rstrip()
