"""One evaluation on this rank: what it says of a device that failed, and which partitions it judges by."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.evaluate import run
from pipeline.evaluate.config import EvaluateConfig
from pipeline.parallel.world import World
from pipeline.telemetry.console import Console
from tests.evaluate.gangs import alone


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


@pytest.mark.parametrize(
    ("partitions", "new", "judged"),
    [
        ("all", ["d2"], ["d1", "d2", "d3"]),
        ("new", ["d2"], ["d2"]),
        ("new", ["d2", "d3"], ["d2"]),  # d3 has no row of the split
        ("new", ["d3"], ["d1", "d2", "d3"]),
        ("new", [], ["d1", "d2", "d3"]),
    ],
)
def test_new_partitions_are_judged_by_where_they_have_rows_of_the_split(
    monkeypatch: pytest.MonkeyPatch, partitions: str, new: list[str], judged: list[str]
) -> None:
    def opened(workspace: Any, sets: list[Any], split: str, *more: Any) -> Any:
        return SimpleNamespace(sets=sets, split=split, order=SimpleNamespace(total=1))

    selected = SimpleNamespace(new=[SimpleNamespace(name=name) for name in new])
    for name in ("ModelScorer", "ModelSearch"):
        monkeypatch.setattr(run, name, lambda *args: None)
    monkeypatch.setattr(run, "_find_leak", lambda *args: None)
    monkeypatch.setattr(run, "select_partitions", lambda *args, **more: selected)
    monkeypatch.setattr(run, "open_holdout", opened)
    splits = {"d1": ("train", "test"), "d2": ("train", "test", "valid"), "d3": ("train",)}
    sets = [SimpleNamespace(partition=one, info=SimpleNamespace(partition=one, splits=splits[one])) for one in splits]
    out = io.StringIO()
    ctx = SimpleNamespace(console=Console(stream=out), workspace=None, scratch=Path("scratch"), world=World())
    settings = SimpleNamespace(evaluate=EvaluateConfig.model_validate({"partitions": partitions}))
    models = SimpleNamespace(candidate=SimpleNamespace(prefix="m", tokenizer=lambda: b""), compared=None)
    inputs = {"candidate": "m", "incumbent": ""}
    backend = SimpleNamespace(name="cpu")
    found = run.Evaluation(settings, ctx, models, sets, inputs, alone(), backend)  # type: ignore[arg-type]
    assert [str(one.partition) for one in found.holdout.sets] == judged
    told = "new partitions hold no row of split test" in out.getvalue()
    assert told is (partitions == "new" and "d2" not in new)
