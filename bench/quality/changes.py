"""The recipe of ours with one thing changed at a time, each a part of its own, on valid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.quality import ours
from bench.quality.part import KEPT, OURS, Budget, PartResult, read_part
from bench.quality.sides import Table, mean_figure, sides_of, values
from bench.results import Figure
from pipeline.settings import resolve

METRICS = {"ndcg@10": "nDCG@10 of retrieval", "accuracy": "accuracy of pairs", "f1": "F1 of match"}
METHOD = """
Ours as in the other tables of this bench, with configs/small.toml and {pairs:,} pairs seen in {precision} and batches
of {batch}, on {device}: as it is, and with one thing changed at a time, or a few that go together. Scored on valid;
test was not read. Behind each change is the difference of its mean to that of the recipe. A change that the recipe has
already is left out.
"""


@dataclass(frozen=True)
class Change:
    """One thing that might be otherwise, as flags and their values, one behind the other."""

    name: str
    flags: tuple[str, ...]

    @property
    def is_the_recipe(self) -> bool:
        """The recipe has this already."""
        changed = list(zip(self.flags[::2], self.flags[1::2], strict=True))
        return resolve([ours.CONFIG], {}, changed).settings == resolve([ours.CONFIG], {}, []).settings


def _values(name: str, flag: str, *found: str, also: tuple[str, ...] = ()) -> Iterator[Change]:
    for value in found:
        yield Change(f"{name}-{value}", (flag, value, *also))


WITHOUT_LINKS = ("--train.link-queries", "false")
CHANGES = (
    *_values("contrastive", "--train.loss.contrastive-weight", "0.2", "1", "2"),
    *_values("graded", "--train.loss.graded-weight", "1", "2", "3"),
    *_values("slots", "--train.candidates-per-query", "1", "2", "4", "8"),
    *_values("topic", "--train.queries-per-topic", "1", "4", "8", "16"),
    *_values("match", "--model.token-match", "false"),
    *_values("head-rate", "--train.optimizer.head-rate", "1", "10", "20"),
    *_values("rate", "--train.optimizer.learning-rate", "5e-5", "1e-4", "2e-4", "4e-4"),
    *_values("temperature", "--train.loss.temperature", "0.02", "0.03", "0.05"),
    *_values("lexical", "--data.lexical", "false"),
    *_values("split-digits", "--data.tokenizer.split-digits", "false"),
    Change("link-queries-false", WITHOUT_LINKS),
    Change("split-digits-false-link-queries-false", ("--data.tokenizer.split-digits", "false", *WITHOUT_LINKS)),
    *_values("unclipped", "--train.optimizer.max-grad-norm", "100"),
    *_values("dropout", "--model.dropout", "0.1"),
    *_values("mined", ours.MINED, "1", "2", also=("--mine.enabled", "true")),
)


def chosen(names: Sequence[str]) -> tuple[Change, ...]:
    """All that differ from the recipe, or those named. Raises SystemExit for a name that there is not."""
    known = {change.name: change for change in CHANGES}
    if wrong := sorted(set(names) - set(known)):
        raise SystemExit(f"no change {', '.join(wrong)}; there are {', '.join(known)}")
    wanted = [known[name] for name in names] or CHANGES
    return tuple(change for change in wanted if not change.is_the_recipe)


def is_kept(result: PartResult, folder: Path = KEPT) -> bool:
    """This part was run, with the same recipe."""
    path = folder / f"{result.name}.json"
    return path.exists() and read_part(path).recipe == result.recipe


def changes_table(task: str, budget: Budget, parts: Sequence[PartResult]) -> Table | None:
    """Of the parts on valid with the present recipe: the recipe, then its changes; None without either."""
    names = {change.name: change for change in CHANGES}
    wanted = (task, "valid", budget, OURS, ours.recipe())
    found = [part for part in parts if (part.task, part.split, part.budget, part.part, part.recipe) == wanted]
    recipe = [part for part in found if not part.variant]
    changed = [part for part in found if part.variant in names and recipe]
    sides = sides_of(sorted(changed, key=lambda part: list(names).index(part.variant)))
    if not sides:
        return None
    shown = [name for name in METRICS if all(name in part.figures for part in [*recipe, *changed])]
    figures = [
        mean_figure(f"recipe_{name}", values(recipe, name), "", f"{METRICS[name]}, the recipe") for name in shown
    ]
    for runs in sides.values():
        figures += _changed(names[runs[0].variant], runs, shown, recipe)
    return Table(
        bench=f"quality_changes_{task}_{budget.name}",
        title=f"{task}, {budget.pairs:,} pairs seen: the recipe with one change at a time, on valid",
        method=METHOD.format(**budget._asdict()),
        figures=figures,
        targets=(),
        also=[],
        settings={"seeds_of_recipe": len(recipe)},
    )


def _changed(change: Change, runs: list[PartResult], shown: list[str], recipe: list[PartResult]) -> list[Figure]:
    figures = []
    for name in shown:
        made = mean_figure(f"{change.name}_{name}", values(runs, name), "", "")
        other = sum(values(recipe, name)) / len(recipe)
        text = f"{METRICS[name]}, {' '.join(change.flags)}: {made.value - other:+.4f}"
        figures.append(made.model_copy(update={"text": text}))
    return figures
