"""Training over ranks, in one of which this is called (tests/ranks.py), or alone: what comes of it, by plan."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.backends import Backend
from pipeline.compile.watch import GraphWatch
from pipeline.core.errors import TransientError
from pipeline.core.shuffle import stream_key
from pipeline.core.stop import StopSignal
from pipeline.data.loader import to_tensors, training_batches
from pipeline.data.shards import TokenRows
from pipeline.evaluate.score import HoldoutFigures, evaluate_holdout
from pipeline.model.config import ModelConfig
from pipeline.model.relevance import build_model
from pipeline.parallel.gang import Gang, open_ranks
from pipeline.parallel.world import World, world_from_env
from pipeline.train.config import OptimizerConfig, TrainConfig, batch_share, run_layout
from pipeline.train.optimizer import control_values
from pipeline.train.step import TrainProgram, module_strategy, open_program
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


class Trained(NamedTuple):
    figures: list[dict[str, float]]
    logits: list[list[float]]
    """Of one batch, by the model that is served."""
    holdout: Sequence[float | None] = ()


def config_of(plan: dict[str, Any], **changes: Any) -> TrainConfig:
    config = EVERYTHING.model_copy(update=changes)
    return TrainConfig.model_validate({**config.model_dump(), "parallel": plan})


class Place:
    """A rank with rows."""

    def __init__(self, gang: Gang, backend: Backend, config: TrainConfig, folder: str, model: ModelConfig) -> None:
        self.gang, self.backend, self.config, self.model = gang, backend, config, model
        world = gang.world
        self.share = batch_share(config, world.world_size, world.rank)
        self.rows = make_rows(Path(folder), [(60, 60)])

    def program(self, *, modules: bool = False) -> TrainProgram:
        fresh = build_model(self.model, SPEC, self.config.seed)
        if modules:  # also where a plan asks for nothing that flat vectors cannot give
            strategy = module_strategy(fresh, self.backend, self.config, self.gang)
            return TrainProgram(strategy, self.backend, self.config, self.share, figure_rows=STEPS, buckets=BUCKETS)
        return open_program(
            fresh,
            self.backend,
            self.config,
            self.share,
            self.gang,
            figure_rows=STEPS,
            buckets=BUCKETS,
            watch=GraphWatch(),
        )

    def train(self, program: TrainProgram, start: int, stop: int) -> Trained:
        """An evaluation stands before the last step, as within a run."""
        groups, count = grouped(self.rows, self.config), self.share.accumulation
        micros = [
            {**one.tensors, "control": control_values(one.position + 1, 1e-3, self.config.optimizer)}
            for one in training_batches(groups, plan_of(groups, self.config), self.share, start, stop)
        ]
        for number in range(stop - start):
            if number == stop - start - 1:
                logits = program.outputs(pairs_of(self.rows)).logits
            seeds = [stream_key(start + number, self.share.rank, micro) % 2**31 for micro in range(count)]
            program.step(micros[number * count : (number + 1) * count], seeds=seeds if program.has_dropout else [])
        return Trained(program.read_figures(stop - start), logits.tolist())

    def evaluated(self, program: TrainProgram) -> HoldoutFigures:
        """Of more rows than fill the batches of all ranks."""
        return evaluate_holdout(
            program.outputs,
            self.backend,
            self.rows,
            label_gains=SPEC.label_gains,
            batch_size=8,
            limit=87,
            gang=self.gang,
            stop=StopSignal(),
            search_pad_id=self.rows.pad_id,
        )


def pairs_of(rows: TokenRows) -> dict[str, Tensor]:
    return to_tensors(rows.read(np.zeros(8, dtype=np.int64), np.arange(8), 0))


def save(program: TrainProgram, path: Path) -> None:
    """All ranks call it; rank 0 writes."""
    weights, optimizer = program.snapshot()
    if weights:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path.with_suffix(".weights"))
        save_file(optimizer, path.with_suffix(".optimizer"))


def restore(program: TrainProgram, path: Path) -> None:
    program.restore(load_file(path.with_suffix(".weights")), load_file(path.with_suffix(".optimizer")))


def alone(config: TrainConfig, folder: Path, name: str = "alone", model: ModelConfig = SMALL) -> Trained:
    """One process, flat vectors; leaves what it has half-way and at the end below `folder`."""
    with TemporaryDirectory() as rows, open_ranks("cpu", World(), timeout_s=30) as (gang, backend):
        place = Place(gang, backend, config, rows, model)
        program = place.program()
        first = place.train(program, 0, HALF)
        save(program, folder / f"{name}-half")
        last = place.train(program, HALF, STEPS)
        save(program, folder / f"{name}-end")
        return Trained(first.figures + last.figures, last.logits, list(astuple(place.evaluated(program))))


def go_on(config: TrainConfig, folder: Path, name: str, model: ModelConfig = SMALL) -> Trained:
    """One process, flat vectors, from what another one left half-way."""
    with TemporaryDirectory() as rows, open_ranks("cpu", World(), timeout_s=30) as (gang, backend):
        place = Place(gang, backend, config, rows, model)
        program = place.program()
        restore(program, folder / f"{name}-half")
        return place.train(program, HALF, STEPS)


def over_ranks(folder: str, cases: str, dropout: str) -> list[dict[str, Any]]:
    """For each plan (JSON: name -> plan): the whole, and from half-way on out of its own files and of one process."""
    found, world = [], world_from_env()
    torch.set_num_threads(1)
    with open_ranks("cpu", world, timeout_s=60) as (gang, backend), TemporaryDirectory() as rows:
        for name, settings in json.loads(cases).items():
            config = config_of(settings.pop("plan"), **settings)
            gang.layout = run_layout(config, world.world_size, world.rank)
            place = Place(gang, backend, config, rows, SMALL.model_copy(update={"dropout": float(dropout)}))
            first = place.program(modules=True)
            figures = place.train(first, 0, HALF).figures
            save(first, Path(folder) / f"{name}-half")
            last = place.train(first, HALF, STEPS)
            save(first, Path(folder) / f"{name}-end")
            gang.barrier()
            again, theirs = place.program(modules=True), place.program(modules=True)
            restore(again, Path(folder) / f"{name}-half")
            repeated = place.train(again, HALF, STEPS)
            save(again, Path(folder) / f"{name}-again")
            theirs.outputs(pairs_of(place.rows))  # whole weights are there before others come
            restore(theirs, Path(folder) / "alone-half")
            found.append(
                {
                    "whole": Trained(figures + last.figures, last.logits)._asdict(),
                    "holdout": list(astuple(place.evaluated(first))),
                    "again": Trained(figures + repeated.figures, repeated.logits)._asdict(),
                    "theirs": place.train(theirs, HALF, STEPS)._asdict(),
                    "state": sum(one.numel() for one in first.strategy.masters),
                }
            )
    return found


def to_the_end(folder: str, cases: str) -> list[list[dict[str, float]]]:
    """For each plan (JSON: name -> plan), in the program that a run of it has: figures of the steps after HALF, where
    it leaves its files."""
    found = []
    for name, place in _places(cases):
        program = place.program()
        place.train(program, 0, HALF)
        save(program, Path(folder) / f"{name}-half")
        found.append(place.train(program, HALF, STEPS).figures)
    return found


def from_each(folder: str, cases: str, *sources: str) -> list[dict[str, list[dict[str, float]]]]:
    """For each plan: figures of the steps after HALF, by whose files it goes on from."""
    found = []
    for _, place in _places(cases):
        figures = {}
        for source in sources:
            program = place.program()
            restore(program, Path(folder) / f"{source}-half")
            figures[source] = place.train(program, HALF, STEPS).figures
        found.append(figures)
    return found


def _places(cases: str) -> Iterator[tuple[str, Place]]:
    world = world_from_env()
    torch.set_num_threads(1)
    with open_ranks("cpu", world, timeout_s=60) as (gang, backend), TemporaryDirectory() as rows:
        for name, plan in json.loads(cases).items():
            config = config_of(plan)
            gang.layout = run_layout(config, world.world_size, world.rank)
            yield name, Place(gang, backend, config, rows, SMALL)


def hung(folder: str, timeout_s: str) -> None:
    """Rank 0 does not come to a step before the other one has given up, which leaves how long it waited."""
    world = world_from_env()
    config = config_of({"shard_degree": 0}, collective_timeout_s=float(timeout_s))
    layout = run_layout(config, world.world_size, world.rank)
    with open_ranks("cpu", world, timeout_s=300, layout=layout) as (gang, backend), TemporaryDirectory() as rows:
        place = Place(gang, backend, config, rows, SMALL)
        program = place.program()
        gang.barrier()  # here there is time; in a step there is not
        place.train(program, 0, 1)
        gang.barrier()
        while world.rank == 0 and not (Path(folder) / "waited-1").exists():
            time.sleep(0.02)
        started = time.monotonic()
        try:
            place.train(program, 1, 2)
        except TransientError:
            (Path(folder) / f"waited-{world.rank}").write_text(str(time.monotonic() - started))
            raise
