"""The training program of one rank: everything that lives on the device, and the graphs of a step.

A step is forward and backward of each micro-batch, then reduction, clipping, guard and AdamW. Nothing here reads a
value back; figures collect in a small device buffer that the host fetches every N steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from pipeline.backends import Backend, step_program
from pipeline.compile.watch import GraphWatch, Place
from pipeline.core.batch_order import Bucket, RankShare
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.model.encoder import TextEncoder
from pipeline.model.losses import LARGEST_LOG_SCALE, LOG_SCALE, Memory, empty_memory, temperature_of
from pipeline.model.relevance import RelevanceOutputs
from pipeline.parallel.strategies.base import KINDS, Strategy
from pipeline.train.config import TrainConfig, groups_of_batch, needs_two_passes, rows_of_batch
from pipeline.train.global_loss import Contrast, GlobalLoss, targets_of
from pipeline.train.optimizer import AdamW, SpikeGuard, move_average, rate_of

FIGURES = ("loss", "grad_norm", "skipped_in_a_row", "skipped", "step")
TEMPERATURE = "temperature"
"""One figure more, where the temperature is learnt."""


class TrainProgram:
    """A model on the device by way of a strategy, the optimizer of its masters, the guard, and figures.

    With `train.average_decay` what is evaluated and saved as the model is the average of the weights, and the masters
    are part of the optimizer's state.
    """

    def __init__(
        self,
        strategy: Strategy,
        backend: Backend,
        config: TrainConfig,
        share: RankShare,
        *,
        figure_rows: int,
        buckets: Sequence[Bucket],
        watch: GraphWatch | None = None,
    ) -> None:
        self.backend, self.config, self.strategy = backend, config, strategy
        self._watch: GraphWatch = watch or GraphWatch()
        self._shapes = {bucket.name for bucket in buckets} | {str(rows) for rows in rows_of_batch(config, buckets)}
        self.has_dropout = strategy.model.encoder.is_random
        self._masters = strategy.masters
        self._copies = strategy.weights if strategy.weights is not strategy.masters else ()
        num_layers = len(strategy.model.encoder.layers)
        rates = [rate_of(part, num_layers, config.optimizer) for part in strategy.parts]
        decayed = [part.decayed for part in strategy.parts]
        written_out = backend.is_lazy or backend.compiles_steps
        self.optimizer = AdamW(self._masters, decayed, config.optimizer, traced=written_out, rates=rates)
        self.average: list[Tensor] = []
        """Of the weights, over the steps; none without train.average_decay."""
        if config.average_decay:
            self.average = [weight.detach().clone() for weight in strategy.weights]
        self.guard = SpikeGuard(config.guard, backend.device)
        self._log_scale: Tensor | None = None
        self._log_scale_master: Tensor | None = None
        if config.loss.learn_temperature:
            self._log_scale, self._log_scale_master = strategy.single(LOG_SCALE)
        self._loss = GlobalLoss(config, share.accumulation, share.world_size, strategy.gather, self._log_scale)
        self._has_two_passes = needs_two_passes(config, share, gathers_in_graph=backend.gathers_in_graph)
        is_recomputed = config.parallel.recompute == "units"
        if backend.is_neuron and (self._has_two_passes or is_recomputed) and has_dropout(strategy.model.encoder):
            twice = "layers are computed again" if is_recomputed else "a step has two passes"
            raise ConfigError(
                f"dropout on {backend.device_name()} where {twice}",
                expected="no dropout: it is not known to drop the same elements twice on this device",
                next_command="--model.dropout 0; with model.factory, a module without dropout",
            )
        self._memory: Memory | None = None
        if config.loss.memory_batches:
            products = groups_of_batch(config) * (config.candidates_per_query + config.mined_per_query)
            width = strategy.model.encoder.width
            self._memory = empty_memory(config.loss, products, width, backend.device)
        self._reduces_on_host = share.world_size > 1 and not backend.reduces_in_graph
        self._gathers_on_host = share.world_size > 1 and not backend.gathers_in_graph
        self._publishes_on_host = bool(self._copies) and self._gathers_on_host
        self._accumulation = share.accumulation
        self._sums: list[Tensor] | None = None  # gradient and loss of this step so far
        self.figures = FIGURES if self._log_scale is None else (*FIGURES, TEMPERATURE)
        self._figures = torch.zeros(figure_rows, len(self.figures), dtype=torch.float32, device=backend.device)
        self._max_norm = torch.tensor(config.optimizer.max_grad_norm, dtype=torch.float32, device=backend.device)
        self._micro_steps = 0
        self._place = Place("start")
        self._loss_of = step_program(backend, self._loss.of_gathered)
        self._change = step_program(backend, self._changed)
        self._note = step_program(backend, self._noted)
        # The form that the state has after a step; else the first one would be a graph of its own.
        with torch.no_grad():
            for tensor in [*self._masters, *self._copies, *self.average] if backend.is_lazy else ():
                tensor.copy_(tensor.clone())
            self._cut("start", [*self._state(), *(self._memory or ())])

    def forward(self, batch: Mapping[str, Tensor], weights: Sequence[Tensor] | None = None) -> RelevanceOutputs:
        """Scores and embeddings of one batch on the device. `weights`: not those in training, but these."""
        shape = _place_of(batch).bucket
        if shape not in self._shapes:
            raise DataError(f"a batch of {shape} tokens", expected=f"one of {', '.join(sorted(self._shapes))}")
        return self.strategy.forward(batch, weights, head_gradient=self.config.loss.head_gradient)

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Logits over relevance classes [B, K] and embeddings [B, D], fp32, without a gradient."""
        self.strategy.model.eval()
        outputs = RelevanceOutputs(*(tensor.float() for tensor in self.forward(batch, self._served)))
        self._place = _place_of(batch)
        self._cut("evaluate", outputs)
        return outputs

    def step(self, micros: Sequence[Mapping[str, Tensor]], *, seeds: Sequence[int] = ()) -> None:
        """One optimizer step over the micro-batches of this rank. `seeds`: of the dropout of each, in both passes."""
        self.accumulate(micros, seeds)
        self._update(micros[-1]["control"])

    def accumulate(self, micros: Sequence[Mapping[str, Tensor]], seeds: Sequence[int] = ()) -> None:
        """Forward and backward of all of them; `reduced` has what comes of it."""
        contrast = self._first_pass(micros, seeds) if self._has_two_passes else None
        for number, batch in enumerate(micros):
            if seeds:
                self.backend.seed(seeds[number])
            self._accumulate(batch, contrast, is_last=number + 1 == len(micros))
            self._place, self._micro_steps = _place_of(batch), number + 1
            if self._micro_steps < self._accumulation:
                if self._micro_steps % self.config.batches_per_execution == 0:
                    self._cut_micro_step()
            elif self.config.step_boundary == "split":
                self._cut_micro_step()

    @torch.no_grad()
    def _first_pass(self, micros: Sequence[Mapping[str, Tensor]], seeds: Sequence[int]) -> Contrast:
        """Embeddings of every micro-batch, then the contrastive loss over those of all ranks."""
        queries, products = [], []
        self.strategy.model.train()
        for number, batch in enumerate(micros, start=1):
            if seeds:
                self.backend.seed(seeds[number - 1])
            outputs = self.forward(batch)
            queries.append(outputs.query.float())
            products.append(outputs.product.float())
            self._place = _place_of(batch)
            if number == len(micros) or number % self.config.batches_per_execution == 0:
                self._cut("embed_batch", [*queries, *products])
        del outputs
        mine = [torch.cat(queries), torch.cat(products), *targets_of(micros)]
        if self._gathers_on_host:
            self._cut("embeddings", mine)
        contrast, self._memory = self._loss.contrast(mine, self._memory)
        self._cut("contrast", [tensor for tensor in (*contrast, *(self._memory or ())) if tensor is not None])
        return contrast

    # What is alive at the end of a graph is an output of it. The two functions below are apart from their callers so
    # that nothing but the state outlives them: each gradient kept would be memory, and a reference that another thread
    # lets go of sooner or later would be a graph of its own, now and then.

    def _accumulate(self, batch: Mapping[str, Tensor], contrast: Contrast | None, *, is_last: bool) -> None:
        self.strategy.model.train()
        outputs = self.forward(batch)
        everybody = self._loss.gathered(outputs, batch, contrast)
        surrogate, loss = self._loss_of(outputs, batch, contrast, everybody, self._memory)
        if self._memory is not None and contrast is None:
            self._memory = self._loss.remembered(self._memory, outputs, batch, everybody)
        del outputs, everybody
        grads = self.strategy.gradient(surrogate / self._accumulation, is_last=is_last)
        loss = (loss.detach() / self._accumulation).reshape(1)
        if self._sums is None:
            self._sums = [*grads, loss]
            return
        *sums, loss_sum = self._sums
        grads = [total + new for total, new in zip(sums, grads, strict=True)] if sums else grads
        self._sums = [*grads, loss_sum + loss]

    def _reduce_and_step(self, control: Tensor) -> None:
        *grads, loss = self.reduced()
        figures = self._change(grads, loss, self.strategy.norm(grads), control)
        if self._publishes_on_host:
            self._cut("update", [*self._state(), *figures])
        self.strategy.publish()
        self._figures = self._note(figures, self._figures, control)

    def _changed(self, grads: list[Tensor], loss: Tensor, grad_norm: Tensor, control: Tensor) -> list[Tensor]:
        """The optimizer's step, where the guard takes it; figures of it."""
        ok = self.guard.judge(loss[0], grad_norm)
        clip = torch.clamp(self._max_norm / (grad_norm + 1e-6), max=1.0)
        self.optimizer.step(grads, control, clip, ok)
        figures = [loss[0], grad_norm, self.guard.state[3], self.guard.state[4], control[3]]
        if self._log_scale_master is not None:
            self._log_scale_master.copy_(torch.clamp(self._log_scale_master, max=LARGEST_LOG_SCALE))
        return figures

    def _noted(self, figures: list[Tensor], rows: Tensor, control: Tensor) -> Tensor:
        """The last rows of figures, with one more; the average of the weights moves."""
        if self._log_scale is not None:
            figures = [*figures, temperature_of(self._log_scale)[0]]
        if self.average:
            move_average(self.average, self.strategy.weights, self.config.average_decay, control[3])
        # A shift, not an indexed write: static on every device.
        return torch.cat([rows[1:], torch.stack(figures)[None]])

    @torch.no_grad()
    def _update(self, control: Tensor) -> None:
        """Reduce over ranks, clip, judge, step, note the figures. `control`: see optimizer.control_values."""
        apart = self.config.step_boundary == "split"
        if not apart and self._reduces_on_host:
            apart = True
            self._cut_micro_step()
        self._reduce_and_step(control)
        state = self._state() if apart else [*self._state(), *self._remembered]
        self._cut("publish" if self._publishes_on_host else "update" if apart else "step", state)

    def reduced(self) -> list[Tensor]:
        """The mean over ranks of this step's gradient, by master, and of its loss; the next micro-step starts anew."""
        if self._sums is None:
            raise RuntimeError("an update before a micro-step")
        sums, self._sums, self._micro_steps = self._sums, None, 0
        return self.strategy.reduce(sums)

    def read_figures(self, count: int) -> list[dict[str, float]]:
        """Figures of the last `count` steps, oldest first. The one synchronisation of a logging interval."""
        (rows,) = self.backend.to_host([self._figures])
        return [dict(zip(self.figures, row, strict=True)) for row in rows[len(rows) - count :].tolist()]

    def _cut_micro_step(self) -> None:
        is_first = self._micro_steps <= self.config.batches_per_execution
        self._cut("first_micro_step" if is_first else "micro_step", [*(self._sums or []), *self._remembered])

    def _cut(self, phase: str, tensors: Sequence[Tensor]) -> None:
        """End a graph here. `tensors`: what it computes."""
        place = replace(self._place, phase=phase)
        self._watch.before(place, tensors)
        self.backend.step_boundary(tensors)
        self._watch.after(place)

    @property
    def _served(self) -> Sequence[Tensor]:
        """The weights of the model that is evaluated and saved."""
        return self.average or self.strategy.weights

    @property
    def _remembered(self) -> Sequence[Tensor]:
        """The memory, where the graph of the gradient makes the next one; a first pass has it in its own."""
        return () if self._memory is None or self._has_two_passes else self._memory

    def _state(self) -> list[Tensor]:
        """Everything an update changes."""
        guard, *vectors = self._optimizer_state().values()
        first = self.average or self._masters
        return [*guard, *first, *chain.from_iterable(vectors), *self._copies, self._figures]

    def _optimizer_state(self) -> dict[str, list[Tensor]]:
        vectors: dict[str, Sequence[Tensor]] = {
            "exp_avg": self.optimizer.exp_avg,
            "exp_avg_sq": self.optimizer.exp_avg_sq,
        }
        if self.average:
            vectors["masters"] = self._masters
        found = {"guard": [self.guard.state]}
        for name, tensors in vectors.items():
            for kind, decayed in KINDS.items():
                pairs = zip(tensors, self.strategy.parts, strict=True)
                found[f"{name}.{kind}"] = [tensor for tensor, part in pairs if part.decayed == decayed]
        return found

    def _saved_state(self) -> dict[str, list[Tensor]]:
        """By name in a checkpoint: the optimizer's, and the memory."""
        memory = self._memory._asdict() if self._memory is not None else {}
        return self._optimizer_state() | {f"memory.{name}": [tensor] for name, tensor in memory.items()}

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(named weights fp32, optimizer state) copied to host memory with one synchronisation."""
        return self.strategy.snapshot(self._served, self._saved_state())

    def restore(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None) -> None:
        """Put weights (our names, any dtype) on the device and, when resuming, the optimizer state.

        Raises CheckpointError for the state of another model or optimizer.
        """
        state, into = self._saved_state(), [self._served]
        if optimizer is not None and optimizer.keys() != state.keys():
            raise CheckpointError(f"optimizer state with {sorted(optimizer)}", expected=str(sorted(state)))
        if optimizer is None and self.average:  # training begins with what was served
            into.append(self._masters)
        self.strategy.restore(weights, into, optimizer, state)


def has_dropout(encoder: TextEncoder) -> bool:
    """Return whether it drops elements, as far as can be seen of a module of a factory."""
    return encoder.dropout > 0 or any(isinstance(one, torch.nn.Dropout) and one.p > 0 for one in encoder.modules())


def _place_of(batch: Mapping[str, Tensor]) -> Place:
    """Rows are named by their length, pairs by their bucket."""
    if "segments" in batch:
        return Place("", str(batch["tokens"].shape[1]), len(batch["label"]))
    samples, product_tokens = batch["product"].shape
    return Place("", Bucket(batch["query"].shape[1], product_tokens).name, samples)
