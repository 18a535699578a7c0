"""Where the seconds of one try went, from the events it left. Pure, and exact: whole milliseconds that add up.

An event tells when something ended and how long it took; what lies between such pieces is named by what it leads up to.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pipeline.telemetry.events import EventName

NEVER = float("inf")


class Category(StrEnum):
    """What a machine did with its time. `waiting` is of the job: no machine waits with it."""

    START_UP = "start-up"
    """Until the work begins, and after it is done; checking the machine."""
    COMPILE = "compile"
    DATA_WAIT = "data wait"
    PRODUCTIVE = "productive"
    """Steps, rows and vectors that were kept."""
    CHECKPOINT = "checkpoint"
    """Training that stands still to save or to load."""
    EVALUATION = "evaluation"
    WASTED = "wasted"
    """Lost by a failure: what was done again, and all of a try that left nothing."""
    WAITING = "waiting"
    """Ready to run, in the queue."""


SPENT: tuple[Category, ...] = tuple(category for category in Category if category is not Category.WAITING)
Spent = dict[Category, int]
"""Milliseconds by category."""

WORK: Mapping[str, Category] = {
    "prepare": Category.PRODUCTIVE,
    "health": Category.START_UP,
    "compile": Category.COMPILE,
    "mine": Category.PRODUCTIVE,
    "train": Category.PRODUCTIVE,
    "evaluate": Category.EVALUATION,
    "embed": Category.PRODUCTIVE,
    "verify": Category.EVALUATION,
    "report": Category.EVALUATION,
}
"""What the time of a stage is, where its events do not say more."""
_ENDS = frozenset({EventName.STAGE_FINISHED, EventName.STAGE_FAILED, EventName.STAGE_SKIPPED})
_TIMED = frozenset({EventName.TRAIN_STEPS, EventName.HOLDOUT_EVALUATED})


@dataclass(frozen=True)
class Moment:
    """One line of the event log. `at_ms`: since 1970."""

    at_ms: int
    name: str
    fields: Mapping[str, Any]

    def number(self, name: str) -> float:
        """A field that is a number and not negative; 0 for anything else."""
        value = self.fields.get(name)
        usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < NEVER
        return float(value) if usable and value is not None else 0.0


def moment_of(line: Mapping[str, Any]) -> Moment | None:
    stamp, name = line.get("time"), line.get("event")
    if not isinstance(stamp, str) or not isinstance(name, str):
        return None
    try:
        at = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    fields = {key: value for key, value in line.items() if key not in ("time", "event")}
    return Moment(round(1000 * at.replace(tzinfo=at.tzinfo or UTC).timestamp()), name, fields)


@dataclass(frozen=True)
class Try:
    """One try of one job, on the clock of whoever runs the jobs. `kept`: it ended well, or has not ended yet."""

    stage: str
    start_ms: int
    stop_ms: int
    kept: bool
    moments: tuple[Moment, ...] = ()
    """Its own, in order of time."""
    kept_until: float = NEVER
    """Training steps after this one were done again, or are lost."""


@dataclass(frozen=True)
class _Piece:
    """Time that an event accounts for, cut into shares; `before` names the time since the piece before it."""

    start_ms: float
    end_ms: int
    before: Category
    shares: tuple[tuple[Category, float], ...] = ()


def spent_in(one: Try) -> Spent:
    """Milliseconds by category; they add up to the length of the try."""
    work = WORK.get(one.stage, Category.PRODUCTIVE)
    spent: Spent = dict.fromkeys(SPENT, 0)
    cursor = one.start_ms
    for piece in _train_pieces(one) if one.stage == "train" else _stage_pieces(one, work):
        start = min(max(cursor, round(piece.start_ms)), one.stop_ms)
        end = min(max(start, piece.end_ms), one.stop_ms)
        spent[piece.before] += start - cursor
        shares = piece.shares or ((piece.before, 1.0),)
        total = sum(share for _, share in shares) or 1.0
        reached = 0.0
        cursor = start
        for index, (category, share) in enumerate(shares, 1):  # whole milliseconds; the last share gets the rest
            reached += share
            until = end if index == len(shares) else min(end, start + round((end - start) * reached / total))
            spent[category] += until - cursor
            cursor = until
    is_done = any(moment.name in _ENDS for moment in one.moments)
    after = Category.WASTED if not one.kept else Category.START_UP if is_done else work
    spent[after] += max(0, one.stop_ms - cursor)
    if one.kept or spent[Category.PRODUCTIVE]:
        return spent
    return dict.fromkeys(SPENT, 0) | {Category.WASTED: sum(spent.values())}


def with_kept_until(tries: Sequence[Try]) -> list[Try]:
    """The tries of one training job, with the steps of each that a later one continued from.

    A later try that began at an earlier step has done those after it again. Where none came later, what was saved
    last is kept for whoever continues.
    """
    starts = [
        next((moment.number("step") for moment in one.moments if moment.name == EventName.TRAIN_STARTED), None)
        for one in tries
    ]
    saved, made = 0.0, []
    for index, one in enumerate(tries):
        saved = max([saved, *(m.number("step") for m in one.moments if m.name == EventName.CHECKPOINT_SAVED)])
        later = [step for step in starts[index + 1 :] if step is not None]
        made.append(replace(one, kept_until=min(later, default=NEVER if one.kept else saved)))
    return made


def _train_pieces(one: Try) -> list[_Piece]:
    """Steps and evaluations; time between them went into checkpoints."""
    pieces: list[_Piece] = []
    compiled_ms = defaultdict[float, float](float)  # by the step that was reported just before
    for moment in one.moments:
        if moment.name == EventName.GRAPH_COMPILED:
            compiled_ms[moment.number("step")] += 1000 * moment.number("compile_s")
    last_timed = max((index for index, moment in enumerate(one.moments) if moment.name in _TIMED), default=-1)
    reached, has_begun = 0.0, False
    for index, moment in enumerate(one.moments):
        between = Category.CHECKPOINT if reached <= one.kept_until else Category.WASTED
        before = between if has_begun else Category.START_UP
        step, length_ms = moment.number("step"), 1000 * moment.number("seconds")
        if moment.name == EventName.TRAIN_STEPS:
            has_begun, reached = True, step
            losses = moment.fields.get("losses")
            count = max(1, len(losses)) if isinstance(losses, list) else 1
            kept = min(1.0, max(0.0, (one.kept_until - (step - count)) / count))
            waiting = min(1.0, moment.number("data_wait_share"))
            compiling = min(1.0 - waiting, compiled_ms[step] / length_ms if length_ms else 0.0)
            shares = (
                (Category.WASTED, 1.0 - kept),
                (Category.DATA_WAIT, kept * waiting),
                (Category.COMPILE, kept * compiling),
                (Category.PRODUCTIVE, kept * (1.0 - waiting - compiling)),
            )
            pieces.append(_Piece(moment.at_ms - length_ms, moment.at_ms, before, shares))
        elif moment.name == EventName.HOLDOUT_EVALUATED:
            kind = Category.EVALUATION if step <= one.kept_until else Category.WASTED
            pieces.append(_Piece(moment.at_ms - length_ms, moment.at_ms, before, ((kind, 1.0),)))
        elif moment.name in (EventName.TRAIN_STARTED, EventName.STAGE_FINISHED) or (
            moment.name == EventName.CHECKPOINT_SAVED and index > last_timed  # others were saved behind the steps
        ):
            pieces.append(_Piece(moment.at_ms, moment.at_ms, before))
    return pieces


def _stage_pieces(one: Try, work: Category) -> list[_Piece]:
    """From its start to its end the stage works. Of one that failed, only what it has left for the next try counts."""
    pieces: list[_Piece] = []
    for moment in one.moments:
        if moment.name == EventName.STAGE_STARTED or (one.kept and moment.name == EventName.STAGE_SKIPPED):
            pieces.append(_Piece(moment.at_ms, moment.at_ms, Category.START_UP))
        elif (one.kept and moment.name in _ENDS) or (not one.kept and moment.name == EventName.PARTITION_PREPARED):
            pieces.append(_Piece(moment.at_ms, moment.at_ms, work))
        elif not one.kept and moment.name == EventName.PART_EMBEDDED:
            start_ms = moment.at_ms - 1000 * moment.number("seconds")
            pieces.append(_Piece(start_ms, moment.at_ms, Category.WASTED, ((work, 1.0),)))
    return pieces
