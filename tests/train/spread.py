"""Training over ranks, in one of which this is called (tests/kit/ranks.py): what comes of it, by plan."""

import json
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.backends import Backend
from pipeline.compile.manifest import GraphWatch
from pipeline.core.errors import TransientError
from pipeline.core.shuffle import stream_key
from pipeline.core.stop import StopSignal
from pipeline.data.loader import to_tensors, training_batches
from pipeline.evaluate.score import evaluate_holdout
from pipeline.model.config import ModelConfig
from pipeline.model.relevance import build_model
from pipeline.parallel.process_group import ProcessGroup, open_ranks
from pipeline.parallel.world import world_from_env
from pipeline.train.config import OptimizerConfig, TrainConfig, rank_slice, run_layout
from pipeline.train.optimizer import control_values
from pipeline.train.step import TrainProgram, open_program
from tests.train.rows import BUCKETS, MODEL, SPEC, TRAIN, grouped, make_rows, plan_of

SMALL = MODEL.model_copy(update={"num_layers": 3, "num_heads": 4, "hidden_size": 32})
EVERYTHING = TRAIN.model_copy(
    update={
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "optimizer": OptimizerConfig(head_rate=2.0, max_grad_norm=0.5, eps=1e-6),
    }
)
"""A global batch of several passes, rates by part, clipping.

`eps` is above what rounding leaves of a gradient that is zero: AdamW divides by its size, and would make a step of it.
"""
HALF, STEPS = 3, 5

Figures = list[dict[str, float]]


def config_of(plan: dict[str, Any], **changes: Any) -> TrainConfig:
    config = EVERYTHING.model_copy(update=changes)
    return TrainConfig.model_validate({**config.model_dump(), "parallel": plan})


class Place:
    """A rank with rows and the program that a run has there."""

    def __init__(
        self, process_group: ProcessGroup, backend: Backend, config: TrainConfig, folder: str, model: ModelConfig
    ) -> None:
        self.process_group, self.backend, self.config, self.model = process_group, backend, config, model
        self.share = rank_slice(config, process_group.world.world_size, process_group.world.rank)
        self.rows = make_rows(Path(folder), [(60, 60)])
        self.program = self.fresh()

    def fresh(self) -> TrainProgram:
        return open_program(
            build_model(self.model, SPEC, self.config.seed),
            self.backend,
            self.config,
            self.share,
            self.process_group,
            metric_rows=STEPS,
            buckets=BUCKETS,
            watch=GraphWatch(),
        )

    def train(self, start: int, stop: int) -> Figures:
        """An evaluation stands before the last step, as within a run."""
        groups, count, program = grouped(self.rows, self.config), self.share.accumulation, self.program
        micros = [
            {**one.tensors, "control": control_values(one.position + 1, 1e-3, self.config.optimizer)}
            for one in training_batches(groups, plan_of(groups, self.config), self.share, start, stop)
        ]
        for number in range(stop - start):
            if number == stop - start - 1:
                program.outputs(to_tensors(self.rows.read(np.zeros(8, dtype=np.int64), np.arange(8), 0)))
            seeds = [stream_key(start + number, self.share.rank, micro) % 2**31 for micro in range(count)]
            program.step(micros[number * count : (number + 1) * count], seeds=seeds if program.has_dropout else [])
        return program.read_metrics(stop - start)

    def holdout(self) -> list[float | None]:
        """Figures of more rows than fill the batches of all ranks."""
        figures = evaluate_holdout(
            self.program.outputs,
            self.backend,
            self.rows,
            label_gains=SPEC.label_gains,
            batch_size=8,
            limit=87,
            process_group=self.process_group,
            stop=StopSignal(),
            search_pad_id=self.rows.pad_id,
        )
        return list(astuple(figures))

    def save(self, path: Path) -> None:
        """All ranks call it; rank 0 writes."""
        weights, optimizer = self.program.snapshot()
        if weights:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path.with_suffix(".weights"))
            save_file(optimizer, path.with_suffix(".optimizer"))


def to_the_end(folder: str, cases: str, dropout: str) -> list[dict[str, Any]]:
    """For each plan (JSON: name -> plan): what comes of a run, which leaves its files half-way and at the end."""
    found = []
    for name, place in _places(cases, dropout):
        figures = place.train(0, HALF)
        place.save(Path(folder) / f"{name}-half")
        figures += place.train(HALF, STEPS)
        place.save(Path(folder) / f"{name}-end")
        state = sum(one.numel() for one in place.program.strategy.masters)
        found.append({"figures": figures, "holdout": place.holdout(), "state": state})
    return found


def from_each(folder: str, cases: str, dropout: str, *sources: str) -> list[dict[str, Figures]]:
    """For each plan: figures of the steps after HALF, by whose files it goes on from."""
    found = []
    for _, place in _places(cases, dropout):
        figures = {}
        for source in sources:
            path = Path(folder) / f"{source}-half"
            weights, optimizer = load_file(path.with_suffix(".weights")), load_file(path.with_suffix(".optimizer"))
            place.program = place.fresh()
            _check_start(place.program, weights, optimizer)
            place.program = place.fresh()
            place.program.restore(weights, optimizer)
            figures[source] = place.train(HALF, STEPS)
        found.append(figures)
    return found


def _check_start(program: TrainProgram, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
    """A run that starts from these has their moments, and a guard that knows nothing."""
    moments = {name: vector for name, vector in optimizer.items() if name != "guard"}
    assert not program.start_from(weights, {name: vector[:-1] for name, vector in moments.items()})
    assert not any(vector.any() for vector in program.snapshot()[1].values())
    assert program.start_from(weights, optimizer)
    _, taken = program.snapshot()
    if taken:  # on rank 0
        assert not taken.pop("guard").any() and taken.keys() == moments.keys()
        assert all(torch.equal(vector, moments[name]) for name, vector in taken.items())


def _places(cases: str, dropout: str) -> Iterator[tuple[str, Place]]:
    world, model = world_from_env(), SMALL.model_copy(update={"dropout": float(dropout)})
    torch.set_num_threads(1)
    with open_ranks("cpu", world, timeout_s=60) as (process_group, backend), TemporaryDirectory() as rows:
        for name, plan in json.loads(cases).items():
            config = config_of(plan)
            process_group.layout = run_layout(config, world.world_size, world.rank)
            yield name, Place(process_group, backend, config, rows, model)


def hung(folder: str, timeout_s: str) -> None:
    """Rank 0 does not come to a step before the other one has given up, which leaves how long it waited."""
    world = world_from_env()
    config = config_of({"shard_degree": 0}, collective_timeout_s=float(timeout_s))
    layout = run_layout(config, world.world_size, world.rank)
    with (
        open_ranks("cpu", world, timeout_s=300, layout=layout) as (process_group, backend),
        TemporaryDirectory() as rows,
    ):
        place = Place(process_group, backend, config, rows, SMALL)
        process_group.barrier()  # here there is time; in a step there is not
        place.train(0, 1)
        process_group.barrier()
        while world.rank == 0 and not (Path(folder) / "waited-1").exists():
            time.sleep(0.02)
        started = time.monotonic()
        try:
            place.train(1, 2)
        except TransientError:
            (Path(folder) / f"waited-{world.rank}").write_text(str(time.monotonic() - started))
            raise
