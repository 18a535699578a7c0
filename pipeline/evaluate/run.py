"""The work of an evaluation on all ranks: score both models, search with both, judge. Rank 0 gets the report."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.context import StageContext
from pipeline.core.arrays import Int64s
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.data.token_sets import Split, TokenSet, open_rows, read_token_sets, select_partitions
from pipeline.evaluate.baselines import ScoredBaseline, fuse, score_baselines
from pipeline.evaluate.gate.compare import Side
from pipeline.evaluate.gate.judge import judge, verdict_advice
from pipeline.evaluate.golden import golden_check
from pipeline.evaluate.holdout import Holdout, Leak, find_leak, judged_slices, leak_doubts, open_holdout, refuse_leak
from pipeline.evaluate.metrics.labels import best_threshold
from pipeline.evaluate.metrics.measure import metric_report, slice_reports
from pipeline.evaluate.models import Models, ModelScorer
from pipeline.evaluate.originals import with_originals
from pipeline.evaluate.report import EvaluationReport, HoldoutReport, ModelReport, MovedQuery, digest_key, score_digest
from pipeline.evaluate.retrieval import ModelSearch, RetrievalResult, moved_queries
from pipeline.evaluate.score import ScoreSet
from pipeline.health.device import diagnose_device_error
from pipeline.io.commit import read_manifest
from pipeline.parallel.process_group import ProcessGroup, open_ranks
from pipeline.retrieval.products import decode_tokens
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName

_UNTRAINED = (
    "it was trained for retrieval alone (train.loss.graded_weight 0), the scores of its relevance head mean nothing"
)
VALID: Split = "valid"
MAX_MOVED = 10
"""Queries that won, and as many that lost, of which pages show the results."""


def run_evaluation(
    settings: Settings, ctx: StageContext, models: Models, sets: list[TokenSet], inputs: dict[str, str]
) -> EvaluationReport | None:
    """Evaluate; return the report on rank 0. Raises DataError for a holdout that cannot be used, Preempted."""
    with open_ranks(settings.backend, ctx.world, timeout_s=settings.train.collective_timeout_s) as (
        process_group,
        backend,
    ):
        try:
            return Evaluation(settings, ctx, models, sets, inputs, process_group, backend).run()
        except RuntimeError as error:
            better = diagnose_device_error(error, backend, settings.health, stop=ctx.stop)
            if better is error:
                raise
            raise better from error


@dataclass(frozen=True)
class ScoredModel:
    """One model with its scores: `judged` by the gate, and the `sample_id` [N] of the rows, ascending."""

    checkpoint: Checkpoint
    sample_id: Int64s
    scores_key: str
    judged: Side
    found: RetrievalResult | None


@dataclass
class Notes:
    """Warnings and durations for the report.

    They are not part of the evaluation: a method of it that is passed on would be a circle of references, which keeps
    the shards open until garbage collection.
    """

    console: Console
    warnings: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.console.warn(text)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = round(time.monotonic() - started, 3)


def new_sets(sets: list[TokenSet], new: Collection[str], split: Split) -> list[TokenSet]:
    """Return the sets of the new partitions that have rows of a split."""
    return [one for one in sets if one.info.partition in new and split in one.info.splits]


def open_valid(open_split: Callable[[Split], Holdout], process_group: ProcessGroup) -> Holdout | str:
    """Open the valid split, or return why there is none: the same on all ranks.

    Raises DataError when it can be read on some ranks only: their collectives would get out of step.
    """
    valid, reason = None, ""
    try:
        valid = open_split(VALID)
    except DataError as error:
        reason = error.seen
    reasons = process_group.gather(reason)
    if any(reasons) and not all(reasons):
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        raise DataError(
            f"split {VALID} cannot be used on rank {rank} of {len(reasons)}: {reasons[rank]}",
            expected="the same prepared rows on all ranks",
            next_command="delete the tokens folder in the scratch of that rank's machine and run the command again",
        )
    return valid or reason


def _find_leak(
    settings: Settings, ctx: StageContext, models: Models, holdout: Holdout, process_group: ProcessGroup, notes: Notes
) -> Leak | None:
    """Look for the holdout's queries in what either model was trained on, where that is still prepared."""
    config, workspace = settings.evaluate, ctx.workspace
    if config.leak == "off":
        return None
    trained: dict[str, str] = {}
    for model in (models.candidate, models.compared):
        if model is not None:
            trained |= model.state.also_seen | {mark: name for name, mark in model.state.partitions.items()}
    prefixes = {mark: f"tokens/{settings.data.name}/{mark}" for mark in sorted(trained)}
    there = [mark for mark, prefix in prefixes.items() if read_manifest(workspace, prefix) is not None]
    unchecked = tuple(sorted(name for mark, name in trained.items() if mark not in there))
    found = [one for mark in there for one in read_token_sets(workspace, [prefixes[mark]])]  # need not fit together
    total = sum(sum(shard.rows) for one in found for shard in one.info.splits.get("train", ()))
    rows = (open_rows(workspace, [one], "train", ctx.scratch / "tokens") for one in found)
    leak = find_leak(holdout.queries(), rows, process_group, ctx.stop, unchecked, total)
    if config.leak == "refuse":
        refuse_leak(leak)
    for doubt in leak_doubts(leak):
        notes.warn(doubt)
    return leak


