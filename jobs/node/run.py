"""One try of one node of a job, from the environment to the exit code."""

import json
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import JsonValue

from jobs.node.command import Command, LogTail, deserves_post_mortem
from jobs.node.environment import Place, Timing
from jobs.node.gang import Hub, Link, Peers, listen
from jobs.node.post_mortem import PostMortem, as_bytes, file_name, secrets_of, shown_environment
from jobs.node.supervisor import Outcome, Supervisor, watched_signals
from pipeline.core.errors import TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound, Storage, open_storage
from pipeline.parallel.network import gang_variables, has_efa, own_interface
from pipeline.proc.children import EXPLAIN_S, kills_for_memory
from pipeline.proc.cleanup import guarded
from pipeline.telemetry.code_version import code_version
from pipeline.telemetry.events import read_events

# The settings of the cycle: from the workspace to the command line of the pipeline.


def read_settings(storage: Storage, cycle: str) -> bytes | None:
    """What the jobs of the cycle were submitted with; None when nothing was. Raises every error of storage."""
    try:
        return storage.read_bytes(f"cycles/{cycle}/jobs/settings.json")
    except KeyNotFound:
        return None


def with_settings(words: Sequence[str], file: Path) -> list[str]:
    """The command with the file of settings, where it is one of ours; other commands stay as they are."""
    return [*words, "--config", str(file)] if is_ours(words) else list(words)


def is_ours(words: Sequence[str]) -> bool:
    """`trnpipe ...` or `trnjobs ...`, at any path, or `python -m pipeline ...` or `python -m jobs ...`."""
    modules = (["-m", "pipeline"], ["-m", "jobs"])
    return Path(words[0]).name in ("trnpipe", "trnjobs") or list(words[1:3]) in modules


# What ran: the code, and the packages that matter for it.

PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "numpy", "pyarrow", "boto3")


