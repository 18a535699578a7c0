"""The committed results of this bench, from the parts that are kept: one table a task and number of pairs seen."""

from collections.abc import Sequence
from pathlib import Path

from bench.quality import ours
from bench.quality.changes import changes_table
from bench.quality.incremental import incremental_table
from bench.quality.part import (
    BM25,
    INCREMENTAL,
    OURS,
    SPLIT_DIGITS,
    Budget,
    PartResult,
    provenance,
    read_parts,
    reads_of_test,
)
from bench.quality.sides import (
    Incomplete,
    Sides,
    Table,
    best_peer,
    interval_figures,
    mean,
    mean_figure,
    sides_of,
    values,
)
from bench.quality.tasks import TASKS
from bench.results import Figure, Result, Target, figure

NDCG, F1, ACCURACY, HYBRID = "ndcg@10", "f1", "accuracy", "hybrid_weighted_ndcg@10"
RETRIEVAL = (NDCG, "recall@10", "recall@100")
_START = """
Every trained side starts from the same published MiniLM-L6 weights and sees {pairs:,} pairs in {precision} and batches
of {batch}, on {device}. Ours: `trnpipe prepare`, `train`, `evaluate` with configs/small.toml, judged pairs of all
grades; the same recipe and model for retrieval and for scores of pairs, and for all data sets of this bench."""
_END = """
Mean and range over seeds. Our settings were chosen on valid; {choice}. The test split was read {reads} times for this
table, once for each run of a part, and {others} more times by other parts that are kept. Seconds are not compared here,
so parts may come from several machines, those of a GPU from the one in the settings; the one below made the table."""
_SEARCH = """
Every side is searched exactly by the same code: all offers of the catalogue for the names of the test products.
sentence-transformers: its trainer, positive pairs, no duplicates in a batch, cosine schedule with 10 % warm-up; loss
and learning rate are in the name of the part. mnrl_split_digits is MNRL with texts cut where letters and digits meet,
as ours has them: a peer with a part of ours, so not the one to beat."""
_PAIRS = """
Thresholds come from valid. Boosting: scikit-learn on the lexical features that ours reads too, fitted on all training
rows. sentence-transformers: bi-encoders fine-tuned on the same pairs (contrastive: both labels; mnrl: the positive
ones), compared by cosine; the learning rate is in the name of the part."""


_ITEMS = """
All pairs of the set are split again by `data.split_by = "both"`, so that each pair of test has an offer, as query or as
product, that was not trained on; `neither`: both are new. Thresholds come from valid, whose offers are new as well.
Boosting: scikit-learn on the lexical features that ours reads too. Search is over the distinct products of all splits;
`new`: queries all of whose relevant products are new. Lower bounds are those of the gate, or 95 % over queries."""
PUBLISHED = f"{OURS}-published"
"""The published weights as they are, with our tokenizer: a training of one step at a learning rate of 1e-9."""


def write(folder: Path) -> list[Result]:
    """Make what the parts in `folder` allow, and say what is missing. Raises SystemExit when there is nothing."""
    made, missing = tables(read_parts(folder))
    for reason in missing:
        print(f"not yet: {reason}", flush=True)
    if not made:
        raise SystemExit(f"{folder} holds no whole table: python -m bench.quality PART --split test, for each part")
    return [table.finish() for table in made]


def tables(parts: Sequence[PartResult]) -> tuple[list[Table], list[str]]:
    """Tables, and why there are no others. Parts of other budgets are never mixed; BM25 is trained on nothing."""
    test = [part for part in parts if part.split == "test" and part.steps]
    made, missing = [], []
    for task, budget in sorted({(part.task, part.budget) for part in test if not part.variant}):
        try:
            made.append(_table(task, budget, parts, reads_of_test(parts, task)))
        except Incomplete as reason:
            missing.append(f"{task}, {budget.pairs:,} pairs: {reason}")
    for task, budget in sorted({(part.task, part.budget) for part in test if part.part == INCREMENTAL}):
        try:
            made.append(incremental_table(task, budget, parts, reads_of_test(parts, task)))
        except Incomplete as reason:
            missing.append(f"{task} by day, {budget.pairs:,} pairs: {reason}")
    changes = changes_table(parts)
    return made + ([changes] if changes else []), missing


