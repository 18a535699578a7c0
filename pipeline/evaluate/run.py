"""Run an evaluation on all ranks: score both models, search with both models, and judge the candidate."""

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
from pipeline.data.token_sets import Split, TokenSet, select_partitions
from pipeline.evaluate.baselines import ScoredBaseline, fuse, score_baselines
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateInput
from pipeline.evaluate.gate.judge import judge, verdict_advice
from pipeline.evaluate.golden import golden_check
from pipeline.evaluate.holdout import Holdout, judged_slices, open_holdout
from pipeline.evaluate.metrics.labels import best_threshold
from pipeline.evaluate.metrics.measure import RowMetrics, metric_report, retrieval_slices, slice_reports
from pipeline.evaluate.models import Models, ModelScorer
from pipeline.evaluate.originals import with_originals
from pipeline.evaluate.report import EvaluationReport, HoldoutReport, ModelReport, MovedQuery, digest_key, score_digest
from pipeline.evaluate.retrieval import ModelSearch, RetrievalResult, moved_queries
from pipeline.evaluate.score import ScoreSet
from pipeline.evaluate.trained import check_trained, leak_warnings
from pipeline.health.device import diagnose_device_error
from pipeline.parallel.process_group import ProcessGroup, open_ranks
from pipeline.retrieval.products import decode_tokens
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName

_UNTRAINED = "the relevance head is untrained, because train.loss.graded_weight was 0"
VALID: Split = "valid"
MAX_MOVED = 10  # maximum number of queries in the digest that gained, and of those that lost


def run_evaluation(
    settings: Settings, ctx: StageContext, models: Models, sets: list[TokenSet], inputs: dict[str, str]
) -> EvaluationReport | None:
    """Evaluate the models on all ranks, and return the report on rank 0.

    Raises DataError if the holdout cannot be used, and Preempted on a stop signal.
    """
    timeout_s = settings.train.collective_timeout_s
    with open_ranks(settings.backend, ctx.world, timeout_s=timeout_s) as (process_group, backend):
        try:
            return Evaluation(settings, ctx, models, sets, inputs, process_group, backend).run()
        except RuntimeError as error:
            diagnosis = diagnose_device_error(error, backend, settings.health, stop=ctx.stop)
            if diagnosis is error:
                raise
            raise diagnosis from error


@dataclass(frozen=True)
class ScoredModel:
    """A model with its results. `sample_id` [N] has the ids of the rows in `gate_input`, in ascending order."""

    checkpoint: Checkpoint
    sample_id: Int64s
    scores_key: str
    gate_input: GateInput
    retrieval: RetrievalResult | None


@dataclass
class Notes:
    """Warnings and durations to include in the report.

    These are kept in a separate object, because passing bound methods of `Evaluation` to other objects would create a
    reference cycle, which would keep the shards open until the garbage collector runs.
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
    """Return the token sets of the `new` partitions that have rows in a split."""
    return [token_set for token_set in sets if token_set.info.partition in new and split in token_set.info.splits]


def open_valid(open_split: Callable[[Split], Holdout], process_group: ProcessGroup) -> Holdout | str:
    """Open the valid split on all ranks, or return the reason why it cannot be used.

    Raises DataError if only some ranks can open it. Otherwise, the ranks would no longer run the same collectives.
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
            f"cannot open split {VALID} on rank {rank} of {len(reasons)}: {reasons[rank]}",
            expected="the same prepared rows on all ranks",
            next_command="delete the tokens folder in the scratch folder of that machine and run the command again",
        )
    return valid or reason


