"""One evaluation on this rank: what it says of a device that failed, and which partitions it judges by."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import DataError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.evaluate import run
from pipeline.evaluate.config import EvaluateConfig
from pipeline.parallel.world import World
from pipeline.telemetry.console import Console
from tests.evaluate.gangs import alone

pytestmark = pytest.mark.unit


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


@pytest.mark.parametrize(
    ("split", "valid", "labels", "trained_head", "is_main", "threshold", "warns"),
    [
        ("test", "a split", 2, True, True, 0.25, False),
        ("valid", "no rows", 2, True, True, 0.5, False),  # its own scores
        ("test", "no rows", 2, True, True, None, True),
        ("test", "a split", 2, True, False, None, False),  # another rank has no scores
        ("test", "a split", 3, True, True, None, False),
        ("test", "a split", 2, False, True, None, False),
        ("test", "a split without labels", 2, True, True, None, True),
    ],
)
def test_where_a_threshold_comes_from(
    monkeypatch: pytest.MonkeyPatch,
    split: str,
    valid: str,
    labels: int,
    trained_head: bool,
    is_main: bool,
    threshold: float | None,
    warns: bool,
) -> None:
    def best(scores: Any) -> float:
        if scores == "a split without labels":
            raise DataError("no row has a label")
        return 0.25 if scores == "a split" else 0.5

    def scored(role: str, checkpoint: Any, holdout: Any) -> tuple[Any, str]:
        return (holdout.name if is_main else None), "key"

    monkeypatch.setattr(run, "to_rows", lambda scores: scores)
    monkeypatch.setattr(run, "best_threshold", best)
    one = object.__new__(run.Evaluation)
    info = SimpleNamespace(labels=("a",) * labels)
    one.holdout = SimpleNamespace(split=split, sets=[SimpleNamespace(info=info)])  # type: ignore[assignment]
    valid_split = valid if valid == "no rows" else SimpleNamespace(name=valid)
    one.search = SimpleNamespace(valid=valid_split)  # type: ignore[assignment]
    one.scorer = SimpleNamespace(run=scored)  # type: ignore[assignment]
    one.notes = run.Notes(Console(stream=io.StringIO()))
    checkpoint = SimpleNamespace(state=SimpleNamespace(trained_head=trained_head))
    own = "own scores" if is_main else None
    assert one._threshold("candidate", checkpoint, own) == threshold  # type: ignore[arg-type]
    assert bool(one.notes.warnings) is warns


@pytest.mark.parametrize(
    ("is_main", "meaningless", "compared", "stored"),
    [(True, "", None, 1), (True, "", "m2", 1), (True, "no trained head", "m2", 0), (False, "", "m2", 0)],
)
def test_the_first_rank_reports_and_draws_scores_that_mean_something(
    monkeypatch: pytest.MonkeyPatch, is_main: bool, meaningless: str, compared: str | None, stored: int
) -> None:
    def side(role: str, checkpoint: str) -> Any:
        scored.append((role, checkpoint))
        return SimpleNamespace(rows=SimpleNamespace(meaningless=meaningless)) if is_main else None

    scored: list[tuple[str, str]] = []
    drawn: list[Any] = []
    monkeypatch.setattr(run, "score_baselines", lambda *args: [])
    monkeypatch.setattr(run.Evaluation, "_side", lambda self, *args: side(*args))
    monkeypatch.setattr(run.Evaluation, "_report", lambda self, ours, theirs, tools: theirs is not None)
    monkeypatch.setattr(run.Evaluation, "_store_digest", lambda self, *args: drawn.append(args))
    one = object.__new__(run.Evaluation)
    one.models = SimpleNamespace(candidate="m", compared=compared)  # type: ignore[assignment]
    one.notes, one.search = run.Notes(Console(stream=io.StringIO())), None  # type: ignore[assignment]
    found: Any = one.run()
    assert found is (compared is not None if is_main else None) and len(drawn) == stored
    assert scored == [("candidate", "m"), *([("incumbent", compared)] if compared else [])]
