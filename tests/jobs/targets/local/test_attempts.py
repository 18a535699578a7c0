"""What happens to the nodes of an attempt, and how its end reads, one row each."""

import pytest

from jobs.cycle.job_states import EXITED, HOST_TERMINATED, INTERRUPTED, TASK_NOT_STARTED, TIMED_OUT, AttemptEnd
from jobs.targets.local.engine import Step, attempt_end, next_step
from jobs.targets.local.nodes import NodeEnd, NodeView, Phase

A, S, R, E = Phase.ABSENT, Phase.STARTING, Phase.RUNNING, Phase.ENDED


@pytest.mark.parametrize(
    ("phases", "stopping", "expected"),
    [
        ([A], False, Step(start=(0,))),
        ([S], False, Step()),
        ([R], False, Step()),
        ([E], False, Step(is_over=True)),
        ([A, A, A], False, Step(start=(0,))),  # the main node first
        ([S, A, A], False, Step()),
        ([R, A, A], False, Step(start=(1, 2))),  # the others when it runs
        ([R, S, A], False, Step(start=(2,))),
        ([R, E, R], False, Step()),  # the death of another node changes nothing
        ([R, E, E], False, Step()),
        ([E, R, S], False, Step(stop=(1, 2))),  # the main node's end stops the others
        ([E, E, R], False, Step(stop=(2,))),
        ([E, A, E], False, Step(exclude=(1,))),
        ([E, E, E], False, Step(is_over=True)),
        ([R, R, A], True, Step(stop=(0, 1), exclude=(2,))),
        ([S], True, Step(stop=(0,))),
        ([A], True, Step(exclude=(0,))),
        ([E, E], True, Step(is_over=True)),
    ],
)
def test_the_next_step(phases: list[Phase], stopping: bool, expected: Step) -> None:
    assert next_step([NodeView(phase) for phase in phases], stopping=stopping) == expected


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
