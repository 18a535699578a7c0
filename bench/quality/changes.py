"""Changes of the recipe that were tried on valid, each beside what it changes: one row each in docs/results.md."""

from collections.abc import Sequence
from textwrap import wrap
from typing import NamedTuple

from bench.quality.part import INCREMENTAL, OURS, PartResult, provenance
from bench.quality.sides import Table
from bench.results import Figure, Result, figure

BENCH = "quality_changes"
_METRICS = ("ndcg@10", "recall@100", "accuracy", "f1")
_METHOD = """
Each value is that with the change minus that without it: one seed, validation split, 32,000 pairs (daily cycles:
16,000). Differences below about 0.005 may be chance. The code of changes that were not kept was deleted."""


class Change(NamedTuple):
    """A variant, what it is, the variant that it changes, and whether it is in the recipe now."""

    variant: str
    text: str
    against: str
    kept: bool = False


_FOUR = "base"
_TWO = "cand2"
_WIDE = "cand2-repeat-wide"
_NEW = "cand2-repeat"
_PRESENT = "present"
_ZERO = "days-zero"
_MOMENTS = "days-moments"
TRIED = (
    Change("cand2", "two products per query in a batch, not four", _FOUR, kept=True),
    Change("topic1", "no similar queries in a batch", _FOUR),
    Change("cand2-topic8", "eight similar queries in a batch, not four", _TWO),
    Change("cand2-temp03", "contrastive temperature 0.03, not 0.05", _TWO),
    Change("cand2-graded0", "no loss of pair scores", _TWO),
    Change("cand2-graded1", "half the weight of the loss of pair scores", _TWO),
    Change("cand2-sym", "contrastive loss of products over queries as well", _TWO),
    Change("cand2-repeat-wide", "positives repeated until each group of a query has one", _TWO, kept=True),
    Change("cand2-repeat-labelled", "the same, also in the loss of pair scores", _TWO),
    Change("cand2-repeat", "tight buckets: 16x16, 16x24, 32x48", _WIDE),
    Change("", "buckets that fit training rows: 16x24, 24x32, 32x48", _NEW, kept=True),
    Change("teacher-vectors", "a fine-tuned teacher of base size: cosine to its vectors", _NEW, kept=True),
    Change("teacher-vectors-8", "the same with eight times the weight", _NEW),
    Change("teacher-scores", "cosine to its vectors, and KL divergence of pair scores", _NEW),
    Change("teacher-both", "cosine to its vectors, and KL divergence in the batch", _NEW),
    Change("teacher-listwise", "only KL divergence of similarities in the batch", _NEW),
    Change("teacher-margin", "only squared differences of margins within a query", _NEW),
    Change("published-vectors", "a published teacher, not fine-tuned: cosine to its vectors", _NEW),
    Change("published-listwise", "the same: KL divergence of similarities in the batch", _NEW),
    Change("freeze3", "the embeddings and three of the six layers frozen", _PRESENT),
    Change("mask01", "a tenth of the tokens masked in training", _PRESENT),
    Change("layers08", "a learning rate for each layer, 0.8 of the next layer's", _PRESENT),
    Change("mix", "a quarter of the pairs from other categories", _PRESENT),
    Change("hinges", "lexical features also as positions in 12 bins", _PRESENT),
    Change("features8", "texts hidden from the relevance head in every eighth row", _PRESENT),
    Change("boosting", "the score of boosting, fitted on other rows, as a feature", _PRESENT),
    Change("days-zero-head2", "ten daily cycles: a tenth of the rate of the head after the first", _ZERO),
    Change("days-zero-warmup", "ten daily cycles: a warm-up of 40 % of the steps after the first", _ZERO),
    Change("days-moments", "ten daily cycles: optimizer moments of the parent, not zero", _ZERO, kept=True),
    Change("days-moments-nearest", "ten daily cycles: the old queries nearest to the new ones replayed", _MOMENTS),
    Change("days-moments-rate05", "ten daily cycles: half the learning rate after the first", _MOMENTS),
    Change("days-moments-replay08", "ten daily cycles: four fifths of the samples from older days, not half", _MOMENTS),
    Change("days-moments-averaged", "ten daily cycles: weights averaged with the parent's if better", _MOMENTS),
    Change(
        "days5-averaged",
        "five daily cycles: weights averaged with the parent's if better",
        "days5-moments",
    ),
)


def changes_table(parts: Sequence[PartResult], tried: Sequence[Change] = TRIED) -> Table | None:
    """Return the differences in each metric between every change and what it changes, if there are any."""
    runs = [part for part in parts if part.part in (OURS, INCREMENTAL) and part.split == "valid"]
    ran = {(part.task, part.variant): part for part in runs}
    figures, used = list[Figure](), list[PartResult]()
    for change in tried:
        for (task, variant), part in sorted(ran.items()):
            before = ran.get((task, change.against))
            if variant != change.variant or before is None:
                continue
            used += [part, before]
            text = f"{change.text}{' (kept)' if change.kept else ''}, {task}"
            figures += [
                figure(f"{task}:{variant}:{name}", part.figures[name] - before.figures[name], "", f"{text}: {name}")
                for name in _METRICS
                if name in part.figures and name in before.figures
            ]
    title = "What each change of the recipe that was tried does on valid"
    return Table(BENCH, title, _METHOD, figures, (), dict(provenance(used))) if figures else None


def page(result: Result) -> str:
    """Return the method, and a Markdown table with a row for each change and data set."""
    rows: dict[str, dict[str, float]] = {}
    for each in result.figures:
        row, _, name = each.text.rpartition(": ")
        rows.setdefault(row, {})[name] = each.value
    lines = [f"| change | data | {' | '.join(_METRICS)} |", "|---" * (2 + len(_METRICS)) + "|"]
    for row, values in rows.items():
        text, _, task = row.rpartition(", ")
        cells = [f"{values[name]:+.3f}" if name in values else "" for name in _METRICS]
        lines.append(f"| {text} | {task} | {' | '.join(cells)} |")
    return "\n".join([*wrap(result.method, 120), "", *lines])
