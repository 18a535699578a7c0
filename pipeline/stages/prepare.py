"""The prepare stage, which tokenises new input partitions into token shards. Existing token shards are used again.

In an array of n workers, each worker prepares every n-th partition. The last worker to finish stores the result.
"""

import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.batch_order import LONGEST
from pipeline.core.errors import DataError
from pipeline.core.format import format_percent
from pipeline.data.buckets import given_buckets
from pipeline.data.input_files import names_of
from pipeline.data.judgements import prepared_warnings, shared_products, sum_judgements
from pipeline.data.prepare import PreparedData, prepare
from pipeline.data.token_sets import (
    QUARANTINE,
    Split,
    TokenSetInfo,
    check_longest,
    check_trainable,
    longest_in_buckets,
    store_digest,
)
from pipeline.evaluate.config import MAX_LEAK_SHARE
from pipeline.evaluate.gate.judge import count_queries, precision_warning, size_advice
from pipeline.evaluate.golden import read_golden
from pipeline.parallel.world import job_index
from pipeline.registry.checkpoints import parent_buckets, parent_inputs, parent_tokenizer
from pipeline.settings import Settings

NAME = "prepare"
_MAX_REASONS = 5
UNSPLIT = (
    "data.tokenizer.split_digits is set, but the tokenizer of the parent model does not split digits: start a new model"
    " with --train.start scratch, or set --data.tokenizer.split-digits false"
)


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Prepare all partitions of the input and store the result.

    The input is listed every time, because there may be new partitions. If nothing has changed, the earlier result is
    returned as already done. Raises DataError if the input cannot be used.
    """
    started, config = datetime.now(UTC), settings.data
    read_golden(settings, ctx.stop)  # report errors in the golden queries now, rather than after training
    tokenizer = None if config.tokenizer.path else parent_tokenizer(settings, ctx.workspace)
    parent = parent_inputs(settings, ctx.workspace) if config.attributes else None
    given = given_buckets(config, ctx.workspace, parent_buckets(settings, ctx.workspace))
    check_longest(longest_in_buckets(given), settings.model.max_positions)
    data = prepare(
        config.model_copy(update={"buckets": given}),
        ctx.workspace,
        scratch=ctx.scratch,
        tokenizer=tokenizer,
        attributes=parent.attributes if parent else (),
        longest=min(LONGEST, settings.model.max_positions),
        products=settings.train.candidates_per_query,
        worker=job_index(config.workers, os.environ, "data"),
        events=ctx.events.emit,
        stop=ctx.stop,
        retry=settings.storage,
    )
    ctx.console.info(summary(data))
    if data.missing:
        ctx.console.info(f"prepare: {data.missing} partition(s) have not been prepared by other workers yet")
        return ctx.finish(NAME, started, inputs={}, outputs={}, figures={"partitions_missing": data.missing})
    check_trainable(data.infos[0], settings.model.max_positions)  # before machines with accelerators are started
    if settings.evaluate.leak == "refuse":
        _check_split(data.infos, settings.evaluate.split)
    if config.path is None:
        ctx.console.info("prepare: data.path is not set, so this is a synthetic shop")
    with_bad = [prefix for prefix, info in zip(data.token_set_prefixes, data.infos, strict=True) if info.rows_bad]
    if with_bad:
        others = f" and {len(with_bad) - 1} other partition(s)" if len(with_bad) > 1 else ""
        uri = ctx.workspace.uri(f"{with_bad[-1]}/{QUARANTINE}")
        ctx.console.info(f"prepare: quarantined rows are in {uri}{others}")
    if data.skipped:
        ctx.console.info(f"prepare: {len(data.skipped)} other file(s) were not read: {names_of(data.skipped)}")
    loss, warnings = settings.train.loss, list(data.input_warnings)
    warnings += prepared_warnings(data.infos, loss.positive_gain, contrastive=loss.contrastive_weight > 0)
    if config.tokenizer.split_digits and not data.splits_digits:  # we are using the tokenizer of the parent model
        warnings.append(UNSPLIT)
    split, queries, few = settings.evaluate.split, count_queries(data.infos), dict[str, Figure]()
    if queries and queries[split] < settings.gate.min_queries:
        few = {"few_queries": size_advice(split, queries[split], settings.gate.min_queries, queries)}
    judged = {"valid": queries, split: {} if few else queries}  # valid selects checkpoints
    imprecise = (precision_warning(name, counts) for name, counts in judged.items())
    for message in (*warnings, *few.values(), *filter(None, imprecise)):
        ctx.console.warn(f"prepare: {message}")
    for message, is_warned in shared_products(data.infos):
        if not is_warned:
            ctx.console.info(f"prepare: {message}")
    by_prefix = dict(zip(data.token_set_prefixes, data.infos, strict=True))
    store_digest(ctx.workspace, ctx.cycle, by_prefix, labels=data.labels, examples=settings.report.examples)
    query_figures = {f"queries_{name}": number for name, number in queries.items()} | few
    token_sets = {f"token_set_{i:04d}": prefix for i, prefix in enumerate(data.token_set_prefixes)}
    result = ctx.finish(
        NAME,
        started,
        # Token sets are named after the fingerprint of their files, tokenizer and data settings.
        inputs={name: prefix.rpartition("/")[2] for name, prefix in token_sets.items()},
        outputs=token_sets | {"tokenizer": data.tokenizer_prefix},
        figures=_figures(data, loss.positive_gain, warnings) | query_figures,
    )
    earlier = ctx.earlier(NAME)
    same = earlier is not None and (earlier.inputs, earlier.outputs) == (result.inputs, result.outputs)
    # Some figures only describe this attempt, so ignore them when comparing with the earlier result.
    of_attempt = ("partitions_reused", "partitions_prepared", "rows_prepared")
    figures = earlier.figures | {name: result.figures[name] for name in of_attempt} if earlier is not None else {}
    if "queries_test" not in figures:  # the earlier result is from a version that did not count queries
        figures |= {name: value for name, value in result.figures.items() if name in query_figures}
    if earlier is not None and same and figures == result.figures:
        ctx.console.info(f"prepare: already done at {earlier.finished:%Y-%m-%d %H:%M:%S} UTC")
        return earlier.model_copy(update={"status": "already_done"})
    return store_result(ctx.workspace, result)


def _check_split(infos: Sequence[TokenSetInfo], split: Split) -> None:
    """Raise DataError if `evaluate` would refuse a split because its queries are also in train.

    With several partitions, this depends on which of them are trained on, so it is only a warning.
    """
    judged = infos[0].judged.get(split)
    if len(infos) > 1 or judged is None or infos[0].split_by != "query":
        return
    queries = sum(judged.query_best.values())
    if judged.queries_in_train > MAX_LEAK_SHARE * queries:
        raise DataError(
            f"{judged.queries_in_train:,} of {queries:,} queries of split {split} are also in split train",
            expected=f"at most {format_percent(MAX_LEAK_SHARE)}, because metrics on these queries are too optimistic",
            next_command="--data.columns.split= to ignore the split column and split by query, or, for example to match"
            " pairs of known products, --evaluate.leak warn",
        )


def summary(data: PreparedData) -> str:
    """Summarise in one line which partitions were prepared or reused and which rows were quarantined."""
    bad, buckets = "", f" | buckets {' '.join(data.infos[0].buckets)}" if data.infos else ""
    if data.rows_bad:
        reasons = sum((Counter(info.reasons) for info in data.infos), Counter[str]()).most_common()
        shown = [f"{rows:,} {reason}" for reason, rows in reasons[:_MAX_REASONS]]
        shown += [f"{len(reasons) - _MAX_REASONS} other reasons"] if len(reasons) > _MAX_REASONS else []
        bad = f", {data.rows_bad:,} quarantined: {', '.join(shown)}"
    missing = sum((Counter(info.without_number) for info in data.infos), Counter[str]())
    repeated = {name for info in data.infos[:1] for each in info.attributes for name in each.features[1:]}
    without = "".join(f", {rows:,} without {name}" for name, rows in missing.items() if rows and name not in repeated)
    return (
        f"prepare: {data.prepared} partition(s) prepared, {data.reused} reused | "
        f"{data.rows:,} rows{bad}{without} | labels {' < '.join(data.labels)}{buckets}"
    )


def _figures(data: PreparedData, positive_gain: float, warnings: Sequence[str]) -> dict[str, Figure]:
    """Return the figures of the result.

    Queries are those of the train split, and a query that occurs in several partitions is counted in each of them.
    """
    judged = sum_judgements(data.infos, "train", positive_gain)
    queries: dict[str, Figure] = {}
    if judged is not None:
        queries = {
            "rows_train": judged.rows,
            "positives_train": judged.positives,
            "queries_train": judged.queries,
            "queries_without_positive": judged.queries_without_positive,
            "queries_without_negative": judged.queries_without_negative,
        }
    skipped = data.skipped
    return {
        "partitions_reused": data.reused,
        "partitions_prepared": data.prepared,
        "rows_prepared": data.rows_prepared,
        "rows": data.rows,
        "rows_bad": data.rows_bad,
        "rows_filtered": data.rows_filtered,
        "rows_blank": data.rows_blank,
        **({"files_not_read": len(skipped), "not_read": names_of(skipped)} if skipped else {}),
        "rows_truncated": sum(info.truncated_rows for info in data.infos),
        **queries,
        "labels": ",".join(data.labels),
        "warnings": len(warnings),
        **{f"warning_{number}": text for number, text in enumerate(warnings, start=1)},
    }
