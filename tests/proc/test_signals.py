"""Signals, with real processes: a loop that polls, a main thread stuck in C, workers, children, a second SIGINT."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipeline.proc.signals import has_stack_dumps

pytestmark = pytest.mark.fault

PREAMBLE = """
import ctypes, multiprocessing, os, signal, subprocess, sys, threading, time, types
import pipeline.proc.signals as signals
from pipeline.core.stop import StopSignal
from pipeline.core.errors import Preempted
from pipeline.proc.signals import stop_on_signals

stop = StopSignal()

def say(text):  # one write: two threads speak, and print writes the end of a line by itself
    os.write(1, (text + "\\n").encode())

def block_in_c():  # a default mutex locked twice: never returns, releases the GIL, is not interrupted by signals
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    say("ready")
    libc.pthread_mutex_lock(mutex)

def say_when_stopping():
    stop.wait(1000)
    say("stopping by " + stop.reason)

speaker = threading.Thread(target=say_when_stopping, daemon=True)
speaker.start()

def count_grace_from(event):  # not from the signal: on a busy machine what is to come first may take its time
    signals.time = types.SimpleNamespace(monotonic=lambda: event.wait() and time.monotonic())
"""


@contextmanager
def started(script: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that has said `ready`; killed at the end whatever happens."""
    command = [sys.executable, "-c", PREAMBLE + script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert read_line(process) == "ready", process.communicate(timeout=10)
        yield process
    finally:
        process.kill()
        process.communicate()


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def pending(pid: int) -> list[int]:
    """Signals that have not been delivered to a process yet."""
    (mask,) = (line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "ShdPnd" in line)
    return [signum for signum in range(1, 65) if int(mask, 16) >> signum - 1 & 1]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_polling_loop_stops_by_itself(signum: signal.Signals) -> None:
    script = """
with stop_on_signals(stop, grace_s=600):
    say("ready")
    try:
        while True:
            stop.wait(1000)
            stop.raise_if_set("waiting")
    except Preempted as error:
        say("saved")
        sys.exit(error.exit_code)
"""
    with started(script) as process:
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
        assert "saved" in out
        assert process.returncode == 143
        if signum == signal.SIGTERM:  # the line for Ctrl-C may come too late for a process that ends at once
            assert "Ctrl-C again" not in err


def test_ctrl_c_is_answered_at_once_while_the_main_thread_is_in_c() -> None:
    with started("with stop_on_signals(stop, grace_s=600): block_in_c()") as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline() == "stopping: saving state (press Ctrl-C again to exit immediately)\n"
        assert process.poll() is None


def test_a_main_thread_stuck_in_c_is_ended_after_the_grace() -> None:
    script = """
signals.LAST_HOOK_S = 60

def last_hook(reason):
    speaker.join()
    say("last words: " + reason)

with stop_on_signals(stop, grace_s=0.3, last_hook=last_hook):
    block_in_c()
"""
    with started(script) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 143
        assert "stopping by SIGTERM" in out
        assert "last words: SIGTERM, not stopped within 0.3 s" in out
        assert "exit 143" in err


def test_a_last_hook_that_hangs_or_fails_changes_nothing() -> None:
    script = """
signals.LAST_HOOK_S = 0.1
with stop_on_signals(stop, grace_s=0.1, last_hook=lambda reason: time.sleep(1000)):
    block_in_c()
"""
    for hook in ("time.sleep(1000)", "1 / 0"):
        with started(script.replace("time.sleep(1000)", hook)) as process:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            assert process.returncode == 143


def test_a_second_sigint_ends_at_once_a_second_sigterm_does_not() -> None:
    with started("with stop_on_signals(stop, grace_s=600): block_in_c()") as process:
        process.send_signal(signal.SIGTERM)
        assert read_line(process) == "stopping by SIGTERM"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        while signal.SIGINT in pending(process.pid):  # two that wait would be one
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143
        assert "second SIGINT" in err


def test_children_do_not_outlive_a_forced_end() -> None:
    script = """
child = subprocess.Popen(["sleep", "1000"])
with stop_on_signals(stop, grace_s=0.1):
    block_in_c()
"""
    with started(script) as process:
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143
        assert not psutil.wait_procs([child], timeout=60)[1]


def test_a_shutdown_that_hangs_is_ended_too() -> None:
    script = """
import atexit
hangs = threading.Event()
count_grace_from(hangs)

def hang():
    say("hangs")
    hangs.set()
    block_in_c()

with stop_on_signals(stop, grace_s=0.1):
    say("ready")
    stop.wait(1000)
say("left")
atexit.register(hang)
"""
    with started(script) as process:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert {"left", "hangs"} <= set(out.splitlines())  # the watcher says why at some moment of its own
        assert process.returncode == 143


def test_ending_a_forked_worker_does_not_stop_the_parent() -> None:
    script = """
with stop_on_signals(stop, grace_s=600):
    codes = set()
    for _ in range(20):  # at once, and once it runs
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        worker.start()
        time.sleep(0.005 * (_ % 2))
        worker.terminate()
        worker.join()
        codes.add(worker.exitcode)
    stop.wait(0.2)
    say("ready")
    say(f"{stop.is_set()} {codes}")
"""
    with started(script) as process:
        assert read_line(process) == f"False {{-{int(signal.SIGTERM)}}}"


def test_handlers_are_put_back() -> None:
    script = """
def handlers():
    return [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]

before = handlers()
with stop_on_signals(stop):
    inside = handlers()
monitors = [thread for thread in threading.enumerate() if thread.name == "signals"]
say("ready")
say(f"{before == handlers()} {before == inside} {signal.set_wakeup_fd(-1)} {monitors}")
"""
    with started(script) as process:
        assert read_line(process) == "True False -1 []"


def test_a_program_that_handles_signals_itself_is_ended_after_the_grace() -> None:
    """And it alone: the end of a worker that has inherited the handler is none of ours."""
    script = """
from pipeline.proc.signals import limit_shutdown_time
limit_shutdown_time(grace_s=0.5)
parent, handled = os.getpid(), threading.Event()
signal.signal(signal.SIGTERM, lambda *_: os.getpid() == parent and (say("handled"), handled.set()))
fork = multiprocessing.get_context("fork")
worker = fork.Process(target=time.sleep, args=(0.2,))
worker.start()
worker.terminate()
worker.join()
time.sleep(0.7)
count_grace_from(handled)
say("ready")
while True:
    time.sleep(1000)
"""
    with started(script) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert (out, process.returncode) == ("handled\n", 143)
        assert "SIGTERM, not stopped within 0.5 s; exit 143" in err


def test_stacks_are_shown_on_request_even_from_within_c(tmp_path: Path) -> None:
    script = f"""
from pipeline.proc.signals import enable_stack_dumps
enable_stack_dumps({{"TRN_STACKS_DIR": {str(tmp_path)!r}}})
block_in_c()
"""
    with started(script) as process:
        assert has_stack_dumps(process.pid, tmp_path)
        file = tmp_path / str(process.pid)
        threads = ("say_when_stopping", "block_in_c")  # another one, and behind it the main one
        while not all(function in file.read_text() for function in threads):
            process.send_signal(signal.SIGUSR1)  # again, where a thread was only just started
            time.sleep(0.1)
            assert process.poll() is None
