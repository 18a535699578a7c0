"""Writes the HLO of small programs and of our own graphs to files. Run by traces.py in a process with torch_xla.

`hlo_text` and `own_graph` are what the compile stage does; the programs are what the lint must find.
"""

import gc
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.backends.xla import XlaBackend
from pipeline.core.batch_order import Bucket, RankShare
from pipeline.model.config import MPNET_PAD, ModelConfig
from pipeline.model.relevance import build_model
from pipeline.train.config import TrainConfig, TrainPlan, rows_of_batch
from pipeline.train.optimizer import CONTROL_SIZE
from pipeline.train.step import TrainProgram, flat_strategy
from tests.train.rows import SPEC

torch_xla: Any = importlib.import_module("torch_xla")
metrics: Any = importlib.import_module("torch_xla.debug.metrics")
DEVICE = torch_xla.device()
BUCKET = Bucket(8, 16)


def hlo_text(tensors: Sequence[Tensor]) -> str:
    """The graph that would compute these lazy tensors, without compiling or executing it."""
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))
    return text


class TracingBackend(XlaBackend):
    """Everything stays one graph that is never run."""

    def step_boundary(self, computed: Sequence[Tensor]) -> None:
        del computed


def own_graph(
    *,
    bucket: Bucket = BUCKET,
    accumulation: int = 1,
    kind: str = "train",
    precision: str = "fp32",
    recompute: bool = False,
    **model: Any,
) -> str:
    """Return the HLO of one of our graphs, with the operators of Neuron."""
    backend = TracingBackend()
    backend.sums_by_matmul = False
    config = TrainConfig(
        precision=precision,  # type: ignore[arg-type]
        parallel=TrainPlan(recompute="units" if recompute else "none"),
        global_batch_size=16,
    )
    spec = SPEC.model_copy(update={"pad_id": MPNET_PAD})  # which no other encoder minds
    strategy = flat_strategy(build_model(ModelConfig(**model), spec, 1), backend, config)
    program = TrainProgram(strategy, backend, config, RankShare(0, 1, accumulation), figure_rows=8, buckets=[bucket])
    batch = _batch(16, bucket)
    backend.synchronise()  # the moments become data, as they are from the second step on
    if kind == "scores":
        return hlo_text([program.outputs(_pairs(16, bucket)).logits])
    program.step([batch] * accumulation)
    optimizer = program.optimizer
    state = [
        *program.strategy.masters,
        *optimizer.exp_avg,
        *optimizer.exp_avg_sq,
        program.guard.state,
        program._figures,
    ]
    return hlo_text([tensor.detach() for tensor in state])


def _pairs(samples: int, bucket: Bucket) -> dict[str, Tensor]:
    texts = {"query": bucket.query_tokens, "product": bucket.product_tokens, "categorical": len(SPEC.categorical_ids)}
    ints = {name: torch.ones(samples, width, dtype=torch.int32).to(DEVICE) for name, width in texts.items()}
    return {**ints, "numeric": torch.ones(samples, len(SPEC.numeric)).to(DEVICE)}


def _batch(samples: int, bucket: Bucket) -> dict[str, Tensor]:
    ints, floats = torch.int32, torch.float32
    groups = samples // TrainConfig().candidates_per_query
    row_tokens = rows_of_batch(TrainConfig(), [bucket])[-1]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        **{name: ((groups, row_tokens), ints) for name in ("tokens", "positions", "segments")},
        "numeric": ((samples, len(SPEC.numeric)), floats),
        "categorical": ((samples, len(SPEC.categorical_ids)), ints),
        "label": ((samples,), ints),
        "gain": ((samples,), floats),
        "query_key": ((groups,), ints),
        "product_key": ((samples,), ints),
        "place": ((groups,), ints),
        "control": ((CONTROL_SIZE,), floats),
    }
    return {name: torch.ones(shape, dtype=dtype).to(DEVICE) for name, (shape, dtype) in shapes.items()}


OWN: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny-longer": {"bucket": Bucket(8, 32)},
    "tiny-bf16": {"precision": "bf16"},
    "tiny-dropout": {"dropout": 0.1},
    "tiny-recompute": {"recompute": True},
    "tiny-accumulation": {"accumulation": 2},
    "tiny-scores": {"kind": "scores"},
    "tiny-match": {"token_match": True},
    "mpnet": {"architecture": "mpnet"},
    "modernbert-bf16": {"architecture": "modernbert", "precision": "bf16"},
}
"""Each way to trace a step, and each encoder."""


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


def _text_of(program: Callable[[], list[Tensor]]) -> str:
    return hlo_text(program())


def counters_of(program: Callable[[], object]) -> dict[str, int]:
    metrics.clear_all()
    program()
    return {name: int(metrics.counter_value(name)) for name in metrics.counter_names()}


def main(folder: Path, what: str) -> None:
    jobs: dict[str, Callable[[], str]] = {}
    if what == "programs":
        jobs = {program.__name__: partial(_text_of, program) for program in PROGRAMS}
    graphs = {"programs": {"tiny": OWN["tiny"]}, "own": OWN}[what]
    jobs |= {f"own-{name}": partial(own_graph, **changes) for name, changes in graphs.items()}
    for name, job in jobs.items():
        try:
            (folder / f"{name}.hlo").write_text(job(), encoding="utf-8")
        except Exception:  # one program that cannot be traced fails the tests that need it, not all
            (folder / f"{name}.error").write_text(traceback.format_exc(), encoding="utf-8")
        gc.collect()  # what is traced and never run must not become part of the next graph
    if what == "programs":
        counted = {
            "fallback": counters_of(lambda: torch.bincount(data(4, dtype=torch.int64))),
            "scalar": counters_of(lambda: data(1).sum().item()),
        }
        (folder / "counters.json").write_text(json.dumps(counted), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
