"""Search with one model in an evaluation: what is done once, by whom, and under which name it is kept."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import NumericError
from pipeline.core.stop import StopSignal
from pipeline.embed.config import EmbedConfig
from pipeline.evaluate import retrieval
from pipeline.evaluate.config import EvaluateConfig, GateConfig
from pipeline.evaluate.metrics.ranking import Judgements
from pipeline.evaluate.retrieval import ModelSearch, Queries, RetrievalTask
from pipeline.evaluate.score import save_arrays
from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.gang import Gang
from pipeline.retrieval.search import Ranked
from pipeline.telemetry.console import Console
from tests.evaluate.gangs import alone, on_ranks

IDS = np.array([3, 8])
TASK = RetrievalTask(
    Queries(IDS, None, ["a", "b"], Judgements(IDS, np.array([0, 1]), np.ones(2))),  # type: ignore[arg-type]
    None,
    5,
    lambda mine: iter(()),
    lambda: iter(()),
)
FOUND, NARROWER = (
    Ranked(np.pad(items, ((0, 0), (0, 8)), constant_values=-1), np.zeros((2, 10)))
    for items in ([[0, 2], [4, 1]], [[2, 3], [4, 3]])
)
TOP = "retrieval_success@1"


def searching(
    folder: Path,
    gang: Gang | None = None,
    evaluate: dict[str, Any] | None = None,
    embed: dict[str, Any] | None = None,
    task: RetrievalTask | str | None = TASK,
    device: str = "cpu",
) -> ModelSearch:
    gang = gang or alone()
    settings = SimpleNamespace(
        evaluate=EvaluateConfig.model_validate(evaluate or {}),
        embed=EmbedConfig.model_validate(embed or {}),
        gate=GateConfig(),
    )
    ctx = SimpleNamespace(
        world=gang.world,
        workspace=open_storage(str(folder / "workspace")),
        scratch=folder / "scratch",
        cycle="c",
        console=Console(stream=io.StringIO()),
        stop=StopSignal(),
    )
    backend = SimpleNamespace(device_name=lambda: device)
    found = ModelSearch(
        settings,  # type: ignore[arg-type]
        ctx,  # type: ignore[arg-type]
        backend,
        gang,
        [],
        SimpleNamespace(name="holdout"),  # type: ignore[arg-type]
        "no valid rows",
        b"",
        lambda text: None,
    )
    found.__dict__["task"] = task
    return found


def checkpoint(max_tokens: int = 64) -> Any:
    model = SimpleNamespace(encoder=SimpleNamespace(hidden_size=16), max_positions=64)
    return SimpleNamespace(digest="d" * 32, state=SimpleNamespace(model=model, max_tokens=max_tokens))


def finds(monkeypatch: pytest.MonkeyPatch, found: Any) -> list[int]:
    """The ranks that searched."""
    ranks: list[int] = []

    def search(task: Any, embed: Any, k: int, gang: Gang, *more: Any) -> Any:
        ranks.append(gang.world.rank)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(retrieval, "search", search)
    return ranks


def run(search: ModelSearch) -> Any:
    return search.run("candidate", checkpoint(), None)  # type: ignore[arg-type]


def test_nothing_is_searched_where_retrieval_is_off_or_has_nothing_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = finds(monkeypatch, [FOUND])
    assert run(searching(tmp_path, evaluate={"retrieval": {"enabled": False}})) is None
    found = run(searching(tmp_path, task="no row has a gain"))
    assert found.per_query is found.ranked is None and not ranks
    assert found.report.missing[TOP] == "no row has a gain" and not found.report.values


def test_vectors_that_are_no_numbers_have_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, NumericError("item 3 is not finite"))
    found = run(searching(tmp_path))
    assert found.ranked is None and found.report.missing[TOP] == "item 3 is not finite"
    assert not list(open_storage(str(tmp_path / "workspace")).list(""))


@pytest.mark.parametrize("dimensions", [[], [4]])
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_ranks_search_once_and_the_first_keeps_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, dimensions: list[int]
) -> None:
    ranks = finds(monkeypatch, [FOUND, NARROWER][: 1 + len(dimensions)])
    saved: list[str] = []

    def save(storage: Storage, key: str, *more: Any) -> None:
        saved.append(key)
        save_arrays(storage, key, *more)

    monkeypatch.setattr("pipeline.evaluate.retrieval.save_arrays", save)
    widths = {"retrieval": {"dimensions": dimensions}}
    for _ in range(2):
        for found in on_ranks(world_size, lambda gang: run(searching(tmp_path, gang, widths))):
            assert found.report.values[TOP] == 0.5
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
    decided = [searching(tmp_path, **change).decides for change in ({}, {"embed": {"chunks": 2}}, of_file, changes[-1])]
    assert ["chunks" in one for one in decided] == [False, False, False, True]
    assert [one.get("asked") for one in decided] == [None, None, "every row", "every row"]
