"""Daily partitions trained one after the other by real cycles, beside one training on all of them."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.machine import gpu_name
from bench.quality import ours
from bench.quality.part import CPU, INCREMENTAL, Budget, PartResult, provenance
from bench.quality.sides import Incomplete, Table, interval_figures, mean, mean_figure, sides_of, values
from bench.quality.tasks import TASKS
from bench.results import ROOT, Target, figure
from pipeline.context import load_result
from pipeline.core.fingerprint import hash63
from pipeline.io.storage import open_storage
from pipeline.settings import resolve
from pipeline.telemetry.events import code_version

NDCG = "ndcg@10"
DAYS, MANY_DAYS = 5, 20
WORK = ROOT / "build" / "quality"
"""Workspaces of chains that have not ended; a chain that is started again goes on in its own."""
_FIRST_DAY = date(2026, 1, 1)
_CHEAP = [
    *("--evaluate.split", "valid", "--evaluate.retrieval.enabled", "false"),
    *("--evaluate.max-rows", "1000", "--train.evaluate-rows", "300"),
]
"""Of the days before the last: they are promoted, and nothing is told of them."""
_PROMOTE = [
    *("--evaluate.promote", "true", "--evaluate.incumbent", "none"),
    *("--evaluate.baselines.bm25", "false", "--evaluate.baselines.boosting", "false"),
    *("--evaluate.force-reason", "bench: each day goes on from the one before"),
]
METHOD = """
Rows are dealt to 5 or 20 days by a hash of their query. A cycle each (`trnpipe prepare`, `train` from the promoted
model, `evaluate` with promotion), with the newest day beside the older ones, against one training on all days; the same
pairs seen in all ({pairs:,} in {precision} and batches of {batch}, on {device}), shared evenly by the days. Every
cycle has a schedule of its own: warm-up, peak, down to zero. `replay`: the share of a cycle's samples that are of older
days. Then the last model is searched exactly, in the same catalogue for all.
Mean and range over seeds. configs/small.toml from published MiniLM-L6 weights.
The test split was read {reads} times for this table, and {others} more times by other parts that are kept."""


@dataclass(frozen=True)
class Arm:
    """One way to train on the days."""

    replay: float | None = None
    """Share of a cycle's samples; None: all days in one training."""
    days: int = DAYS

    @property
    def name(self) -> str:
        if self.replay is None:
            return "together"
        days = "" if self.days == DAYS else f"-days-{self.days}"
        return f"replay-{self.replay:g}{days}"

    @property
    def cycles(self) -> int:
        return 1 if self.replay is None else self.days


def shipped_arm(days: int = DAYS) -> Arm:
    """Return the arm of the present recipe."""
    return Arm(resolve([ours.CONFIG], {}, []).settings.train.replay_share, days=days)


TOGETHER, NO_REPLAY = Arm(), Arm(0.0)


@dataclass(frozen=True)
class Chain:
    """One arm on one task."""

    arm: Arm
    task: str
    data: Path | None
    model: Path | None
    split: str
    steps: int
    """Of all cycles together."""
    batch: int
    precision: str
    device: str
    seed: int

    @property
    def result(self) -> PartResult:
        """The part, with nothing found yet."""
        return PartResult(
            task=self.task,
            part=INCREMENTAL,
            variant=self.arm.name,
            split=self.split,
            seed=self.seed,
            steps=self.steps,
            batch=self.batch,
            precision=self.precision,
            device=self.device,
            gpu=gpu_name() if self.device != CPU else "",
            rate=0.0,
            recipe=ours.recipe(),
            figures={},
            train_seconds=0.0,
            code_version=code_version(),
        )

    def run(self) -> PartResult:
        """Every cycle that has not ended, then the figures of the last. Raises CalledProcessError, SystemExit."""
        if self.steps % self.arm.days:
            raise SystemExit(f"--steps {self.steps}: expected a multiple of {self.arm.days}, a share for each day")
        place, started = self.place, time.monotonic()
        workspace = place / "workspace"
        storage = open_storage(str(workspace))
        for cycle in range(1, self.arm.cycles + 1):
            if load_result(storage, self._name(cycle), "evaluate") is None:
                day = self.arm.days if self.arm.replay is None else cycle
                ours.run(self.flags(workspace, place / "days", day, cycle), ())
        last = self._name(self.arm.cycles)
        found = ours.figures_of(ours.report_of(workspace, last))
        by_query = ours.ndcg_by_query(workspace, place / "scratch", last)
        seconds = time.monotonic() - started
        update = {"figures": found, "ndcg_by_query": by_query, "train_seconds": seconds}
        return self.result.model_copy(update=update)

    def forget(self) -> None:
        """Remove the workspace; its figures are kept."""
        shutil.rmtree(self.place)

    @property
    def place(self) -> Path:
        """Of its workspace: another recipe has another one."""
        return WORK / f"{self.result.name}-{self.result.recipe[:8]}"

    @staticmethod
    def _name(cycle: int) -> str:
        return f"day-{cycle}"

    def flags(self, workspace: Path, days: Path, day: int, cycle: int) -> list[str]:
        """Of the cycle that is the first to see `day`."""
        steps = self.steps // self.arm.cycles
        flags = [*self._files(workspace, days, day, steps, self._name(cycle)), *_PROMOTE]
        if self.arm.replay is not None:
            flags += ["--train.replay-share", f"{self.arm.replay:g}"]
        return flags + (_CHEAP if cycle < self.arm.cycles else [])

    def _files(self, workspace: Path, days: Path, day: int, steps: int, cycle: str) -> list[str]:
        """Published weights and a file; days that have come by then are folders of it."""
        if self.data is None or self.model is None:
            raise SystemExit(f"{self.task} needs --data and --model")
        task = TASKS[self.task]
        if not task.catalogue:
            raise SystemExit(f"{self.task} has no catalogue to search; pricerunner has one")
        deal_days(self.data / task.pairs, days, day, self.arm.days)
        flags = ours.flags_of(
            task,
            self.data.resolve(),
            self.model.resolve(),
            workspace,
            cycle=cycle,
            split=self.split,
            seed=self.seed,
            steps=steps,
            batch=self.batch,
            precision=self.precision,
            device=self.device,
        )
        return [*flags, "--data.path", str(days.resolve())]


