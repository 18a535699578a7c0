"""A training script without trnpipe: plain DistributedDataParallel, which writes its own checkpoints.

    trnjobs run --nodes 2 --processes 2 -- examples/ddp_script.py --steps 40

It only depends on the variables of torchrun, which every launcher sets, and on the folder in TRNJOBS_CHECKPOINT_URI,
which is the same for every attempt. After a kill at any time and a restart it ends with the same weights: bit for bit
with two ranks, up to rounding with more, because DDP reorders its buckets after the first step of a process.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
parser.add_argument("--step-s", type=float, default=0.0, help="minimum seconds per step")
arguments = parser.parse_args()
folder = Path(os.environ.get("TRNJOBS_CHECKPOINT_URI", "checkpoints").removeprefix("file://"))

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

start = 0
if (folder / "last.pt").exists():
    saved = torch.load(folder / "last.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
    if rank == 0:
        print(f"continuing at step {start}", flush=True)

for step in range(start, arguments.steps):
    rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))[rank::ranks]
    loss = (model(rows).squeeze(-1) - rows.sum(-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(arguments.step_s)
    if rank == 0 and ((step + 1) % arguments.every == 0 or step + 1 == arguments.steps):
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, folder / "writing.pt")
        (folder / "writing.pt").replace(folder / "last.pt")  # atomic
        print(f"step {step + 1} loss {loss.item():.6f}", flush=True)

dist.barrier()
dist.destroy_process_group()
