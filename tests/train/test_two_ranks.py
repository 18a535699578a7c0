"""Two real ranks over gloo train on the gradient that one process has of the same global batch."""

from pathlib import Path

import pytest
import torch

from pipeline.parallel.world import World
from tests.ranks import run_ranks
from tests.train.gloo_rank import reduced_gradients
from tests.train.rows import TRAIN


@pytest.mark.stage
@pytest.mark.parametrize(("chunk_mib", "accumulation"), [(0.002, 1), pytest.param(32.0, 2, marks=pytest.mark.thorough)])
def test_gradients_averaged_over_ranks_are_those_of_one_process(
    tmp_path: Path, chunk_mib: float, accumulation: int
) -> None:
    case = "tests.train.gloo_rank:leave_gradients"
    run_ranks(case, 2, tmp_path / "ranks", str(tmp_path), str(chunk_mib), str(accumulation))
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(2))
    expected = reduced_gradients(World(), TRAIN, 1)
    assert first.keys() == second.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(first[name], second[name]), name
        largest = float(gradient.abs().max())  # one unit in the last place of 10 is 1e-6 already
        torch.testing.assert_close(first[name], gradient, rtol=0, atol=1e-6 * max(largest, 0.1), msg=name)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-2
