"""From the end of a process to an exit code, and to a post-mortem."""

import signal

import pytest

from jobs.node.command import deserves_post_mortem, exit_code_of_return


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT), 75),
        ((signal.SIGTERM, signal.SIGINT), 143),
        ((signal.SIGILL, signal.SIGUSR1), 1),
    ],
)
def test_codes_pass_and_signals_become_codes(signals: tuple[signal.Signals, ...], code: int) -> None:
    assert [exit_code_of_return(-signum) for signum in signals] == [code] * len(signals)
    codes = [0, 1, 65, 70, 74, 75, 78, 80, 143]
    assert [exit_code_of_return(one) for one in codes] == codes


@pytest.mark.parametrize(
    ("code", "stopped", "killed", "expected"),
    [
        (0, False, False, False),
        (1, False, False, True),
        (80, False, False, False),
        (143, True, False, False),
        (143, False, False, True),
        (143, True, True, True),
        (65, True, False, True),
    ],
)
def test_who_gets_a_post_mortem(code: int, stopped: bool, killed: bool, expected: bool) -> None:
    assert deserves_post_mortem(code, stopped=stopped, killed=killed) is expected
