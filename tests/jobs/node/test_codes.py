"""From the end of a process to an exit code."""

import signal

import pytest

from jobs.node.command import exit_code_of_return


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
