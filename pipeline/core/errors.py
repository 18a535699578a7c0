"""The error family, one class per fault, and the exit code of each.

`trnjobs` derives AWS Batch retry rules from `EXIT_TABLE`; nothing else may invent an exit code.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


class TrnpipeError(Exception):
    """An expected failure: seen, expected and the next command to run, in one message.

    Args:
        seen: what was found, with the value.
        expected: what would have been right.
        next_command: the command or edit that gets the user further.
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
    """Nothing valid to load."""

    exit_code = 74


class NumericError(TrnpipeError):
    """NaN or divergence beyond the guard's patience."""

    exit_code = 70


class GateRefused(TrnpipeError):
    """The candidate is not better than allowed."""

    exit_code = 80


class TransientError(TrnpipeError):
    """Device, peer, collective time-out, storage budget spent, unhealthy host: another try may succeed."""

    exit_code = 75
    retry = True


class Preempted(TrnpipeError):
    """SIGTERM or SIGINT: the state is saved, another attempt continues."""

    exit_code = 143
    retry = True


@dataclass(frozen=True)
class ExitRule:
    """One row of the table: an exit code and whether AWS Batch should retry it."""

    name: str
    exit_code: int
    retry: bool


EXIT_OK = 0
EXIT_BUG = 1
EXIT_TABLE: tuple[ExitRule, ...] = tuple(
    ExitRule(error.__name__, error.exit_code, error.retry)
    for error in (ConfigError, DataError, CheckpointError, NumericError, GateRefused, TransientError, Preempted)
)


# How a log ends when a command fails: the commands of this project print `trnpipe train: DataError: seen`, then
# `  expected: ...` and `  next: ...`; Python prints a traceback; torchrun and our launcher may put `[0]` before a line.

MAX_ERROR_LINES = 12
MAX_ERROR_CHARACTERS = 1000
"""Of one line."""
_CODES = {rule.name: rule.exit_code for rule in EXIT_TABLE}
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_RANK = re.compile(r"\[[\w -]{1,20}\]:? ?")
_OURS = re.compile(r"(trnpipe|trnjobs)[\w -]*: ")
_ERROR = re.compile(rf"(?:trnpipe|trnjobs)[\w -]*: (?:exit \d+: )?(?P<error>(?P<name>{'|'.join(_CODES)}): .*)")
_POST_MORTEM = re.compile(r"trnjobs-entry: (no )?post-mortem: ")
_TRACEBACK = "Traceback (most recent call last):"


def error_in_log(lines: Iterable[str], exit_code: int | None = None) -> tuple[str, ...]:
    """Return what a log says went wrong, in at most MAX_ERROR_LINES lines without control characters.

    It is the last error of the family above, of the class with this exit code if there is one; else the last traceback;
    else the last lines. Empty for an empty log.
    """
    shown = [one for line in lines if (one := _printable(line)).strip()]
    blocks = [(index, match) for index, line in enumerate(shown) if (match := _ERROR.match(_RANK.sub("", line, 1)))]
    of_code = [block for block in blocks if _CODES[block[1]["name"]] == exit_code]
    trace = max((i for i, line in enumerate(shown) if _RANK.sub("", line, 1) == _TRACEBACK), default=-1)
    if of_code or (blocks and blocks[-1][0] > trace):
        index, match = (of_code or blocks)[-1]
        rank = _rank(shown[index])
        found = [match["error"]]
        for line in (one[len(rank) :] for one in shown[index + 1 :] if _rank(one) == rank):
            if not line.startswith("  "):
                break
            found.append(line)
        left_out = len(found) - MAX_ERROR_LINES
        if left_out > 0:  # what was expected, and what to do next, stand last
            found[MAX_ERROR_LINES - 5 : -4] = [f"  ... ({left_out + 1} lines)"]
        return tuple(found)
    if trace >= 0:
        rank = _rank(shown[trace])
        found = [one[len(rank) :] for one in shown[trace:] if _rank(one) == rank]
        ended = next((i for i, line in enumerate(found) if _OURS.match(line)), len(found))
        return tuple(found[:ended][-MAX_ERROR_LINES:])
    return tuple([line for line in shown if not _POST_MORTEM.match(line)][-MAX_ERROR_LINES:])


def headline(error: Sequence[str]) -> str:
    """Return the one line of an error from a log that says most: what was seen, or the last line of the command."""
    if not error:
        return ""
    name, _, seen = error[0].partition(": ")
    return seen if name in _CODES else next((one for one in reversed(error) if not _OURS.match(one)), error[-1]).strip()


def _rank(line: str) -> str:
    match = _RANK.match(line)
    return match[0] if match else ""


def _printable(line: str) -> str:
    """What a terminal shows of a line, without colours; of a progress bar its last state."""
    text = _CONTROL.sub("", line.rstrip().rpartition("\r")[2])[:MAX_ERROR_CHARACTERS]
    return "".join(" " if unicodedata.category(one)[0] == "C" else one for one in text).rstrip()


def first_line(error: BaseException) -> str:
    """Of what an exception says; its class where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def exit_code_of(error: BaseException) -> int:
    """The process exit code for an exception that reached the top."""
    if isinstance(error, KeyboardInterrupt):
        return Preempted.exit_code
    return error.exit_code if isinstance(error, TrnpipeError) else EXIT_BUG
