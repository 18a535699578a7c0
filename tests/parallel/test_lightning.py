"""PyTorch Lightning: a module under our Strategy, the articles' snippet and a plain Trainer, and its checkpoints."""

from pathlib import Path

import pytest
import torch
from torch import nn

import trnpipe
from pipeline.core.errors import CheckpointError
from tests.kit.ranks import run_ranks

CASES = "tests.parallel.lightning_cases"


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, '{"shard_degree": 2}'),
        pytest.param(4, '{"shard_degree": 2, "tensor_degree": 2}', marks=pytest.mark.thorough),
    ],
)
def test_one_module_under_three_strategies(tmp_path: Path, ranks: int, plan: str) -> None:
    """Losses of 12 micro-steps and of validation, and of the last 6 from a checkpoint of either kind."""
    results = run_ranks(f"{CASES}:matrix", ranks, tmp_path, str(tmp_path), plan, env={"LOCAL_WORLD_SIZE": str(ranks)})
    for found in results:
        refusals, plain = found.pop("refused"), found["plain"]
        for name, run in found.items():
            steps = 6 if "from" in name else 12
            assert len(run["losses"]) == steps, name
            assert run["losses"] == pytest.approx(plain["losses"][-steps:], abs=1e-6), name
            assert run["validation"] == pytest.approx(plain["validation"], abs=1e-6), name
        assert found["ours from ours"]["losses"] == found["ours"]["losses"][6:], "bit for bit"
        if ranks == 2:
            whole = ("EMAWeightAveraging", "StochasticWeightAveraging", "ModelPruning")
            said = (
                "no accelerator for Neuron devices",
                "Trainer(devices=2, num_nodes=1)",
                "one plan per process",
                "precision",
            )
            expected = (*said, *(f"callback {name}" for name in whole))
            assert all(part in text for part, text in zip(expected, refusals, strict=True)), refusals
    ours, plain = (torch.load(tmp_path / name / "epoch=1.ckpt", weights_only=True) for name in ("ours", "plain-0"))
    assert ours.keys() == plain.keys() and ours["state_dict"].keys() == plain["state_dict"].keys()
    for name, tensor in plain["state_dict"].items():
        assert type(ours["state_dict"][name]) is torch.Tensor
        torch.testing.assert_close(ours["state_dict"][name], tensor, rtol=0, atol=1e-5)


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not broadcast."""
    strategy = trnpipe.Strategy()
    monkeypatch.setattr(strategy, "_lightning_module", nn.Linear(3, 2))
    torch.save({"state_dict": nn.Linear(3, 1).state_dict()}, tmp_path / "one.ckpt")
    with pytest.raises(CheckpointError, match=r"'bias' is \[1\]"):
        strategy.load_checkpoint(tmp_path / "one.ckpt")
