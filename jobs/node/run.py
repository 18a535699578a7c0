"""One try of one node of a job, from the environment to the exit code."""

import json
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import JsonValue

from jobs.node.command import Command, deserves_post_mortem
from jobs.node.environment import LOOPBACK, STARTS, Place, Timing, batch_variables, count_start
from jobs.node.group import NodeGroup
from jobs.node.post_mortem import PostMortem, as_bytes, secrets_of, shown_environment, without_secrets
from jobs.node.sagemaker import resolve_ipv4, sagemaker_variables, write_failure
from jobs.node.supervisor import Supervisor, watched_signals
from pipeline.core.errors import TransientError, TrnpipeError, error_in_log, headline
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound, Storage, open_storage
from pipeline.parallel.world import gang_variables, has_efa, own_interface
from pipeline.proc.children import EXPLAIN_S, kills_for_memory
from pipeline.proc.cleanup import guarded_temp_folder
from pipeline.telemetry.events import code_version, read_events

PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "numpy", "pyarrow", "boto3")
Say = Callable[[str], None]
EVENTS_BYTES = 512 * 1024
MIN_BUNDLE_S = 1.0
LINGER_S = 1.0


def run(words: Sequence[str], env: Mapping[str, str], say: Say) -> int:
    """Run a command as this node's part of the job; the exit code. Raises ConfigError for a broken environment.

    Whatever it has started is gone when this returns. When this process is killed, its container ends the rest, or the
    keeper of the local target.
    """
    timing = Timing.from_env(env)
    ours = batch_variables(env) | sagemaker_variables(env, gather_s=timing.gather_s, resolve=resolve_ipv4)
    place = Place.from_env({**env, **ours})
    with watched_signals() as signals, guarded_temp_folder() as folder:
        env = {**env, **ours}  # with what the guard has set in it
        group, linger_s = NodeGroup(place, timing, say), 0.0
        try:
            attempt = _Attempt(place, timing, words, env, folder, say, group)
            attempt.prepare(signals.stop)
            supervisor = Supervisor(attempt.start, group, signals, timing, say)
            supervisor.run()
            code = supervisor.code
            if supervisor.reason:
                say(f"exit {code}: {supervisor.reason}")
            # In one line without secrets: the reason, else what the log says.
            error = error_in_log(supervisor.command.log(), code) if supervisor.command else ()
            why = str(without_secrets(supervisor.reason or headline(error), secrets_of(attempt.env)))
            group.acknowledge(code, why)
            attempt.explain(supervisor)
            write_failure(env, *(group.agreed or (code, why)))
            # The other nodes explain themselves too.
            linger_s = timing.bundle_s if code and not supervisor.stopped else LINGER_S
            return code
        finally:
            group.close(linger_s)


