"""What in the data of a run costs quality without failing: said with counts, before training starts.

`prepare` says the same of the prepared data, in the same words (data/quality).
"""

from collections.abc import Sequence

from pipeline.core.buckets import Bucket
from pipeline.data.quality import about_order, about_positives
from pipeline.data.sampler import GroupedRows, Judged
from pipeline.train.config import TrainConfig

_POOR_FILL = 0.6
"""Of slots: below this share a warning says so."""


def warnings_of(groups: GroupedRows, train: TrainConfig, labels: Sequence[str], buckets: Sequence[Bucket]) -> list[str]:
    """What in the chosen rows costs quality without failing, with counts. `labels`: from worst to best."""
    found, fill = [], groups.groups.fill
    if fill < _POOR_FILL:
        found.append(
            f"{fill:.0%} of the {groups.slots} slots of a query hold a row, so a batch has fewer samples than"
            " train.global_batch_size says; queries have fewer judged products: lower train.candidates_per_query"
        )
    if groups.mined is not None and groups.mined.fill < _POOR_FILL:
        found.append(
            f"{groups.mined.fill:.0%} of the {train.mined_per_query} slots of a query for mined negatives hold one:"
            " lower train.mined_per_query, or raise mine.depth or mine.negatives_per_query and mine again"
        )
    if not train.loss.trains_head:
        found.append(
            "train.loss.graded_weight is 0: the relevance head is not trained, evaluate has no figures of pairs, and"
            " gate.floors, gate.drops and gate.baseline_drops must name metrics of retrieval (retrieval_ndcg@10=0.01)"
        )
    return found + _of_judgements(groups.judged, train, labels, buckets)


def _of_judgements(judged: Judged, train: TrainConfig, labels: Sequence[str], buckets: Sequence[Bucket]) -> list[str]:
    found = {}
    if train.loss.contrastive_weight:
        found = about_positives(
            judged.rows,
            judged.positives,
            queries=judged.queries,
            without_negative=judged.queries_without_negative,
            buckets=buckets,
            positive_gain=train.loss.positive_gain,
        )
    return list((found | about_order(labels, judged.mean_gains)).values())
