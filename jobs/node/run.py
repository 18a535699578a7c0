"""Run one attempt of a job on a node: start the command, supervise it, and determine the exit code."""

import json
import os
import platform
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from jobs.node.environment import (
    LOOPBACK,
    MAX_FAILURES,
    STARTS,
    NodeIdentity,
    Timing,
    batch_variables,
    count_start,
    final_exit_code,
    sagemaker_variables,
    write_failure,
)
from jobs.node.group import NodeGroup
from jobs.node.post_mortem import PostMortem, ProcessStatus, as_bytes, shown_environment
from jobs.node.spot import SPOT_NOTICE, watch_spot_notice
from pipeline.core.errors import (
    EXIT_BUG,
    EXIT_OK,
    ConfigError,
    GateRefused,
    Preempted,
    TransientError,
    TrnpipeError,
    error_in_log,
    headline,
    reported_name,
)
from pipeline.core.progress import Say
from pipeline.core.secrets import secret_values, without_secrets
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound, open_storage
from pipeline.parallel.world import has_efa, network_variables, own_interface
from pipeline.proc.children import EXPLAIN_S, adopt_orphans, oom_kill_count
from pipeline.proc.signals import STACKS_VARIABLE, has_stack_dumps
from pipeline.proc.tool import guarded_temp_folder
from pipeline.telemetry.events import code_version, read_events

PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "numpy", "pyarrow", "boto3")
EVENTS_BYTES = 512 * 1024
MIN_BUNDLE_S = 1.0
LINGER_S = 1.0
STACKS_S = 1.0  # how long processes have to write their stack traces before they are killed
UNKILLABLE_S = 4.0
POLL_S = 0.05
TAIL_BYTES = BLOCK_BYTES = 64 * 1024
END_S = 2.0


def run(command: Sequence[str], env: Mapping[str, str], say: Say) -> int:
    """Run a command as this node's part of the job, and return the exit code.

    When this function returns, all processes of the command have ended. If this process itself is killed, they are
    ended along with the container, or by the keeper of the local target.

    This function sets signal handlers, so it must be called in the main thread. Raises ConfigError if the environment
    is invalid.
    """
    timing = Timing.from_env(env)
    variables = batch_variables(env) | sagemaker_variables(env, gather_s=timing.gather_s)
    identity = NodeIdentity.from_env({**env, **variables})
    stop = StopSignal()
    for signum in (signal.SIGTERM, signal.SIGINT):  # PID 1 ignores signals without a handler
        signal.signal(signum, lambda number, frame: stop.set(signal.Signals(number).name))
    watch_spot_notice(stop, env)
    with guarded_temp_folder() as folder:
        env = {**env, **variables}  # the guard has also set variables, so do this afterwards
        group, linger_s = NodeGroup(identity, timing, say), 0.0
        try:
            attempt = Attempt(identity, timing, command, env, folder, group, stop, say)
            attempt.run()
            # Report a single line without secrets, which is the reason or, if there is none, the error in the log.
            error = error_in_log(attempt.process.log(), attempt.code) if attempt.process else ()
            attempt.count_failure()
            code = attempt.code
            if attempt.reason:
                say(f"exit {code}: {attempt.reason}")
            reason = str(without_secrets(attempt.reason or headline(error), secret_values(attempt.env)))
            group.acknowledge(code, reason)
            attempt.write_post_mortem()
            write_failure(env, *(group.job_result or (code, reason)))
            # The other nodes also need time to write their post-mortems.
            linger_s = timing.bundle_s if code and not attempt.stopped else LINGER_S
            return code
        finally:
            group.close(linger_s)


