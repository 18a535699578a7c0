"""A hand-written perceptron of seven dense layers, on random numbers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
import trnpipe as trn

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(7))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = rows + layer(rows).relu()
        return rows


model = Perceptron(128)
model = trn.transform(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

data = torch.Generator().manual_seed(1)
for step in range(20):
    rows = torch.randn(32, 128, generator=data)[rank::ranks]
    loss = nn.functional.mse_loss(model(rows), rows.sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item():.9f}")

dist.destroy_process_group()
