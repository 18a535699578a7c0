"""A LightningModule of seven dense layers with the Trainer, on random numbers."""

import os

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Perceptron(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(7))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = rows + layer(rows).relu()
        return rows

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        (rows,) = batch
        loss = nn.functional.mse_loss(self(rows), rows.sin())
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        self.print(f"step {number} loss {mean.item():.9f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
model = Perceptron(128)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
rows = TensorDataset(torch.randn(20 * 32, 128, generator=torch.Generator().manual_seed(1)))
trainer = L.Trainer(
    accelerator="cpu",
    devices=local_ranks,
    num_nodes=ranks // local_ranks,
    strategy=DDPStrategy(),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(rows, batch_size=32 // ranks))
