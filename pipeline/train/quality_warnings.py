"""What in the data of a run costs quality without failing: said with counts, before training starts."""

from collections.abc import Sequence
from itertools import pairwise

from pipeline.core.buckets import Bucket
from pipeline.data.sampler import GroupedRows, Judged
from pipeline.train.config import TrainConfig

_POOR_FILL = 0.6
"""Of slots: below this share a warning says so."""
_MANY = 0.5
"""Of queries: above this share a warning says so."""
_SAME_GAIN = 1e-6


def warnings_of(groups: GroupedRows, train: TrainConfig, labels: Sequence[str], buckets: Sequence[Bucket]) -> list[str]:
    """What in the chosen rows costs quality without failing, with counts. `labels`: from worst to best."""
    found, fill = [], groups.groups.fill
    if fill < _POOR_FILL:
        found.append(
            f"{fill:.0%} of the {groups.slots} slots of a query hold a row, the rest is computed for nothing; queries"
            " have fewer judged products: lower train.candidates_per_query"
        )
    if groups.mined is not None and groups.mined.fill < _POOR_FILL:
        found.append(
            f"{groups.mined.fill:.0%} of the {train.mined_per_query} slots of a query for mined negatives hold one:"
            " lower train.mined_per_query, or raise mine.depth or mine.negatives_per_query and mine again"
        )
    return found + _of_judgements(groups.judged, train, labels, buckets)


def _of_judgements(judged: Judged, train: TrainConfig, labels: Sequence[str], buckets: Sequence[Bucket]) -> list[str]:
    found, least = [], f"train.loss.positive_gain {train.loss.positive_gain:g}"
    if train.loss.contrastive_weight and not sum(judged.positives):
        found.append(
            f"no row has a gain of {least} or more: the contrastive loss learns nothing; lower it, give gains"
            " (data.columns.gain), or order data.labels from worst to best"
        )
    elif train.loss.contrastive_weight:
        empty = [place for place in range(len(buckets)) if judged.lacks(place)]
        if empty:
            shown = ", ".join(f"{judged.rows[place]:,} in bucket {buckets[place].name}" for place in empty)
            found.append(f"rows without a gain of {least} or more among them: {shown}; no positive is so long")
        if judged.queries_without_negative > _MANY * judged.queries:
            found.append(
                f"{judged.queries_without_negative:,} of {judged.queries:,} queries have no judged negative: their"
                " negatives are other queries' products alone; trnpipe mine finds harder ones"
            )
    gains = [(label, gain) for label, gain in zip(labels, judged.mean_gains, strict=False) if gain is not None]
    if any(worse > better + _SAME_GAIN for (_, worse), (_, better) in pairwise(gains)):
        shown = ", ".join(f"{label} {gain:.3g}" for label, gain in gains)
        found.append(f"labels from worst to best have these mean gains: {shown}; put data.labels in the order of gains")
    return found