class Command:
    """A command that runs as a child process.

    Its output is copied to standard output. The last lines are also kept for the post-mortem.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stacks: Path) -> None:
        """Start the command without a shell. Its Python processes write stack traces to the empty folder `stacks`.

        Raises ConfigError if the command cannot be started.
        """
        self._stacks = stacks
        adopt_orphans()
        source, target = os.pipe()
        try:
            # Use a new session. Otherwise, a signal to our process group would reach the command twice, because we also
            # forward it.
            self._process = subprocess.Popen(  # noqa: S603 - a list, no shell
                command,
                env={**env, STACKS_VARIABLE: str(stacks)},
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            os.close(source)
            raise ConfigError(
                f"{command[0]!r} cannot be started: {error.strerror}",
                expected="a command that exists in the image",
                next_command="run the command manually in the same image",
            ) from error
        finally:
            os.close(target)
        self._tail = b""
        self._pump = threading.Thread(target=self._copy_output, args=(source,), name="log", daemon=True)
        self._pump.start()

    def log(self) -> tuple[str, ...]:
        """Return the last lines of the output. Invalid UTF-8 is replaced."""
        return tuple(self._tail.decode(errors="replace").splitlines())

    def returncode(self) -> int | None:
        """Return the exit code, or None while the command is still running. The code is negative after a signal.

        This also reaps orphaned processes that this process has adopted.
        """
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                ended = None
            if ended is None or ended.si_pid == 0:
                return self._process.poll()
            if ended.si_pid == self._process.pid:
                self._process.poll()
            else:
                with suppress(ChildProcessError):
                    os.waitpid(ended.si_pid, os.WNOHANG)

    def send_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the command itself, but not to its children."""
        self._process.send_signal(signum)

    def request_stacks(self) -> None:
        """Ask all Python processes of the command that support it to write their stack traces."""
        for process in self._descendants():
            with suppress(psutil.Error, ProcessLookupError):
                if has_stack_dumps(process.pid, self._stacks):
                    process.send_signal(signal.SIGUSR1)

    def stacks(self) -> dict[int, str]:
        """Return the stack traces by process id."""
        texts = {int(path.name): path.read_text(errors="replace") for path in sorted(self._stacks.glob("[0-9]*"))}
        return {pid: text for pid, text in texts.items() if text}

    def processes(self) -> tuple[ProcessStatus, ...]:
        """Return the status of all running processes of the command."""
        statuses = []
        for process in self._descendants():
            with suppress(psutil.Error), process.oneshot():  # the process may have ended in the meantime
                times, words = process.cpu_times(), tuple(process.cmdline())
                cpu_s, memory_bytes = round(times.user + times.system, 3), process.memory_info().rss
                statuses.append(ProcessStatus(process.pid, words, process.status(), cpu_s, memory_bytes))
        return tuple(statuses)

    def end(self) -> None:
        """Kill all remaining processes of the command, and wait for the rest of its output."""
        until = time.monotonic() + END_S
        while (processes := self._descendants()) and time.monotonic() < until:
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=0.05)
            self.returncode()
        self._pump.join(max(0.1, until - time.monotonic()))

    def _descendants(self) -> list[psutil.Process]:
        """Return all running descendants of this process, including adopted orphans (see `adopt_orphans`)."""
        with suppress(psutil.Error):
            children = psutil.Process().children(recursive=True)
            return [process for process in children if process.status() != psutil.STATUS_ZOMBIE]
        return []

    def _copy_output(self, source: int) -> None:
        """Copy the output until it is closed.

        If we cannot write to standard output, we continue to read, because otherwise the command would block.
        """
        target: int | None = 1
        while block := os.read(source, BLOCK_BYTES):
            self._tail = (self._tail + block)[-TAIL_BYTES:]
            try:
                while target is not None and block:
                    block = block[os.write(target, block) :]
            except OSError:
                target = None
        os.close(source)


STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
TRANSIENT_SIGNALS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT})
"""Signals caused by the out-of-memory killer, a faulty device or its driver, in which case a retry may succeed."""


def exit_code_of_return(returncode: int) -> int:
    """Convert the return code of a process to an exit code. It is negative if a signal ended the process."""
    if returncode >= 0:
        return returncode
    if -returncode in STOP_SIGNALS:
        return Preempted.exit_code
    return TransientError.exit_code if -returncode in TRANSIENT_SIGNALS else EXIT_BUG


