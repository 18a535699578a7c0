"""Simple tools on the holdout of an evaluation, scored once for the same data, by rank 0 when the models are done.

Their scores lie under `baselines/` in the workspace, below a key of all that decides them: another candidate, another
try and another cycle on the same data find them there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pipeline.context import StageContext
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import Json, fingerprint
from pipeline.data.tokens import TokenSet, open_rows
from pipeline.evaluate import bm25, boosting
from pipeline.evaluate.boosting import Boosting
from pipeline.evaluate.fusion import Ranked
from pipeline.evaluate.gate.judge import Baseline
from pipeline.evaluate.holdout_rows import Holdout
from pipeline.evaluate.metrics.labels import best_threshold
from pipeline.evaluate.metrics.measure import metric_report
from pipeline.evaluate.report import BaselineReport, HybridReport
from pipeline.evaluate.retrieval import RetrievalTask, hybrid_reports, lexical_search
from pipeline.evaluate.scores import load_arrays, save_arrays
from pipeline.evaluate.search import ModelSearch
from pipeline.io.commit import read_manifest
from pipeline.settings import Settings

VERSION = 1
"""Of what the baselines do; a higher one scores them again."""
BM25, BOOSTING = "BM25", "boosting"
_KIND = "boosting"

Timed = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Scored:
    """One baseline: its figures, what the gate compares, and of BM25 the lists of all queries."""

    report: BaselineReport
    baseline: Baseline
    ranked: Ranked | None = None


@dataclass
class Baselines:
    """The baselines of one evaluation."""

    settings: Settings
    ctx: StageContext
    sets: list[TokenSet]
    search: ModelSearch
    timed: Timed

    def score(self) -> list[Scored]:
        """All that are asked for, found or made now. Raises DataError for saved ones that cannot be read, Preempted."""
        config = self.settings.evaluate
        found = []
        if config.baselines.bm25 and config.retrieval.enabled:
            with self.timed("bm25"):
                found.append(self._bm25(self.search.task))
        if config.baselines.boosting:
            with self.timed("boosting"):
                found.append(self._boosting(self.search.holdout, self.search.valid))
        return found

    def hybrids(self, scored: list[Scored], ranked: Ranked | None) -> tuple[HybridReport, ...]:
        """Search of one model, whose lists are `ranked`, fused with that of BM25."""
        words, task = next((one.ranked for one in scored if one.ranked), None), self.search.task
        if not self.settings.evaluate.baselines.hybrid or not words or not ranked or isinstance(task, str):
            return ()
        return hybrid_reports(task, ranked, words, self.settings.evaluate.metrics)

    def _bm25(self, task: RetrievalTask | str) -> Scored:
        if isinstance(task, str):
            return Scored(BaselineReport(name="bm25", missing=task), Baseline(BM25, missing=task))
        key = self._key("bm25", {**self.search.decides, "k1": bm25.K1, "b": bm25.B})
        if read_manifest(self.ctx.workspace, key) is None:
            found = self.search.save(task, key, lexical_search(task, self.search.depth, self.ctx.stop))
        else:
            found = self.search.load(task, key)
        report = BaselineReport(name="bm25", scores=key, retrieval=found.report)
        return Scored(report, Baseline(BM25, retrieval=found.per_query), found.ranked)

    def _boosting(self, holdout: Holdout, valid: Holdout | str) -> Scored:
        config, ctx = self.settings.evaluate, self.ctx
        decides: dict[str, Json] = {
            "data": [one.info.fingerprint for one in self.sets],
            "holdout": holdout.name,
            "valid": valid if isinstance(valid, str) else valid.name,
            "rows": config.baselines.boosting_rows,
        }
        key = self._key("boosting", decides)
        if read_manifest(ctx.workspace, key) is None:
            train = open_rows(ctx.workspace, self.sets, "train", ctx.scratch / "tokens")
            fitted = boosting.fit(train, len(holdout.sets[0].info.labels), config.baselines.boosting_rows, ctx.stop)
            if isinstance(fitted, str):
                return Scored(BaselineReport(name="boosting", missing=fitted), Baseline(BOOSTING, missing=fitted))
            self._save(key, fitted, holdout, valid)
        arrays, fields = load_arrays(ctx.workspace, key, _KIND, ctx.scratch / _KIND)
        rows, chosen = boosting.to_rows(arrays, holdout.sets[0].info), fields.get("threshold")
        threshold = chosen if isinstance(chosen, float) else None
        metrics = metric_report(rows, config.metrics, threshold)
        report = BaselineReport(name="boosting", scores=key, metrics=metrics, threshold=threshold)
        return Scored(report, Baseline(BOOSTING, rows=rows, threshold=threshold))

    def _save(self, key: str, fitted: Boosting, holdout: Holdout, valid: Holdout | str) -> None:
        """Score the holdout and commit that, with the threshold of two labels."""
        arrays = fitted.score(holdout, self.ctx.stop)
        fields = {"threshold": self._threshold(fitted, holdout, valid), "fitted_rows": fitted.num_rows}
        save_arrays(self.ctx.workspace, key, _KIND, arrays, self.ctx.scratch, fields)

    def _threshold(self, fitted: Boosting, holdout: Holdout, valid: Holdout | str) -> float | None:
        """Of two labels, chosen as that of a model; None where it cannot be."""
        chosen_on = holdout if holdout.split == "valid" else valid
        if isinstance(chosen_on, str) or fitted.num_labels != 2:
            return None
        try:
            return best_threshold(boosting.to_rows(fitted.score(chosen_on, self.ctx.stop), holdout.sets[0].info))
        except DataError as error:
            self.search.warn(f"no threshold for {BOOSTING}: {error.seen}")
            return None

    def _key(self, name: str, decides: dict[str, Json]) -> str:
        mark = fingerprint({"version": VERSION, **decides})[:16]
        return f"baselines/{self.settings.data.name}/{name}-{mark}"
