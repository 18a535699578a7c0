"""The training program of one rank: everything that lives on the device, and the graphs of a step.

A step is forward and backward of each micro-batch, then reduction, clipping, guard and AdamW. Nothing here reads a
value back; figures collect in a small device buffer that the host fetches every N steps.

The contrastive loss is one number of the whole global batch, however that is cut. Where one graph holds all of the
batch, or can gather it from the other ranks, it is computed there. Elsewhere a step has two passes (GradCache, Gao et
al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021): embeddings of every
micro-batch without a gradient; the loss of all of them and its gradient by embedding; then forward and backward of each
micro-batch, where the product of embeddings and those gradients stands for the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.backends import Backend, HostGather, HostMean
from pipeline.compile.watch import GraphWatch, NoWatch, Place
from pipeline.core.batching import Bucket, RankShare
from pipeline.core.errors import CheckpointError, DataError
from pipeline.model.config import LossConfig
from pipeline.model.flat import FlatLayout, flat_forward
from pipeline.model.losses import Targets, contrastive_loss, pair_loss, relevance_loss
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import RelevanceModel, RelevanceOutputs
from pipeline.model.temperature import LARGEST_LOG_SCALE, Temperature, temperature_of
from pipeline.train.config import TrainConfig
from pipeline.train.guard import SpikeGuard
from pipeline.train.optimizer import AdamW, rate_of
from pipeline.train.share import needs_two_passes, rows_of_batch

_GUARD, _SERVED, _MASTERS = "guard", "served", "masters"
FIGURES = ("loss", "grad_norm", "skipped_in_a_row", "skipped", "step")
TEMPERATURE = "temperature"
"""One figure more, where the temperature is learnt."""


class Contrast(NamedTuple):
    """The contrastive loss of a global batch, and its gradient by the embeddings of all its queries and products.

    And by the parameter of the temperature, where that is learnt.
    """

    loss: Tensor
    query: Tensor
    product: Tensor
    log_scale: Tensor | None = None


class TrainProgram:
    """Master weights (fp32), moments, guard and figures on one device.

    With `train.average_decay` also a moving average of the weights: what is evaluated and saved as the model is the
    average then, and the masters are part of the optimizer's state.
    """

    def __init__(
        self,
        model: RelevanceModel,
        backend: Backend,
        config: TrainConfig,
        *,
        accumulation: int,
        world_size: int = 1,
        host_mean: HostMean,
        host_gather: HostGather = list,
        figure_rows: int,
        buckets: Sequence[Bucket],
        watch: GraphWatch | None = None,
    ) -> None:
        self.backend = backend
        self._watch: GraphWatch = watch or NoWatch()
        self._buckets = {bucket.name for bucket in buckets}
        self._rows = {str(length) for length in rows_of_batch(config, buckets)}
        config.loss.check_width(model.encoder.word_embeddings.embedding_dim)
        if config.loss.learn_temperature:
            model.temperature = Temperature(config.loss.temperature)
        self.layout = FlatLayout.of(model, config.chunk_mib, by_layer=config.optimizer.by_layer)
        self.has_dropout = model.encoder.dropout > 0
        self.masters = [flat.to(backend.device).requires_grad_() for flat in self.layout.pack(model.state_dict())]
        decayed = [chunk.decayed for chunk in self.layout.chunks]
        self._log_scale = self.masters[-1] if config.loss.learn_temperature else None
        num_layers = len(model.encoder.layers)
        rates = [rate_of(chunk, num_layers, config.optimizer) for chunk in self.layout.chunks]
        self.optimizer = AdamW(self.masters, decayed, config.optimizer, traced=backend.is_lazy, rates=rates)
        self.averages = [master.detach().clone() for master in self.masters] if config.average_decay else []
        self.guard = SpikeGuard(config.guard, backend.device)
        choose_forms(model, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
        self._model = model.to("meta")  # structure only: its tensors are the masters
        self._config = config
        self._loss_config: LossConfig = config.loss
        self._accumulation, self._world_size = accumulation, world_size
        self._host_mean, self._host_gather = host_mean, host_gather
        self._sums: list[Tensor] | None = None  # gradient by chunk, and the loss, of this step so far
        self.figures = FIGURES if self._log_scale is None else (*FIGURES, TEMPERATURE)
        self._figures = torch.zeros(figure_rows, len(self.figures), dtype=torch.float32, device=backend.device)
        self._max_norm = torch.tensor(config.optimizer.max_grad_norm, dtype=torch.float32, device=backend.device)
        self._micro_steps = 0
        self._place = Place("start")
        self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        """Bring the state into the form it has after a step; else the first step would be a graph of its own."""
        for tensor in [*self.masters, *self.averages] if self.backend.is_lazy else ():
            tensor.copy_(tensor.clone())
        self._cut("start", self._state())

    def forward(self, batch: Mapping[str, Tensor], weights: Sequence[Tensor] | None = None) -> RelevanceOutputs:
        """Scores and embeddings of one batch on the device. `weights`: not those in training, but these."""
        shape = _place_of(batch).bucket
        if shape not in self._buckets | self._rows:
            known = ", ".join(sorted(self._buckets | self._rows))
            raise DataError(f"a batch of {shape} tokens", expected=f"one of {known}")
        return flat_forward(
            self._model,
            self.layout,
            self.masters if weights is None else weights,
            batch,
            backend=self.backend,
            precision=self._config.precision,
            head_gradient=self._loss_config.head_gradient,
        )

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Logits over relevance classes [B, K] and embeddings [B, D], fp32, without a gradient."""
        self._model.eval()
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
        contrast = None
        if self._needs_two_passes:
            contrast = self._contrast(micros, seeds)
        for number, batch in enumerate(micros):
            if seeds:
                self.backend.seed(seeds[number])
            self._accumulate(batch, contrast)
            self._place, self._micro_steps = _place_of(batch), number + 1
            if self._micro_steps < self._accumulation:
                if self._micro_steps % self._config.batches_per_execution == 0:
                    self._cut_micro_step()
            elif self._config.step_boundary == "split":
                self._cut_micro_step()

    @property
    def _needs_two_passes(self) -> bool:
        share = RankShare(0, self._world_size, self._accumulation)
        return needs_two_passes(self._config, share, gathers_in_graph=self.backend.gathers_in_graph)

    @torch.no_grad()
    def _update(self, control: Tensor) -> None:
        """Reduce over ranks, clip, judge, step, note the figures. `control`: see optimizer.control_values."""
        apart = self._config.step_boundary == "split"
        if not apart and self._world_size > 1 and not self.backend.reduces_in_graph:
            apart = True  # the reduction goes through the host
            self._cut_micro_step()
        self._reduce_and_step(control)
        self._cut("update" if apart else "step", self._state())

    @torch.no_grad()
    def _contrast(self, micros: Sequence[Mapping[str, Tensor]], seeds: Sequence[int]) -> Contrast:
        """The first pass: embeddings of every micro-batch, then the loss over those of all ranks."""
        queries, products = [], []
        self._model.train()
        for number, batch in enumerate(micros, start=1):
            if seeds:
                self.backend.seed(seeds[number - 1])
            outputs = self.forward(batch)
            queries.append(outputs.query.float())
            products.append(outputs.product.float())
            self._place = _place_of(batch)
            if number == len(micros) or number % self._config.batches_per_execution == 0:
                self._cut("embed_batch", [*queries, *products])
        del outputs
        mine = [torch.cat(queries), torch.cat(products), *_targets(micros)]
        if self._world_size > 1 and not self.backend.gathers_in_graph:
            self._cut("embeddings", mine)  # they go through the host
        query, product, targets = self._everybody(mine[0], mine[1], Targets(*mine[2:]))
        with torch.set_grad_enabled(True), torch.autograd.set_multithreading_enabled(False):
            query, product = query.requires_grad_(), product.requires_grad_()
            loss = contrastive_loss(query, product, targets, self._loss_config, self._temperature())
            by = (query, product) if self._log_scale is None else (query, product, self._log_scale)
            contrast = Contrast(loss.detach(), *torch.autograd.grad(loss, by))
        del query, product, by, loss, targets
        self._cut("contrast", [tensor for tensor in contrast if tensor is not None])
        return contrast

    def _temperature(self, share: float = 1.0) -> Tensor | None:
        """That is learnt, fp32 [1]; `share` of its gradient reaches the parameter. None: it is fixed."""
        if self._log_scale is None:
            return None
        if share == 1.0:
            return temperature_of(self._log_scale)
        fixed = self._log_scale.detach()
        return temperature_of(fixed + (self._log_scale - fixed) * share)

    def _everybody(self, query: Tensor, product: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Targets]:
        """The rows of all ranks, in the order of the global batch."""
        mine = [query, product, *targets]
        if self._world_size > 1:
            mine = self.backend.gather(mine, self._host_gather)
        return mine[0], mine[1], Targets(*mine[2:])

    # What is alive at the end of a graph is an output of it. The two functions below are apart from their callers so
    # that nothing but the state outlives them: each gradient kept would be memory, and a reference that another thread
    # lets go of sooner or later would be a graph of its own, now and then.

    def _accumulate(self, batch: Mapping[str, Tensor], contrast: Contrast | None) -> None:
        self._model.train()
        surrogate, loss = self._losses(self.forward(batch), batch, contrast)
        with torch.autograd.set_multithreading_enabled(False):  # the engine's thread keeps gradients a little longer
            grads = torch.autograd.grad(surrogate / self._accumulation, self.masters, materialize_grads=True)
        # In the form that is reduced: anything later is a graph more.
        parts = [*grads, (loss.detach() / self._accumulation).reshape(1)]
        if self._sums is None:
            self._sums = parts
        else:
            self._sums = [total + new for total, new in zip(self._sums, parts, strict=True)]

    def _losses(
        self, outputs: RelevanceOutputs, batch: Mapping[str, Tensor], contrast: Contrast | None
    ) -> tuple[Tensor, Tensor]:
        """(what is differentiated, what is reported) of a micro-batch.

        The mean of the first over micro-batches and ranks has the gradient of the loss of the global batch.
        """
        targets, weight = _targets([batch]), self._loss_config.contrastive_weight
        if not weight or (contrast is None and self._world_size == 1):
            loss = relevance_loss(
                outputs, targets, self._loss_config, self._config.mined_per_query, self._temperature()
            )
            return loss, loss
        pairs = pair_loss(outputs, targets, self._loss_config, self._config.mined_per_query, self._temperature())
        parts = self._accumulation * self._world_size
        if contrast is None:
            contrastive = self._gathered_loss(outputs, targets, batch["place"])
            return pairs + weight * parts * contrastive, pairs + weight * contrastive
        place, groups, width = batch["place"], *contrast.query.shape
        products = contrast.product.view(groups, -1).index_select(0, place).view(-1, width)
        stand_in = (outputs.query.float() * contrast.query.index_select(0, place)).sum()
        stand_in = stand_in + (outputs.product.float() * products).sum()
        if self._log_scale is not None and contrast.log_scale is not None:  # the same for all, so each has its part
            stand_in = stand_in + (self._log_scale * contrast.log_scale).sum() / parts
        return pairs + weight * parts * stand_in, pairs + weight * contrast.loss

    def _gathered_loss(self, outputs: RelevanceOutputs, targets: Targets, place: Tensor) -> Tensor:
        """The loss of the global batch in this rank's graph, differentiable by this rank's embeddings alone.

        The other ranks' come without a gradient, and the temperature's is shared by all ranks. Where this rank's stand
        is data, not structure: the graph is the same on every rank.
        """
        query, product = outputs.query.float(), outputs.product.float()
        everybody = self._everybody(query.detach(), product.detach(), targets)
        places = torch.arange(everybody[0].shape[0], dtype=place.dtype, device=place.device)
        at = (places[:, None] == place[None, :]).float()  # [Q of all, Q]
        groups, width = query.shape
        # Zeros, with the gradient of this rank's.
        of_query = torch.matmul(at, query - query.detach())
        of_product = torch.matmul(at, (product - product.detach()).view(groups, -1)).view(-1, width)
        return contrastive_loss(
            everybody[0] + of_query,
            everybody[1] + of_product,
            everybody[2],
            self._loss_config,
            self._temperature(1.0 / self._world_size),
        )

    def _reduce_and_step(self, control: Tensor) -> None:
        *grads, loss = self.reduced()
        grad_norm = torch.sqrt(self.layout.sum_of_squares(grads))
        ok = self.guard.judge(loss[0], grad_norm)
        clip = torch.clamp(self._max_norm / (grad_norm + 1e-6), max=1.0)
        self.optimizer.step(grads, control, clip, ok)
        figures = [loss[0], grad_norm, self.guard.state[3], self.guard.state[4], control[3]]
        if self._log_scale is not None:
            self._log_scale.copy_(torch.clamp(self._log_scale, max=LARGEST_LOG_SCALE))
            figures.append(temperature_of(self._log_scale)[0])
        self._average(control[3])
        row = torch.stack(figures)
        # A shift, not an indexed write: static on every device.
        self._figures = torch.cat([self._figures[1:], row[None]])

    def _average(self, step: Tensor) -> None:
        """Move the averages towards the masters. Early ones forget faster: they began with weights of no training.

        The decay is min(average_decay, (1 + t) / (10 + t)) at step t (TensorFlow's ExponentialMovingAverage).
        """
        if not self.averages:
            return
        share = torch.clamp(9.0 / (10.0 + step), min=1.0 - self._config.average_decay)
        for average, master in zip(self.averages, self.masters, strict=True):
            average.copy_(average + (master - average) * share)

    @property
    def _served(self) -> list[Tensor]:
        """The weights of the model that is evaluated and saved."""
        return self.averages or self.masters

    def reduced(self) -> list[Tensor]:
        """The mean over ranks of this step's gradient, by chunk, and of its loss; the next micro-step starts anew.

        In the graph it is one collective for each chunk, the loss with the last; through the host one for all.
        """
        if self._sums is None:
            raise RuntimeError("an update before a micro-step")
        sums, self._sums, self._micro_steps = self._sums, None, 0
        if self._world_size > 1:
            *chunks, last, loss = sums
            together = [*([chunk] for chunk in chunks), [last, loss]] if self.backend.reduces_in_graph else [sums]
            for tensors in together:
                self.backend.reduce(tensors, self._host_mean)
        return sums

    def read_figures(self, count: int) -> list[dict[str, float]]:
        """Figures of the last `count` steps, oldest first. The one synchronisation of a logging interval."""
        (rows,) = self.backend.to_host([self._figures])
        return (
            [dict(zip(self.figures, row, strict=True)) for row in rows[len(rows) - count :].tolist()] if count else []
        )

    def _cut_micro_step(self) -> None:
        is_first = self._micro_steps <= self._config.batches_per_execution
        self._cut("first_micro_step" if is_first else "micro_step", self._sums or [])

    def _cut(self, phase: str, tensors: Sequence[Tensor]) -> None:
        """End a graph here. `tensors`: what it computes."""
        place = replace(self._place, phase=phase)
        self._watch.before(place, lambda: self.backend.hlo_text(tensors))
        self.backend.step_boundary(tensors)
        self._watch.after(place)

    def _state(self) -> list[Tensor]:
        """Everything a step changes."""
        return [*chain.from_iterable(self._device_state().values()), self._figures]

    def _device_state(self) -> dict[str, list[Tensor]]:
        """By name; what is one vector in a checkpoint, whatever the chunks, lies in several here."""
        state = {_GUARD: [self.guard.state], _SERVED: self._served}
        vectors = {"exp_avg": self.optimizer.exp_avg, "exp_avg_sq": self.optimizer.exp_avg_sq}
        if self.averages:
            vectors[_MASTERS] = self.masters
        for name, tensors in vectors.items():
            for kind, decayed in (("decayed", True), ("plain", False)):
                chosen = zip(tensors, self.layout.chunks, strict=True)
                state[f"{name}.{kind}"] = [tensor for tensor, chunk in chosen if chunk.decayed == decayed]
        return state

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(named weights fp32, optimizer state) copied to host memory with one synchronisation."""
        state = self._device_state()
        host = iter(self.backend.to_host(list(chain.from_iterable(state.values()))))
        parts = {name: list(islice(host, len(tensors))) for name, tensors in state.items()}
        weights = self.layout.unpack(parts.pop(_SERVED))
        return weights, {name: torch.cat(chunks) if len(chunks) > 1 else chunks[0] for name, chunks in parts.items()}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor] | None) -> None:
        """Put weights (our names, any dtype) and, when resuming, the optimizer state on the device."""
        state = self._device_state()
        incoming = {_SERVED: self.layout.pack(weights)}
        if optimizer is not None and optimizer.keys() != state.keys() - incoming.keys():
            raise CheckpointError(
                f"optimizer state with {sorted(optimizer)}", expected=str(sorted(state.keys() - incoming.keys()))
            )
        for name, whole in (optimizer or {}).items():
            sizes = [chunk.numel() for chunk in state[name]]
            if list(whole.shape) != [sum(sizes)]:
                raise CheckpointError(
                    f"{name} has {list(whole.shape)} elements", expected=f"[{sum(sizes)}] for this model"
                )
            incoming[name] = list(torch.split(whole, sizes))
        if optimizer is None and self.averages:  # training begins with what was served
            state[_MASTERS], incoming[_MASTERS] = self.masters, incoming[_SERVED]
        for name, chunks in incoming.items():
            for ours, chunk in zip(state[name], chunks, strict=True):
                ours.copy_(chunk.to(self.backend.device))
        self.backend.synchronise()


def _place_of(batch: Mapping[str, Tensor]) -> Place:
    """Rows are named by their length, pairs by their bucket."""
    if "segments" in batch:
        return Place("", str(batch["tokens"].shape[1]), len(batch["label"]))
    samples, product_tokens = batch["product"].shape
    return Place("", Bucket(batch["query"].shape[1], product_tokens).name, samples)


def _targets(micros: Sequence[Mapping[str, Tensor]]) -> Targets:
    """The targets of micro-batches, one after the other."""
    if len(micros) == 1:
        return Targets(*(micros[0][name] for name in Targets._fields))
    return Targets(*(torch.cat([batch[name] for batch in micros]) for name in Targets._fields))