@dataclass
class _Attempt:
    place: Place
    timing: Timing
    words: Sequence[str]
    env: Mapping[str, str]
    folder: Path
    say: Say
    group: NodeGroup
    _settings: bytes | None = None
    _failure: TrnpipeError | None = None
    _kills_before: int | None = field(default_factory=kills_for_memory)
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def prepare(self, stop: StopSignal) -> None:
        """Look for the network of a node group, read the settings of the cycle.

        A failure is told in `start`: the other nodes are to hear of it.
        """
        try:
            if self.place.num_nodes > 1 and self.place.main_address not in LOOPBACK:
                network = gang_variables(own_interface(), has_efa=has_efa(), kernel=platform.release())
                self.env = {**network, **self.env}
            if self.place.is_in_cycle:
                storage = open_storage(self.place.workspace, stop=stop)
                with suppress(KeyNotFound):  # nothing was submitted
                    self._settings = storage.read_bytes(f"cycles/{self.place.cycle}/jobs/settings.json")
                if STARTS in self.env and self.place.node == 0:
                    self.group.start = count_start(storage, self.place.cycle, self.env)
        except TrnpipeError as error:
            self._failure = error

    def start(self) -> Command:
        """Raises what went wrong while preparing, and ConfigError for a command that is not there."""
        if self._failure is not None:
            raise self._failure
        start = self.group.start
        if start is None and STARTS in self.env and self.place.is_in_cycle:
            raise TransientError("the main node has not counted this start", next_command="the log of the main node")
        if start is not None:
            self.env = {**self.env, **start.words}
            self.place = replace(self.place, job_id=start.job_id, attempt=start.attempt)
        words = list(self.words)
        # `trnpipe ...` or `trnjobs ...`, at any path, or `python -m ...`; other commands stay as they are.
        is_ours = Path(words[0]).name in ("trnpipe", "trnjobs") or words[1:3] in (["-m", "pipeline"], ["-m", "jobs"])
        if self._settings is not None and is_ours:
            file = self.folder / "settings.json"
            file.write_bytes(self._settings)
            end = words.index("--") if "--" in words else len(words)  # behind it is a command of the user
            words[end:end] = ["--config", str(file)]
        stacks = self.folder / "stacks"
        stacks.mkdir()
        return Command(words, self.env, stacks)

    def explain(self, ended: Supervisor) -> None:
        """Leave a post-mortem where there is a failure. Whatever happens here, the exit code stays what it is."""
        if not deserves_post_mortem(ended.own_code or ended.code, stopped=ended.stopped, killed=ended.killed):
            return
        if not self.place.is_in_cycle:
            return
        limit_s = self.timing.bundle_s
        if ended.stopped and ended.told_at is not None:
            left_s = EXPLAIN_S - (time.monotonic() - ended.told_at)
            limit_s = max(MIN_BUNDLE_S, min(limit_s, left_s))
        told: list[str] = []
        work = threading.Thread(target=self._write, args=(ended, told), name="post-mortem", daemon=True)
        work.start()
        work.join(limit_s)
        self.say(told[0] if told else f"no post-mortem: not written within {limit_s:g} s")

    def _write(self, ended: Supervisor, told: list[str]) -> None:
        try:
            storage = open_storage(self.place.workspace)
            place = self.place
            name = f"{place.job}-{place.attempt}-node{place.node}"
            name += f"-round-{place.round_}" if place.round_ > 1 else ""
            key = f"cycles/{place.cycle}/jobs/post-mortem/{name}.json"
            bundle = self._bundle(ended, storage)
            storage.write_bytes(key, as_bytes(bundle, secrets_of(self.env)))
            told.append(f"post-mortem: {storage.uri(key)}")
        except Exception as error:  # the exit code says more than what goes wrong while explaining it
            told.append(f"no post-mortem: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    def _bundle(self, ended: Supervisor, storage: Storage) -> PostMortem:
        unread, kills = list[str](), kills_for_memory()
        settings: JsonValue = None
        try:
            settings = json.loads(self._settings) if self._settings else None
        except ValueError as error:
            unread.append(f"settings: {error}")
        events = list[str]()
        try:
            found = read_events(storage, f"cycles/{self.place.cycle}/events.jsonl", last_bytes=EVENTS_BYTES)
            events = [json.dumps(event) for event in found]
        except TrnpipeError as error:
            unread.append(f"events: {error.seen}")
        versions = {"trnpipe": code_version(), "python": platform.python_version(), "kernel": platform.release()}
        for package in PACKAGES:
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        return PostMortem(
            job=self.place.job,
            job_id=self.place.job_id,
            attempt=self.place.attempt,
            node=self.place.node,
            num_nodes=self.place.num_nodes,
            host=socket.gethostname(),
            command=tuple(self.words),
            exit_code=ended.code,
            own_exit_code=ended.own_code or 0,
            returncode=ended.returncode,
            reason=ended.reason,
            killed=ended.killed,
            out_of_memory_kills=None if kills is None else kills - (self._kills_before or 0),
            started=self._started,
            ended=datetime.now(UTC),
            versions=versions,
            environment=shown_environment(self.env),
            settings=settings,
            nodes=tuple(self.group.seen()),
            processes=ended.processes,
            stacks=ended.command.stacks() if ended.command else {},
            log=ended.command.log() if ended.command else (),
            events=tuple(events),
            unread=tuple(unread),
        )
