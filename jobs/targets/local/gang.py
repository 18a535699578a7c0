"""The nodes of one attempt, as AWS Batch runs them; a job of one container is a gang of its main node alone.

The main node starts first, the others when it runs. When it ends the others are stopped, and its end is that of the
attempt. The end of another node changes nothing. Source: the user guide of AWS Batch, multi-node parallel jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from jobs.cycle import states
from jobs.cycle.states import AttemptEnd

SIGKILL_CODE = 137  # 128 + 9, as a container reports it


class Phase(StrEnum):
    """Where one node is."""

    ABSENT = "absent"
    STARTING = "starting"
    """Under way, its command has not begun."""
    RUNNING = "running"
    ENDED = "ended"


StoppedBy = Literal["", "timeout", "SIGTERM", "SIGINT"]
"""What made a keeper end its command. SIGINT: the user interrupted the engine."""


@dataclass(frozen=True)
class NodeEnd:
    """How the command of one node ended. `at`: seconds since 1970; None: nobody knows."""

    at: float | None = None
    exit_code: int | None = None
    stopped_by: StoppedBy = ""
    out_of_memory: bool = False
    lost: bool = False
    """Its keeper died, so nobody knows."""
    error: str = ""
    """Why it could not be started."""


@dataclass(frozen=True)
class NodeView:
    """What is seen of one node now."""

    phase: Phase
    started_at: float | None = None
    end: NodeEnd | None = None


@dataclass(frozen=True)
class Step:
    """What to do with the nodes of an attempt now, by index."""

    start: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    exclude: tuple[int, ...] = ()
    """Have not started, and never may."""
    is_over: bool = False


def next_step(nodes: Sequence[NodeView], *, stopping: bool) -> Step:
    """`stopping`: the attempt is to end, because of a user."""
    main = nodes[0].phase
    if main is Phase.ENDED or stopping:
        return Step(
            stop=_those(nodes, Phase.STARTING, Phase.RUNNING),
            exclude=_those(nodes, Phase.ABSENT),
            is_over=all(node.phase is Phase.ENDED for node in nodes),
        )
    if main is Phase.ABSENT:
        return Step(start=(0,))
    return Step(start=_those(nodes, Phase.ABSENT) if main is Phase.RUNNING else ())


def attempt_end(main: NodeEnd, *, cancelled: str = "", interrupted: bool = False) -> AttemptEnd:
    """The end of an attempt in the words of AWS Batch.

    `cancelled`: a user's reason. `interrupted`: the engine is being stopped. A SIGKILL that is neither ours nor for
    want of memory did not come from the code: it counts as a lost machine.
    """
    code = main.exit_code
    if cancelled and (main.stopped_by or code != 0):
        return AttemptEnd(code, cancelled)
    if main.stopped_by == "timeout":
        return AttemptEnd(code, states.TIMED_OUT)
    if (main.stopped_by == "SIGINT" and code != 0) or (interrupted and main.error):
        return AttemptEnd(code, states.INTERRUPTED)
    if main.lost:
        return AttemptEnd(None, states.HOST_TERMINATED)
    if code is None:
        return AttemptEnd(None, states.TASK_NOT_STARTED, f"CannotStartContainerError: {main.error}")
    if code == SIGKILL_CODE and main.out_of_memory:
        return AttemptEnd(code, states.EXITED, "OutOfMemoryError: Container killed due to memory usage")
    if code == SIGKILL_CODE and not main.stopped_by:
        return AttemptEnd(code, states.HOST_TERMINATED, "Killed from outside")
    return AttemptEnd(code, states.EXITED)


def _those(nodes: Sequence[NodeView], *phases: Phase) -> tuple[int, ...]:
    return tuple(index for index, node in enumerate(nodes) if node.phase in phases)
