"""Data parallel training on the accelerator of this machine: the native Neuron device, a GPU, or else the host.

    trnpipe launch --launch.processes 2 -- examples/native_ddp.py

Each rank has one device. The process group is created before the device is used, because Neuron does not allow it
later. It only accepts tensors on the device. Prints the mean loss over all ranks at each step, which is the same for
any number of ranks that divides 32.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
dist.init_process_group(dist.get_default_backend_for_device(device))
if device.type == "cuda":  # on Neuron each rank only sees its own device
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
rows = torch.randn(256, 64)
labels = (rows.mean(dim=1) > 0).long()
data = TensorDataset(rows, labels)
sampler = DistributedSampler(data, shuffle=False)  # rank r has rows r, r + ranks, ...
loader = DataLoader(data, batch_size=32 // ranks, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
model = DistributedDataParallel(model.to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step, (some, targets) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(some.to(device)), targets.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item():.9f}")

dist.destroy_process_group()
