"""Writes the HLO of small programs, which the lint must find or pass, to files. Run by traces.py with torch_xla."""

import gc
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

torch_xla: Any = importlib.import_module("torch_xla")
metrics: Any = importlib.import_module("torch_xla.debug.metrics")
DEVICE = torch_xla.device()


def hlo_text(tensors: Sequence[Tensor]) -> str:
    """The graph that would compute these lazy tensors, without compiling or executing it."""
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))
    return text


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ones that are an input of the graph, not a constant."""
    return torch.ones(shape, dtype=dtype).to(DEVICE)


def classifier() -> list[Tensor]:
    """Embedding, layer norm, attention, GELU, cross entropy and their backward pass: what every encoder has."""
    table, weight = data(20, 8).requires_grad_(), data(8, 3).requires_grad_()
    hidden = F.layer_norm(F.embedding(data(4, 5, dtype=torch.int32), table), (8,))
    hidden = F.gelu(F.scaled_dot_product_attention(hidden, hidden, hidden))
    loss = F.cross_entropy(hidden.mean(1) @ weight, data(4, dtype=torch.int64))
    return [loss.detach(), *torch.autograd.grad(loss, [table, weight])]


def sorts_and_sums() -> list[Tensor]:
    return [torch.sort(data(8)).values, torch.cumsum(data(8), 0), torch.argmax(data(8)), *torch.topk(data(8), 2)]


INT, LONG, COMPLEX = torch.int32, torch.int64, torch.complex64
PROGRAMS: dict[str, Callable[[], Sequence[Tensor]]] = {
    "inverse": lambda: [torch.linalg.inv_ex(data(4, 4)).inverse],
    "complex_product": lambda: [data(4, dtype=COMPLEX) * data(4, dtype=COMPLEX)],
    "eight_bit": lambda: [data(4).to(torch.float8_e4m3fn)],
    "random_numbers": lambda: [torch.rand(4, device=DEVICE)],
    "topk_of_integers": lambda: torch.topk(data(8, dtype=INT), 2),
    "scatter_of_integers": lambda: [data(8, dtype=INT).scatter_add(0, data(4, dtype=LONG), data(4, dtype=INT))],
    "compare_with_a_python_float": lambda: [data(4) < 0.5],
    "nonzero": lambda: [torch.nonzero(data(4))],
    "integer_product": lambda: [torch.matmul(data(4, 4, dtype=INT), data(4, 4, dtype=INT))],
    "classifier": classifier,
    "sorts_and_sums": sorts_and_sums,
}


def counters_of(program: Callable[[], object]) -> dict[str, int]:
    metrics.clear_all()
    program()
    return {name: int(metrics.counter_value(name)) for name in metrics.counter_names()}


def main(folder: Path) -> None:
    for name, program in PROGRAMS.items():
        try:
            (folder / f"{name}.hlo").write_text(hlo_text(program()), encoding="utf-8")
        except Exception:  # one program that cannot be traced fails the tests that need it, not all
            (folder / f"{name}.error").write_text(traceback.format_exc(), encoding="utf-8")
        gc.collect()  # what is traced and never run must not become part of the next graph
    counted = {
        "fallback": counters_of(lambda: torch.bincount(data(4, dtype=torch.int64))),
        "scalar": counters_of(lambda: data(1).sum().item()),
    }
    (folder / "counters.json").write_text(json.dumps(counted), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
