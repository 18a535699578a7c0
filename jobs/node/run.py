"""One attempt of one node of a job, from the environment to the exit code."""

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
    STARTS,
    NodeIdentity,
    Timing,
    batch_variables,
    count_start,
    sagemaker_variables,
    write_failure,
)
from jobs.node.group import NodeGroup
from jobs.node.post_mortem import PostMortem, ProcessSeen, as_bytes, shown_environment
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
)
from pipeline.core.secrets import secret_values, without_secrets
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound, open_storage
from pipeline.parallel.world import has_efa, network_variables, own_interface
from pipeline.proc.children import EXPLAIN_S, adopt_orphans, oom_kill_count
from pipeline.proc.signals import STACKS_VARIABLE, has_stack_dumps
from pipeline.proc.tool import guarded_temp_folder
from pipeline.telemetry.events import code_version, read_events

PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "numpy", "pyarrow", "boto3")
Say = Callable[[str], None]
EVENTS_BYTES = 512 * 1024
MIN_BUNDLE_S = 1.0
LINGER_S = 1.0
STACKS_S = 1.0  # for processes to show their stacks before they are killed
UNKILLABLE_S = 4.0
POLL_S = 0.05
TAIL_BYTES = BLOCK_BYTES = 64 * 1024
END_S = 2.0


def run(words: Sequence[str], env: Mapping[str, str], say: Say) -> int:
    """Run a command as this node's part of the job; return the exit code. Raises ConfigError for a broken environment.

    All processes it started have ended when this returns. If this process is killed, its container ends the rest, or
    the keeper of the local target. Main thread only, for good: it sets handlers of signals.
    """
    timing = Timing.from_env(env)
    ours = batch_variables(env) | sagemaker_variables(env, gather_s=timing.gather_s)
    place = NodeIdentity.from_env({**env, **ours})
    stop = StopSignal()
    for signum in (signal.SIGTERM, signal.SIGINT):  # as PID 1 too, where the kernel drops signals without a handler
        signal.signal(signum, lambda number, frame: stop.set(signal.Signals(number).name))
    with guarded_temp_folder() as folder:
        env = {**env, **ours}  # with what the guard has set in it
        group, linger_s = NodeGroup(place, timing, say), 0.0
        try:
            attempt = Attempt(place, timing, words, env, folder, group, stop, say)
            attempt.run()
            code = attempt.code
            if attempt.reason:
                say(f"exit {code}: {attempt.reason}")
            # In one line without secrets: the reason, else what the log says.
            error = error_in_log(attempt.command.log(), code) if attempt.command else ()
            why = str(without_secrets(attempt.reason or headline(error), secret_values(attempt.env)))
            group.acknowledge(code, why)
            attempt.explain()
            write_failure(env, *(group.agreed or (code, why)))
            # The other nodes explain themselves too.
            linger_s = timing.bundle_s if code and not attempt.stopped else LINGER_S
            return code
        finally:
            group.close(linger_s)


# The command as a child process: started without a shell, watched, and ended with all it has started.