def deal_days(file: Path, folder: Path, day: int, days: int = DAYS) -> None:
    """The first `day` of all days of a file of judgements as dt= folders. Raises OSError, pyarrow.ArrowInvalid."""
    table = pq.read_table(file)
    dealt = np.array([hash63(f"day|{query}") % days for query in table["query_id"].to_pylist()])
    for number in range(day):
        place = folder / f"dt={_FIRST_DAY + timedelta(days=number)}" / "part-0.parquet"
        if place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = place.parent / "_part-0.parquet"
        pq.write_table(table.filter(pa.array(dealt == number)), unfinished)
        unfinished.replace(place)


def incremental_table(task: str, budget: Budget, parts: Sequence[PartResult], reads: int) -> Table:
    """The five days beside one training on all of them, on test. Raises Incomplete."""
    runs = [one for one in parts if (one.part, one.task, one.split, one.budget) == (INCREMENTAL, task, "test", budget)]
    if len({(one.recipe, one.settings) for one in runs}) > 1:
        raise Incomplete(f"chains of {task} with different recipes; run all of them again")
    sides = {runs[0].variant: runs for runs in sides_of(runs).values()}
    shipped, many = shipped_arm().name, shipped_arm(MANY_DAYS).name
    for wanted in (TOGETHER.name, shipped):
        if wanted not in sides:
            raise Incomplete(f"{wanted} was not run on test")
    beside = {
        "behind": (shipped, f"{shipped}, means over the seeds that both have"),
        "behind_without_replay": (NO_REPLAY.name, "no replay"),
        "behind_20_days": (many, many),
    }
    pairs = {
        arm: _of_same_seeds(sides[TOGETHER.name], sides[arm]) for arm in (shipped, NO_REPLAY.name, many) if arm in sides
    }
    figures = [
        *(
            figure(name, mean(pairs[arm][0], NDCG) - mean(pairs[arm][1], NDCG), "", f"nDCG@10, together minus {text}")
            for name, (arm, text) in beside.items()
            if arm in pairs
        ),
        *(mean_figure(f"{name}_{NDCG}", values(found, NDCG), "", f"{NDCG}, {name}") for name, found in sides.items()),
        *(each for arm, (whole, runs) in pairs.items() for each in interval_figures(whole, {arm: runs})),
    ]
    used = sum(one.reads for one in runs)
    return Table(
        bench=f"quality_incremental_{task}_{budget.name}",
        title=f"{task}: nDCG@10 that five daily cycles with replay lose to one training on all, {budget.seen}",
        method=METHOD.format(**budget._asdict(), reads=used, others=reads - used),
        figures=figures,
        targets=(
            Target(figure="behind", comparison="<=", value=0.005),
            *([Target(figure="behind_20_days", comparison="<=", value=0.01)] if many in sides else []),
        ),
        settings={"seeds": len(sides[shipped]), **provenance(runs)},
    )


def _of_same_seeds(one: list[PartResult], other: list[PartResult]) -> tuple[list[PartResult], list[PartResult]]:
    """Those runs of both sides whose seed the other side has too."""
    seeds = {run.seed for run in one} & {run.seed for run in other}
    return [run for run in one if run.seed in seeds], [run for run in other if run.seed in seeds]
