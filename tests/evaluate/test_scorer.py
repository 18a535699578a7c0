"""Scoring a holdout: all rows once, however many ranks share them, and stopped anywhere it goes on."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.backends import Batch
from pipeline.backends.cpu import CpuBackend
from pipeline.core.errors import Preempted
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays, TokenRows
from pipeline.evaluate.holdout import HoldoutOrder
from pipeline.evaluate.score import PartStore, Score, Scorer
from pipeline.io.storage import open_storage
from pipeline.parallel.process_group import ProcessGroup
from tests.evaluate.process_groups import alone, on_ranks
from tests.train.rows import every_row, make_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return make_rows(tmp_path_factory.mktemp("scorer"), [(13, 6), (0, 9), (5, 0)])


@pytest.fixture(scope="module")
def order(rows: TokenRows) -> HoldoutOrder:
    return HoldoutOrder(tuple(np.arange(size, dtype=np.int64) for size in rows.sizes))


def score(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A function of each row alone."""
    guess = torch.sin(batch["query"][:, 1].float() * 3 + batch["product"][:, 2].float())
    return {"logits": torch.stack([-guess, guess], dim=1)}


class Clock:
    """Seconds that pass at every look."""

    def __init__(self, step_s: float) -> None:
        self._times = count(0.0, step_s)

    def __call__(self) -> float:
        return next(self._times)


PREFIX = "cycles/c1/evaluate/parts/x"


def parts_in(folder: Path, told: list[str] | None = None) -> PartStore:
    storage = open_storage(str(folder / "workspace"))
    return PartStore.open(storage, PREFIX, folder / "scratch", (told if told is not None else []).append)


def run(
    rows: TokenRows,
    order: HoldoutOrder,
    folder: Path,
    process_group: ProcessGroup | None = None,
    *,
    scoring: Score = score,
    stop: StopSignal | None = None,
    save_every_s: float = 1e9,
    backend: CpuBackend | None = None,
    told: list[str] | None = None,
    step_s: float = 2.0,
) -> Arrays:
    process_group, stop = process_group or alone(), stop or StopSignal()
    scorer = Scorer(backend or CpuBackend(), process_group, stop, 4, save_every_s, Clock(step_s))
    return scorer.run(scoring, rows, order, parts_in(folder, told))


def check(found: Arrays, rows: TokenRows) -> None:
    """Against every row read and scored on its own."""
    expected = every_row(rows)
    logits = score({name: torch.from_numpy(expected[name]) for name in ("query", "product")})["logits"]
    expected["logits"] = logits.numpy()
    expected["query_tokens"] = (expected["query"] != rows.pad_id).sum(axis=1)
    by_id = np.argsort(expected["sample_id"])
    for name in ("sample_id", "query_id", "label", "gain", "logits", "query_tokens"):
        np.testing.assert_array_equal(found[name], expected[name][by_id], err_msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 3, 12])
def test_ranks_share_the_work(rows: TokenRows, order: HoldoutOrder, tmp_path: Path, world_size: int) -> None:
    found = on_ranks(world_size, lambda process_group: run(rows, order, tmp_path, process_group))
    check(found[0], rows)
    assert not any(found[1:]), "only rank 0 keeps the scores"
    assert not parts_in(tmp_path).parts.done(), "it took no time worth saving"


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 2)])
def test_stopped_anywhere_it_goes_on_with_other_ranks(
    rows: TokenRows, order: HoldoutOrder, tmp_path: Path, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, calls = StopSignal(), count(1)

    def stopping(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if next(calls) == 4:
            stop.set("SIGTERM")
        return score(batch)

    with pytest.raises(Preempted, match=r"of 33 rows are saved"):
        on_ranks(before, lambda process_group: run(rows, order, tmp_path, process_group, scoring=stopping, stop=stop))
    done, _ = parts_in(tmp_path).load()
    assert 0 < done < order.total
    scored: list[int] = []

    def counting(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        scored.append(len(batch["query"]))
        return score(batch)

    loads, load = count(), PartStore.load
    monkeypatch.setattr(PartStore, "load", lambda self: (next(loads), load(self))[1])
    check(on_ranks(after, lambda process_group: run(rows, order, tmp_path, process_group, scoring=counting))[0], rows)
    assert next(loads) == 1, "the first rank alone reads them"
    assert sum(scored) < order.total + 12 * after, "what was saved is not scored again"


def test_it_saves_on_the_way(rows: TokenRows, order: HoldoutOrder, tmp_path: Path) -> None:
    check(run(rows, order, tmp_path, save_every_s=5.0), rows)
    store = parts_in(tmp_path)
    assert len(store.parts.done()) > 2
    place, found = store.load()
    assert place == sum(len(part["sample_id"]) for part in found) < order.total, "the last rows are in the scores"

    def never(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        assert len(batch["query"]) == 4
        calls.append(1)
        return score(batch)

    calls: list[int] = []
    check(run(rows, order, tmp_path, scoring=never), rows)
    assert len(calls) <= -(-(order.total - place) // 4) + 1
    store.parts.delete()
    assert store.load() == (0, [])


@pytest.mark.parametrize("damage", ["flip", "remove", "not committed"])
def test_a_damaged_part_is_computed_again(rows: TokenRows, order: HoldoutOrder, tmp_path: Path, damage: str) -> None:
    run(rows, order, tmp_path, save_every_s=5.0)
    told, parts = list[str](), parts_in(tmp_path).parts
    second = sorted(parts.done())[1]
    (file,) = parts.fetch(second, tmp_path)
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "remove":
        file.unlink()
    else:
        parts.storage.delete([f"{PREFIX}/done/{second:05d}.json"])
    check(run(rows, order, tmp_path, told=told), rows)
    assert len(told) == (damage == "flip")


def test_a_loader_that_loses_batches_is_noticed(rows: TokenRows, order: HoldoutOrder, tmp_path: Path) -> None:
    class Losing(CpuBackend):
        def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
            @contextmanager
            def short() -> Iterator[Iterator[Batch]]:
                yield islice(iter(batches), 3)

            return short()

    with pytest.raises(RuntimeError, match="only 12 of 33 rows were scored"):
        run(rows, order, tmp_path, backend=Losing())
