"""A perceptron of seven dense layers as a LightningModule, on made-up numbers."""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Perceptron(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(7))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = rows + layer(rows).relu()
        return rows

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[0].sin())
        mean = self.all_gather(loss.detach()).mean().item()
        if self.trainer.is_global_zero:
            print(f"step {number} loss {mean:.9f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
model = Perceptron(128)
loader = DataLoader(TensorDataset(torch.randn(640, 128)), batch_size=16)
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=DDPStrategy(),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, loader)