class Command:
    """A running command. Its output goes to ours, and its last part is kept."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], stacks: Path) -> None:
        """`stacks`: an empty folder for the stacks that its Python processes may be asked for.

        Raises ConfigError when there is no such command.
        """
        self._stacks = stacks
        adopt_orphans()
        source, target = os.pipe()
        try:
            # A session of its own: a signal to our group reaches us alone, and we pass it on once.
            self._process = subprocess.Popen(  # noqa: S603 - a list, no shell
                words,
                env={**env, STACKS_VARIABLE: str(stacks)},
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            os.close(source)
            seen = f"{words[0]!r} cannot be started: {error.strerror}"
            raise ConfigError(
                seen, expected="a command that is in the image", next_command="run it in that image by hand"
            ) from error
        finally:
            os.close(target)
        self._tail = b""
        self._pump = threading.Thread(target=self._copy_output, args=(source,), name="log", daemon=True)
        self._pump.start()

    def log(self) -> tuple[str, ...]:
        """Return its last lines; bytes that are no UTF-8 show as such."""
        return tuple(self._tail.decode(errors="replace").splitlines())

    def returncode(self) -> int | None:
        """Return None while it runs, minus the signal that ended it. Also reaps orphans."""
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

    def tell(self, signum: signal.Signals) -> None:
        """Send a signal to the command itself, which is to pass it on as it sees fit."""
        self._process.send_signal(signum)

    def ask_stacks(self) -> None:
        """Ask every Python process of the command that knows how for the stacks of its threads."""
        for process in self._family():
            with suppress(psutil.Error, ProcessLookupError):
                if has_stack_dumps(process.pid, self._stacks):
                    process.send_signal(signal.SIGUSR1)

    def stacks(self) -> dict[int, str]:
        shown = {int(path.name): path.read_text(errors="replace") for path in sorted(self._stacks.glob("[0-9]*"))}
        return {pid: text for pid, text in shown.items() if text}

    def processes(self) -> tuple[ProcessSeen, ...]:
        found = []
        for process in self._family():
            with suppress(psutil.Error), process.oneshot():  # gone meanwhile
                times, words = process.cpu_times(), tuple(process.cmdline())
                cpu_s, memory_bytes = round(times.user + times.system, 3), process.memory_info().rss
                found.append(ProcessSeen(process.pid, words, process.status(), cpu_s, memory_bytes))
        return tuple(found)

    def end(self) -> None:
        """Kill all processes that are left, and wait for the last of the output."""
        until = time.monotonic() + END_S
        while (family := self._family()) and time.monotonic() < until:
            for process in family:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(family, timeout=0.05)
            self.returncode()
        self._pump.join(max(0.1, until - time.monotonic()))

    def _family(self) -> list[psutil.Process]:
        """Return the living processes below us: orphans come to us, see `adopt_orphans`."""
        with suppress(psutil.Error):
            return [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
        return []

    def _copy_output(self, source: int) -> None:
        """Copy until the last writer has closed. When nobody reads our output any more, the command still goes on."""
        target: int | None = 1
        while block := os.read(source, BLOCK_BYTES):
            self._tail = (self._tail + block)[-TAIL_BYTES:]
            try:
                while target is not None and block:
                    block = block[os.write(target, block) :]
            except OSError:
                target = None
        os.close(source)


# From how a process ended to an exit code of the family.

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


@dataclass
class Attempt:
    """This node's part of the job: run the command once all nodes are here, until the end of every node is known.

    After `run` its attributes say how it ended. `code`: of the job, as far as this node decides it. `returncode`: of
    the process; None: it never ran. `reason`: why it was stopped or failed to start; empty when it ended by itself.
    `told_at`: when it was told to stop, by the monotonic clock. `killed`: it did not stop within the grace, and
    `processes` were left.
    """

    place: NodeIdentity
    timing: Timing
    words: Sequence[str]
    env: Mapping[str, str]
    folder: Path
    group: NodeGroup
    stop: StopSignal
    say: Say
    command: Command | None = None
    code: int = EXIT_BUG
    own_code: int | None = None
    returncode: int | None = None
    reason: str = ""
    told_at: float | None = None
    killed: bool = False
    processes: tuple[ProcessSeen, ...] = ()
    _asked_stacks: bool = False
    _settings: bytes | None = None
    _failure: TrnpipeError | None = None
    _kills_before: int | None = field(default_factory=oom_kill_count)
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def stopped(self) -> bool:
        """Whether a signal came from outside."""
        return self.stop.is_set()

    def run(self) -> None:
        """Run the command, or note why it did not start."""
        self._prepare()
        while self.own_code is None or not self.group.settled:
            self.group.tick()
            if self.command is not None and self.own_code is None:
                self.returncode = self.command.returncode()
                if self.returncode is not None:
                    self.command.end()  # what it has started ends with it
                    self._end(self._code_when_killed() if self.killed else exit_code_of_return(self.returncode))
            self._stop_when_asked()
            if self.command is None and self.own_code is None and self.group.ready:
                try:
                    self.command = self._start()
                except TrnpipeError as error:
                    self.reason = f"{type(error).__name__}: {error}"
                    self._end(error.exit_code)
            elif self.own_code is None or not self.group.settled:
                time.sleep(min(POLL_S, self.timing.heartbeat_s / 4))
        self.code = self.group.exit_code(self.own_code, stopped=self.stopped)
        self.reason = self.reason or self.group.trouble

    def _stop_when_asked(self) -> None:
        asked = signal.Signals[self.stop.reason] if self.stopped else None
        reason = f"{asked.name} from outside" if asked else self.group.trouble
        if not reason:
            return
        if self.told_at is None:
            self.told_at = time.monotonic()
            self.group.stop(reason)
            if self.own_code is not None:
                return
            self.reason = reason
            self.say(f"stopping the command: {reason}")
            if self.command is None:
                self._end(self._code_when_killed())
                return
            if not asked:  # it may hang in a collective: that is the moment to see where
                self.command.ask_stacks()
            self.command.tell(asked or signal.SIGTERM)
        elif self.command is not None and self.own_code is None:
            waited_s = time.monotonic() - self.told_at
            if waited_s > self.timing.grace_s - STACKS_S and not self._asked_stacks:
                self._asked_stacks = True
                self.command.ask_stacks()
            if waited_s > self.timing.grace_s and not self.killed:
                self.say(f"the command has not stopped within {self.timing.grace_s:g} s: killing it")
                self.killed = True
                self.processes = self.command.processes()
                self.command.end()
            elif waited_s > self.timing.grace_s + UNKILLABLE_S:  # stuck in a driver
                self._end(self._code_when_killed())

    def _code_when_killed(self) -> int:
        return Preempted.exit_code if self.stopped else TransientError.exit_code

    def _end(self, code: int) -> None:
        self.own_code = code
        self.group.report(code)
        if code != EXIT_OK:
            self.group.stop(f"the main node exited with {code}")
        self.group.tick()

    def _prepare(self) -> None:
        """Look for the network of a node group, read the settings of the cycle.

        `_start` raises what fails here, so that the other nodes learn of it.
        """
        try:
            if self.place.num_nodes > 1 and self.place.main_address not in LOOPBACK:
                network = network_variables(own_interface(), has_efa=has_efa(), kernel=platform.release())
                self.env = {**network, **self.env}
            if self.place.is_in_cycle:
                storage = open_storage(self.place.workspace, stop=self.stop)
                with suppress(KeyNotFound):  # nothing was submitted
                    self._settings = storage.read_bytes(f"cycles/{self.place.cycle}/jobs/settings.json")
                if STARTS in self.env and self.place.node == 0:
                    self.group.start = count_start(storage, self.place.cycle, self.env)
        except TrnpipeError as error:
            self._failure = error

    def _start(self) -> Command:
        """Start the command. Raises what went wrong while preparing, and ConfigError for an unknown command."""
        if self._failure is not None:
            raise self._failure
        start = self.group.start
        if start is None and STARTS in self.env and self.place.is_in_cycle:
            raise TransientError("the main node has not counted this start", next_command="the log of the main node")
        if start is not None:
            self.env = {**self.env, **start.words}
            self.place = replace(self.place, job_id=start.job_id, attempt=start.attempt)
        words = list(self.words)
        # `trnpipe ...` or `trnjobs ...`, at any path, or `python [-u -P] -m ...`; other commands stay as they are.
        module = words[words.index("-m") + 1 :][:1] if "-m" in words[1:4] else []
        is_ours = Path(words[0]).name in ("trnpipe", "trnjobs") or module in (["pipeline"], ["jobs"])
        if self._settings is not None and is_ours:
            file = self.folder / "settings.json"
            file.write_bytes(self._settings)
            end = words.index("--") if "--" in words else len(words)  # behind it is a command of the user
            words[end:end] = ["--config", str(file)]
        stacks = self.folder / "stacks"
        stacks.mkdir()
        return Command(words, self.env, stacks)

    def explain(self) -> None:
        """Write a post-mortem of a failure. Whatever happens here, the exit code stays what it is.

        A refusal by the gate is no failure, nor a command that stopped when it was told to.
        """
        code = self.own_code or self.code
        is_well = code in (EXIT_OK, GateRefused.exit_code) or (self.stopped and code == Preempted.exit_code)
        if (is_well and not self.killed) or not self.place.is_in_cycle:
            return
        limit_s = self.timing.bundle_s
        if self.stopped and self.told_at is not None:
            left_s = EXPLAIN_S - (time.monotonic() - self.told_at)
            limit_s = max(MIN_BUNDLE_S, min(limit_s, left_s))
        told: list[str] = []
        work = threading.Thread(target=self._write, args=(told,), name="post-mortem", daemon=True)
        work.start()
        work.join(limit_s)
        self.say(told[0] if told else f"no post-mortem: not written within {limit_s:g} s")

    def _write(self, told: list[str]) -> None:
        try:
            storage, place = open_storage(self.place.workspace), self.place
            name = f"{place.job}-{place.attempt}-node{place.node}"
            name += f"-round-{place.round_}" if place.round_ > 1 else ""
            key = f"cycles/{place.cycle}/jobs/post-mortem/{name}.json"
            unread, kills, events = list[str](), oom_kill_count(), list[str]()
            try:
                found = read_events(storage, f"cycles/{place.cycle}/events.jsonl", last_bytes=EVENTS_BYTES)
                events = [json.dumps(event) for event in found]
            except TrnpipeError as error:
                unread.append(f"events: {error.seen}")
            versions = {"trnpipe": code_version(), "python": platform.python_version(), "kernel": platform.release()}
            for package in PACKAGES:
                with suppress(PackageNotFoundError):
                    versions[package] = version(package)
            bundle = PostMortem(
                job=place.job,
                job_id=place.job_id,
                attempt=place.attempt,
                node=place.node,
                num_nodes=place.num_nodes,
                host=socket.gethostname(),
                command=tuple(self.words),
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
                nodes=tuple(self.group.seen()),
                processes=self.processes,
                stacks=self.command.stacks() if self.command else {},
                log=self.command.log() if self.command else (),
                events=tuple(events),
                unread=tuple(unread),
            )
            storage.write_bytes(key, as_bytes(bundle, secret_values(self.env)))
            told.append(f"post-mortem: {storage.uri(key)}")
        except Exception as error:  # the exit code says more than what goes wrong while explaining it
            told.append(f"no post-mortem: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
