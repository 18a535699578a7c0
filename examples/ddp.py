"""Data parallel training as in the PyTorch tutorial: a small convolutional network on random images.

    trnpipe launch --launch.processes 2 -- examples/ddp.py

Prints the mean loss over all ranks at each step, which is the same for any number of ranks that divides 32.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(256, 1, 16, 16)
labels = (images.mean(dim=(1, 2, 3)) > 0).long()
data = TensorDataset(images, labels)
sampler = DistributedSampler(data, shuffle=False)  # rank r has rows r, r + ranks, ...
loader = DataLoader(data, batch_size=32 // ranks, sampler=sampler)

model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step, (rows, targets) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(rows), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item():.9f}")

dist.destroy_process_group()
