"""A trial run: the very same program and loop on made-up rows of every bucket, to meet every graph a cycle will need.

Nothing of it is kept. In graph extraction on Neuron every value is meaningless (neuron_parallel_compile), so nothing
here looks at one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.backends import Backend
from pipeline.compile.watch import GraphWatch
from pipeline.core.arrays import Int64s
from pipeline.core.batch_order import BatchPlan, Bucket
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays
from pipeline.data.training_groups import GroupedRows, MinedProducts
from pipeline.embed.engine import EmbedProgram
from pipeline.evaluate.score import Outputs, ScoreProgram, evaluate_holdout
from pipeline.model.config import InputSpec
from pipeline.model.relevance import build_model
from pipeline.parallel.gang import Gang
from pipeline.parallel.mesh import check_plan
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.train.config import TrainConfig, batch_share, groups_of_batch, needs_two_passes, rows_of_batch
from pipeline.train.loop import BatchStream, Cadence, EvaluationOutcome, Hooks, TrainLoop
from pipeline.train.step import TrainProgram, open_program

STEPS_PER_BUCKET = 3
"""The first step, a steady one and one more; with accumulation also at least two full cycles: all graphs were there
after as many, measured with torch-xla 2.9 on XLA:CPU.
"""


class TrialRows:
    """A RowSource with as many made-up rows in every bucket, `slots` of each query.

    `texts`: of how many tokens the query and the products of each bucket really are (none: as many as it holds).
    """

    def __init__(
        self, spec: InputSpec, buckets: Sequence[Bucket], rows: int, slots: int = 1, texts: Sequence[Bucket] = ()
    ) -> None:
        self.buckets, self.slots, self._spec, self._rows = tuple(buckets), slots, spec, rows
        self.pad_id, self._texts = spec.pad_id, texts or buckets

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self._rows,) * len(self.buckets)

    def read(self, pools: Int64s, rows: Int64s, bucket: int, fields: Sequence[str] = ()) -> Arrays:
        """Rows `rows` in the shape of `bucket`; the types are those of data/shards.TokenRows."""
        shape, count, spec = self.buckets[bucket], len(rows), self._spec
        text = [self._texts[pool] for pool in pools.tolist()]
        numbers = pools * self._rows + rows
        labels = numbers % spec.num_classes
        return {
            "query": _tokens([one.query_tokens for one in text], shape.query_tokens, spec),
            "product": _tokens([one.product_tokens for one in text], shape.product_tokens, spec),
            "label": labels.astype(np.int16),
            "gain": np.array(spec.label_gains, dtype=np.float32)[labels],
            "numeric": np.zeros((count, len(spec.numeric)), dtype=np.float32),
            "categorical": np.zeros((count, len(spec.categorical_ids)), dtype=np.int32),
            "sample_id": numbers,
            "query_id": numbers // self.slots,
        }


def _tokens(lengths: Sequence[int], width: int, spec: InputSpec) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """[N, width]: texts of `lengths` [N] tokens, padded."""
    real = np.arange(width) < np.array(lengths, dtype=np.int64)[:, None]
    other = (spec.pad_id + 1) % spec.vocab_size
    return np.where(real, other, spec.pad_id).astype(np.int32)


def _texts_that_fill(length: int, largest: Bucket, products: int) -> Bucket:
    """Tokens of a query and of each of its products, which together take up a row of `length`, or nearly so."""
    each = min(largest.product_tokens, (length - 1) // products)
    return Bucket(min(largest.query_tokens, length - products * each), each)


def _nothing(*args: object, **kwargs: object) -> None:
    """A trial leaves no figures and no events."""


def _go_on_from_a_copy(program: TrainProgram) -> None:
    """As after a stop. The copy is let go of: kept, it is a fifth of a trial's memory (large: 11.2 GiB, not 8.9)."""
    weights, optimizer = program.snapshot()
    if weights:  # on rank 0 at least
        program.restore(weights, optimizer)


