"""Plans of parallelism on this host: the same losses under each, and what a rank takes: `python -m bench.plans`."""

import argparse
import json
import os
import socket
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import trnpipe as trn
from bench.results import Figure, Result, Target, figure, finish
from bench.rows import input_spec
from bench.side_process import peak_resident_mib
from pipeline.model.config import ModelConfig
from pipeline.model.relevance import RelevanceInputs, build_model

NAME = "plans"
TITLE = "Largest difference of a loss from one process's, over all plans on 2 and 4 ranks (parity, not speed)"
METHOD = """
Preset small in fp32, 16 pairs of 32 + 32 tokens a global batch, cross entropy of the relevance head, AdamW with
clipping, on gloo; each plan in processes of its own, one thread a rank. The difference is the largest over the steps
between the mean loss over ranks and that of one process on the same batches. Memory is the most that a rank has
resident, libraries included: all of them, with host and device one. Ranks share the host's cores with each other and
with whatever else runs, so times, without the first step, say nothing of a plan's speed on devices of their own.
"""
TARGET = Target(figure="difference", comparison="<=", value=1e-6)


@dataclass(frozen=True)
class Case:
    """A plan on so many ranks."""

    name: str
    ranks: int
    plan: str
    text: str


_RECOMPUTE = '"recompute": "units"'
CASES = (
    Case("one", 1, '{"shard_degree": 1}', "one process"),
    Case("r2_data", 2, '{"shard_degree": 1}', "2 ranks, data parallel"),
    Case("r2_state", 2, '{"shard": "state"}', "2 ranks, shard state"),
    Case("r2_all", 2, "{}", "2 ranks, shard all"),
    Case("r2_tensor", 2, '{"tensor_degree": 2}', "2 ranks, tensor_degree 2"),
    Case("r2_all_recompute", 2, f"{{{_RECOMPUTE}}}", "2 ranks, shard all, recompute"),
    Case("r2_all_offload", 2, '{"recompute": "units", "offload": true}', "2 ranks, shard all, recompute, offload"),
    Case("r4_data", 4, '{"shard_degree": 1}', "4 ranks, data parallel"),
    Case("r4_all", 4, "{}", "4 ranks, shard all"),
    Case("r4_hybrid", 4, '{"shard_degree": 2}', "4 ranks, shard_degree 2"),
    Case("r4_tensor", 4, '{"tensor_degree": 2}', "4 ranks, shard all x tensor_degree 2"),
    Case("r4_tensor_recompute", 4, f'{{"tensor_degree": 2, {_RECOMPUTE}}}', "4 ranks, the same, recompute"),
)


def train(output: Path, plan: str, *, preset: str, pairs: int, tokens: int, steps: int) -> None:
    """Be one rank: our model under a plan, on the same batches whatever it is. Rank 0 writes what it found."""
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


def measured(case: Case, folder: Path, **sizes: int | str) -> dict[str, list[float]]:
    """What rank 0 found. Raises RuntimeError when a rank fails."""
    output = folder / f"{case.name}.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    world |= {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
    started = []
    for rank in range(case.ranks):
        process = os.fork()  # libraries are imported once
        if not process:
            code = 1
            try:
                os.environ |= {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                train(output, case.plan, **sizes)  # type: ignore[arg-type]
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        started.append(process)
    if any(os.waitpid(process, 0)[1] for process in started):
        raise RuntimeError(f"a rank failed: {case.text}")
    found: dict[str, list[float]] = json.loads(output.read_text())
    return found


def run(*, quick: bool) -> Result:
    """Every case, one after the other."""
    sizes: dict[str, int | str] = {"preset": "small", "pairs": 16, "tokens": 32, "steps": 5}
    if quick:
        sizes |= {"preset": "tiny", "tokens": 8, "steps": 2}
    cases = [case for case in CASES if not quick or case.name in ("one", "r2_all", "r2_tensor")]
    with tempfile.TemporaryDirectory() as folder:
        found = {case.name: measured(case, Path(folder), **sizes) for case in cases}
    alone = found["one"]["losses"]
    figures: list[Figure] = []
    worst = 0.0
    for case in cases:
        one = found[case.name]
        difference = max(abs(mine - theirs) for mine, theirs in zip(one["losses"], alone, strict=True))
        worst = max(worst, difference)
        if case.name != "one":
            figures.append(figure(f"{case.name}_difference", difference, "", f"difference of a loss, {case.text}"))
        figures.append(figure(f"{case.name}_step", [1e3 * s for s in one["seconds"]], "ms", f"step, {case.text}"))
        figures.append(figure(f"{case.name}_memory", one["peak_mib"], "MiB", f"most resident of a rank, {case.text}"))
    whole = figure("difference", worst, "", "largest difference of a loss, all plans")
    return finish(NAME, TITLE, METHOD, [whole, *figures], quick=quick, target=TARGET, settings=dict(sizes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few steps of few plans: proves that the script works")
    run(quick=parser.parse_args().quick)