def versions() -> dict[str, str]:
    """By name; packages that are not installed are left out."""
    found = {"trnpipe": code_version(), "python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


Say = Callable[[str], None]
EVENTS_BYTES = 512 * 1024
MIN_BUNDLE_S = 1.0
LINGER_S = 1.0


def run(words: Sequence[str], env: Mapping[str, str], say: Say) -> int:
    """Run a command as this node's part of the job; the exit code. Raises ConfigError for a broken environment.

    Whatever it has started is gone when this returns, or when this process is killed.
    """
    place, timing = Place.from_env(env), Timing.from_env(env)
    with watched_signals() as signals, guarded() as folder:
        peers, linger_s = _peers(place, timing, say), 0.0
        try:
            attempt = _Attempt(place, timing, words, env, folder, say)
            attempt.prepare(signals.stop)
            supervisor = Supervisor(attempt.start, peers, signals, timing, say)
            outcome = supervisor.run()
            if outcome.reason:
                say(f"exit {outcome.code}: {outcome.reason}")
            peers.acknowledge()
            attempt.explain(outcome, peers, supervisor.command)
            # The other nodes explain themselves too.
            linger_s = timing.bundle_s if outcome.code and not outcome.stopped else LINGER_S
            return outcome.code
        finally:
            peers.close(linger_s)


def _peers(place: Place, timing: Timing, say: Say) -> Peers:
    if place.num_nodes == 1:
        return Peers()
    if place.node > 0:
        return Link(place, timing)
    return Hub(place, timing, say, listen(place.main_address, place.port))


@dataclass
class _Attempt:
    """What goes into the command and what is told of it."""

    place: Place
    timing: Timing
    words: Sequence[str]
    env: Mapping[str, str]
    folder: Path
    say: Say

    def __post_init__(self) -> None:
        self.tail = LogTail()
        self._settings: bytes | None = None
        self._failure: TrnpipeError | None = None
        self._kills_before = kills_for_memory()
        self._started = datetime.now(UTC)

    def prepare(self, stop: StopSignal) -> None:
        """Look for the network of a gang, read the settings of the cycle.

        A failure is told in `start`: the other nodes are to hear of it.
        """
        try:
            if not self.place.is_on_one_machine:
                network = gang_variables(own_interface(), has_efa=has_efa(), kernel=platform.release())
                self.env = {**network, **self.env}
            if self.place.is_in_cycle:
                self._settings = read_settings(open_storage(self.place.workspace, stop=stop), self.place.cycle)
        except TrnpipeError as error:
            self._failure = error

    def start(self) -> Command:
        """Raises what went wrong while preparing, and ConfigError for a command that is not there."""
        if self._failure is not None:
            raise self._failure
        words = list(self.words)
        if self._settings is not None:
            file = self.folder / "settings.json"
            file.write_bytes(self._settings)
            words = with_settings(words, file)
        stacks = self.folder / "stacks"
        stacks.mkdir()
        return Command(words, self.env, stacks, self.tail)

    def explain(self, outcome: Outcome, peers: Peers, command: Command | None) -> None:
        """Leave a post-mortem where there is a failure. Whatever happens here, the exit code stays what it is."""
        if not deserves_post_mortem(outcome.own_code or outcome.code, stopped=outcome.stopped, killed=outcome.killed):
            return
        if not self.place.is_in_cycle:
            return
        limit_s = self.timing.bundle_s
        if outcome.stopped and outcome.told_at is not None:
            left_s = EXPLAIN_S - (time.monotonic() - outcome.told_at)
            limit_s = max(MIN_BUNDLE_S, min(limit_s, left_s))
        told: list[str] = []
        work = threading.Thread(
            target=self._write, args=(outcome, peers, command, told), name="post-mortem", daemon=True
        )
        work.start()
        work.join(limit_s)
        self.say(told[0] if told else f"no post-mortem: not written within {limit_s:g} s")

    def _write(self, outcome: Outcome, peers: Peers, command: Command | None, told: list[str]) -> None:
        try:
            storage = open_storage(self.place.workspace)
            folder = f"cycles/{self.place.cycle}/jobs/post-mortem"
            key = f"{folder}/{file_name(self.place.job, self.place.attempt, self.place.node)}"
            bundle = self._bundle(outcome, peers, command, storage)
            storage.write_bytes(key, as_bytes(bundle, secrets_of(self.env)))
            told.append(f"post-mortem: {storage.uri(key)}")
        except Exception as error:  # the exit code says more than what goes wrong while explaining it
            told.append(f"no post-mortem: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    def _bundle(self, outcome: Outcome, peers: Peers, command: Command | None, storage: Storage) -> PostMortem:
        unread: list[str] = []
        kills = kills_for_memory()
        return PostMortem(
            job=self.place.job,
            job_id=self.place.job_id,
            attempt=self.place.attempt,
            node=self.place.node,
            num_nodes=self.place.num_nodes,
            host=socket.gethostname(),
            command=tuple(self.words),
            exit_code=outcome.code,
            own_exit_code=outcome.own_code,
            returncode=outcome.returncode,
            reason=outcome.reason,
            killed=outcome.killed,
            out_of_memory_kills=None if kills is None else kills - (self._kills_before or 0),
            started=self._started,
            ended=datetime.now(UTC),
            versions=versions(),
            environment=shown_environment(self.env),
            settings=self._settings_tree(unread),
            nodes=tuple(peers.seen()),
            processes=outcome.processes,
            stacks=command.stacks() if command else {},
            log=self.tail.lines(),
            events=_last_events(storage, self.place.cycle, unread),
            unread=tuple(unread),
        )

    def _settings_tree(self, unread: list[str]) -> JsonValue:
        try:
            tree: JsonValue = json.loads(self._settings) if self._settings else None
        except ValueError as error:
            unread.append(f"settings: {error}")
            return None
        return tree


def _last_events(storage: Storage, cycle: str, unread: list[str]) -> tuple[str, ...]:
    try:
        found = read_events(storage, f"cycles/{cycle}/events.jsonl", last_bytes=EVENTS_BYTES)
    except TrnpipeError as error:
        unread.append(f"events: {error.seen}")
        return ()
    return tuple(json.dumps(event) for event in found)
