"""The scoring program: the very logits that training's evaluation computes, with weights that can be exchanged."""

from pathlib import Path

import numpy as np
import torch

from pipeline.backends.cpu import CpuBackend
from pipeline.compile.manifest import GraphPosition, GraphWatch
from pipeline.data.loader import to_tensors
from pipeline.evaluate.score import ScoreProgram
from pipeline.model.relevance import RelevanceModel, build_model
from tests.train.rows import MODEL, SPEC, make_program, make_rows


class Watching(GraphWatch):
    def __init__(self) -> None:
        self.seen: list[GraphPosition] = []

    def after(self, place: GraphPosition) -> None:
        self.seen.append(place)


def test_the_logits_of_training_and_of_another_model(tmp_path: Path) -> None:
    rows, watch, trained = make_rows(tmp_path, [(5, 3)]), Watching(), make_program(CpuBackend())
    batch = to_tensors(rows.read(np.zeros(5, dtype=np.int64), np.arange(5), 1))
    with torch.device("meta"):
        program = ScoreProgram(RelevanceModel(MODEL, SPEC), CpuBackend(), "fp32", watch)
    program.load(trained.snapshot()[0])
    torch.testing.assert_close(program.outputs(batch).logits, trained.outputs(batch).logits, rtol=0, atol=0)
    assert watch.seen == [GraphPosition("evaluate", "6x8", 5)]
    program.load(build_model(MODEL, SPEC, seed=9).state_dict())
    assert not torch.equal(program.outputs(batch).logits, trained.outputs(batch).logits)
