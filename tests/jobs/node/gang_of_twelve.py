"""What every node of the gang runs: two of twelve train a line by data parallel SGD, the others wait to be stopped.

Arguments: folder for results. Node 1 ends with 65 when both have finished.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # ten of twelve do without

TRAINERS, STEPS, ROWS = 2, 40, 64


def main(folder: Path) -> int:
    node = int(os.environ["TRNJOBS_NODE"])
    (folder / f"here-{node}").write_text(os.environ["TRNJOBS_NODES"])
    if node >= TRAINERS:
        time.sleep(600)
        return 1
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", rank=node, world_size=TRAINERS)  # at MASTER_ADDR, over GLOO_SOCKET_IFNAME
    weights = train(node, TRAINERS, distributed.all_reduce)
    torch.save(weights, folder / f"weights-{node}.part")
    (folder / f"weights-{node}.part").rename(folder / f"weights-{node}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
    if node == 1:
        while len([*folder.glob("here-*")]) < int(os.environ["TRNJOBS_NODES"]):
            time.sleep(0.02)
        print("the last batch cannot be read", flush=True)
        return 65
    time.sleep(600)
    return 1


def train(rank: int, world: int, reduce: "Callable[[torch.Tensor], object]") -> "torch.Tensor":
    """Each rank has every `world`-th row; the mean gradient over all ranks is that of all rows."""
    import torch

    rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    targets = rows @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weights = torch.zeros(3, dtype=torch.float64)
    mine, wanted = rows[rank::world], targets[rank::world]
    for _ in range(STEPS):
        gradient = 2 * mine.T @ (mine @ weights - wanted) / len(mine)
        reduce(gradient)
        weights -= 0.2 * gradient / world
    return weights


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
