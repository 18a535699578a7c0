"""One part of this bench: a trained side, or BM25, on one split of one task."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.machine import gpu_name
from bench.quality import ours, peers
from bench.quality.part import BM25, CPU, OURS, PartResult
from bench.quality.tasks import TASKS, Catalogue, Task, read_catalogue, read_pairs
from pipeline.core.arrays import Float32s
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.metrics.labels import best_threshold
from pipeline.evaluate.metrics.measure import metric_report, retrieval_report
from pipeline.evaluate.metrics.ranking import Judgements
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows
from pipeline.retrieval.bm25 import Bm25
from pipeline.retrieval.search import ExactTopK
from pipeline.telemetry.events import code_version

PARTS = (OURS, BM25, *peers.LOSSES)


@dataclass(frozen=True)
class Run:
    """What a part is told."""

    part: str
    task: str
    data: Path
    """Folder of the data sets."""
    model: Path | None
    """Folder of the MiniLM weights and tokenizer; BM25 needs none."""
    split: str
    steps: int
    batch: int
    rate: float
    precision: str
    device: str
    seed: int
    variant: str = ""
    settings: tuple[str, ...] = ()
    workspace: Path | None = None
    """Kept, so that later parts reuse its data and what a teacher computed for it."""

    @property
    def result(self) -> PartResult:
        """The part, with nothing found yet."""
        trained = self.part != BM25
        return PartResult(
            task=self.task,
            part=self.part,
            variant=self.variant,
            split=self.split,
            seed=self.seed,
            steps=self.steps if trained else 0,
            batch=self.batch if trained else 0,
            precision=self.precision if trained else "",
            device=self.device if trained else CPU,
            gpu=gpu_name() if trained and self.device != CPU else "",
            rate=self.rate if self.part in peers.LOSSES else 0.0,
            settings=self.settings,
            recipe=ours.recipe() if self.part == OURS else "",
            figures={},
            train_seconds=0.0,
            code_version=code_version(),
        )


@dataclass(frozen=True)
class Found:
    """What a side found."""

    figures: dict[str, float]
    by_query: tuple[float, ...] = ()
    """nDCG@10 of each query asked."""
    train_seconds: float = 0.0


def run_part(run: Run) -> PartResult:
    """Train and score. Raises what the tools raise."""
    task = TASKS[run.task]
    catalogue = read_catalogue(run.data, task, run.split) if task.catalogue else None
    if run.part == OURS:
        found = _ours(run, task)
    elif run.part == BM25:
        found = _bm25(task, catalogue)
    else:
        found = _peer(run, task, catalogue)
    update = {"figures": found.figures, "ndcg_by_query": found.by_query, "train_seconds": found.train_seconds}
    return run.result.model_copy(update=update)


def _model(run: Run) -> Path:
    if run.model is None:
        raise SystemExit(f"{run.part} needs --model, the folder of the MiniLM weights and tokenizer")
    return run.model


def _ours(run: Run, task: Task) -> Found:
    """The real commands, in a workspace that is deleted unless it was given."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        workspace, cycle = run.workspace or Path(folder) / "workspace", run.result.name.replace(".", "_")
        flags = ours.flags_of(
            task,
            run.data.resolve(),
            _model(run).resolve(),
            workspace,
            cycle=cycle,
            split=run.split,
            seed=run.seed,
            steps=run.steps,
            batch=run.batch,
            precision=run.precision,
            device=run.device,
        )
        ours.run(flags, run.settings)
        seconds = time.monotonic() - started
        searched = task.catalogue or task.by_item
        by_query = ours.ndcg_by_query(workspace, Path(folder) / "scratch", cycle) if searched else ()
        return Found(ours.figures_of(ours.report_of(workspace, cycle)), by_query, seconds)


def _bm25(task: Task, catalogue: Catalogue | None) -> Found:
    if catalogue is None:
        raise SystemExit(f"{task.name} has no catalogue to search")
    per_query, figures = retrieval(Bm25(catalogue.titles).search(catalogue.queries, 100)[1], catalogue)
    return Found(figures, tuple(per_query.values["retrieval_ndcg@10"].tolist()))


def _peer(run: Run, task: Task, catalogue: Catalogue | None) -> Found:
    """sentence-transformers; the threshold of a match is chosen on valid."""
    started = time.monotonic()
    model = peers.train(
        run.part,
        _model(run),
        read_pairs(run.data, task, "train"),
        steps=run.steps,
        batch=run.batch,
        rate=run.rate,
        seed=run.seed,
        bf16=run.precision != "fp32",
        device=run.device,
    )
    seconds = time.monotonic() - started
    encode = peers.encoder(model, run.precision, run.device)
    figures: dict[str, float] = {}
    by_query: tuple[float, ...] = ()
    if catalogue is not None:
        per_query, figures = retrieval(nearest(encode, catalogue), catalogue)
        by_query = tuple(per_query.values["retrieval_ndcg@10"].tolist())
    similar = {}
    for split in {"valid", run.split}:
        pairs = read_pairs(run.data, task, split)
        similar[split] = of_cosines((encode(pairs.query) * encode(pairs.title)).sum(1), pairs.positive)
    chosen = best_threshold(similar["valid"])
    figures["f1"] = metric_report(similar[run.split], MetricsConfig(), chosen).values["f1"]
    return Found(figures, by_query, seconds)


# One way to score every tool: the same exact search, the same metrics, the same choice of a threshold.

DEPTH = 100
_WINDOW = 4096


def nearest(encode: peers.Encode, catalogue: Catalogue) -> npt.NDArray[np.int64]:
    """The DEPTH nearest titles of each query asked, [Q, DEPTH], best first."""
    search = ExactTopK(encode(catalogue.queries), DEPTH)
    for first in range(0, len(catalogue.titles), _WINDOW):
        search.add(first, encode(catalogue.titles[first : first + _WINDOW]))
    return search.result()[1]


def retrieval(ranked: npt.NDArray[np.int64], catalogue: Catalogue) -> tuple[PerQuery, dict[str, float]]:
    """Figures of each query, and their means."""
    relevant = np.flatnonzero(np.isin(catalogue.owner, catalogue.asked)).astype(np.int64)
    judged = Judgements(catalogue.owner[relevant], relevant, np.ones(len(relevant)))
    per_query, report = retrieval_report(catalogue.asked, ranked, judged, MetricsConfig())
    return per_query, {name.removeprefix("retrieval_"): value for name, value in report.values.items()}


def of_cosines(cosine: Float32s, positive: npt.NDArray[np.bool_]) -> ScoredRows:
    """Pairs that a bi-encoder has compared, [N] each, as rows of a model of two labels: -1 to 1 becomes 0 to 1."""
    match = np.clip((1.0 + cosine.astype(np.float64)) / 2, 0.0, 1.0)
    rows, gain = np.arange(len(match), dtype=np.int64), positive.astype(np.float64)
    probabilities = np.stack([1.0 - match, match], axis=1)
    return ScoredRows(rows, positive.astype(np.int64), gain, probabilities, ("other", "match"), (0.0, 1.0))
