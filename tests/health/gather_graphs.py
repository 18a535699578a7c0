"""Prints the graphs of the device's collectives as HLO, for test_gather_graph.py: replicas need a process of their own.

XLA:CPU with two devices stands for two ranks. The graphs are traced and never run: there is nobody to answer.
"""

import json
from collections.abc import Sequence

import torch
from torch import Tensor
from torch_xla._internal import pjrt

from pipeline.backends.xla import XlaBackend
from pipeline.core.stop import StopSignal
from pipeline.health.ranks import Ranks, agent_store, contents, expected_of, in_graph


class Traced(XlaBackend):
    """What comes to the host is zeros; the graph that would have made it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.reduces_in_graph = True
        self.graphs: list[str] = []

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.graphs.append(self.hlo_text(tensors))
        self._xla._XLAC._set_all_reduce_token(str(self.device), None)  # as a sync does: graphs are not chained
        return [torch.zeros(tensor.shape) for tensor in tensors]


def main() -> None:
    pjrt.initialize_multiprocess(0, 2)
    backend = Traced()
    store = agent_store("127.0.0.1", 0, is_agent=True)
    ranks = Ranks(0, range(2), store, backend.device, 1.0, StopSignal())
    shapes = {}
    for name, collective in in_graph(backend).items():
        run = collective(ranks, contents(0, 1, 6).to(backend.device))
        shapes[name] = [list(run().shape), list(expected_of(name, ranks, 1, 6).shape)]
    print(json.dumps({"graphs": dict(zip(shapes, backend.graphs, strict=True)), "shapes": shapes}))


if __name__ == "__main__":
    main()
