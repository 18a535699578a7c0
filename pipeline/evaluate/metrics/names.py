"""The names of metrics: what a setting, a report and the gate call them."""

from dataclasses import dataclass
from typing import Literal

Needs = Literal["", "rank", "label"]
"""What follows the word: nothing, `@k`, or `:label`."""

RETRIEVAL = "retrieval_"


@dataclass(frozen=True)
class Kind:
    """One metric, or a family of them by rank or label."""

    text: str
    needs: Needs = ""
    lower_is_better: bool = False


KINDS: dict[str, Kind] = {
    "accuracy": Kind("share of rows whose most probable label is right"),
    "macro_f1": Kind("mean F1 over the labels that occur or are predicted"),
    "micro_f1": Kind("F1 of all decisions together; with one label a row it equals accuracy"),
    "f1": Kind("F1 of one label (f1:LABEL); of two labels the more relevant, at the threshold", "label"),
    "precision": Kind("share of right rows among those at or above the threshold; @k: among the first k", "rank"),
    "recall": Kind("share found of the relevant rows, at the threshold; @k: among the first k", "rank"),
    "ndcg": Kind("normalised discounted cumulative gain of the first k", "rank"),
    "mrr": Kind("mean of 1 / rank of the first relevant row"),
    "ece": Kind("expected calibration error of the most probable label", lower_is_better=True),
    "loss": Kind("mean negative log probability of the true label, nats", lower_is_better=True),
    "roc_auc": Kind("probability that a matching row scores above another (two labels)"),
    "average_precision": Kind("area under precision over recall, in steps (two labels)"),
    f"{RETRIEVAL}recall": Kind("share of a query's relevant items among the first k of the catalogue", "rank"),
    f"{RETRIEVAL}ndcg": Kind("nDCG of the first k of the catalogue", "rank"),
    f"{RETRIEVAL}success": Kind("share of queries with a relevant item among the first k of the catalogue", "rank"),
    f"{RETRIEVAL}mrr": Kind("mean of 1 / rank of the first relevant item; 0 when the list holds none"),
}
_BARE_TOO = ("f1", "precision", "recall")
"""Families that also exist without a rank or label: of two labels, at a threshold."""


@dataclass(frozen=True)
class MetricName:
    """A name taken apart: the word, and the rank or label after it."""

    text: str
    word: str
    rank: int | None = None
    label: str | None = None

    @property
    def lower_is_better(self) -> bool:
        return KINDS[self.word].lower_is_better

    @property
    def of_retrieval(self) -> bool:
        return self.word.startswith(RETRIEVAL)

    @classmethod
    def parse(cls, text: str) -> "MetricName":
        """Take a name apart. Raises ValueError for one that no metric has."""
        word, at, rank = text.partition("@")
        word, colon, label = (word, "", "") if at else text.partition(":")
        kind = KINDS.get(word)
        bare = not at and not colon
        if kind and bare and (not kind.needs or word in _BARE_TOO):
            return cls(text, word)
        if kind and at and kind.needs == "rank" and rank.isdecimal() and rank.isascii() and rank[0] != "0":
            return cls(text, word, rank=int(rank))
        if kind and colon and kind.needs == "label" and label:
            return cls(text, word, label=label)
        raise ValueError(f"no metric is called {text!r}; expected one of {', '.join(spellings())}")


def spellings() -> list[str]:
    """Every name as one may write it, K for a rank."""
    names: list[str] = []
    for word, kind in KINDS.items():
        names += [word] if not kind.needs or word in _BARE_TOO else []
        names += [f"{word}@K"] if kind.needs == "rank" else [f"{word}:LABEL"] if kind.needs == "label" else []
    return names
