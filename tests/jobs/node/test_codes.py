"""From the end of a process to an exit code."""

import signal

import pytest

from jobs.node.command import deserves_post_mortem, exit_code_of_return


@pytest.mark.parametrize("code", [0, 1, 65, 70, 74, 75, 78, 80, 143])
def test_codes_of_the_family_pass(code: int) -> None:
    assert exit_code_of_return(code) == code


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGKILL, 75),
        (signal.SIGSEGV, 75),
        (signal.SIGBUS, 75),
        (signal.SIGABRT, 75),
        (signal.SIGTERM, 143),
        (signal.SIGINT, 143),
        (signal.SIGILL, 1),
        (signal.SIGUSR1, 1),
    ],
)
def test_signals(signum: signal.Signals, code: int) -> None:
    assert exit_code_of_return(-signum) == code


@pytest.mark.parametrize(
    ("code", "stopped", "killed", "expected"),
    [
        (0, False, False, False),
        (1, False, False, True),
        (75, False, False, True),
        (80, False, False, False),
        (143, True, False, False),
        (143, False, False, True),
        (143, True, True, True),
        (65, True, False, True),
    ],
)
def test_who_gets_a_post_mortem(code: int, stopped: bool, killed: bool, expected: bool) -> None:
    assert deserves_post_mortem(code, stopped=stopped, killed=killed) is expected