@dataclass
class Attempt:
    """One attempt of a job on this node, which ends when the outcome on all nodes is known.

    The following attributes are the results of `run`:
        code: The exit code of the job, as far as this node knows.
        own_code: The exit code of the command on this node.
        returncode: The return code of the command's process, or None if it never ran.
        reason: Why the command was stopped or could not be started. Empty if it ended without being stopped.
        stop_requested_at: When the command was first asked to stop, on the monotonic clock.
        killed: Whether the command had to be killed, because it did not stop within the grace period.
        processes: The processes that were still running at that time.
    """

    identity: NodeIdentity
    timing: Timing
    command: Sequence[str]
    env: Mapping[str, str]
    folder: Path
    group: NodeGroup
    stop: StopSignal
    say: Say
    process: Command | None = None
    code: int = EXIT_BUG
    own_code: int | None = None
    returncode: int | None = None
    reason: str = ""
    stop_requested_at: float | None = None
    killed: bool = False
    processes: tuple[ProcessStatus, ...] = ()
    _stacks_requested: bool = False
    _settings: bytes | None = None
    _failure: TrnpipeError | None = None
    _kills_before: int | None = field(default_factory=oom_kill_count)
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def stopped(self) -> bool:
        """Return whether this node has received a signal to stop."""
        return self.stop.is_set()

    def run(self) -> None:
        """Run the command until it has ended on all nodes. If it cannot be started, the reason is recorded."""
        self._prepare()
        while self.own_code is None or not self.group.settled:
            self.group.poll()
            if self.process is not None and self.own_code is None:
                self.returncode = self.process.returncode()
                if self.returncode is not None:
                    self.process.end()  # its children may still be running
                    self._end(self._code_when_killed() if self.killed else exit_code_of_return(self.returncode))
            self._stop_if_requested()
            if self.process is None and self.own_code is None and self.group.ready:
                try:
                    self.process = self._start()
                except TrnpipeError as error:
                    self.reason = f"{reported_name(error)}: {error}"
                    self._end(error.exit_code)
            elif self.own_code is None or not self.group.settled:
                time.sleep(min(POLL_S, self.timing.heartbeat_s / 4))
        self.code = self.group.exit_code(self.own_code, stopped=self.stopped)
        self.reason = self.reason or self.group.failure

    def _stop_if_requested(self) -> None:
        is_notice = self.stop.reason == SPOT_NOTICE
        received = signal.SIGTERM if is_notice else signal.Signals[self.stop.reason] if self.stopped else None
        reason = "the Spot instance will be reclaimed" if is_notice else f"received {received.name}" if received else ""
        reason = reason or self.group.failure
        if not reason:
            return
        if self.stop_requested_at is None:
            self.stop_requested_at = time.monotonic()
            self.group.stop(reason)
            if self.own_code is not None:
                return
            self.reason = reason
            self.say(f"stopping the command: {reason}")
            if self.process is None:
                self._end(self._code_when_killed())
                return
            if not received:  # the command may hang in a collective, so record its stack traces
                self.process.request_stacks()
            self.process.send_signal(received or signal.SIGTERM)
        elif self.process is not None and self.own_code is None:
            waited_s = time.monotonic() - self.stop_requested_at
            if waited_s > self.timing.grace_s - STACKS_S and not self._stacks_requested:
                self._stacks_requested = True
                self.process.request_stacks()
            if waited_s > self.timing.grace_s and not self.killed:
                self.say(f"killing the command, because it has not stopped within {self.timing.grace_s:g} s")
                self.killed = True
                self.processes = self.process.processes()
                self.process.end()
            elif waited_s > self.timing.grace_s + UNKILLABLE_S:  # processes that hang in a driver cannot be killed
                self._end(self._code_when_killed())

    def count_failure(self) -> None:
        """Count the attempt if it failed with a TransientError, and change its code if it was the last one allowed."""
        identity = self.identity
        counts = MAX_FAILURES in self.env and identity.is_in_cycle and identity.node == 0
        if self.code != TransientError.exit_code or not counts:
            return

        def count() -> str:
            try:
                self.code = final_exit_code(open_storage(identity.workspace), identity, self.env)
            except TrnpipeError as error:
                return error.seen
            return ""

        limit_s = self.timing.bundle_s
        problem = _within(limit_s, count, f"the workspace did not answer within {limit_s:g} s")
        if problem:
            self.say(f"could not count this failure: {problem}")
        if self.code != TransientError.exit_code:
            self.say(f"exit {self.code}: {self.env[MAX_FAILURES]} attempts have failed, which is the limit")

    def _code_when_killed(self) -> int:
        return Preempted.exit_code if self.stopped else TransientError.exit_code

    def _end(self, code: int) -> None:
        self.own_code = code
        self.group.report(code)
        if code != EXIT_OK:
            self.group.stop(f"the main node exited with {code}")
        self.group.poll()

    def _prepare(self) -> None:
        """Configure the network of a multi-node job, and read the settings of the cycle.

        Errors are not raised here but later in `_start`, so that the other nodes are notified.
        """
        try:
            if self.identity.num_nodes > 1 and self.identity.main_address not in LOOPBACK:
                network = network_variables(own_interface(), has_efa=has_efa(), kernel=platform.release())
                self.env = {**network, **self.env}
            if self.identity.is_in_cycle:
                storage = open_storage(self.identity.workspace, stop=self.stop)
                with suppress(KeyNotFound):  # there are no settings if the job was not submitted by trnjobs
                    self._settings = storage.read_bytes(f"cycles/{self.identity.cycle}/jobs/settings.json")
                if STARTS in self.env and self.identity.node == 0:
                    self.group.start = count_start(storage, self.identity.cycle, self.env)
        except TrnpipeError as error:
            self._failure = error

    def _start(self) -> Command:
        """Start the command.

        Raises the error that occurred in `_prepare`, if any, and ConfigError if the command does not exist.
        """
        if self._failure is not None:
            raise self._failure
        start = self.group.start
        if start is None and STARTS in self.env and self.identity.is_in_cycle:
            raise TransientError(
                "timed out waiting for the start number from the main node",
                next_command="check the log of the main node",
            )
        if start is not None:
            self.env = {**self.env, **start.variables}
            self.identity = replace(self.identity, job_id=start.job_id, attempt=start.attempt)
        command = list(self.command)
        # Pass the settings to `trnpipe` and `trnjobs`, whether they are called by name, by path or as a Python module.
        # Other commands are not changed.
        module = command[command.index("-m") + 1 :][:1] if "-m" in command[1:4] else []
        takes_settings = Path(command[0]).name in ("trnpipe", "trnjobs") or module in (["pipeline"], ["jobs"])
        if self._settings is not None and takes_settings:
            file = self.folder / "settings.json"
            file.write_bytes(self._settings)
            end = (
                command.index("--") if "--" in command else len(command)
            )  # anything after `--` belongs to the user's own command
            command[end:end] = ["--config", str(file)]
        stacks = self.folder / "stacks"
        stacks.mkdir()
        return Command(command, self.env, stacks)

    def write_post_mortem(self) -> None:
        """Write a post-mortem if the attempt has failed. This never affects the exit code.

        It does not count as a failure if the gate refuses a candidate, or if the command stops because it was asked to.
        """
        code = self.own_code or self.code
        is_expected = code in (EXIT_OK, GateRefused.exit_code) or (self.stopped and code == Preempted.exit_code)
        if (is_expected and not self.killed) or not self.identity.is_in_cycle:
            return
        limit_s = self.timing.bundle_s
        if self.stopped and self.stop_requested_at is not None:
            remaining_s = EXPLAIN_S - (time.monotonic() - self.stop_requested_at)
            limit_s = max(MIN_BUNDLE_S, min(limit_s, remaining_s))
        self.say(_within(limit_s, self._write, f"could not write a post-mortem within {limit_s:g} s"))

    def _write(self) -> str:
        try:
            storage, identity = open_storage(self.identity.workspace), self.identity
            name = f"{identity.job}-{identity.attempt}-node{identity.node}"
            name += f"-round-{identity.submission}" if identity.submission > 1 else ""
            key = f"cycles/{identity.cycle}/jobs/post-mortem/{name}.json"
            unread, kills, events = list[str](), oom_kill_count(), list[str]()
            try:
                last = read_events(storage, f"cycles/{identity.cycle}/events.jsonl", last_bytes=EVENTS_BYTES)
                events = [json.dumps(event) for event in last]
            except TrnpipeError as error:
                unread.append(f"events: {error.seen}")
            versions = {"trnpipe": code_version(), "python": platform.python_version(), "kernel": platform.release()}
            for package in PACKAGES:
                with suppress(PackageNotFoundError):
                    versions[package] = version(package)
            bundle = PostMortem(
                job=identity.job,
                job_id=identity.job_id,
                attempt=identity.attempt,
                node=identity.node,
                num_nodes=identity.num_nodes,
                host=socket.gethostname(),
                command=tuple(self.command),
                exit_code=self.code,
                own_exit_code=self.own_code or 0,
                returncode=self.returncode,
                reason=self.reason,
                killed=self.killed,
                out_of_memory_kills=None if kills is None else kills - (self._kills_before or 0),
                started=self._started,
                ended=datetime.now(UTC),
                versions=versions,
                environment=shown_environment(self.env),
                settings=json.loads(self._settings) if self._settings else None,
                nodes=tuple(self.group.status()),
                processes=self.processes,
                stacks=self.process.stacks() if self.process else {},
                log=self.process.log() if self.process else (),
                events=tuple(events),
                unread=tuple(unread),
            )
            storage.write_bytes(key, as_bytes(bundle, secret_values(self.env)))
            return f"post-mortem: {storage.uri(key)}"
        except Exception as error:  # the exit code of the command is more important
            text = "".join(str(error).splitlines()[:1])
            return f"could not write a post-mortem: {type(error).__name__}: {text}"


def _within(limit_s: float, work: Callable[[], str], otherwise: str) -> str:
    """Return the message of `work`, or `otherwise` if it takes longer than the limit. It is not interrupted then."""
    messages = [otherwise]

    def run_work() -> None:
        messages[0] = work()

    thread = threading.Thread(target=run_work, name=work.__name__, daemon=True)
    thread.start()
    thread.join(limit_s)
    return messages[0]
