"""From how a process ended to an exit code of the family."""

import signal

from pipeline.core.errors import EXIT_BUG, EXIT_OK, GateRefused, Preempted, TransientError

TOLD = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
MAY_PASS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT})
"""A killer for lack of memory, a faulty device or its driver: another try, perhaps on another machine, may succeed."""


def exit_code_of_return(returncode: int) -> int:
    """The code of a command from the return code of its process, which is minus the signal that ended it."""
    if returncode >= 0:
        return returncode
    if -returncode in TOLD:
        return Preempted.exit_code
    return TransientError.exit_code if -returncode in MAY_PASS else EXIT_BUG


def deserves_post_mortem(code: int, *, stopped: bool, killed: bool) -> bool:
    """A failure does. A refusal by the gate is none, nor is a command that stopped when it was told to."""
    if killed:
        return True
    return code not in (EXIT_OK, GateRefused.exit_code) and not (stopped and code == Preempted.exit_code)
