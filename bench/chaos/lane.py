"""Cycles of one workspace, one after the other, each with a day of data more, run by the real commands."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path

from bench.chaos.checks import Expected, tries_beside, wrong_model, wrong_vectors
from bench.chaos.faults import Fault, Hit, Injector
from bench.chaos.processes import Watch
from bench.chaos.s3 import FailingServer
from bench.results import ROOT
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import JobState
from jobs.targets.local.nodes import LocalFiles, local_files
from pipeline.core.errors import TransientError, TrnpipeError
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.records import read_pointer
from tests.kit.s3 import s3_env

MODEL = "chaos"
FIRST_DAY = date(2026, 1, 1)
QUERIES_PER_DAY, CANDIDATES, FIRST_DAYS = 16, 12, 2
MAX_STEPS = 48
CYCLE_LIMIT_S = 900.0
MAX_RUNS = 40
CONFIG = f"""
backend = "cpu"
model_name = "{MODEL}"
[data]
name = "{MODEL}"
buckets = ["16x32", "24x48"]
rows_per_chunk = 100
labels = ["irrelevant", "complement", "substitute", "exact"]
valid_fraction = 0.15
test_fraction = 0.2
[data.synthetic]
num_queries = {QUERIES_PER_DAY}
[data.tokenizer]
vocab_size = 400
[model]
hidden_size = 32
num_layers = 1
intermediate_size = 64
max_positions = 48
interaction_size = 16
cross_layers = 1
mlp_sizes = [16]
[train]
max_steps = {MAX_STEPS}
global_batch_size = 48
micro_batch_size = 12
evaluate_every = 24
collective_timeout_s = 15.0
[checkpoint]
every_steps = 6
[embed]
compiled = false
[embed.output]
rows_per_part = 64
[gate]
min_queries = 2
min_slice_queries = 2
first_without_comparison = true
resamples = 200
first_baselines = "warn"
[gate.drops]
"ndcg@10" = 1.0
macro_f1 = 1.0
[gate.slice_drops]
"ndcg@10" = 1.0
macro_f1 = 1.0
[health]
only = ["host"]
min_free_gib = 0.0
[storage]
total_deadline_s = 8.0
[log]
every_steps = 4
[jobs]
local_vcpus = 2
[jobs.environment]
OMP_NUM_THREADS = "1"
TRNJOBS_HEARTBEAT_S = "1"
TRNJOBS_LOST_AFTER_S = "8"
TRNJOBS_GATHER_S = "60"
TRNJOBS_GRACE_S = "5"
TRNJOBS_BUNDLE_S = "3"
"""
"""The gate lets every model pass: whether it judges well is measured elsewhere. Nothing waits for minutes."""
STAGES = ("prepare", "health", "compile", "train", "evaluate", "embed", "verify", "report")
ATTEMPTS, TIMEOUT_S = 5, 300
Shape = tuple[int, int]
"""Nodes and processes a node of training."""


def config_text() -> str:
    """The settings of all cycles."""
    workers = {"embed": "workers = 2\n"}
    jobs = [f"[jobs.{one}]\nattempts = {ATTEMPTS}\ntimeout_s = {TIMEOUT_S}\n{workers.get(one, '')}" for one in STAGES]
    return CONFIG + "".join(jobs)


@dataclass(frozen=True)
class CycleResult:
    """How one cycle went. `problems`: what must never be."""

    lane: str
    cycle: str
    shape: Shape
    outcome: str
    reason: str
    seconds: float
    runs: int
    """Of the command: one more than it was killed or could not go on."""
    jobs: int
    jobs_finished: int
    attempts: int
    drawn: tuple[str, ...]
    """Kinds of the faults that were to come; of those that came are `hits`."""
    hits: tuple[Hit, ...]
    wrong_models: tuple[str, ...]
    wrong_vectors: tuple[str, ...]
    run_twice: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        return self.outcome == "succeeded"


@dataclass
class Lane:
    """One workspace. `folder`: for logs and scratch."""

    name: str
    folder: Path
    watch: Watch
    dice: random.Random
    server: FailingServer | None = None
    kinds: tuple[str, ...] = field(init=False)
    workspace: str = field(init=False)

    def __post_init__(self) -> None:
        local = f"file://{(self.folder / 'disk' / 'workspace').absolute()}"
        self.workspace = f"s3://{self.server.bucket}/{self.name}" if self.server else local
        (self.folder / "chaos.toml").write_text(config_text())
        of_place = ("s3_errors", "s3_errors") if self.server else ("full_disk", "corrupt_checkpoint")
        self.kinds = ("kill_process", "kill_process", "kill_node", "kill_engine", *of_place)

    def kinds_for(self, shape: Shape) -> tuple[str, ...]:
        """With ranks that wait for each other one may hang; with nodes one may fall silent."""
        group = ("hang_rank",) if shape != (1, 1) else ()
        return self.kinds + group + (("lost_heartbeat", "lost_heartbeat") if shape[0] > 1 else ())

    def run(self, number: int, shape: Shape, faults: list[Fault]) -> CycleResult:
        """Cycle `number` (from 0), to its end."""
        day = FIRST_DAY + timedelta(days=FIRST_DAYS + number)
        cycle, started = f"{day}", time.monotonic()
        expected = self._expected(number, cycle)
        with Injector(faults, self.dice, self.watch, self.workspace, cycle, self.server) as injector:
            runs = self._until_ended(injector, self._words(cycle, number, shape), cycle, started)
        if self.server:
            self.server.fail_for(0.0, 0.0)
        if injector.errors:
            raise injector.errors[0]
        if not injector.jobs:
            raise RuntimeError(f"no process of {cycle} in {self.workspace} was seen: the faults cannot hit")
        closed = self.store(cycle).closed()
        records = self.store(cycle).records()
        good = closed is not None and closed.outcome == "succeeded"
        return CycleResult(
            lane=self.name,
            cycle=cycle,
            shape=shape,
            outcome=closed.outcome if closed else "not ended",
            reason=closed.reason if closed else "",
            seconds=round(time.monotonic() - started, 1),
            runs=runs,
            jobs=len(STAGES),
            jobs_finished=sum(record.state is JobState.SUCCEEDED for record in records),
            attempts=sum(len(task.attempts) for record in records for task in record.tasks()),
            drawn=tuple(fault.kind for fault in faults),
            hits=tuple(injector.hits),
            wrong_models=tuple(wrong_model(self.storage, expected, succeeded=good)),
            wrong_vectors=tuple(wrong_vectors(self.storage, expected, succeeded=good)),
            run_twice=tuple(tries_beside(self.files(cycle), records)),
        )

    @property
    def storage(self) -> Storage:
        return open_storage(self.workspace)

    def store(self, cycle: str) -> CycleStore:
        return CycleStore(self.storage, cycle, time.time)

    def files(self, cycle: str) -> LocalFiles:
        """Of the engine."""
        return local_files(self.storage, self._scratch, cycle)

    @property
    def _scratch(self) -> Path:
        """For S3, where a local workspace has its own."""
        return self.folder / "disk" / "scratch"

    def _expected(self, number: int, cycle: str) -> Expected:
        days, pointer = FIRST_DAYS + number, read_pointer(self.storage, MODEL)
        ids = (f"p{query}-{place}" for query in range(days * QUERIES_PER_DAY) for place in range(CANDIDATES))
        names = (f"dt={FIRST_DAY + timedelta(days=day)}" for day in range(days))
        return Expected(cycle, MODEL, MAX_STEPS, frozenset(names), frozenset(ids), pointer[0] if pointer else None)

    def _words(self, cycle: str, number: int, shape: Shape) -> list[str]:
        words = [sys.executable, "-m", "jobs", "submit", "--target", "local", "--cycle", cycle]
        words += ["--config", str(self.folder / "chaos.toml"), "--workspace", self.workspace]
        words += ["--data.synthetic.num-days", str(FIRST_DAYS + number)]
        words += ["--jobs.train.nodes", str(shape[0]), "--jobs.train.processes", str(shape[1])]
        return words + (["--scratch", str(self._scratch)] if self.server else [])

    def _until_ended(self, injector: Injector, words: list[str], cycle: str, started: float) -> int:
        """Run the command again after it was killed or could not go on, as a scheduler would; how often it ran."""
        for run in range(1, MAX_RUNS + 1):
            log = self.folder / f"{cycle}.log"
            with log.open("ab") as out:
                engine = subprocess.Popen(
                    words, cwd=ROOT, env=self._environment(), stdout=out, stderr=subprocess.STDOUT
                )
            injector.engine = engine
            try:
                engine.wait(max(1.0, CYCLE_LIMIT_S - (time.monotonic() - started)))
            except subprocess.TimeoutExpired:
                engine.terminate()
                engine.wait()
                return run
            if self._has_ended(cycle):
                return run
            # Could not go on: after some time, as a scheduler would; killed: at once.
            time.sleep(5.0 if engine.returncode == TransientError.exit_code else self.dice.uniform(0.0, 3.0))
        return MAX_RUNS

    def _has_ended(self, cycle: str) -> bool:
        while True:
            try:
                return self.store(cycle).closed() is not None
            except TrnpipeError:  # this bench reads from the same server, while it fails
                time.sleep(1.0)

    def _environment(self) -> Mapping[str, str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith(("TRNPIPE_", "TRNJOBS_"))}
        base |= {"OMP_NUM_THREADS": "1"}
        return base | (s3_env(self.server.url) if self.server else {})
