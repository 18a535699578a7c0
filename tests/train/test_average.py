"""Averages of the trained weights with those that a run started from, up to the candidate and through kills."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.io.commit import read_manifest
from pipeline.telemetry.events import EventName
from pipeline.train.average import SHARES, interpolate
from pipeline.train.loop import Outcome
from tests.train.rows import MODEL
from tests.train.test_run import CONFIG, ROWS, Cycle

ONCE = CONFIG.model_copy(update={"evaluate_every": 0, "evaluate_rows": 5000})


def rate(learning_rate: float) -> dict[str, Any]:
    return {"optimizer": CONFIG.optimizer.model_copy(update={"learning_rate": learning_rate})}


def test_weights_lie_between_the_start_and_the_trained_ones() -> None:
    start = {"encoder.a": torch.tensor([1.0, 0.0])}
    trained = {"encoder.a": torch.tensor([3.0, -4.0]), "head.weight": torch.tensor([5.0])}
    for share, expected in ((1.0, [3.0, -4.0]), (0.75, [2.5, -3.0]), (0.5, [2.0, -2.0])):
        averaged = interpolate(start, trained, share)
        assert averaged["encoder.a"].tolist() == expected and averaged["head.weight"].tolist() == [5.0]
        assert averaged.keys() == trained.keys()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a cycle that has learned something."""
    cycle = Cycle(tmp_path_factory.mktemp("first"), ONCE.model_copy(update={"max_steps": 400, **rate(5e-3)}), name="c")
    cycle.every_steps = 400
    cycle.partition(1, {"train": (200, 200), "valid": (100, 100)})
    assert cycle.run().holdouts["valid"].accuracy > 0.7
    return cycle.folder


def next_cycle(trained: Path, folder: Path, **changes: Any) -> tuple[Cycle, Checkpoint]:
    """The next cycle, in a copy of the workspace, and its parent. Unless changed, its learning rate does harm."""
    shutil.copytree(trained, folder)
    second = ONCE.model_copy(update={"start": "incumbent", "average": "start", **rate(0.015), **changes})
    cycle = Cycle(folder, second, name="next", prefixes=["tokens/d/print-1"])
    cycle.partition(2, ROWS | {"valid": (100, 100)})
    return cycle, open_checkpoint(cycle.storage, "checkpoints/c/step-400", folder / "cache")


def averages(cycle: Cycle) -> dict[float, float]:
    evaluations = [fields for name, fields in cycle.events if name == EventName.HOLDOUT_EVALUATED]
    return {fields["trained_share"]: fields["accuracy"] for fields in evaluations if "trained_share" in fields}


def candidate(cycle: Cycle, outcome: Outcome) -> Checkpoint:
    return open_checkpoint(cycle.storage, outcome.prefix, cycle.folder / "cache")


@pytest.fixture(params=["parent", "published"])
def averaged(
    request: pytest.FixtureRequest, trained: Path, tmp_path: Path
) -> Iterator[tuple[Cycle, Checkpoint | None, Checkpoint]]:
    """A cycle whose training does harm, so that an average wins; its parent, and what the candidate starts from."""
    cycle, parent = next_cycle(trained, tmp_path / "next")
    if request.param == "parent":
        yield cycle, parent, parent
        return
    published = tmp_path / "published"
    published.mkdir()
    encoder = {name: one for name, one in parent.weights().items() if name.startswith("bert.")}
    save_file(encoder, published / "model.safetensors")
    cycle.model = MODEL.model_copy(update={"init_from": str(published)})
    yield cycle, None, parent