def _table(task: str, budget: Budget, parts: Sequence[PartResult], reads: int) -> Table:
    """One of them. Raises Incomplete."""
    of_task = [part for part in parts if part.task == task and (part.budget == budget or not part.steps)]
    shipped = [part for part in of_task if not part.variant]
    test, valid = (sides_of([part for part in shipped if part.split == split]) for split in ("test", "valid"))
    recipe = ours.recipe()
    variants = [part for part in of_task if part.part == OURS and part.split == "test" and part.variant]
    changed = sides_of([part for part in variants if part.recipe == recipe])
    test[OURS] = [part for part in test.get(OURS, ()) if part.recipe == recipe]
    if not test[OURS]:
        raise Incomplete("ours was not run on test with the present configs/small.toml")
    searched, by_item = bool(TASKS[task].catalogue), TASKS[task].by_item
    if searched or (not by_item and set(test) - {OURS, BM25}):
        best, choice = best_peer(test, valid, NDCG if searched else F1)
    else:
        best, choice = "", "no bi-encoder was trained on this many pairs, so only boosting is beside it"
    of_table = [part for sides in (test, changed) for runs in sides.values() for part in runs]
    used = sum(part.reads for part in of_table)
    method = (_START + (_SEARCH if searched else _ITEMS if by_item else _PAIRS) + _END).format(
        **budget._asdict(), choice=choice, reads=used, others=reads - used
    )
    build = _searched if searched else _paired
    figures, targets = _new_items(test, changed) if by_item else build(task, test, best)
    figures += _of_sides(changed, (NDCG, ACCURACY) if searched else (F1,))
    return Table(
        bench=f"quality_{task}_{budget.name}",
        title=_title(task, budget, best, searched=searched),
        method=method,
        figures=figures,
        targets=targets,
        settings={
            "seeds_of_ours": len(test[OURS]),
            "seeds_of_best_peer": len(test.get(best, ())),
            **provenance(of_table),
        },
    )


def _title(task: str, budget: Budget, best: str, *, searched: bool) -> str:
    if searched:
        return f"{task}, {budget.seen}: nDCG@10 of retrieval minus that of the best peer, {best}"
    return f"WDC {task}, {budget.seen}: F1 of match minus that of boosting on lexical features"


def _of_sides(sides: Sides, names: Sequence[str]) -> list[Figure]:
    return [
        mean_figure(f"{side}_{name}", values(runs, name), "", f"{name}, {side}, {len(runs)} seed(s)")
        for side, runs in sides.items()
        for name in names
        if all(name in run.figures for run in runs)
    ]


def _searched(task: str, sides: Sides, best: str) -> tuple[list[Figure], tuple[Target, ...]]:
    """Retrieval beside the best peer and BM25, hybrid search, and scores of pairs of the same model."""
    if BM25 not in sides:
        raise Incomplete("bm25 was not run on test")
    own, bm25 = sides[OURS], sides[BM25]
    split = {side: runs for side, runs in sides.items() if runs[0].part == SPLIT_DIGITS}
    lexical = mean(bm25, NDCG)
    gains = [hybrid - max(alone, lexical) for hybrid, alone in zip(values(own, HYBRID), values(own, NDCG), strict=True)]
    figures = [
        figure(
            "ahead_of_best_peer", mean(own, NDCG) - mean(sides[best], NDCG), "", f"nDCG@10, mean minus that of {best}"
        ),
        mean_figure(f"{OURS}_{NDCG}", values(own, NDCG), "", f"nDCG@10 of retrieval, ours, {len(own)} seed(s)"),
        *interval_figures(own, {BM25: bm25, "best_peer": sides[best]}),
        *(
            figure(f"ahead_of_{SPLIT_DIGITS}", mean(own, NDCG) - mean(runs, NDCG), "", f"nDCG@10, minus that of {side}")
            for side, runs in split.items()
        ),
        mean_figure("hybrid_ahead", gains, "", "nDCG@10, hybrid of ours and BM25 minus the better of both"),
        mean_figure(f"{OURS}_{ACCURACY}", values(own, ACCURACY), "", "accuracy of pairs, the same model of ours"),
        *_of_sides({OURS: own}, ("boosting_accuracy", "macro_f1", "boosting_macro_f1", "hybrid_rrf_ndcg@10", HYBRID)),
        *(one for one in _of_sides(sides, RETRIEVAL) if one.name != f"{OURS}_{NDCG}"),
    ]
    targets = (
        Target(figure="ahead_of_best_peer", comparison=">=", value=0.01),
        Target(figure=f"{OURS}_{NDCG}", comparison=">=", value=0.82),
        Target(figure=f"{BM25}_low", comparison=">", value=0.0),
        Target(figure="hybrid_ahead", comparison=">", value=0.0),
        Target(figure=f"{OURS}_{ACCURACY}", comparison=">=", value=0.916),
    )
    return figures, targets


