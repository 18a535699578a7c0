"""One evaluation on this rank: a device that failed is explained, and ranks go on only when all see the same rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import DataError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.evaluate import run
from pipeline.evaluate.run import new_sets, open_valid
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from tests.evaluate.process_groups import on_ranks


@pytest.mark.parametrize("is_known", [False, True])
def test_an_error_of_the_device_is_explained_where_it_is_known(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    failed = RuntimeError("execution failed")
    raised: Exception = TransientError("the device is gone") if is_known else failed

    @contextmanager
    def ranks(*args: Any, **more: Any) -> Iterator[tuple[None, None]]:
        yield None, None

    def fail(*args: Any) -> None:
        raise failed

    monkeypatch.setattr(run, "open_ranks", ranks)
    monkeypatch.setattr(run, "Evaluation", fail)
    monkeypatch.setattr(run, "diagnose_device_error", lambda *args, **more: raised)
    settings = SimpleNamespace(backend=None, health=None, train=SimpleNamespace(collective_timeout_s=1))
    ctx = SimpleNamespace(world=World(), stop=StopSignal())
    with pytest.raises(type(raised)) as caught:
        run.run_evaluation(settings, ctx, None, [], {})  # type: ignore[arg-type]
    assert caught.value is raised and caught.value.__cause__ is (failed if is_known else None)


@pytest.mark.parametrize(("new", "judged"), [(["d2"], ["d2"]), (["d2", "d3"], ["d2"]), (["d3"], []), ([], [])])
def test_new_partitions_are_judged_where_they_have_rows_of_the_split(new: list[str], judged: list[str]) -> None:
    splits = {"d1": ("train", "test"), "d2": ("train", "test", "valid"), "d3": ("train",)}
    sets: list[Any] = [SimpleNamespace(info=SimpleNamespace(partition=one, splits=splits[one])) for one in splits]
    assert [one.info.partition for one in new_sets(sets, new, "test")] == judged


@pytest.mark.parametrize("unreadable", [(), (0,), (1,), (0, 1)])
def test_all_ranks_see_the_valid_split_or_none_does(unreadable: tuple[int, ...]) -> None:
    def work(process_group: ProcessGroup) -> Any:
        def split(name: str) -> Any:
            if process_group.world.rank in unreadable:
                raise DataError(f"shard {process_group.world.rank} of {name} cannot be read")
            return [name]  # stands for its rows

        return open_valid(split, process_group)

    if len(unreadable) == 1:
        with pytest.raises(DataError, match=f"on rank {unreadable[0]} of 2: shard {unreadable[0]} of valid"):
            on_ranks(2, work)
    else:
        expected = [f"shard {rank} of valid cannot be read" for rank in (0, 1)]
        assert on_ranks(2, work) == (expected if unreadable else [["valid"], ["valid"]])
