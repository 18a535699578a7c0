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
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import find_units, parallelize
from pipeline.parallel.process_group import collective_errors
from pipeline.parallel.strategies import KINDS, FlatVector, ParallelStrategy, Precision, State
from pipeline.parallel.strategies.flat import FlatLayout, split_saved
from pipeline.parallel.tensors import full_cpu_tensor, fused_parts, load_shard, local_shard, shard_groups


class FsdpStrategy(ParallelStrategy):
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
        """Take the model over. `host_*`: over all ranks, of CPU tensors."""
        self.mesh, self.backend = mesh, mesh.backend
        self._precision: Precision = precision
        self._host_mean, self._host_gather = host_mean, host_gather
        self.template = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
        flat = FlatLayout.of(model, _ONE_VECTOR_MIB)
        self.parts = [
            FlatVector(chunk.decayed, chunk.encoder, (name,), (shape,), (shape.numel(),))
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
        """Do nothing: units gather their weights from the masters as they are used."""

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Compute scores and embeddings; all ranks call it."""
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

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        """Return that of all micro-batches of the step, by master, at the last of them.

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
        """Sum the squares of each slice once."""
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
        """Copy to host memory of rank 0, nothing on the others. One tensor at a time is whole on the device."""
        weights: dict[str, Tensor] = {}
        vectors: dict[str, list[Tensor]] = {}
        is_main = self.mesh.layout.rank == 0
        with collective_errors("gathering a checkpoint", mixed=True):
            for number, master in enumerate(self.masters):
                full = self._whole(number, master)
                if is_main:
                    weights[self.names[number]] = full.clone()
            for name, tensors in state.items():
                for index, tensor in zip(self._indices(name), tensors, strict=True):
                    full = tensor.cpu() if index is None else self._flat(index, self._whole(index, tensor))
                    if is_main:
                        vectors.setdefault(name, []).append(full.clone())
        return weights, {name: torch.cat(tensors) for name, tensors in vectors.items()}

    def _indices(self, name: str) -> list[int | None]:
        """Return which masters the tensors of an optimizer belong to, by their name in a checkpoint; None: to none."""
        decayed = KINDS.get(name.rpartition(".")[2])
        return [index for index, part in enumerate(self.parts) if part.decayed == decayed] or [None]

    def _flat(self, index: int, full: Tensor) -> Tensor:
        return FlatLayout((self.parts[index],)).pack({self.names[index]: full})[0]

    def _carrier(self, index: int) -> Tensor:
        return torch.empty_like(self._parameters[index], requires_grad=False)

    def _whole(self, index: int, tensor: Tensor) -> Tensor:
        """Gather the slices of parameter `index`, or of one of its moments, in host memory."""
        carrier = self._carrier(index)
        local_shard(carrier).copy_(tensor)
        return full_cpu_tensor(carrier, self._fused[index])

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None, state: State) -> None:
        """Put weights and state in place. Of tensors that are mapped from files each rank reads its slices."""
        for number, name in enumerate(self.names):
            self._fill(number, self.masters[number], weights[name])
        for name, vector in (saved or {}).items():
            indices, tensors = self._indices(name), state[name]
            sizes = [one.numel() if i is None else self.parts[i].size for i, one in zip(indices, tensors, strict=True)]
            for index, ours, incoming in zip(indices, tensors, split_saved(name, vector, sizes), strict=True):
                if index is None:
                    ours.copy_(incoming)
                else:
                    unpacked = FlatLayout((self.parts[index],)).unpack([incoming])
                    self._fill(index, ours, unpacked[self.names[index]])
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what is gathered still, after a forward pass alone, is of other weights
        self.backend.synchronise()

    def _fill(self, index: int, ours: Tensor, full: Tensor) -> None:
        """Copy this rank's part of a whole parameter, or of one of its moments. Nothing else of it is read."""
        carrier = self._carrier(index)
        load_shard(carrier, full, self._fused[index])
        ours.copy_(local_shard(carrier))


def _added(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    return [total + grad for total, grad in zip(sums, grads, strict=True)]


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([(tensor * tensor).sum() for tensor in tensors]).sum()


_ONE_VECTOR_MIB = 2.0**40
