"""Trace every graph that a cycle needs by running the training loop on dummy rows of every shape.

All results are discarded. During graph extraction on Neuron (neuron_parallel_compile), no actual values are computed,
so this module does not check any.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.backends import Backend, Batch
from pipeline.compile.manifest import GraphWatch
from pipeline.core.arrays import Int64s
from pipeline.core.batch_order import BatchPlan, Bucket
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays
from pipeline.data.taught import taught_scores, taught_vectors
from pipeline.embed.engine import EmbedProgram
from pipeline.evaluate.score import Outputs, ScoreProgram
from pipeline.model.config import InputSpec
from pipeline.model.relevance import build_model
from pipeline.parallel.mesh import check_plan
from pipeline.parallel.process_group import ProcessGroup
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.train.config import Cadence, batch_lengths, groups_per_batch, needs_two_passes, rank_slice
from pipeline.train.loop import TrainLoop
from pipeline.train.step import open_program
from pipeline.train.stream import BatchStream

_STOPPED = "the trial run (its results are discarded)"
STEPS_PER_LENGTH = 3
"""The first step may have graphs that later steps do not. Two further steps cover two full accumulation cycles. With
torch-xla 2.9 on XLA:CPU, no new graph appeared after the third step.
"""


def dummy_pairs(spec: InputSpec, bucket: Bucket, rows: int) -> dict[str, Tensor]:
    """Build a dummy evaluation batch with the shape of a bucket."""
    token = (spec.pad_id + 1) % spec.vocab_size
    return {
        "query": torch.full((rows, bucket.query_tokens), token, dtype=torch.int32),
        "product": torch.full((rows, bucket.product_tokens), token, dtype=torch.int32),
        "numeric": torch.zeros(rows, len(spec.numeric)),
        "categorical": torch.zeros(rows, len(spec.categorical_ids), dtype=torch.int32),
    }


@dataclass(frozen=True)
class DummyGroups:
    """A GroupSource that has the same number of dummy groups for every row length.

    The dtypes must match those of GroupedRows, because they are part of the graphs.
    """

    spec: InputSpec
    lengths: Sequence[int]
    slots: int
    mined: int
    groups: int
    teacher: int | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.groups,) * len(self.lengths)

    def read(self, pools: Int64s, numbers: Int64s, length: int, epoch: int = 0) -> Arrays:
        """Build the groups `numbers` as rows of `lengths[length]` tokens, each filled with equally long texts."""
        width, products = self.lengths[length], self.slots + self.mined
        segments = 1 + np.arange(width) * (1 + products) // width
        positions = np.arange(width) - np.searchsorted(segments, segments)
        is_row = np.tile(np.arange(products) < self.slots, len(numbers))
        rows = ((pools * self.groups + numbers)[:, None] * products + np.arange(products)).reshape(-1)
        labels = rows % self.spec.num_classes
        tokens = np.full(width, (self.spec.pad_id + 1) % self.spec.vocab_size)
        taught = {}
        if self.teacher:
            zeros = (np.zeros((count, self.teacher), dtype=np.float32) for count in (len(numbers), len(rows)))
            taught = taught_vectors(*zeros)
        elif self.teacher is not None:
            taught = taught_scores(np.zeros(len(rows), dtype=np.float32))
        row = {"tokens": tokens, "positions": positions, "segments": segments}
        return {
            **{name: np.tile(values.astype(np.int32), (len(numbers), 1)) for name, values in row.items()},
            "label": labels.astype(np.int16),
            "gain": np.array(self.spec.label_gains, dtype=np.float32)[labels],
            "numeric": np.zeros((len(rows), len(self.spec.numeric)), dtype=np.float32),
            "categorical": np.zeros((len(rows), len(self.spec.categorical_ids)), dtype=np.int32),
            "sample_id": rows,
            "is_row": is_row,
            "is_mined": ~is_row,
            "query_key": pools * self.groups + numbers,
            "product_key": rows,
            **taught,
        }


@dataclass(frozen=True)
class Trial:
    """A trial run that uses the settings and shapes of a real run."""

    settings: Settings
    spec: InputSpec
    buckets: tuple[Bucket, ...]
    backend: Backend
    process_group: ProcessGroup
    stop: StopSignal
    console: Console
    watch: GraphWatch
    teacher: int | None = None

    @property
    def num_graphs(self) -> int:
        """Estimate of the number of graphs in `run`. It is off by one or two if gradients are reduced on the host."""
        train = self.settings.train
        share = rank_slice(train, self.process_group.world.world_size, self.process_group.world.rank)
        two_passes = needs_two_passes(train, share, gathers_in_graph=self.backend.gathers_in_graph)
        per_length = 1 + (share.accumulation > 1) + two_passes
        lengths = len(batch_lengths(train, self.buckets))
        apart = two_passes + (train.step_boundary == "split")
        return 1 + lengths * per_length + apart + len(self.buckets) + len(self.settings.embed.buckets)

    def run(self) -> None:
        """Train on every row length, evaluate, copy a checkpoint to the host, and embed. Raises Preempted."""
        self._train()  # frees its model on return, so that there is never more than one model on the device
        self.embed_dummies()

    def _train(self) -> None:
        train, world = self.settings.train, self.process_group.world
        check_plan(train.parallel, self.backend)
        batch = groups_per_batch(train)
        groups = DummyGroups(
            self.spec,
            batch_lengths(train, self.buckets),
            train.candidates_per_query,
            train.mined_per_query,
            STEPS_PER_LENGTH * batch,
            self.teacher,
        )
        plan, share = BatchPlan(groups.sizes, batch, train.seed), rank_slice(train, world.world_size, world.rank)
        steps, log_every = plan.batches_per_epoch, self.settings.log.every_steps
        model = build_model(self.settings.model, self.spec, train.seed)
        if self.teacher:
            model.add_projection(self.teacher, train.seed)
        program = open_program(
            model,
            self.backend,
            train,
            share,
            self.process_group,
            metric_rows=log_every,
            buckets=self.buckets,
            watch=self.watch,
        )
        # Restore a snapshot, as a resumed run does. Freeing the copy afterwards reduces the memory of a trial by a
        # fifth (from 11.2 to 8.9 GiB for the model `large`).
        copy = program.snapshot()
        if copy[0]:  # some strategies return the weights only on rank 0
            program.restore(*copy)
        del copy

        def evaluate(step: int) -> tuple[bool, bool]:
            self._score(program.outputs)
            return False, False

        def save(step: int) -> None:
            program.snapshot()

        loop = TrainLoop(
            program=program,
            stream=BatchStream(groups, plan, share, train, 0, steps),
            process_group=self.process_group,
            stop=self.stop,
            console=self.console,
            cadence=Cadence(min(log_every, 2), max(1, steps // 2), max(1, steps // 2)),
            evaluate=evaluate,
            save=save,
            emit=lambda *name, **fields: None,
            values_are_real=False,
        )
        if loop.run() == "stopped":
            self.stop.set("another rank")
            self.stop.raise_if_set(_STOPPED)
        evaluate(steps)
        save(steps)

    def score(self) -> None:
        """Evaluate and embed without training, for a rank count that training does not use. Raises Preempted."""
        train = self.settings.train
        model = build_model(self.settings.model, self.spec, train.seed)
        weights = model.state_dict()
        program = ScoreProgram(
            model, self.backend, train.precision, self.watch, has_one_rate=train.optimizer.has_one_rate
        )
        program.load(weights)
        self._score(program.outputs)
        del program
        self.embed_dummies()

    def _score(self, score: Outputs) -> None:
        """Score one full batch of every bucket and discard the results."""
        size = min(self.settings.train.micro_batch_size, self.settings.train.global_batch_size)
        pairs = (dummy_pairs(self.spec, bucket, size) for bucket in self.buckets)
        self._compute(pairs, lambda batch: list(score(batch)))

    def embed_dummies(self) -> None:
        """Embed two dummy batches of every shape."""
        encoder = build_model(self.settings.model, self.spec, self.settings.train.seed).encoder
        program = EmbedProgram(encoder, self.backend, self.settings.embed, self.watch)
        texts = (shape.dummy() for shape in program.shapes for _ in range(2))
        self._compute(texts, lambda batch: [program.vectors(batch)])

    def _compute(self, batches: Iterable[Batch], compute: Callable[[Batch], list[Tensor]]) -> None:
        with self.backend.loader(batches) as ready:
            for batch in ready:
                self.stop.raise_if_set(_STOPPED)
                self.backend.fetch(compute(batch))()
