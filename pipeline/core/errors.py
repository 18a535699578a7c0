"""Error classes and their exit codes.

`trnjobs` derives AWS Batch retry rules from `EXIT_TABLE`. No other module defines exit codes.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


class TrnpipeError(Exception):
    """An expected failure, with the problem, the expectation and the next command in one message.

    Args:
        seen: the problem, with the offending value.
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
    """Bad settings or command line."""

    exit_code = 78


class DataError(TrnpipeError):
    """Input that cannot be used."""

    exit_code = 65


class CheckpointError(TrnpipeError):
    """No valid checkpoint to load."""

    exit_code = 74


class NumericError(TrnpipeError):
    """NaN or divergence beyond the guard's patience."""

    exit_code = 70


class GateRefused(TrnpipeError):
    """The candidate does not pass the gate."""

    exit_code = 80


class TransientError(TrnpipeError):
    """A failure that a retry may fix: device, other rank, collective time-out, storage deadline, unhealthy host."""

    exit_code = 75
    retry = True


class Preempted(TrnpipeError):
    """Stopped by SIGTERM or SIGINT. The state is saved and another attempt continues."""

    exit_code = 143
    retry = True


@dataclass(frozen=True)
class ExitRule:
    """An exit code, and whether AWS Batch should retry it."""

    name: str
    exit_code: int
    retry: bool


EXIT_OK = 0
EXIT_BUG = 1
EXIT_TABLE: tuple[ExitRule, ...] = tuple(
    ExitRule(error.__name__, error.exit_code, error.retry)
    for error in (ConfigError, DataError, CheckpointError, NumericError, GateRefused, TransientError, Preempted)
)


# The end of the log of a failed command: trnpipe and trnjobs print `trnpipe train: DataError: seen`, then
# `  expected: ...` and `  next: ...`. Python prints a traceback. Launchers of ranks may prefix lines with `[0]`.

MAX_ERROR_LINES = 12
MAX_ERROR_CHARACTERS = 1000
"""Maximum length of a line."""
_CODES = {rule.name: rule.exit_code for rule in EXIT_TABLE}
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_RANK = re.compile(r"\[[\w -]{1,20}\]:? ?")
_COMMAND = re.compile(r"(trnpipe|trnjobs)[\w -]*: ")
_ERROR = re.compile(rf"(?:trnpipe|trnjobs)[\w -]*: (?:exit \d+: )?(?P<error>(?P<name>{'|'.join(_CODES)}): .*)")
_POST_MORTEM = re.compile(r"trnjobs-entry: (no )?post-mortem: ")
_TRACEBACK = "Traceback (most recent call last):"


def error_in_log(lines: Iterable[str], exit_code: int | None = None) -> tuple[str, ...]:
    """Return the error at the end of a log, in at most MAX_ERROR_LINES lines without control characters.

    This is the last TrnpipeError (one with this exit code if possible), else the last traceback, else the last lines.
    Empty for an empty log.
    """
    printed = [text for line in lines if (text := _printable(line)).strip()]
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
        if num_omitted > 0:  # the expectation and the next command are the last lines
            message[MAX_ERROR_LINES - 5 : -4] = [f"  ... ({num_omitted + 1} lines)"]
        return tuple(message)
    if trace >= 0:
        rank = _rank(printed[trace])
        message = [line[len(rank) :] for line in printed[trace:] if _rank(line) == rank]
        end = next((i for i, line in enumerate(message) if _COMMAND.match(line)), len(message))
        return tuple(message[:end][-MAX_ERROR_LINES:])
    return tuple([line for line in printed if not _POST_MORTEM.match(line)][-MAX_ERROR_LINES:])


def headline(error: Sequence[str]) -> str:
    """Return the most informative line of an error from a log: the problem, or the last line of the command."""
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
    """Return a line as a terminal shows it, without colours. Of a progress bar only the last state remains."""
    text = _CONTROL.sub("", line.rstrip().rpartition("\r")[2])[:MAX_ERROR_CHARACTERS]
    return "".join(" " if unicodedata.category(char)[0] == "C" else char for char in text).rstrip()


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an exception, or its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def exit_code_of(error: BaseException) -> int:
    """Return the process exit code for an uncaught exception."""
    if isinstance(error, KeyboardInterrupt):
        return Preempted.exit_code
    return error.exit_code if isinstance(error, TrnpipeError) else EXIT_BUG
