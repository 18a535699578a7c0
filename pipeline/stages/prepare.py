"""The prepare stage: new input partitions become committed token shards; what is there already is reused."""

from datetime import UTC, datetime

from pipeline.data.prepare import PreparedData, prepare
from pipeline.settings import Settings
from pipeline.stages.context import StageContext
from pipeline.stages.incumbent import parent_tokenizer
from pipeline.stages.result import StageResult, load_result, store_result

NAME = "prepare"


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Prepare every partition of the input and commit the result.

    The input is looked at each time, as new partitions may have come. When all of them were there and the stored result
    says the same, that result is returned as already done. Raises DataError for input that cannot be used.
    """
    started = datetime.now(UTC)
    data = prepare(
        settings.data,
        ctx.workspace,
        scratch=ctx.scratch,
        tokenizer=None if settings.data.tokenizer.path else parent_tokenizer(settings, ctx.workspace),
        events=ctx.events.emit,
        stop=ctx.stop,
    )
    ctx.console.info(summary(data))
    result = _result(data, ctx, started)
    earlier = load_result(ctx.workspace, ctx.cycle, NAME)
    if earlier is not None and (earlier.inputs, earlier.outputs) == (result.inputs, result.outputs):
        ctx.console.info(f"prepare: done already at {earlier.finished:%Y-%m-%d %H:%M:%S} UTC")
        return earlier.model_copy(update={"status": "already_done"})
    return store_result(ctx.workspace, result)


def summary(data: PreparedData) -> str:
    """One line: what was made, what was reused, what was refused."""
    bad = f" ({data.rows_bad:,} bad ones in quarantine)" if data.rows_bad else ""
    known = f" (known vocabulary {data.vocabulary})" if data.vocabulary else ""
    return (
        f"prepare: {data.prepared} partition(s) prepared, {data.reused} reused | "
        f"{data.rows:,} rows{bad} | labels {' < '.join(data.labels)}{known}"
    )


def _result(data: PreparedData, ctx: StageContext, started: datetime) -> StageResult:
    token_sets = {f"token_set_{i:04d}": prefix for i, prefix in enumerate(data.token_set_prefixes)}
    return StageResult(
        stage=NAME,
        cycle=ctx.cycle,
        status="done",
        # The name of a token set is the fingerprint of all that went into it: files, tokenizer and data settings.
        inputs={name: prefix.rpartition("/")[2] for name, prefix in token_sets.items()},
        outputs=token_sets | {"tokenizer": data.tokenizer_prefix},
        figures={
            "partitions_reused": data.reused,
            "partitions_prepared": data.prepared,
            "rows": data.rows,
            "rows_bad": data.rows_bad,
            "rows_filtered": data.rows_filtered,
            "rows_blank": data.rows_blank,
            "labels": ",".join(data.labels),
        },
        settings_hash=ctx.settings_hash,
        code_version=ctx.code_version,
        started=started,
        finished=datetime.now(UTC),
    )