class Evaluation:
    """An evaluation, as run by each rank. The constructor opens the holdout and checks it for leaked queries."""

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
        # The ranks read the production pointer separately, so it may have changed between these reads.
        if len(set(process_group.gather((inputs["candidate"], inputs["incumbent"])))) > 1:
            raise TransientError(
                "the production model changed while the ranks of this job started",
                expected="the same production model on all ranks",
                next_command="run the same command again to compare with the new model",
            )
        compared, notes = models.compared, Notes(ctx.console)
        selection = select_partitions(
            [token_set.partition for token_set in sets],
            parent_watermark=compared.state.watermark if compared else None,
            parent_partitions=compared.state.partitions if compared else {},
        )
        new = frozenset(partition.name for partition in selection.new)  # all partitions if there is no production model

        def open_split(split: Split) -> Holdout:
            chosen = sets if settings.evaluate.partitions == "all" else new_sets(sets, new, split)
            if not chosen:
                notes.warn(f"the new partitions have no rows in split {split}, so all partitions are evaluated")
            cache_dir, max_rows = ctx.scratch / "tokens", settings.evaluate.max_rows
            return open_holdout(ctx.workspace, chosen or sets, split, cache_dir, max_rows)

        holdout = open_split(settings.evaluate.split)
        ctx.console.info(
            f"evaluate: {models.candidate.prefix} vs {compared.prefix if compared else 'no production model'} | "
            f"{holdout.order.total:,} rows of split {holdout.split}, {len(holdout.sets)} partition(s) | "
            f"{ctx.world.world_size} x {backend.name}"
        )
        tokenizer = models.candidate.tokenizer()
        # The valid split is used to choose thresholds and to tune the weight of hybrid search.
        valid = (
            "the models are judged on the valid split itself"
            if holdout.split == VALID
            else open_valid(open_split, process_group)
        )
        self.settings, self.ctx, self.models, self.inputs, self.backend = settings, ctx, models, inputs, backend
        self.notes, self.new, self.holdout = notes, new, holdout
        self.scorer = ModelScorer(settings, ctx, backend, process_group)
        self.search = ModelSearch(settings, ctx, backend, process_group, sets, holdout, valid, tokenizer, notes.warn)
        with notes.timed("leak_check"):
            self.leak, self.parts = check_trained(models, self.search, notes.warn)

    def run(self) -> EvaluationReport | None:
        """Score the models and the baselines, judge the candidate, and return the report on rank 0."""
        candidate = self._score("candidate", self.models.candidate)
        production = None if self.models.compared is None else self._score("incumbent", self.models.compared)
        if candidate is None:
            return None
        baselines = [self._with_parts(scored) for scored in score_baselines(self.search, self.notes.timed)]
        with self.notes.timed("judging"):
            report = self._report(candidate, production, baselines)
            if not candidate.gate_input.rows.meaningless:
                self._store_digest(candidate, production)
            return report

    def _score(self, role: str, checkpoint: Checkpoint) -> ScoredModel | None:
        """Score the holdout and evaluate retrieval with a model on all ranks, and return the results on rank 0."""
        with self.notes.timed(f"scoring_{role}"):
            scores, key = self.scorer.run(role, checkpoint, self.holdout)
            threshold = self._threshold(role, checkpoint, scores)
        with self.notes.timed(f"searching_{role}"):
            retrieval = self.search.run(role, checkpoint, self.scorer.embed(checkpoint, self.holdout))
        if scores is None:
            return None
        slices = {**scores.rows.slices, **self.parts.rows}
        rows = judged_slices(replace(scores.rows, slices=slices), self.new)
        if not checkpoint.state.trained_head:
            rows = replace(rows, meaningless=_UNTRAINED)
        gate_input = GateInput(
            rows, self.settings.evaluate.metrics, threshold, retrieval.per_query if retrieval else None
        )
        return ScoredModel(checkpoint, scores.arrays["sample_id"], key, gate_input, retrieval)

    def _threshold(self, role: str, checkpoint: Checkpoint, scores: ScoreSet | None) -> float | None:
        """Choose the threshold with the highest F1 on the valid split.

        Returns None if the number of labels is not two, or if the relevance head is untrained.
        """
        if len(self.holdout.sets[0].info.labels) != 2 or not checkpoint.state.trained_head:
            return None
        if self.holdout.split != VALID:
            valid = self.search.valid
            if isinstance(valid, str):
                self.notes.warn(f"no threshold was chosen for the {role}: {valid}")
                return None
            # Do not catch errors here. If this rank failed and continued, the others would wait for it forever.
            scores, _ = self.scorer.run(role, checkpoint, valid)
        try:
            return best_threshold(scores.rows) if scores else None
        except DataError as error:
            self.notes.warn(f"no threshold was chosen for the {role}: {error.seen}")
            return None

    def _report(
        self, candidate: ScoredModel, production: ScoredModel | None, baselines: list[ScoredBaseline]
    ) -> EvaluationReport:
        config, ctx, holdout, leak = self.settings.evaluate, self.ctx, self.holdout, self.leak
        candidate_report = self._measure(candidate, baselines)
        production_report = None if production is None else self._measure(production, baselines)
        golden = self.search.judge_golden(candidate.retrieval, production.retrieval if production else None)
        action = self.settings.gate.golden
        verdict = judge(
            candidate.gate_input,
            production.gate_input if production else None,
            self.settings.gate,
            searched=config.retrieval.enabled,
            baselines=[scored.baseline for scored in baselines],
            warnings=leak_warnings(leak),
            golden=golden_check(golden, action) if golden and action != "off" else None,
        )
        advice = verdict_advice(
            verdict,
            config,
            [token_set.info for token_set in self.search.sets],
            split=holdout.split,
            rows=holdout.order.total,
            rows_in_split=sum(holdout.rows.sizes),
            all_partitions=len(holdout.sets) == len(self.search.sets),
            later=production is not None,
        )
        task = self.search.task if config.retrieval.enabled else ""
        partitions = tuple(token_set.info.partition for token_set in holdout.sets)
        return EvaluationReport(
            cycle=ctx.cycle,
            inputs=self.inputs,
            backend=self.backend.name,
            device=self.backend.device_name(),
            precision=self.settings.train.precision,
            candidate=candidate_report,
            incumbent=production_report,
            baselines=tuple(scored.report for scored in baselines),
            golden=golden,
            holdout=HoldoutReport(
                split=holdout.split,
                partitions=partitions,
                new_partitions=tuple(name for name in partitions if name in self.new),
                rows=holdout.order.total,
                rows_in_split=sum(holdout.rows.sizes),
                queries=candidate_report.metrics.num_queries,
                leaked_by_id=leak.by_id if leak else 0,
                leaked_by_text=leak.by_text if leak else 0,
                leak_checked=config.leak != "off",
                unchecked_partitions=leak.unchecked if leak else (),
                retrieval_queries=0 if isinstance(task, str) else len(task.queries.ids),
                retrieval_items=0 if isinstance(task, str) else task.num_items,
                parts=dict(self.parts.counts),
            ),
            verdict=verdict.model_copy(update={"advice": advice}),
            warnings=tuple(self.notes.warnings),
            seconds=self.notes.seconds,
            settings_hash=ctx.settings_hash,
            code_version=ctx.code_version,
            at=datetime.now(UTC),
        )

    def _with_parts(self, scored: ScoredBaseline) -> ScoredBaseline:
        baseline, slices = scored.baseline, retrieval_slices(scored.baseline.retrieval, self.parts.queries)
        if baseline.rows is not None:
            rows = replace(baseline.rows, slices=self.parts.rows)
            slices += slice_reports(rows, self.settings.evaluate.metrics, baseline.threshold)
        return replace(scored, report=scored.report.model_copy(update={"slices": slices}))

    def _store_digest(self, candidate: ScoredModel, production: ScoredModel | None) -> None:
        def texts_of(numbers: Int64s) -> dict[int, tuple[str, str]]:
            if not len(numbers):
                return {}
            tokenizer = self.models.candidate.tokenizer()
            tokens = self.holdout.tokens_of("sample_id", candidate.sample_id[numbers], ("query", "product"))
            pairs = zip(*(decode_tokens(side, tokenizer) for side in tokens), strict=True)
            return {row: (query, product) for row, (query, product) in zip(numbers.tolist(), pairs, strict=True)}

        models = [(model.checkpoint.digest, model.gate_input) for model in (candidate, production) if model]
        limit, metric, moved = self.settings.report.examples, self.search.ndcg, list[MovedQuery]()
        results = candidate.retrieval, production.retrieval if production else None
        if results[0] and results[1] and not isinstance(task := self.search.task, str):
            moved = moved_queries(task, results[0], results[1], metric, min(limit, MAX_MOVED))
        digest = score_digest(self.ctx.cycle, models, limit, texts_of, metric, moved)
        # The texts of a catalogue file are original already. Searching for them would read the input to its limit.
        originals = {"moved": digest.moved} if self.settings.evaluate.retrieval.catalogue else {}
        try:
            info, decoded = self.holdout.sets[0].info, digest.model_copy(update=dict.fromkeys(originals, ()))
            digest = with_originals(decoded, info, self.search.tokenizer, self.settings.data, self.ctx)
            digest = digest.model_copy(update=originals)
        except (ConfigError, DataError) as error:  # original texts are nice to have, so do not fail the evaluation
            self.ctx.console.warn(f"the report page shows decoded instead of original texts: {error.seen}")
        self.ctx.workspace.write_bytes(digest_key(self.ctx.cycle), digest.to_json())

    def _measure(self, model: ScoredModel, baselines: list[ScoredBaseline]) -> ModelReport:
        state, metrics, retrieval = model.checkpoint.state, self.settings.evaluate.metrics, model.retrieval
        rows, threshold = model.gate_input.rows, model.gate_input.threshold
        powers = rows.probabilities**state.temperature  # the probabilities without the temperature, times a constant
        uncalibrated = replace(rows, probabilities=powers / powers.sum(axis=1, keepdims=True))
        report = ModelReport(
            checkpoint=model.checkpoint.uri,
            digest=model.checkpoint.digest,
            cycle=state.cycle,
            step=state.step,
            began_from=state.published.text if state.published else "",
            scores=model.scores_key,
            metrics=metric_report(rows, metrics, threshold),
            retrieval=retrieval.report if retrieval else None,
            ndcg_by_width=retrieval.by_width if retrieval else {},
            hybrids=fuse(self.search, baselines, retrieval.ranked) if retrieval else (),
            slices=slice_reports(rows, metrics, threshold)
            + retrieval_slices(model.gate_input.retrieval, self.parts.queries),
            threshold=threshold,
            temperature=state.temperature,
            ece_before=RowMetrics(uncalibrated, metrics).measure(MetricName.parse("ece")).value,
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
