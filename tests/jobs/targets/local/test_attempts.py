"""How the end of an attempt reads, one row each."""

import pytest

from jobs.cycle.job_states import EXITED, HOST_TERMINATED, INTERRUPTED, TASK_NOT_STARTED, TIMED_OUT, AttemptEnd
from jobs.targets.local.nodes import NodeEnd
from jobs.targets.local.target import attempt_end

OOM = "OutOfMemoryError: Container killed due to memory usage"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (NodeEnd(exit_code=0), AttemptEnd(0, EXITED)),
        (NodeEnd(exit_code=75), AttemptEnd(75, EXITED)),
        (NodeEnd(exit_code=137, out_of_memory=True), AttemptEnd(137, EXITED, OOM)),
        (NodeEnd(exit_code=75, out_of_memory=True), AttemptEnd(75, EXITED)),  # another process was killed
        (NodeEnd(exit_code=137), AttemptEnd(137, HOST_TERMINATED, "Killed from outside")),
        (NodeEnd(exit_code=137, stopped_by="SIGTERM"), AttemptEnd(137, EXITED)),
        (NodeEnd(exit_code=143, stopped_by="SIGTERM"), AttemptEnd(143, EXITED)),
        (NodeEnd(exit_code=143, stopped_by="timeout"), AttemptEnd(143, TIMED_OUT)),
        (NodeEnd(exit_code=137, stopped_by="timeout"), AttemptEnd(137, TIMED_OUT)),
        (NodeEnd(exit_code=0, stopped_by="timeout"), AttemptEnd(0, TIMED_OUT)),
        (NodeEnd(exit_code=143, stopped_by="SIGINT"), AttemptEnd(143, INTERRUPTED)),
        (NodeEnd(exit_code=0, stopped_by="SIGINT"), AttemptEnd(0, EXITED)),  # it was ready just then
        (NodeEnd(lost=True), AttemptEnd(None, HOST_TERMINATED)),
        (NodeEnd(error="x: gone"), AttemptEnd(None, TASK_NOT_STARTED, "CannotStartContainerError: x: gone")),
    ],
)
def test_the_end_of_an_attempt_in_the_words_of_batch(end: NodeEnd, expected: AttemptEnd) -> None:
    assert attempt_end(end) == expected


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (NodeEnd(exit_code=143, stopped_by="SIGTERM"), AttemptEnd(143, "why")),
        (NodeEnd(exit_code=0, stopped_by="SIGTERM"), AttemptEnd(0, "why")),
        (NodeEnd(exit_code=75), AttemptEnd(75, "why")),
        (NodeEnd(lost=True), AttemptEnd(None, "why")),
        (NodeEnd(exit_code=0), AttemptEnd(0, EXITED)),  # it had ended before
    ],
)
def test_cancelled(end: NodeEnd, expected: AttemptEnd) -> None:
    assert attempt_end(end, cancelled="why") == expected


@pytest.mark.parametrize(
    ("end", "status_reason"),
    [
        (NodeEnd(error="stopped before it began"), INTERRUPTED),
        (NodeEnd(exit_code=65), EXITED),  # its own failure, at the same moment
        (NodeEnd(lost=True), HOST_TERMINATED),
    ],
)
def test_interrupted(end: NodeEnd, status_reason: str) -> None:
    assert attempt_end(end, interrupted=True).status_reason == status_reason