class Evaluation:
    """One evaluation on this rank: what is scored is opened, and looked through for what was trained on."""

    def __init__(
        self,
        settings: Settings,
        ctx: StageContext,
        models: Models,
        sets: list[TokenSet],
        inputs: dict[str, str],
        process_group: ProcessGroup,
        backend: Backend,
    ) -> None:
        # Every rank read production for itself; it may have moved between two of them.
        if len(set(process_group.gather((inputs["candidate"], inputs["incumbent"])))) > 1:
            raise TransientError(
                "production changed while the ranks of this job started",
                expected="one incumbent on all ranks",
                next_command="run the same command again; it judges against the new one",
            )
        compared, notes = models.compared, Notes(ctx.console)
        selection = select_partitions(
            [one.partition for one in sets],
            parent_watermark=compared.state.watermark if compared else None,
            parent_partitions=compared.state.partitions if compared else {},
        )
        new = frozenset(partition.name for partition in selection.new)  # to the incumbent; all of them without one

        def open_split(split: Split) -> Holdout:
            chosen = sets if settings.evaluate.partitions == "all" else new_sets(sets, new, split)
            if not chosen:
                notes.warn(f"new partitions hold no row of split {split}: the holdout is that of all partitions")
            cache_dir, max_rows = ctx.scratch / "tokens", settings.evaluate.max_rows
            return open_holdout(ctx.workspace, chosen or sets, split, cache_dir, max_rows)

        holdout = open_split(settings.evaluate.split)
        ctx.console.info(
            f"evaluate: {models.candidate.prefix} against {compared.prefix if compared else 'nothing'} | "
            f"{holdout.order.total:,} rows of split {holdout.split}, {len(holdout.sets)} partition(s) | "
            f"{ctx.world.world_size} x {backend.name}"
        )
        with notes.timed("leak_check"):
            leak = _find_leak(settings, ctx, models, holdout, process_group, notes)
        tokenizer = models.candidate.tokenizer()
        # The valid split beside the one that is judged.
        valid = (
            "the valid split is the one that is judged"
            if holdout.split == VALID
            else open_valid(open_split, process_group)
        )
        self.settings, self.ctx, self.models, self.inputs, self.backend = settings, ctx, models, inputs, backend
        self.notes, self.new, self.holdout, self.leak = notes, new, holdout, leak
        self.scorer = ModelScorer(settings, ctx, backend, process_group)
        self.search = ModelSearch(settings, ctx, backend, process_group, sets, holdout, valid, tokenizer, notes.warn)

    def run(self) -> EvaluationReport | None:
        ours = self._side("candidate", self.models.candidate)
        theirs = None if self.models.compared is None else self._side("incumbent", self.models.compared)
        if ours is None:
            return None
        scored = score_baselines(self.search, self.notes.timed)
        with self.notes.timed("judging"):
            report = self._report(ours, theirs, scored)
            if not ours.judged.rows.meaningless:
                self._store_digest(ours, theirs)
            return report

    def _side(self, role: str, checkpoint: Checkpoint) -> ScoredModel | None:
        """On all ranks; what rank 0 gets."""
        with self.notes.timed(f"scoring_{role}"):
            scores, key = self.scorer.run(role, checkpoint, self.holdout)
            threshold = self._threshold(role, checkpoint, scores)
        with self.notes.timed(f"searching_{role}"):
            found = self.search.run(role, checkpoint, self.scorer.embed(checkpoint, self.holdout))
        if scores is None:
            return None
        rows = judged_slices(scores.rows, self.new)
        if not checkpoint.state.trained_head:
            rows = replace(rows, meaningless=_UNTRAINED)
        judged = Side(rows, self.settings.evaluate.metrics, threshold, found.per_query if found else None)
        return ScoredModel(checkpoint, scores.arrays["sample_id"], key, judged, found)

    def _threshold(self, role: str, checkpoint: Checkpoint, scores: ScoreSet | None) -> float | None:
        """Of two classes: the probability of a match with the best F1 on valid. None where there is none."""
        if len(self.holdout.sets[0].info.labels) != 2 or not checkpoint.state.trained_head:
            return None
        if self.holdout.split != VALID:
            valid = self.search.valid
            if isinstance(valid, str):
                self.notes.warn(f"no threshold for the {role}: {valid}")
                return None
            # Ranks gather in here: an error of one of them ends the run, or the others would wait for it.
            scores, _ = self.scorer.run(role, checkpoint, valid)
        try:
            return best_threshold(scores.rows) if scores else None
        except DataError as error:
            self.notes.warn(f"no threshold for the {role}: {error.seen}")
            return None

    def _report(self, ours: ScoredModel, theirs: ScoredModel | None, scored: list[ScoredBaseline]) -> EvaluationReport:
        config, ctx, holdout, leak = self.settings.evaluate, self.ctx, self.holdout, self.leak
        candidate, incumbent = self._measured(ours, scored), None if theirs is None else self._measured(theirs, scored)
        golden = self.search.judge_golden(ours.found, theirs.found if theirs else None)
        action = self.settings.gate.golden
        verdict = judge(
            ours.judged,
            theirs.judged if theirs else None,
            self.settings.gate,
            searched=config.retrieval.enabled,
            baselines=[one.baseline for one in scored],
            warnings=leak_doubts(leak),
            golden=golden_check(golden, action) if golden and action != "off" else None,
        )
        advice = verdict_advice(
            verdict,
            config,
            [one.info for one in self.search.sets],
            split=holdout.split,
            rows=holdout.order.total,
            rows_in_split=sum(holdout.rows.sizes),
            all_partitions=len(holdout.sets) == len(self.search.sets),
            later=theirs is not None,
        )
        task = self.search.task if config.retrieval.enabled else ""
        partitions = tuple(one.info.partition for one in holdout.sets)
        return EvaluationReport(
            cycle=ctx.cycle,
            inputs=self.inputs,
            backend=self.backend.name,
            device=self.backend.device_name(),
            precision=self.settings.train.precision,
            candidate=candidate,
            incumbent=incumbent,
            baselines=tuple(one.report for one in scored),
            golden=golden,
            holdout=HoldoutReport(
                split=holdout.split,
                partitions=partitions,
                new_partitions=tuple(name for name in partitions if name in self.new),
                rows=holdout.order.total,
                rows_in_split=sum(holdout.rows.sizes),
                queries=candidate.metrics.num_queries,
                leaked_by_id=leak.by_id if leak else 0,
                leaked_by_text=leak.by_text if leak else 0,
                leak_checked=config.leak != "off",
                unchecked_partitions=leak.unchecked if leak else (),
                retrieval_queries=0 if isinstance(task, str) else len(task.queries.ids),
                retrieval_items=0 if isinstance(task, str) else task.num_items,
            ),
            verdict=verdict.model_copy(update={"advice": advice}),
            warnings=tuple(self.notes.warnings),
            seconds=self.notes.seconds,
            settings_hash=ctx.settings_hash,
            code_version=ctx.code_version,
            at=datetime.now(UTC),
        )

    def _store_digest(self, ours: ScoredModel, theirs: ScoredModel | None) -> None:
        def texts_of(numbers: Int64s) -> dict[int, tuple[str, str]]:
            if not len(numbers):
                return {}
            tokenizer = self.models.candidate.tokenizer()
            sides = self.holdout.tokens_of("sample_id", ours.sample_id[numbers], ("query", "product"))
            pairs = zip(*(decode_tokens(side, tokenizer) for side in sides), strict=True)
            return {row: (query, product) for row, (query, product) in zip(numbers.tolist(), pairs, strict=True)}

        models = [(one.checkpoint.digest, one.judged) for one in (ours, theirs) if one]
        limit, metric, moved = self.settings.report.examples, self.search.ndcg, list[MovedQuery]()
        if theirs and ours.found and theirs.found and not isinstance(task := self.search.task, str):
            moved = moved_queries(task, ours.found, theirs.found, metric, min(limit, MAX_MOVED))
        digest = score_digest(self.ctx.cycle, models, limit, texts_of, metric, moved)
        try:
            info = self.holdout.sets[0].info
            digest = with_originals(digest, info, self.search.tokenizer, self.settings.data, self.ctx)
        except (ConfigError, DataError) as error:  # the verdict does not depend on it
            self.ctx.console.warn(f"the page shows decoded texts: {error.seen}")
        self.ctx.workspace.write_bytes(digest_key(self.ctx.cycle), digest.model_dump_json(indent=1).encode() + b"\n")

    def _measured(self, model: ScoredModel, scored: list[ScoredBaseline]) -> ModelReport:
        state, metrics, found = model.checkpoint.state, self.settings.evaluate.metrics, model.found
        rows, threshold = model.judged.rows, model.judged.threshold
        report = ModelReport(
            checkpoint=model.checkpoint.uri,
            digest=model.checkpoint.digest,
            cycle=state.cycle,
            step=state.step,
            began_from=state.published.text if state.published else "",
            scores=model.scores_key,
            metrics=metric_report(rows, metrics, threshold),
            retrieval=found.report if found else None,
            ndcg_by_width=found.by_width if found else {},
            hybrids=fuse(self.search, scored, found.ranked) if found else (),
            slices=slice_reports(rows, metrics, threshold),
            threshold=threshold,
        )
        self.ctx.events.emit(
            EventName.HOLDOUT_EVALUATED,
            step=state.step,
            split=self.settings.evaluate.split,
            checkpoint=model.checkpoint.uri,
            rows=rows.num_rows,
            **report.figures,
        )
        return report