def _paired(task: str, sides: Sides, best: str) -> tuple[list[Figure], tuple[Target, ...]]:
    """Pairs: F1 of match beside boosting on the lexical features and the best fine-tuned bi-encoder, where one was."""
    own, boosting = sides[OURS], f"boosting_{F1}"
    beside = {"boosting": ("boosting", mean(own, boosting))}
    if best:
        beside["bi_encoder"] = (best, mean(sides[best], F1))
    figures = [
        *(
            figure(f"ahead_of_{name}", mean(own, F1) - value, "", f"F1 of match, mean of ours minus that of {text}")
            for name, (text, value) in beside.items()
        ),
        mean_figure(f"{OURS}_{F1}", values(own, F1), "", f"F1 of match, ours, {len(own)} seed(s)"),
        mean_figure(boosting, values(own, boosting), "", "F1 of match, boosting on lexical features"),
        *(one for one in _of_sides(sides, (F1,)) if one.name != f"{OURS}_{F1}"),
    ]
    targets = tuple(Target(figure=f"ahead_of_{name}", comparison=">", value=0.0) for name in beside)
    return figures, targets


def _new_items(sides: Sides, changed: Sides) -> tuple[list[Figure], tuple[Target, ...]]:
    """Pairs and search on offers that were not trained on, beside boosting, BM25 and the published weights."""
    own, boosting, search = sides[OURS], f"boosting_{F1}", "retrieval_ndcg@10"
    if PUBLISHED not in changed:
        raise Incomplete(
            "the published weights were not searched: --variant published, and after --, --train.max-steps 1"
            " --train.optimizer.learning-rate 1e-9"
        )
    lowest = {
        "boosting": (min(values(own, f"{F1}_ahead_of_boosting_low")), "F1 of match, minus boosting"),
        "bm25": (min(values(own, f"{search}_ahead_of_bm25_low")), "nDCG@10 of search, minus BM25"),
    }
    figures = [
        figure("ahead_of_boosting", mean(own, F1) - mean(own, boosting), "", "F1 of match, mean minus boosting"),
        *(
            figure(f"{name}_lowest", low, "", f"{text}: lower bound, the lowest of the seeds")
            for name, (low, text) in lowest.items()
        ),
        *interval_figures(own, {"published": changed[PUBLISHED]}),
        *_of_sides(
            {OURS: own}, (F1, boosting, f"{F1}:neither", f"{boosting}:neither", "accuracy", "ece", "ece_before")
        ),
        *_of_sides({OURS: own}, (NDCG, f"bm25_{NDCG}", f"{search}:new", f"bm25_{search}:new")),
    ]
    targets = (
        Target(figure="ahead_of_boosting", comparison=">=", value=0.05),
        *(Target(figure=name, comparison=">", value=0.0) for name in ("boosting_lowest", "bm25_lowest")),
        Target(figure="published_low", comparison=">", value=0.0),
        Target(figure=f"{OURS}_ece", comparison="<=", value=0.03),
    )
    return figures, targets