def test_the_best_average_becomes_the_candidate(averaged: tuple[Cycle, Checkpoint | None, Checkpoint]) -> None:
    cycle, parent, start = averaged
    outcome = cycle.run(parent)
    values, found = averages(cycle), candidate(cycle, outcome)
    state, step = found.state, cycle.open(outcome.step)
    assert list(values) == list(SHARES) and state.averaged in SHARES
    assert outcome.prefix == f"checkpoints/next/averaged-{outcome.step}" and outcome.steps_done == 6
    assert state.best is not None and state.best.value == values[state.averaged] == max(values.values())
    assert step.state.averaged == 1.0 and step.state.best and step.state.best.value < state.best.value
    trained, began = step.weights(), start.weights()
    for name, tensor in found.weights().items():
        is_averaged = parent is not None or name.startswith("bert.")
        expected = torch.lerp(began[name], trained[name], state.averaged) if is_averaged else trained[name]
        assert torch.equal(tensor, expected)
    # What the run reports of the candidate is what its weights score, and its temperature is its own.
    assert outcome.holdouts["valid"].accuracy == state.best.value
    assert outcome.holdouts["valid"].temperature == state.temperature not in (1.0, step.state.temperature)
    moments = step.optimizer()
    assert all(torch.equal(vector, moments.pop(name)) for name, vector in found.optimizer().items()) and not moments
    # A next cycle goes on with it.
    cycle.partition(3, ROWS)
    cycle.name, cycle.model = "third", MODEL
    follower = cycle.open(cycle.run(found).step)
    assert follower.state.parent and follower.state.parent.digest == found.digest and follower.state.averaged == 1.0
    assert follower.state.earlier_steps == outcome.step + (400 if parent is not None else 0)


@pytest.mark.fault
@pytest.mark.parametrize("shares", [1, 3, 4])
def test_a_kill_anywhere_leads_to_the_same_candidate(trained: Path, tmp_path: Path, shares: int) -> None:
    """Killed after so many averages were scored, or with the last right after the checkpoint was committed."""
    whole, begun = next_cycle(trained, tmp_path / "whole")
    expected = whole.run(begun)
    assert expected.prefix.startswith("checkpoints/next/averaged-")
    cycle, parent = next_cycle(trained, tmp_path / "killed")
    seen = 0

    class Killed(BaseException):
        pass

    def kill(name: EventName, fields: dict[str, Any]) -> None:
        nonlocal seen
        seen += "trained_share" in fields or "averaged" in str(fields.get("prefix"))
        if seen == shares:
            raise Killed

    cycle.on_event = kill
    with pytest.raises(Killed):
        cycle.run(parent)
    committed = read_manifest(cycle.storage, expected.prefix)
    assert (committed is not None) == (shares == 4)
    cycle.on_event = lambda name, fields: None
    outcome = cycle.run(parent)
    assert outcome == expected
    found, other = candidate(cycle, outcome), candidate(whole, expected)
    assert found.state.model_copy(update={"parent": None}) == other.state.model_copy(update={"parent": None})
    assert all(torch.equal(tensor, other.weights()[name]) for name, tensor in found.weights().items())
    if committed is not None:
        assert found.digest == committed.digest, "it was found, not written again"
    (cycle.folder / "workspace" / outcome.prefix / "model.safetensors").write_bytes(b"damaged")
    assert cycle.run(parent) == expected and candidate(cycle, outcome).digest == found.digest


def test_if_no_average_is_better_the_step_is_the_candidate(trained: Path, tmp_path: Path) -> None:
    cycle, parent = next_cycle(trained, tmp_path / "next", max_steps=150, **rate(5e-3))
    worse = cycle.storage.local_path("checkpoints/c/step-400/model.safetensors")
    assert worse is not None
    object.__setattr__(parent, "weights", lambda: {name: -one for name, one in load_file(worse).items()})
    outcome = cycle.run(parent)
    values, found = averages(cycle), candidate(cycle, outcome)
    assert list(values) == list(SHARES) and found.state.best and max(values.values()) <= found.state.best.value
    assert outcome.prefix == f"checkpoints/next/step-{outcome.step}" and found.state.averaged == 1.0
    assert outcome.holdouts["valid"].temperature == found.state.temperature


def test_a_run_from_scratch_has_nothing_to_average_with(tmp_path: Path) -> None:
    cycle = Cycle(tmp_path, train=CONFIG.model_copy(update={"average": "start"}))
    cycle.partition(1, ROWS)
    outcome = cycle.run()
    assert averages(cycle) == {} and outcome.prefix == f"checkpoints/c/step-{outcome.step}"
