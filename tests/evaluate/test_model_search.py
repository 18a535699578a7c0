"""Search with one model in an evaluation: what is done once, by whom, and under which name it is kept."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.core.stop import StopSignal
from pipeline.data.token_sets import TokenSet
from pipeline.evaluate import retrieval
from pipeline.evaluate.metrics.ranking import Judgements
from pipeline.evaluate.retrieval import ModelSearch, RetrievalQueries, RetrievalTask
from pipeline.evaluate.score import save_arrays
from pipeline.io.storage import Storage, open_storage
from pipeline.model.config import Attribute
from pipeline.parallel.process_group import ProcessGroup
from pipeline.retrieval.search import Ranked
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from tests.evaluate.process_groups import alone, on_ranks
from tests.train.rows import BUCKETS, token_set_info

IDS = np.array([3, 8])
TASK = RetrievalTask(
    RetrievalQueries(IDS, None, ["a", "b"], Judgements(IDS, np.array([0, 1]), np.ones(2))),  # type: ignore[arg-type]
    None,
    5,
    lambda mine: iter(()),
    lambda: iter(()),
)
FOUND, NARROWER = (
    Ranked(np.pad(items, ((0, 0), (0, 8)), constant_values=-1), np.zeros((2, 10)))
    for items in ([[0, 2], [4, 1]], [[2, 3], [4, 3]])
)


def searching(
    folder: Path, process_group: ProcessGroup | None = None, device: str = "cpu", **sections: dict[str, Any]
) -> ModelSearch:
    """The search for TASK, with settings of `evaluate` and `embed`."""
    process_group = process_group or alone()
    settings = Settings.model_validate(sections)
    ctx = SimpleNamespace(
        world=process_group.world,
        workspace=open_storage(str(folder / "workspace")),
        scratch=folder / "scratch",
        cycle="c",
        console=Console(stream=io.StringIO()),
        stop=StopSignal(),
    )
    backend, holdout = SimpleNamespace(device_name=lambda: device), SimpleNamespace(name="holdout")
    sets = [SimpleNamespace(info=SimpleNamespace(fingerprint="f", attributes=()))]
    given: Any = (settings, ctx, backend, process_group, sets, holdout, "no valid rows", b"", print)
    found = ModelSearch(*given)
    found.__dict__["task"] = TASK
    return found


def test_golden_products_are_named_by_their_titles_without_attributes(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("query,title,label,product_id,brand\nq,lamp 5,good,a,Acme\nq,desk,bad,b,\n")
    found = searching(tmp_path, data={"path": str(tmp_path / "rows.csv")})
    brand = Attribute(name="brand", query="", product="brand", kind="text")
    found.sets = [TokenSet("", token_set_info("flat").model_copy(update={"attributes": (brand,)}))]
    found.holdout = SimpleNamespace(rows=SimpleNamespace(buckets=BUCKETS))  # type: ignore[assignment]
    assert list(found._product_rows()) == [("a", "lamp 5", "lamp 5 Acme"), ("b", "desk", "desk")]


def checkpoint(max_tokens: int = 64) -> Any:
    model = SimpleNamespace(encoder=SimpleNamespace(hidden_size=16), max_positions=64)
    return SimpleNamespace(digest="d" * 32, state=SimpleNamespace(model=model, max_tokens=max_tokens))


@pytest.mark.parametrize("dimensions", [[], [4]])
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_ranks_search_once_and_the_first_keeps_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, dimensions: list[int]
) -> None:
    ranks, saved = list[int](), list[str]()

    def search(task: Any, embed: Any, k: int, process_group: ProcessGroup, *more: Any) -> Any:
        ranks.append(process_group.world.rank)
        return [FOUND, NARROWER][: 1 + len(dimensions)]

    def save(storage: Storage, key: str, *more: Any) -> None:
        saved.append(key)
        save_arrays(storage, key, *more)

    def run(process_group: ProcessGroup) -> Any:
        search = searching(tmp_path, process_group, evaluate={"retrieval": {"dimensions": dimensions}})
        return search.run("candidate", checkpoint(), None)  # type: ignore[arg-type]

    monkeypatch.setattr(retrieval, "search", search)
    monkeypatch.setattr(retrieval, "save_arrays", save)
    for _ in range(2):
        for found in on_ranks(world_size, run):
            assert found.report.values["retrieval_success@1"] == 0.5
            assert found.by_width == dict.fromkeys(dimensions, 0.0)
            np.testing.assert_array_equal(found.ranked.items, FOUND.items)
    assert sorted(ranks) == list(range(world_size)) and len(saved) == 1


def test_what_decides_the_lists_is_in_their_name(tmp_path: Path) -> None:
    catalogue, other = tmp_path / "items.csv", tmp_path / "others.csv"
    catalogue.write_text("id,title,query\n1,a,b\n")
    other.write_text("id,title,query\n1,a,c\n")
    of_file: dict[str, Any] = {"evaluate": {"retrieval": {"catalogue": str(catalogue)}}}
    changes: list[dict[str, Any]] = [
        {},
        {"device": "cuda"},
        {"embed": {"precision": "bf16"}},
        {"embed": {"chunks": 2}},
        {"embed": {"chunks": 3}},
        {"embed": {"buckets": [16]}},
        {"embed": {"buckets": [24]}},
        {"embed": {"output": {"dimensions": 8}}},
        {"evaluate": {"retrieval": {"dimensions": [8]}}},
        {"evaluate": {"retrieval": {"max_items": 9}}},
        {"evaluate": {"metrics": {"retrieval_at": [5]}}},
        of_file,
        {"evaluate": {"retrieval": {"catalogue": str(other)}}},
        {**of_file, "embed": {"chunks": 2}},
    ]
    names = [searching(tmp_path, **change)._key(checkpoint()) for change in changes]
    assert len(set(names)) == len(names)
    decided = [searching(tmp_path, **change).inputs for change in ({}, {"embed": {"chunks": 2}}, of_file, changes[-1])]
    assert ["chunks" in one for one in decided] == [False, False, False, True]
    assert [one.get("asked") for one in decided] == [None, None, "every row", "every row"]
