"""What ranks run for test_lightning.py, which does not import lightning itself: that takes seconds."""

# ruff: noqa: E402 - lightning would import torch_xla, and with it all of Inductor, if it found it

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.modules["torch_xla"] = None  # type: ignore[assignment]

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

import trnpipe
from examples.process_group import NAME
from pipeline.core.errors import TrnpipeError

SIZE = 8  # of a global batch
TENSOR_PLAN = {"layers.*.0": "colwise", "layers.*.2": "rowwise"}


class Classifier(LightningModule):
    """Steps call the module or its parts; embedding and head are in no unit, and tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 6)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)))
        self.head = nn.Linear(6, 5)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)  # never has a gradient, nor state in the optimizer
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.embedding(tokens).mean(1)))
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        tokens, labels = batch
        scores = self(tokens) if number % 2 else self.head(self.layers(self.embedding(tokens).mean(1)))
        loss = nn.functional.cross_entropy(scores, labels)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("validation", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trainer_of(strategy: Any, devices: int, **more: Any) -> Trainer:
    quiet: Any = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, **quiet, **more)


def trained(
    strategy: Any, devices: int, parts: int, *, start: Path | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """Losses of the global batches, each cut in `parts`, in the order of training; validation at the end."""
    drawn = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 5, (6 * SIZE, 4), generator=drawn)
    rows = TensorDataset(tokens, tokens.sum(1) % 3)
    alone: Any = DistributedSampler(rows, 1, 0) if devices == 1 else None  # else Lightning's, of the strategy's ranks
    callbacks: Any = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else None
    limits: Any = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    trainer = trainer_of(strategy, devices, callbacks=callbacks, enable_checkpointing=folder is not None, **limits)
    model = Classifier(1 if start is None else 2)
    trainer.fit(model, DataLoader(rows, SIZE // parts, sampler=alone), DataLoader(rows, SIZE // parts), ckpt_path=start)
    losses = torch.stack(model.losses).double()
    if devices > 1:
        dist.all_reduce(losses)
        os.environ["WORLD_SIZE"] = str(devices)  # LightningEnvironment takes it away at its end
    return {"losses": (losses / devices).tolist(), "validation": float(trainer.callback_metrics["validation"])}


def matrix(words: str, plan: str) -> dict[str, Any]:
    """One process, which needs no other; the articles' snippet; ours, over the group that is there; checkpoints."""
    ranks, folder = int(os.environ["WORLD_SIZE"]), Path(words)
    plain = folder / f"plain-{os.environ['RANK']}"
    found: dict[str, Any] = {"plain": trained(SingleDeviceStrategy("cpu"), 1, 1, folder=plain)}

    env = LightningEnvironment()
    env.world_size = lambda: int(os.environ["WORLD_SIZE"])  # type: ignore[method-assign]
    env.global_rank = lambda: int(os.environ["RANK"])  # type: ignore[method-assign]
    ddp = DDPStrategy(cluster_environment=env, process_group_backend=NAME, find_unused_parameters=True)
    found["the articles'"] = trained(ddp, ranks, ranks)
    assert dist.get_backend() == NAME

    ours, parts = trnpipe.Strategy(plan, tensor_plan=TENSOR_PLAN), trnpipe.Plan.read(plan).shard_degree
    found["ours"] = trained(ours, ranks, parts, folder=folder / "ours")
    for name, start in (("ours", folder / "ours"), ("plain", folder / "plain-0")):
        again = trnpipe.Strategy(tensor_plan=TENSOR_PLAN)
        found[f"ours from {name}"] = trained(again, ranks, parts, start=start / "epoch=0.ckpt")
    found["plain from ours"] = trained(SingleDeviceStrategy("cpu"), 1, 1, start=folder / "ours/epoch=0.ckpt")
    found["refused"] = refused()
    return found


def fit_with(callback: Any) -> None:
    trainer_of(trnpipe.Strategy(), 2, callbacks=[callback]).fit(Classifier(1), [])


def refused() -> list[str]:
    """Of each thing that cannot be, what is said."""
    said = []
    whole: Any = (EMAWeightAveraging(), StochasticWeightAveraging(1e-2), cast(Any, ModelPruning)("l1_unstructured"))
    os.environ["PJRT_DEVICE"] = "NEURON"
    attempts: tuple[Callable[[], object], ...] = (
        lambda: trnpipe.Strategy(),
        lambda: trainer_of(trnpipe.Strategy(), 3).fit(Classifier(1), []),
        lambda: trainer_of(trnpipe.Strategy({"shard_degree": 1}), 2).fit(Classifier(1), []),
        lambda: trainer_of(trnpipe.Strategy(), 2, precision="bf16-mixed"),
        *(partial(fit_with, one) for one in whole),
    )
    for attempt in attempts:
        try:
            attempt()
        except TrnpipeError as error:
            said.append(str(error))
        os.environ["PJRT_DEVICE"] = "CPU"
    return said