@dataclass(frozen=True)
class Trial:
    """What a trial needs of the run it stands for."""

    settings: Settings
    spec: InputSpec
    buckets: tuple[Bucket, ...]
    backend: Backend
    gang: Gang
    stop: StopSignal
    console: Console
    watch: GraphWatch

    @property
    def train(self) -> TrainConfig:
        return self.settings.train

    @property
    def num_graphs(self) -> int:
        """About how many graphs `run` meets: one or two more or less where gradients go through the host."""
        share = batch_share(self.train, self.gang.world.world_size, self.gang.world.rank)
        two_passes = needs_two_passes(self.train, share, gathers_in_graph=self.backend.gathers_in_graph)
        of_a_length = 1 + (share.accumulation > 1) + two_passes
        lengths = len(rows_of_batch(self.train, self.buckets))
        embeds = len(self.settings.embed.buckets)
        apart = two_passes + (self.train.step_boundary == "split")
        return 1 + lengths * of_a_length + apart + len(self.buckets) + embeds

    def run(self) -> None:
        """Train over every bucket, evaluate, embed and copy out a checkpoint on the way. Raises Preempted."""
        self._train()  # its model leaves the device on return: one at a time
        self.embed_blank()

    def _train(self) -> None:
        check_plan(self.train.parallel, self.backend)
        groups = self._groups()
        plan = BatchPlan(groups.sizes, groups_of_batch(self.train), self.train.seed)
        steps, share = plan.batches_per_epoch, batch_share(self.train, self.gang.world.world_size, self.gang.world.rank)
        program = open_program(
            build_model(self.settings.model, self.spec, self.train.seed),
            self.backend,
            self.train,
            share,
            self.gang,
            figure_rows=self.settings.log.every_steps,
            buckets=self.buckets,
            watch=self.watch,
        )
        _go_on_from_a_copy(program)

        def evaluate(step: int) -> EvaluationOutcome:
            self._score(program.outputs)
            return EvaluationOutcome(is_best=False)

        def save(step: int) -> None:
            program.snapshot()

        loop = TrainLoop(
            program=program,
            stream=BatchStream(groups, plan, share, self.train, 0, steps),
            gang=self.gang,
            stop=self.stop,
            console=self.console,
            cadence=Cadence(min(self.settings.log.every_steps, 2), max(1, steps // 2), max(1, steps // 2)),
            hooks=Hooks(evaluate, save, _nothing, _nothing),
            values_are_real=False,
        )
        if loop.run() == "stopped":
            self.stop.set("another rank")
            self.stop.raise_if_set("the trial run; nothing of it is kept")
        evaluate(steps)
        save(steps)

    def _groups(self) -> GroupedRows:
        """As many groups in rows of every length: a bucket for each, of texts that fill it."""
        slots, mined = self.train.candidates_per_query, self.train.mined_per_query
        lengths = rows_of_batch(self.train, self.buckets)
        largest = self.buckets[-1]
        texts = [_texts_that_fill(length, largest, slots + mined) for length in lengths]
        shapes = [largest] * len(lengths)
        rows = TrialRows(self.spec, shapes, STEPS_PER_BUCKET * self.train.global_batch_size, slots, texts)
        # As many mined products for every query as training has slots for, all as long as its own.
        queries = np.arange(sum(rows.sizes) // slots, dtype=np.int64)
        negatives = np.repeat((queries * slots)[:, None], mined, axis=1)
        seed = self.train.seed
        found = GroupedRows.of(
            rows,
            slots=slots,
            lengths=lengths,
            positive_gain=self.train.loss.positive_gain,
            seed=seed,
            mined=MinedProducts(rows, self.spec.pad_id, queries, negatives, mined, seed) if mined else None,
        )
        if 0 in found.sizes:  # training would meet it first
            length = lengths[found.sizes.index(0)]
            raise ConfigError(
                f"rows of {length} tokens cannot be filled by a query and {slots + mined} products of equal length",
                expected=f"buckets whose rows are farther apart, or longer, than {', '.join(map(str, lengths))}",
                next_command="give other data.buckets, or fewer products a query",
            )
        return found

    def score(self) -> None:
        """Evaluate and embed alone, for a number of ranks that training does not have. Raises Preempted."""
        model = build_model(self.settings.model, self.spec, self.train.seed)
        weights = model.state_dict()
        program = ScoreProgram(
            model,
            self.backend,
            self.train.precision,
            self.buckets,
            self.watch,
        )
        program.load(weights)
        self._score(program.outputs)
        del program
        self.embed_blank()

    def _score(self, score: Outputs) -> None:
        """Score one full batch of every bucket; the figures mean nothing."""
        size = min(self.train.micro_batch_size, self.train.global_batch_size)
        rows = TrialRows(self.spec, self.buckets, size * self.gang.layout.data_size)
        evaluate_holdout(
            score,
            self.backend,
            rows,
            label_gains=self.spec.label_gains,
            batch_size=size,
            limit=sum(rows.sizes),
            gang=self.gang,
            stop=self.stop,
        )

    def embed_blank(self) -> None:
        """Embed two batches of every shape, without a text in them."""
        encoder = build_model(self.settings.model, self.spec, self.train.seed).encoder
        program = EmbedProgram(encoder, self.backend, self.settings.embed, self.watch)
        with self.backend.loader(shape.blank() for shape in program.shapes for _ in range(2)) as ready:
            for batch in ready:
                self.stop.raise_if_set("the trial run; nothing of it is kept")
                self.backend.fetch([program.vectors(batch)])()
