"""The training program of a rank, which keeps all training state on the device and runs the graphs of a step.

A step runs forward and backward for each micro-batch, reduces the gradients over all ranks, clips them, and updates the
weights with AdamW if the guard allows it. The host never waits for a value during a step. Instead, metrics are
collected in a small buffer on the device, which the host reads every few steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.backends import Backend, HostGather, HostMean, step_program
from pipeline.compile.manifest import GraphPosition, GraphWatch
from pipeline.core.batch_order import Bucket, RankSlice
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.model.encoder import TextEncoder
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import RelevanceModel, RelevanceOutputs
from pipeline.parallel.mesh import REPLICATE, SHARD, open_mesh
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.strategies import KINDS, ParallelStrategy
from pipeline.parallel.strategies.flat import CHUNK_MIB, FlatStrategy
from pipeline.parallel.strategies.zero1 import Zero1Strategy
from pipeline.train.config import TrainConfig, batch_lengths, needs_two_passes
from pipeline.train.loss import Contrast, Embeddings, GlobalLoss, concat_targets
from pipeline.train.optimizer import AdamW, SpikeGuard

if TYPE_CHECKING:
    from pipeline.parallel.strategies.fsdp import FsdpStrategy

METRICS = ("loss", "grad_norm", "skipped_in_a_row", "skipped", "step")


def open_program(
    model: RelevanceModel,
    backend: Backend,
    config: TrainConfig,
    share: RankSlice,
    process_group: ProcessGroup,
    *,
    metric_rows: int,
    buckets: Sequence[Bucket],
    watch: GraphWatch,
) -> "TrainProgram":
    """Build the training program of a rank, for a run or for its trial. Takes ownership of the model.

    A trial uses the same function, which ensures that it has the same graphs as the run.
    """
    plan, layout = config.parallel, process_group.layout
    model.encoder.longest_text = max(max(bucket.query_tokens, bucket.product_tokens) for bucket in buckets)
    strategy: ParallelStrategy
    is_sharded = layout.tensor_size > 1 or plan.offload or (plan.shard == "all" and layout.shard_size > 1)
    if config.compiled and is_sharded:
        raise ConfigError(
            "train.compiled is set, but sharded models are not compiled",
            expected="train.compiled false, or plain data parallelism",
            next_command="--no-train.compiled",
        )
    has_two_passes = needs_two_passes(config, share, gathers_in_graph=backend.gathers_in_graph)
    repeats_dropout = has_two_passes and uses_dropout(model.encoder)
    if is_sharded or backend.compiles_steps:
        strategy = module_strategy(model, backend, config, process_group)
    elif layout.shard_size > 1:
        prepare_model(model, backend, config)
        mesh = open_mesh(plan.as_plan(), backend, timeout_s=config.collective_timeout_s)
        strategy = Zero1Strategy(
            model,
            backend,
            precision=config.precision,
            has_one_rate=config.optimizer.has_one_rate,
            recompute=plan.recompute == "units",
            compiled=compiles_layers(config, backend, repeats_dropout=repeats_dropout),
            shards=mesh.ranks(SHARD),
            replicas=mesh.ranks(REPLICATE),
            host_gather=process_group.gather_rows,
        )
    else:
        strategy = flat_strategy(
            model,
            backend,
            config,
            repeats_dropout=repeats_dropout,
            world_size=share.world_size,
            host_mean=process_group.mean,
            host_gather=process_group.gather_rows,
        )
    return TrainProgram(strategy, backend, config, share, metric_rows=metric_rows, buckets=buckets, watch=watch)


def module_strategy(
    model: RelevanceModel, backend: Backend, config: TrainConfig, process_group: ProcessGroup
) -> "FsdpStrategy":
    """Apply FSDP and tensor parallelism to the model, as configured. Takes ownership of the model."""
    from pipeline.parallel.strategies.fsdp import FsdpStrategy  # the import takes 0.15 s, and most runs do not need it

    prepare_model(model, backend, config)
    plan = config.parallel.as_plan("bf16" if config.precision == "bf16" else "fp32")
    return FsdpStrategy(
        model,
        open_mesh(plan, backend, timeout_s=config.collective_timeout_s),
        precision=config.precision,
        host_mean=process_group.mean,
        host_gather=process_group.gather_rows,
    )


def flat_strategy(
    model: RelevanceModel,
    backend: Backend,
    config: TrainConfig,
    *,
    world_size: int = 1,
    repeats_dropout: bool = False,
    host_mean: HostMean = list,
    host_gather: HostGather = list,
    chunk_mib: float = CHUNK_MIB,
) -> FlatStrategy:
    """Apply plain data parallelism over `world_size` ranks. Takes ownership of the model."""
    prepare_model(model, backend, config)
    return FlatStrategy(
        model,
        backend,
        precision=config.precision,
        chunk_mib=chunk_mib,
        has_one_rate=config.optimizer.has_one_rate,
        recompute=config.parallel.recompute == "units",
        compiled=compiles_layers(config, backend, repeats_dropout=repeats_dropout),
        world_size=world_size,
        host_mean=host_mean,
        host_gather=host_gather,
    )


def compiles_layers(config: TrainConfig, backend: Backend, *, repeats_dropout: bool = False) -> bool:
    """Return whether to compile the layers of the encoder. Raises ConfigError if it is requested but not possible.

    `repeats_dropout` is whether a step has two passes that need the same dropout masks.
    """
    recomputes = config.parallel.recompute == "units"
    if config.compiled and repeats_dropout:
        raise ConfigError(
            "train.compiled is set, but with dropout, a step with two passes needs the same random numbers in both, and"
            " the first one is not compiled",
            expected="no dropout, a single pass per step, or layers that are not compiled",
            next_command="--no-train.compiled, or --model.dropout 0",
        )
    if config.compiled and (backend.is_lazy or recomputes):
        raise ConfigError(
            f"train.compiled is set, but {'recomputed layers are' if recomputes else f'{backend.name} is'} not compiled"
            " by torch.compile",
            expected="backend cuda or cpu, and train.parallel.recompute none",
            next_command="--no-train.compiled",
        )
    if config.compiled is not None:
        return config.compiled
    return backend.compiles_layers and not recomputes and not repeats_dropout


def prepare_model(model: RelevanceModel, backend: Backend, config: TrainConfig) -> None:
    """Select the operator implementations for the backend. Raises ConfigError if a matryoshka size is too large."""
    config.loss.check_width(model.encoder.width)
    choose_forms(model, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)


class TrainProgram:
    """Runs the training steps of a rank, and owns the model, the optimizer, the guard and the metrics buffer."""

    def __init__(
        self,
        strategy: ParallelStrategy,
        backend: Backend,
        config: TrainConfig,
        share: RankSlice,
        *,
        metric_rows: int,
        buckets: Sequence[Bucket],
        watch: GraphWatch | None = None,
    ) -> None:
        self.backend, self.config, self.strategy = backend, config, strategy
        self.has_dropout = strategy.model.encoder.is_random
        self._accumulation = share.accumulation
        self._loss = GlobalLoss(config, share.accumulation * share.world_size, strategy.gather)
        self._has_two_passes = needs_two_passes(config, share, gathers_in_graph=backend.gathers_in_graph)
        is_recomputed = config.parallel.recompute == "units"
        if backend.is_neuron and (self._has_two_passes or is_recomputed) and uses_dropout(strategy.model.encoder):
            reason = "recomputes layers" if is_recomputed else "has two passes per step"
            raise ConfigError(
                f"dropout on {backend.device_name()} is not supported in a run that {reason}",
                expected="no dropout, because this device may not drop the same elements when a layer runs again",
                next_command="--model.dropout 0 (with model.factory: a module without dropout)",
            )
        is_distributed = share.world_size > 1
        self._gathers_in_pass = is_distributed and config.loss.contrastive_weight > 0 and not self._has_two_passes
        self._reduces_on_host = is_distributed and not backend.reduces_in_graph
        self._gathers_on_host = is_distributed and not backend.gathers_in_graph
        self._copies = strategy.weights if strategy.weights is not strategy.masters else ()
        self._publishes_on_host = bool(self._copies) and self._gathers_on_host
        self.optimizer = AdamW(
            strategy.masters,
            [part.decayed for part in strategy.parts],
            config.optimizer,
            traced=backend.is_lazy or backend.compiles_steps,
            rates=[1.0 if part.encoder else config.optimizer.head_rate for part in strategy.parts],
        )
        self.guard = SpikeGuard(config.guard, backend.device)
        self._max_norm = torch.tensor(config.optimizer.max_grad_norm, dtype=torch.float32, device=backend.device)
        self._metrics = torch.zeros(metric_rows, len(METRICS), dtype=torch.float32, device=backend.device)
        self._sums: list[Tensor] | None = None  # gradients and loss accumulated in this step
        self._micro_steps = 0
        self._shapes = {bucket.name for bucket in buckets} | {str(length) for length in batch_lengths(config, buckets)}
        self._watch: GraphWatch = watch or GraphWatch()
        self._position = GraphPosition("start")
        self._local_loss = step_program(backend, self._loss.local)
        self._one_pass = step_program(backend, self._loss.one_pass)
        self._second_pass = step_program(backend, self._loss.second_pass)
        self._step_optimizer = step_program(backend, self._clip_and_step)
        self._append_metrics = step_program(backend, _append_row)
        # Copy everything once, so that the graph of step 1 has the same inputs as that of step 2. Otherwise, step 1
        # would require an additional graph.
        with torch.no_grad():
            for tensor in [*strategy.masters, *self._copies] if backend.is_lazy else ():
                tensor.copy_(tensor.clone())
            # A tensor of 0 or 1 is a constant of the graph until it has been computed once.
            self._cut("start", [*self._state(), self._max_norm, self.optimizer.zero])

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Compute the scores and embeddings of a batch on the device. Raises DataError if its shape is unexpected."""
        shape = _position_of(batch).bucket
        if shape not in self._shapes:
            raise DataError(f"a batch has shape {shape}", expected=f"one of {', '.join(sorted(self._shapes))}")
        return self.strategy.forward(batch)

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Compute the relevance logits [B, K] and embeddings [B, D] in fp32, without tracking gradients."""
        self.strategy.model.eval()
        outputs = RelevanceOutputs(*(tensor.float() for tensor in self.forward(batch)))
        self._position = _position_of(batch)
        self._cut("evaluate", outputs)
        return outputs

    def step(self, micros: Sequence[Mapping[str, Tensor]], *, seeds: Sequence[int] = ()) -> None:
        """Take one optimizer step over the micro-batches of this rank.

        `seeds` has a dropout seed for each micro-batch, which is used in both passes. The `control_values` of the step
        are taken from the last micro-batch.
        """
        self.accumulate(micros, seeds)
        self._update(micros[-1]["control"])

    def accumulate(self, micros: Sequence[Mapping[str, Tensor]], seeds: Sequence[int] = ()) -> None:
        """Run forward and backward for all micro-batches. Call `reduce` to get the accumulated gradients and loss."""
        contrast = self._first_pass(micros, seeds) if self._has_two_passes else None
        for number, batch in enumerate(micros):
            if seeds:
                self.backend.seed(seeds[number])
            self._accumulate(batch, contrast, is_last=number + 1 == len(micros))
            self._position, self._micro_steps = _position_of(batch), number + 1
            if self._micro_steps < self._accumulation or self.config.step_boundary == "split":
                self._cut_micro_step()

    @torch.no_grad()
    def _first_pass(self, micros: Sequence[Mapping[str, Tensor]], seeds: Sequence[int]) -> Contrast:
        """Embed every micro-batch, then compute the contrastive loss over the embeddings of all ranks."""
        queries, products = [], []
        self.strategy.model.train()
        for number, batch in enumerate(micros):
            if seeds:
                self.backend.seed(seeds[number])
            outputs = self.forward(batch)
            queries.append(outputs.query.float())
            products.append(outputs.product.float())
            self._position = _position_of(batch)
            self._cut("embed_batch", [*queries, *products])
        del outputs
        local = Embeddings(torch.cat(queries), torch.cat(products), concat_targets(micros))
        if self._gathers_on_host:
            self._cut("embeddings", [local.query, local.product, *local.targets.judged])
        contrast = self._loss.contrast(self._loss.gather_embeddings(*local))
        self._cut("contrast", contrast)
        return contrast

    # On a lazy backend, every tensor that is alive at a step boundary becomes an output of the graph. The next two
    # methods are separate from their callers to ensure that only the state is still alive after they return. A gradient
    # that stays alive would use memory, and one that is freed late by a different thread would occasionally cause an
    # additional graph to be compiled.

    def _accumulate(self, batch: Mapping[str, Tensor], contrast: Contrast | None, *, is_last: bool) -> None:
        self.strategy.model.train()
        outputs = self.forward(batch)
        if contrast is not None:
            surrogate, loss = self._second_pass(outputs, batch, contrast)
        elif self._gathers_in_pass:
            query, product = outputs.query.float().detach(), outputs.product.float().detach()
            rows = self._loss.gather_embeddings(query, product, concat_targets([batch]))
            surrogate, loss = self._one_pass(outputs, batch, rows)
            del query, product, rows
        else:
            surrogate, loss = self._local_loss(outputs, batch)
        del outputs
        grads = self.strategy.gradient(surrogate / self._accumulation, is_last=is_last)
        loss = (loss.detach() / self._accumulation).reshape(1)
        if self._sums is None:
            self._sums = [*grads, loss]
            return
        *sums, loss_sum = self._sums
        grads = [total + new for total, new in zip(sums, grads, strict=True)] if sums else grads
        self._sums = [*grads, loss_sum + loss]

    def _reduce_and_step(self, control: Tensor) -> None:
        *grads, loss = self.reduce()
        metrics = self._step_optimizer(grads, loss, self.strategy.norm(grads), control)
        if self._publishes_on_host:
            self._cut("update", [*self._state(), *metrics])
        self.strategy.publish()
        self._metrics = self._append_metrics(metrics, self._metrics)

    def _clip_and_step(self, grads: list[Tensor], loss: Tensor, grad_norm: Tensor, control: Tensor) -> list[Tensor]:
        """Clip the gradients and step the optimizer if the guard allows it. Return the metrics listed in METRICS."""
        ok = self.guard.judge(loss[0], grad_norm)
        clip = torch.clamp(self._max_norm / (grad_norm + 1e-6), max=1.0)
        self.optimizer.step(grads, control, clip, ok)
        return [loss[0], grad_norm, self.guard.state[3], self.guard.state[4], control[3]]

    @torch.no_grad()
    def _update(self, control: Tensor) -> None:
        """Reduce the gradients over ranks, update the weights and record the metrics.

        `control` is the result of `optimizer.control_values`.
        """
        is_separate = self.config.step_boundary == "split"
        if not is_separate and self._reduces_on_host:
            is_separate = True
            self._cut_micro_step()
        self._reduce_and_step(control)
        self._cut("publish" if self._publishes_on_host else "update" if is_separate else "step", self._state())

    def reduce(self) -> list[Tensor]:
        """Average the accumulated gradients and loss over all ranks, and reset the accumulators.

        Returns the gradient of each master, followed by the loss.
        """
        if self._sums is None:
            raise RuntimeError("cannot update the weights before the first micro-step")
        sums, self._sums, self._micro_steps = self._sums, None, 0
        return self.strategy.reduce(sums)

    def read_metrics(self, count: int) -> list[dict[str, float]]:
        """Return the metrics of the last `count` steps, oldest first.

        This is the only host sync in a logging interval.
        """
        (rows,) = self.backend.to_host([self._metrics])
        return [dict(zip(METRICS, row, strict=True)) for row in rows[len(rows) - count :].tolist()]

    def _cut_micro_step(self) -> None:
        self._cut("first_micro_step" if self._micro_steps <= 1 else "micro_step", self._sums or [])

    def _cut(self, phase: str, tensors: Sequence[Tensor]) -> None:
        """End the current graph, which computes `tensors`, and report it to the graph watch."""
        position = replace(self._position, phase=phase)
        self._watch.before(position, tensors)
        self.backend.step_boundary(tensors)
        self._watch.after(position)

    def _state(self) -> list[Tensor]:
        """Return all tensors that are modified by an update."""
        guard, *vectors = self._saved_state().values()
        return [*guard, *self.strategy.masters, *chain.from_iterable(vectors), *self._copies, self._metrics]

    def _saved_state(self) -> dict[str, list[Tensor]]:
        """Return the guard and optimizer tensors by their name in a checkpoint."""
        state = {"guard": [self.guard.state]}
        for name, tensors in (("exp_avg", self.optimizer.exp_avg), ("exp_avg_sq", self.optimizer.exp_avg_sq)):
            for kind, decayed in KINDS.items():
                pairs = zip(tensors, self.strategy.parts, strict=True)
                state[f"{name}.{kind}"] = [tensor for tensor, part in pairs if part.decayed == decayed]
        return state

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copy the fp32 weights and the optimizer state to host memory, by name, with a single host sync."""
        return self.strategy.snapshot(self._saved_state())

    def restore(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None) -> None:
        """Load weights and, when resuming, the optimizer state onto the device.

        The weights must use trnpipe's parameter names, but can have any dtype. Raises CheckpointError if the state
        belongs to a different model or optimizer.
        """
        state = self._saved_state()
        if optimizer is not None and optimizer.keys() != state.keys():
            raise CheckpointError(f"the optimizer state has tensors {sorted(optimizer)}", expected=str(sorted(state)))
        self.strategy.restore(weights, optimizer, state)

    def start_from(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> bool:
        """Load the weights of a parent and, if they fit this model, the moments of its optimizer onto the device.

        Returns whether they fit. The guard starts from scratch.
        """
        state, parts = self._saved_state(), self.strategy.parts
        moments = {name: optimizer[name] for name in state.keys() & optimizer.keys() if name != "guard"}
        sizes = {kind: [sum(part.size for part in parts if part.decayed == KINDS[kind])] for kind in KINDS}
        fit = len(moments) == len(state) - 1 and all(
            list(vector.shape) == sizes[name.rpartition(".")[2]] for name, vector in moments.items()
        )
        self.strategy.restore(weights, moments if fit else None, state)
        return fit


def _append_row(metrics: list[Tensor], rows: Tensor) -> Tensor:
    """Drop the first row and append `metrics`. Unlike an indexed write, a shift has a static graph on every device."""
    return torch.cat([rows[1:], torch.stack(metrics)[None]])


def uses_dropout(encoder: TextEncoder) -> bool:
    """Return whether an encoder has active dropout modules. Other random operators are not detected."""
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in encoder.modules())


def _position_of(batch: Mapping[str, Tensor]) -> GraphPosition:
    """Return the graph position of a batch, which is named after its row length or, for pairs, after its bucket."""
    if "segments" in batch:
        return GraphPosition("", str(batch["tokens"].shape[1]), len(batch["label"]))
    samples, product_tokens = batch["product"].shape
    return GraphPosition("", Bucket(batch["query"].shape[1], product_tokens).name, samples)
