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

from pipeline.core.batch_order import Bucket

torch_xla: Any = importlib.import_module("torch_xla")
metrics: Any = importlib.import_module("torch_xla.debug.metrics")
DEVICE = torch_xla.device()
BUCKET = Bucket(8, 16)


def hlo_text(tensors: Sequence[Tensor]) -> str:
    """The graph that would compute these lazy tensors, without compiling or executing it."""
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))
    return text


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ones that are an input of the graph, not a constant."""
    return torch.ones(shape, dtype=dtype).to(DEVICE)


def inverse() -> list[Tensor]:
    return [torch.linalg.inv_ex(data(4, 4)).inverse]


def complex_product() -> list[Tensor]:
    return [data(4, dtype=torch.complex64) * data(4, dtype=torch.complex64)]


def eight_bit() -> list[Tensor]:
    return [data(4).to(torch.float8_e4m3fn)]


def random_numbers() -> list[Tensor]:
    return [torch.rand(4, device=DEVICE)]


def topk_of_integers() -> list[Tensor]:
    return list(torch.topk(data(8, dtype=torch.int32), 2))


def scatter_of_integers() -> list[Tensor]:
    return [data(8, dtype=torch.int32).scatter_add(0, data(4, dtype=torch.int64), data(4, dtype=torch.int32))]


def compare_with_a_python_float() -> list[Tensor]:
    return [data(4) < 0.5]


def nonzero() -> list[Tensor]:
    return [torch.nonzero(data(4))]


def integer_product() -> list[Tensor]:
    return [torch.matmul(data(4, 4, dtype=torch.int32), data(4, 4, dtype=torch.int32))]


def classifier() -> list[Tensor]:
    """Embedding, layer norm, attention, GELU, cross entropy and their backward pass: what every encoder has."""
    table, weight = data(20, 8).requires_grad_(), data(8, 3).requires_grad_()
    hidden = F.layer_norm(F.embedding(data(4, 5, dtype=torch.int32), table), (8,))
    hidden = F.gelu(F.scaled_dot_product_attention(hidden, hidden, hidden))
    loss = F.cross_entropy(hidden.mean(1) @ weight, data(4, dtype=torch.int64))
    return [loss.detach(), *torch.autograd.grad(loss, [table, weight])]


def sorts_and_sums() -> list[Tensor]:
    return [torch.sort(data(8)).values, torch.cumsum(data(8), 0), torch.argmax(data(8)), *torch.topk(data(8), 2)]


PROGRAMS: tuple[Callable[[], list[Tensor]], ...] = (
    inverse,
    complex_product,
    eight_bit,
    random_numbers,
    topk_of_integers,
    scatter_of_integers,
    compare_with_a_python_float,
    nonzero,
    integer_product,
    classifier,
    sorts_and_sums,
)


def counters_of(program: Callable[[], object]) -> dict[str, int]:
    metrics.clear_all()
    program()
    return {name: int(metrics.counter_value(name)) for name in metrics.counter_names()}


def main(folder: Path) -> None:
    for program in PROGRAMS:
        try:
            (folder / f"{program.__name__}.hlo").write_text(hlo_text(program()), encoding="utf-8")
        except Exception:  # one program that cannot be traced fails the tests that need it, not all
            (folder / f"{program.__name__}.error").write_text(traceback.format_exc(), encoding="utf-8")
        gc.collect()  # what is traced and never run must not become part of the next graph
    counted = {
        "fallback": counters_of(lambda: torch.bincount(data(4, dtype=torch.int64))),
        "scalar": counters_of(lambda: data(1).sum().item()),
    }
    (folder / "counters.json").write_text(json.dumps(counted), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
