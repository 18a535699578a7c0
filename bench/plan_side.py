"""One rank of bench.plans: our model under a plan, in the two lines of docs/parallel.md; losses, steps and memory."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import trnpipe as trn
from bench.rows import input_spec
from bench.side_process import peak_resident_mib
from pipeline.model.config import ModelConfig
from pipeline.model.relevance import RelevanceInputs, build_model


def train(output: Path, plan: str, *, preset: str, pairs: int, tokens: int, steps: int) -> None:
    """The same global batches of `pairs` whatever the plan; rank 0 leaves what it found."""
    torch.set_num_threads(1)
    place = trn.init(plan, device="cpu")
    config, spec = ModelConfig.model_validate({"preset": preset}), input_spec(8192)
    model = trn.transform(build_model(config, spec, seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)  # at 20 times that losses jump, and rounding with them
    losses, seconds = [], []
    mine = slice(*(pairs * (place.data_rank + more) // place.data_size for more in (0, 1)))
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        texts = torch.randint(5, 8192, (2, pairs, tokens), generator=generator, dtype=torch.int32)
        numbers = torch.rand(pairs, len(spec.numeric), generator=generator)
        labels = torch.randint(0, spec.num_classes, (pairs,), generator=generator)
        none = torch.zeros(pairs, 0, dtype=torch.int32)
        dist.barrier()
        started = time.monotonic()
        outputs = model(RelevanceInputs(texts[0][mine], texts[1][mine], numbers[mine], none[mine]))
        loss = F.cross_entropy(outputs.logits, labels[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        trn.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.monotonic() - started)
        whole = loss.detach().double()
        dist.all_reduce(whole)  # tensor peers have the same loss
        losses.append(float(whole) / place.world_size)
    peak = torch.tensor(peak_resident_mib(Path("/proc/self/status")))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if place.rank == 0:
        output.write_text(json.dumps({"losses": losses, "seconds": seconds[1:], "peak_mib": [float(peak)]}))
    dist.barrier()
