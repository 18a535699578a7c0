"""A model spread over ranks as modules: FSDP2's shards of units, tensor parallelism, recomputation, offloading.

Where no rank shards it is replicated, by the same calls. The masters are this rank's slices of the parameters, one of
each. Checkpoints are those of flat vectors: whole named tensors, and moments in the order of FlatLayout, so a run may
change the way it is spread at a resume.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeline.backends import HostGather, HostMean, step_program
from pipeline.model.relevance import GroupInputs, RelevanceInputs, RelevanceModel, RelevanceOutputs, inputs_of
from pipeline.parallel.activations import recompute_units
from pipeline.parallel.gang import collective_errors
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import find_units, parallelize
from pipeline.parallel.strategies.base import KINDS, Chunk, Precision, State, Strategy
from pipeline.parallel.strategies.flat import FlatLayout, split_saved
from pipeline.parallel.tensor_plan import fused_parts
from pipeline.parallel.tensors import full_cpu_tensor, load_shard, local_shard, shard_groups


class FsdpStrategy(Strategy):
    """A Strategy: the parameters of a module, each in slices over the ranks of a mesh."""

    def __init__(
        self,
        model: RelevanceModel,
        mesh: Mesh,
        *,
        precision: Precision,
        host_mean: HostMean = list,
        host_gather: HostGather = list,
    ) -> None:
        """Takes the model over. `host_*`: over all ranks, of CPU tensors."""
        self.mesh, self.backend = mesh, mesh.backend
        self._precision: Precision = precision
        self._host_mean, self._host_gather = host_mean, host_gather
        self.template = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
        flat = FlatLayout.of(model, _ONE_VECTOR_MIB)
        self.parts = [
            Chunk(chunk.decayed, chunk.encoder, (name,), (shape,), (shape.numel(),))
            for chunk in flat.chunks
            for name, shape in zip(chunk.names, chunk.shapes, strict=True)
        ]
        self.names = [part.names[0] for part in self.parts]
        self.size = flat.size
        self.model = model
        self._root: Any = None  # an FSDPModule as well; none where every rank has the whole model
        if self.backend.compiles_steps and mesh.layout.shard_size == mesh.layout.tensor_size == 1:
            # Every rank has all of the model and meets the others once a step.
            if mesh.plan.recompute == "units":
                recompute_units([unit for _, unit in find_units(model)])
            model.to(self.backend.device)
            self._compute = self.backend.compiled(self._computed)
        else:
            self._root = cast(Any, parallelize(model, mesh))
            # Before the first forward pass slices that need padding move, and masters would be copies from then on.
            self._root._get_fsdp_state()._lazy_init()
            self._compute = self._computed
        parameters = dict(model.named_parameters())
        self._parameters: list[Tensor] = [parameters[name] for name in self.names]
        fused = fused_parts(model)
        self._fused = [fused.get(name, 1) for name in self.names]
        with torch.no_grad():
            self.masters = [local_shard(one) for one in self._parameters]
        self.weights = self.masters
        self._squares = step_program(self.backend, _sum_of_squares)
        self._added = step_program(self.backend, _added)
        self._sums: list[Tensor] = []  # gradients of the micro-batches so far, where every rank has the whole model
        self._norms: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            self._norms.setdefault(shard_groups(parameter), []).append(index)

    def publish(self) -> None:
        """Units gather their weights from the masters as they are used."""

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """All ranks call it."""
        context = self.backend.autocast(torch.bfloat16) if self._precision == "autocast" else nullcontext()
        with context, collective_errors("computing", mixed=True):
            return self._compute(inputs_of(batch))

    def _computed(self, inputs: RelevanceInputs | GroupInputs) -> RelevanceOutputs:
        outputs: RelevanceOutputs
        if self._root is not None or self._precision != "bf16":
            outputs = self.model(inputs)
        else:  # what the policy of shards does elsewhere
            weights = {name: one.to(torch.bfloat16) for name, one in self.model.named_parameters()}
            outputs = torch.func.functional_call(self.model, weights, (inputs,))
        return outputs

    def _forget_whole(self) -> None:
        """What is gathered still, after a forward pass without a backward pass, is of other weights."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        """By master, of all micro-batches of the step, at the last of them.

        Where ranks hold slices each micro-batch is reduced to them, else they would hold whole gradients in between;
        replicas meet at the last one.
        """
        if self._root is None:  # as programs: eager additions would be of any length
            grads = list(torch.autograd.grad(loss, self._parameters, materialize_grads=True))
            sums = self._added(self._sums, grads) if self._sums else grads
            self._sums = [] if is_last else sums
            return sums if is_last else []
        if self.mesh.layout.shard_size == 1:
            self._root.set_requires_gradient_sync(is_last)
        else:
            self._root.set_requires_all_reduce(is_last)
        with collective_errors("computing gradients", mixed=True):
            loss.backward()  # type: ignore[no-untyped-call]
        if not is_last:
            return []
        found = []
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            found.append(torch.zeros_like(master) if parameter.grad is None else local_shard(parameter.grad))
            parameter.grad = None
        return found

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        layout = self.mesh.layout
        if layout.world_size == 1:
            return tensors
        with collective_errors("gathering embeddings", mixed=True):
            every = self.backend.gather(tensors, self._host_gather)
        if layout.tensor_size == 1:
            return every
        return [torch.cat(rows.chunk(layout.world_size)[:: layout.tensor_size]) for rows in every]

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Reduce the loss; gradients of shards are reduced already, those of whole tensors are not."""
        pairs = zip(sums, self._parameters, strict=False)
        outside = [grad for grad, parameter in pairs if not isinstance(parameter, DTensor)]
        if self.mesh.layout.world_size > 1:
            with collective_errors("reducing the loss", mixed=True):
                self.backend.reduce([*outside, sums[-1]], self._host_mean)
        return sums

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Each slice counts once."""
        total = torch.zeros((), dtype=torch.float32, device=self.backend.device)
        with collective_errors("summing gradients", mixed=True):
            for groups, indices in self._norms.items():
                squares = self._squares([grads[index] for index in indices])
                for group in groups:
                    dist.all_reduce(squares, group=group)
                total += squares
        return torch.sqrt(total)

    @torch.no_grad()
    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """In host memory of rank 0, nothing on the others. One tensor at a time is whole on the device."""
        weights: dict[str, Tensor] = {}
        parts: dict[str, list[Tensor]] = {}
        with collective_errors("gathering a checkpoint", mixed=True):
            for index, tensor in enumerate(self.masters):
                if (full := self._whole(index, tensor)) is not None:
                    weights[self.names[index]] = full
            for name, tensors in state.items():
                indices = self._indices(name, len(tensors))
                for index, tensor in zip(indices, tensors, strict=True):
                    if index < 0:
                        packed = [tensor.cpu().clone()] if self.mesh.layout.rank == 0 else []
                    else:
                        full = self._whole(index, tensor)
                        layout = FlatLayout((self.parts[index],))
                        packed = [] if full is None else layout.pack({self.names[index]: full})
                    if packed:
                        parts.setdefault(name, []).extend(packed)
        return weights, {name: torch.cat(tensors) for name, tensors in parts.items()}

    def _indices(self, name: str, count: int) -> list[int]:
        """Which masters the tensors of an optimizer belong to, by their name in a checkpoint; -1: to none of them."""
        decayed = KINDS.get(name.rpartition(".")[2])
        return [i for i, part in enumerate(self.parts) if part.decayed == decayed] or [-1] * count

    def _whole(self, index: int, tensor: Tensor) -> Tensor | None:
        """In host memory, of a slice [of parameter `index`]; on rank 0 alone."""
        parameter = self._parameters[index]
        if isinstance(parameter, DTensor):
            carrier = torch.empty_like(parameter, requires_grad=False)
            local_shard(carrier).copy_(tensor)
            tensor = carrier
        full = full_cpu_tensor(tensor, self._fused[index])
        return full.clone() if self.mesh.layout.rank == 0 else None

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None, state: State) -> None:
        """Of tensors that are mapped from files each rank reads its slices."""
        for index, name in enumerate(self.names):
            self._fill(index, self.masters[index], weights[name])
        for name, vector in (saved or {}).items():
            indices = self._indices(name, len(state[name]))
            sizes = [self.parts[i].size if i >= 0 else one.numel() for i, one in zip(indices, state[name], strict=True)]
            pieces = split_saved(name, vector, sizes)
            for index, ours, incoming in zip(indices, state[name], pieces, strict=True):
                if index < 0:
                    ours.copy_(incoming)
                else:
                    unpacked = FlatLayout((self.parts[index],)).unpack([incoming])
                    self._fill(index, ours, unpacked[self.names[index]])
        self._forget_whole()
        self.backend.synchronise()

    def _fill(self, index: int, ours: Tensor, full: Tensor) -> None:
        """This rank's part of a whole parameter, or of one of its moments. Nothing else of it is read."""
        parameter = self._parameters[index]
        if not isinstance(parameter, DTensor):
            ours.copy_(full)
            return
        carrier = torch.empty_like(parameter, requires_grad=False)
        load_shard(carrier, full, self._fused[index])
        ours.copy_(local_shard(carrier))


def _added(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    return [total + grad for total, grad in zip(sums, grads, strict=True)]


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([(tensor * tensor).sum() for tensor in tensors]).sum()


_ONE_VECTOR_MIB = 2.0**40
