"""Error classes and their exit codes.

This is the only module that defines exit codes. `trnjobs` derives the AWS Batch retry rules from `EXIT_TABLE`.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


class TrnpipeError(Exception):
    """Base class for expected failures. These are reported without a traceback.

    Args:
        seen: the problem, including the offending value.
        expected: a description of valid input.
        next_command: the command or edit that fixes the problem.
    """

    exit_code: ClassVar[int] = 1
    retry: ClassVar[bool] = False

    def __init__(self, seen: str, *, expected: str = "", next_command: str = "") -> None:
        self.seen = seen
        self.expected = expected
        self.next_command = next_command
        parts = [seen]
        if expected:
            parts.append(f"expected: {expected}")
        if next_command:
            parts.append(f"next: {next_command}")
        super().__init__("\n  ".join(parts))


class ConfigError(TrnpipeError):
    """Raised if the settings or the command line are invalid."""

    exit_code = 78


class DataError(TrnpipeError):
    """Raised if the input data can't be used."""

    exit_code = 65


class CheckpointError(TrnpipeError):
    """Raised if there is no valid checkpoint to load."""

    exit_code = 74


class NumericError(TrnpipeError):
    """Raised if the loss is NaN or diverges for longer than the guard tolerates."""

    exit_code = 70


class GateRefused(TrnpipeError):
    """Raised if the candidate doesn't pass the gate."""

    exit_code = 80


class TransientError(TrnpipeError):
    """Raised for failures that may not occur again on a retry.

    Examples are device errors, a failure on a different rank, a collective that timed out, a storage request that hit
    its deadline, and an unhealthy host.
    """

    exit_code = 75
    retry = True


class AttemptsExhausted(TrnpipeError):
    """The result of an attempt that failed with a TransientError and was the last one allowed by `jobs.*.attempts`.

    AWS Batch counts preemptions as attempts, so it would otherwise retry a job that keeps failing until the attempts
    for preemptions are used up as well.
    """

    exit_code = 69


class Preempted(TrnpipeError):
    """Raised if the process is stopped by SIGTERM or SIGINT, so that it can save its state and resume later."""

    exit_code = 143
    retry = True


@dataclass(frozen=True)
class ExitRule:
    """An exit code and whether AWS Batch should retry a job that exits with it."""

    name: str
    exit_code: int
    retry: bool


EXIT_OK = 0
EXIT_BUG = 1
EXIT_TABLE: tuple[ExitRule, ...] = tuple(
    ExitRule(error.__name__, error.exit_code, error.retry)
    for error in (
        ConfigError,
        DataError,
        CheckpointError,
        NumericError,
        GateRefused,
        TransientError,
        AttemptsExhausted,
        Preempted,
    )
)
EXIT_NAMES = {rule.exit_code: rule.name for rule in EXIT_TABLE}


def reported_name(error: BaseException) -> str:
    """Return the name to report an error with, which is that of its class or base class in `EXIT_TABLE`, if any."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((name for name in names if name in _CODES), type(error).__name__)


def cause_code(exit_code: int | None) -> int | None:
    """Return the exit code of the error that ended an attempt, which is a TransientError if it was the last attempt."""
    return TransientError.exit_code if exit_code == AttemptsExhausted.exit_code else exit_code


# Find the error at the end of a failed command's log. For an expected failure, trnpipe and trnjobs print
# `trnpipe train: DataError: seen`, followed by `  expected: ...` and `  next: ...`. For a bug, Python prints a
# traceback. Note that the launcher may prefix every line with the rank, as in `[0]`.

MAX_ERROR_LINES = 12
MAX_ERROR_CHARACTERS = 1000
"""Longer lines are cut."""
_CODES = {rule.name: rule.exit_code for rule in EXIT_TABLE}
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_RANK = re.compile(r"\[[\w -]{1,20}\]:? ?")
_COMMAND = re.compile(r"(trnpipe|trnjobs)[\w -]*: ")
_ERROR = re.compile(rf"(?:trnpipe|trnjobs)[\w -]*: (?:exit \d+: )?(?P<error>(?P<name>{'|'.join(_CODES)}): .*)")
_POST_MORTEM = re.compile(r"trnjobs-entry: (no )?post-mortem: ")
_TRACEBACK = "Traceback (most recent call last):"


def error_in_log(lines: Iterable[str], exit_code: int | None = None) -> tuple[str, ...]:
    """Return the error at the end of a log as at most MAX_ERROR_LINES lines without control characters.

    This is the last TrnpipeError, preferably one that matches `exit_code`. If the log has none, fall back to the last
    traceback, and then to the last lines of the log. The result is only empty if the log is empty.
    """
    printed = [text for line in lines if (text := _printable(line)).strip()]
    exit_code = cause_code(exit_code)
    errors = [(index, match) for index, line in enumerate(printed) if (match := _ERROR.match(_RANK.sub("", line, 1)))]
    with_code = [error for error in errors if _CODES[error[1]["name"]] == exit_code]
    trace = max((i for i, line in enumerate(printed) if _RANK.sub("", line, 1) == _TRACEBACK), default=-1)
    if with_code or (errors and errors[-1][0] > trace):
        index, match = (with_code or errors)[-1]
        rank = _rank(printed[index])
        message = [match["error"]]
        for line in (other[len(rank) :] for other in printed[index + 1 :] if _rank(other) == rank):
            if not line.startswith("  "):
                break
            message.append(line)
        num_omitted = len(message) - MAX_ERROR_LINES
        if num_omitted > 0:  # cut from the middle, because the last lines say what is expected and what to do next
            message[MAX_ERROR_LINES - 5 : -4] = [f"  ... ({num_omitted + 1} lines)"]
        return tuple(message)
    if trace >= 0:
        rank = _rank(printed[trace])
        message = [line[len(rank) :] for line in printed[trace:] if _rank(line) == rank]
        end = next((i for i, line in enumerate(message) if _COMMAND.match(line)), len(message))
        return tuple(message[:end][-MAX_ERROR_LINES:])
    return tuple([line for line in printed if not _POST_MORTEM.match(line)][-MAX_ERROR_LINES:])


def headline(error: Sequence[str]) -> str:
    """Return the most informative line of an error that was found by `error_in_log`.

    For a TrnpipeError this is the problem. For anything else it is the last line that was not printed by trnpipe.
    """
    if not error:
        return ""
    name, _, seen = error[0].partition(": ")
    if name in _CODES:
        return seen
    return next((line for line in reversed(error) if not _COMMAND.match(line)), error[-1]).strip()


def _rank(line: str) -> str:
    match = _RANK.match(line)
    return match[0] if match else ""


def _printable(line: str) -> str:
    """Return a line the way a terminal would display it, without colors and with only the last state of a bar."""
    text = _CONTROL.sub("", line.rstrip().rpartition("\r")[2])[:MAX_ERROR_CHARACTERS]
    return "".join(" " if unicodedata.category(char)[0] == "C" else char for char in text).rstrip()


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its class if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def exit_code_of(error: BaseException) -> int:
    """Return the process exit code for an uncaught exception."""
    if isinstance(error, KeyboardInterrupt):
        return Preempted.exit_code
    return error.exit_code if isinstance(error, TrnpipeError) else EXIT_BUG
