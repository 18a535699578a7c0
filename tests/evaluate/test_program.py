"""The scoring program: the very logits that training's evaluation computes, with weights that can be exchanged."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pipeline.backends.cpu import CpuBackend
from pipeline.compile.manifest import GraphWatch, Place
from pipeline.core.errors import CheckpointError, DataError
from pipeline.data.loader import to_tensors
from pipeline.evaluate.score import ScoreProgram
from pipeline.model.relevance import RelevanceModel, build_model
from tests.train.rows import BUCKETS, MODEL, SPEC, make_program, make_rows

Seen = list[Place]


class Watching(GraphWatch):
    def __init__(self) -> None:
        self.seen: Seen = []

    def before(self, place: Place, tensors: Sequence[torch.Tensor]) -> None:
        del tensors

    def after(self, place: Place) -> None:
        self.seen.append(place)


@pytest.fixture
def batch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    rows = make_rows(tmp_path_factory.mktemp("program"), [(5, 3)])
    return to_tensors(rows.read(np.zeros(5, dtype=np.int64), np.arange(5), 1))


def empty_program(watch: Watching | None = None) -> ScoreProgram:
    with torch.device("meta"):
        model = RelevanceModel(MODEL, SPEC)
    return ScoreProgram(model, CpuBackend(), "fp32", BUCKETS, watch)


def test_the_logits_of_training_and_of_another_model(batch: dict[str, torch.Tensor]) -> None:
    watch = Watching()
    program = empty_program(watch)
    trained = make_program(CpuBackend())
    program.load(trained.snapshot()[0])
    torch.testing.assert_close(program.outputs(batch).logits, trained.outputs(batch).logits, rtol=0, atol=0)
    assert watch.seen == [Place("evaluate", "6x8", 5)]
    other = build_model(MODEL, SPEC, seed=9)
    program.load(other.state_dict())
    assert not torch.equal(program.outputs(batch).logits, trained.outputs(batch).logits)


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    weights = dict(build_model(MODEL, SPEC, 1).state_dict())
    with pytest.raises(CheckpointError, match=r"head\.bias is \[3\]"):
        empty_program().load({**weights, "head.bias": torch.zeros(3)})
    weights.pop("head.weight")
    with pytest.raises(CheckpointError, match=r"head\.weight is missing"):
        empty_program().load(weights)


def test_only_known_shapes(batch: dict[str, torch.Tensor]) -> None:
    program = empty_program()
    program.load(build_model(MODEL, SPEC, 1).state_dict())
    with pytest.raises(DataError, match="a batch of 6x7 tokens"):
        program.outputs({**batch, "product": batch["product"][:, :7]})
