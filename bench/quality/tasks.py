"""The public data sets of this bench: texts to search, pairs to tell apart. None of it is part of the project."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.core.arrays import Int64s


@dataclass(frozen=True)
class Task:
    """Pairs of a Parquet file, the rows of it that count, and the catalogue to search, where there is one."""

    name: str
    pairs: str
    filter: Mapping[str, tuple[str, ...]]
    positive: str
    """Label of a pair that belongs together."""
    catalogue: str = ""
    splits_pairs: bool = False
    """It has pairs of its own in each split, but the same offers in more than one: 58 % of the queries of watches' test
    split were trained on, beside other products."""
    by_item: bool = False
    """The pairs of all splits are split again, so that each pair of test has an offer that was not trained on."""

    def data_flags(self, split: str) -> list[str]:
        """What `trnpipe prepare` is told of it. For valid, test stays out: `train` scores each split that it finds."""
        if self.by_item:
            return ["--data.name", self.name, *ITEM_SPLIT]
        kept = dict(self.filter) | ({"split": ("train", "valid")} if split == "valid" else {})
        wanted = ",".join(f"{key}={'|'.join(values)}" for key, values in kept.items())
        return ["--data.name", self.name, *(["--data.filter", wanted] if wanted else [])]


def _wdc(category: str, tier: str) -> Task:
    return Task(
        f"wdc-{category}",
        "wdc_lspc_pairs.parquet",
        {"category": (category,), "tier": (tier, "test")},
        "match",
        splits_pairs=True,
    )


def _items(category: str) -> Task:
    """The medium tier of a category, of which all four have training pairs."""
    return replace(_wdc(category, "medium"), name=f"wdc-{category}-items", splits_pairs=False, by_item=True)


ITEM_SPLIT = ("--data.split-by", "both", "--data.test-fraction", "0.18", "--data.valid-fraction", "0.09")
"""About a third of the pairs have an offer of test, and four of ten of these have two."""

TASKS = {
    "pricerunner": Task(
        "pricerunner", "pricerunner_relevance_derived.parquet", {}, "same_product", "pricerunner_offers.parquet"
    ),
    "cameras": _wdc("cameras", "large"),
    "shoes": _wdc("shoes", "large"),
    # The large tier of these two has no training rows in the file.
    "computers": _wdc("computers", "medium"),
    "watches": _wdc("watches", "medium"),
    **{f"{category}_items": _items(category) for category in ("cameras", "shoes", "computers", "watches")},
}
SEARCH_FLAGS = ["--evaluate.retrieval.query", "cluster_label", "--evaluate.retrieval.query-id", "cluster_id"]


def write_items(folder: Path, task: Task, file: Path) -> None:
    """Write the distinct pairs of a task without ids and splits. Raises OSError, pyarrow.ArrowInvalid."""
    table = pq.read_table(folder / task.pairs, filters=[(name, "in", values) for name, values in task.filter.items()])
    distinct = table.select(["query", "title", "label"]).group_by(["query", "title"], use_threads=False)
    named = distinct.aggregate([("label", "first")]).rename_columns(["query", "title", "label"])
    pq.write_table(named, file)


@dataclass(frozen=True)
class Pairs:
    """Pairs of one split: texts, and whether they belong together, [N]."""

    query: list[str]
    title: list[str]
    positive: npt.NDArray[np.bool_]

    def only_positive(self) -> "Pairs":
        """Those that belong together."""
        kept = np.flatnonzero(self.positive).tolist()
        return Pairs([self.query[i] for i in kept], [self.title[i] for i in kept], self.positive[kept])


def read_pairs(folder: Path, task: Task, split: str) -> Pairs:
    """One split. Raises OSError, pyarrow.ArrowInvalid."""
    table = pq.read_table(folder / task.pairs)
    for column, values in {**task.filter, "split": (split,)}.items():
        table = table.filter(pc.is_in(table[column], value_set=pc.cast(list(values), table.schema.field(column).type)))
    positive = np.array([label == task.positive for label in table["label"].to_pylist()])
    return Pairs(table["query"].to_pylist(), table["title"].to_pylist(), positive)


@dataclass(frozen=True)
class Catalogue:
    """Titles [N] with the number of the query each belongs to [N], and the queries that are asked, ascending [Q]."""

    titles: list[str]
    owner: Int64s
    asked: Int64s
    queries: list[str]


def read_catalogue(folder: Path, task: Task, split: str) -> Catalogue:
    """All offers; the names of the products of one split are the queries. Raises OSError, pyarrow.ArrowInvalid."""
    rows = pq.read_table(folder / task.catalogue).to_pydict()
    number = {key: place for place, key in enumerate(dict.fromkeys(rows["cluster_id"]))}
    owner = np.array([number[key] for key in rows["cluster_id"]], dtype=np.int64)
    names: dict[int, str] = {}
    for place, name, of in zip(owner.tolist(), rows["cluster_label"], rows["split"], strict=True):
        if of == split:
            names.setdefault(place, name)
    asked = np.array(sorted(names), dtype=np.int64)
    return Catalogue(rows["title"], owner, asked, [names[one] for one in asked.tolist()])
