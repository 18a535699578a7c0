"""The error family, one class per fault, and the exit code of each.

`trnjobs` derives AWS Batch retry rules from `EXIT_TABLE`; nothing else may invent an exit code.
"""

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


def first_line(error: BaseException) -> str:
    """Of what an exception says; its class where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def exit_code_of(error: BaseException) -> int:
    """The process exit code for an exception that reached the top."""
    if isinstance(error, KeyboardInterrupt):
        return Preempted.exit_code
    return error.exit_code if isinstance(error, TrnpipeError) else EXIT_BUG
