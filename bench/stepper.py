"""Our training steps as the real loop takes them: TrainProgram fed by BatchStream through the backend's loader."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from pipeline.backends import Backend, Batch
from pipeline.core.batch_order import BatchPlan, Bucket
from pipeline.data.loader import RowSource
from pipeline.data.training_groups import GroupedRows
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.weights import initial_model
from pipeline.train.config import TrainConfig, batch_lengths, groups_per_batch, rank_slice
from pipeline.train.step import TrainProgram, flat_strategy
from pipeline.train.stream import BatchStream

ENDLESS = 1_000_000
"""Steps of the schedule; no bench gets near."""


AnyProgram = TypeVar("AnyProgram", bound=TrainProgram)


class BucketedRows(RowSource, Protocol):
    """Rows that know their shapes."""

    @property
    def buckets(self) -> tuple[Bucket, ...]: ...


class Program(Protocol):
    """What is stepped: a TrainProgram, or one to compare it with."""

    def step(self, micros: Sequence[Mapping[str, Tensor]], *, seeds: Sequence[int] = ()) -> None: ...
    def read_metrics(self, count: int) -> list[dict[str, float]]: ...


@dataclass
class Stepper:
    """Takes steps and counts their tokens."""

    program: Program
    backend: Backend
    stream: BatchStream
    batches: Iterator[Batch]
    plan: BatchPlan
    log_every: int
    accumulation: int = 1
    position: int = 0
    tokens: int = 0
    """Without padding, of all steps so far."""

    def step(self) -> None:
        """One optimizer step; nothing waits for the device, as in the loop (figures are read every `log_every`)."""
        micros = []
        for _ in range(self.accumulation):
            micros.append(next(self.batches))
            self.tokens += self.stream.received(self.position)[0]
        self.program.step(micros)
        self.position += 1
        if self.position % self.log_every == 0:
            self.program.read_metrics(self.log_every)

    def warm_up(self) -> None:
        """Steps until every bucket has been met twice, or once, so that nothing is left to compile. From position 0."""
        buckets = [self.plan.batch(position).bucket for position in range(self.plan.batches_per_epoch)]
        met = [index for index, bucket in enumerate(buckets) if buckets[:index].count(bucket) <= 1]
        self.seconds(max(3, 1 + max(met, default=0)))

    def seconds(self, steps: int) -> float:
        """Wall time of `steps` steps, the device waited for at both ends."""
        self.backend.synchronise()
        started = time.monotonic()
        for _ in range(steps):
            self.step()
        self.backend.synchronise()
        return time.monotonic() - started


@contextmanager
def open_stepper(
    program: Program, backend: Backend, source: BucketedRows, config: TrainConfig, log_every: int
) -> Iterator[Stepper]:
    """Endless steps over `source`; leaving the context ends the loader."""
    groups = grouped(source, config)
    plan = BatchPlan(groups.sizes, groups_per_batch(config), config.seed)
    share = rank_slice(config, 1)
    stream = BatchStream(groups, plan, share, config, 0, ENDLESS)
    with backend.loader(stream) as batches:
        yield Stepper(program, backend, stream, batches, plan, log_every, share.accumulation)


def make_program(
    model: ModelConfig,
    spec: InputSpec,
    config: TrainConfig,
    backend: Backend,
    buckets: Sequence[Bucket],
    log_every: int,
    kind: type[AnyProgram],
) -> AnyProgram:
    """The program of one rank, from freshly initialised weights or those of `model.init_from`, a local folder."""
    strategy = flat_strategy(initial_model(model, spec, config.seed, Path()), backend, config)
    return kind(strategy, backend, config, rank_slice(config, 1), metric_rows=log_every, buckets=buckets)


def train_config(batch_size: int) -> TrainConfig:
    """Default settings at a given batch size, but a query with every product: as the peers compute it."""
    return TrainConfig(global_batch_size=batch_size, micro_batch_size=batch_size, candidates_per_query=1)


def grouped(source: BucketedRows, config: TrainConfig) -> GroupedRows:
    """Rows in groups of one query, as a run of this config has them."""
    return GroupedRows.build(
        source,
        slots=config.candidates_per_query,
        lengths=batch_lengths(config, source.buckets),
        positive_gain=config.loss.positive_gain,
        seed=config.seed,
    )
