"""How many queries a split has, how many a verdict takes, and which share of the data would give enough. Pure."""

from collections.abc import Iterable, Mapping
from math import sqrt

from pipeline.data.token_sets import SPLITS, Split, TokenSetInfo
from pipeline.evaluate.config import EvaluateConfig, MetricName
from pipeline.evaluate.gate.compare import Verdict

FRACTIONS = tuple(step / 20 for step in range(1, 9))
"""Offered as `data.test_fraction` or `data.valid_fraction`: 0.05 to 0.4, which leaves most queries for training."""
MIN_QUERIES = "lower --gate.min-queries"
_LATER = (
    "production was trained on queries that move into it: add --train.start scratch and --evaluate.leak warn, or"
    " promote on record with --evaluate.force-reason TEXT"
)


def count_queries(infos: Iterable[TokenSetInfo]) -> dict[Split, int]:
    """Count the queries of each split, once in each partition; empty if an earlier version did not count them."""
    judged = [info.judged for info in infos]
    counts: dict[Split, int] = {
        split: sum(sum(one[split].query_best.values()) for one in judged if split in one) for split in SPLITS
    }
    return counts if any(judged) else {}


def fraction_for(total: int, needed: int) -> float | None:
    """Return the smallest share of `total` queries that holds `needed` of them, with room for the spread of a hash."""
    enough = (share for share in FRACTIONS if share * total - 2 * sqrt(share * (1 - share) * total) >= needed)
    return next(enough, None)


def size_advice(split: Split, queries: int, needed: int, counts: Mapping[Split, int], remedy: str = MIN_QUERIES) -> str:
    """Say what to do about a `split` of which too few `queries` bear on a metric.

    `counts`: queries of each split. Those of the others are taken to bear on the metric as often as those of `split`.
    `remedy`: what helps as well as more queries.
    """
    few = f"split {split} has {queries:,} queries to judge by, about {needed:,} are needed"
    total = sum(counts.values())
    if counts.get(split):
        total = round(total * min(1.0, queries / counts[split]))
    share = fraction_for(total, needed)
    if share is not None:
        return (
            f"{few}: where no split column decides, --data.{split}-fraction {share:g} gives about"
            f" {round(share * total):,} of {total:,} (prepare and train again with it); or {remedy}"
        )
    if total:
        few += f": all splits together have about {total:,}, so no {split} split is large enough"
    return f"{few}: judge more queries, or {remedy}"


def verdict_advice(
    verdict: Verdict,
    config: EvaluateConfig,
    infos: Iterable[TokenSetInfo],
    *,
    split: Split,
    rows: int,
    rows_in_split: int,
    all_partitions: bool,
    later: bool,
) -> str:
    """Say how a candidate can be judged that is refused because of too few queries; nothing for any other verdict.

    `rows`, `rows_in_split`: scored, and before evaluate.max_rows. `all_partitions`: the holdout is that of all
    partitions. `later`: there is an incumbent, which has seen the queries that another split would judge by.
    """
    few = [check for check in verdict.checks if check.outcome == "fail" and check.needed_queries]
    if not few:
        return ""
    check = max(few, key=lambda one: (one.needed_queries or 0) / max(1, one.num_queries or 0))
    needed, queries = check.needed_queries or 0, check.num_queries or 0
    remedy = MIN_QUERIES if check.kind != "delta" or check.low is None else "allow a larger drop (--gate.drops)"
    if check.kind == "comparison":
        remedy += ", or promote it unjudged (--gate.first-without-comparison)"
    if rows < rows_in_split:
        return f"evaluate.max_rows takes {rows:,} of {rows_in_split:,} rows of split {split}: raise it; or {remedy}"
    if not all_partitions:
        return f"only new partitions are judged: --evaluate.partitions all takes the others too; or {remedy}"
    if config.retrieval.catalogue and check.metric and MetricName.parse(check.metric).of_retrieval:
        return (
            f"the catalogue asks {queries:,} queries, about {needed:,} are needed: add items with other queries to"
            f" {config.retrieval.catalogue}, or raise --evaluate.retrieval.max-queries; or {remedy}"
        )
    advice = size_advice(split, queries, needed, count_queries(infos), remedy)
    return f"{advice}; {_LATER}" if later and f"--data.{split}-fraction" in advice else advice
