"""A strategy that shards each unit with FSDP2 and supports tensor parallelism, recomputation and offloading.

If the shard degree is 1, the model is replicated instead. Each master is this rank's shard of a parameter. Checkpoints
use the same format as the flat strategy, which consists of full named tensors and moments in the order of FlatLayout.
A run can therefore resume with a different strategy.
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
    """Strategy that shards each parameter of a module over the ranks of a mesh."""

    def __init__(
        self,
        model: RelevanceModel,
        mesh: Mesh,
        *,
        precision: Precision,
        host_mean: HostMean = list,
        host_gather: HostGather = list,
    ) -> None:
        """Shard `model` in place. `host_mean`, `host_gather`: collectives for CPU tensors over all ranks."""
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
        self._root: Any = None  # the FSDPModule, or None if every rank has the full model
        if self.backend.compiles_steps and mesh.layout.shard_size == mesh.layout.tensor_size == 1:
            # Every rank has the full model, so the ranks only communicate once per step.
            if mesh.plan.recompute == "units":
                recompute_units([unit for _, unit in find_units(model)])
            model.to(self.backend.device)
            self._compute = self.backend.compiled(self._run_model)
        else:
            self._root = cast(Any, parallelize(model, mesh))
            # Initialize FSDP now. Otherwise, the first forward pass would reallocate any shards that need padding, and
            # the masters would no longer share their storage.
            self._root._get_fsdp_state()._lazy_init()
            self._compute = self._run_model
        parameters = dict(model.named_parameters())
        self._parameters: list[Tensor] = [parameters[name] for name in self.names]
        fused = fused_parts(model)
        self._fused = [fused.get(name, 1) for name in self.names]
        with torch.no_grad():
            self.masters = [local_shard(parameter) for parameter in self._parameters]
        self.weights = self.masters
        self._sum_of_squares = step_program(self.backend, _sum_of_squares)
        self._add = step_program(self.backend, _add)
        self._sums: list[Tensor] = []  # accumulated gradients, if every rank has the full model
        self._norms: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            self._norms.setdefault(shard_groups(parameter), []).append(index)

    def publish(self) -> None:
        """Do nothing, because each unit gathers its weights from the masters before it runs."""

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Compute scores and embeddings. This must be called on all ranks."""
        context = self.backend.autocast(torch.bfloat16) if self._precision == "autocast" else nullcontext()
        with context, collective_errors("computing", mixed=True):
            return self._compute(inputs_of(batch))

    def _run_model(self, inputs: RelevanceInputs | GroupInputs) -> RelevanceOutputs:
        outputs: RelevanceOutputs
        if self._root is not None or self._precision != "bf16":
            outputs = self.model(inputs)
        else:  # without FSDP, no mixed precision policy casts the weights
            weights = {name: parameter.to(torch.bfloat16) for name, parameter in self.model.named_parameters()}
            outputs = torch.func.functional_call(self.model, weights, (inputs,))
        return outputs

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        """Accumulate the gradient of a micro-batch and return the sums, one per master, after the last one.

        Sharded gradients are reduce-scattered in every micro-batch, since ranks would otherwise have to keep the full
        gradients in between. The all-reduce over replicas only runs in the last micro-batch.
        """
        if self._root is None:  # use a step program, since eager additions would trigger a compile for each shape
            grads = list(torch.autograd.grad(loss, self._parameters, materialize_grads=True))
            sums = self._add(self._sums, grads) if self._sums else grads
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
        grads = []
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            grads.append(torch.zeros_like(master) if parameter.grad is None else local_shard(parameter.grad))
            parameter.grad = None
        return grads

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        layout = self.mesh.layout
        if layout.world_size == 1:
            return tensors
        with collective_errors("gathering embeddings", mixed=True):
            gathered = self.backend.gather(tensors, self._host_gather)
        if layout.tensor_size == 1:
            return gathered
        return [torch.cat(rows.chunk(layout.world_size)[:: layout.tensor_size]) for rows in gathered]

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Average the loss and the gradients of unsharded parameters. FSDP has already reduced the other gradients."""
        pairs = zip(sums, self._parameters, strict=False)
        unsharded = [grad for grad, parameter in pairs if not isinstance(parameter, DTensor)]
        if self.mesh.layout.world_size > 1:
            with collective_errors("reducing the loss", mixed=True):
                self.backend.reduce([*unsharded, sums[-1]], self._host_mean)
        return sums

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Compute the norm from the sums of squares of all shards, counting each shard once."""
        total = torch.zeros((), dtype=torch.float32, device=self.backend.device)
        with collective_errors("summing gradients", mixed=True):
            for groups, indices in self._norms.items():
                squares = self._sum_of_squares([grads[index] for index in indices])
                for group in groups:
                    dist.all_reduce(squares, group=group)
                total += squares
        return torch.sqrt(total)

    @torch.no_grad()
    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gather weights and optimizer state in host memory on rank 0, one full tensor at a time.

        Returns empty dictionaries on the other ranks.
        """
        weights: dict[str, Tensor] = {}
        vectors: dict[str, list[Tensor]] = {}
        is_main = self.mesh.layout.rank == 0
        with collective_errors("gathering a checkpoint", mixed=True):
            for number, master in enumerate(self.masters):
                full = self._full(number, master)
                if is_main:
                    weights[self.names[number]] = full.clone()
            for name, tensors in state.items():
                for index, tensor in zip(self._indices(name), tensors, strict=True):
                    full = tensor.cpu() if index is None else self._flat(index, self._full(index, tensor))
                    if is_main:
                        vectors.setdefault(name, []).append(full.clone())
        return weights, {name: torch.cat(tensors) for name, tensors in vectors.items()}

    def _indices(self, name: str) -> list[int | None]:
        """Return the indices of the masters that a vector of the checkpoint covers.

        Returns [None] if the vector is a value that does not belong to any master.
        """
        decayed = KINDS.get(name.rpartition(".")[2])
        return [index for index, part in enumerate(self.parts) if part.decayed == decayed] or [None]

    def _flat(self, index: int, full: Tensor) -> Tensor:
        return FlatLayout((self.parts[index],)).pack({self.names[index]: full})[0]

    def _empty_like(self, index: int) -> Tensor:
        return torch.empty_like(self._parameters[index], requires_grad=False)

    def _full(self, index: int, tensor: Tensor) -> Tensor:
        """Gather the full tensor of parameter `index`, or of one of its moments, in host memory."""
        sharded = self._empty_like(index)
        local_shard(sharded).copy_(tensor)
        return full_cpu_tensor(sharded, self._fused[index])

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None, state: State) -> None:
        """Load weights and optimizer state. If tensors are memory-mapped, each rank only reads its own shards."""
        for number, name in enumerate(self.names):
            self._load(number, self.masters[number], weights[name])
        for name, vector in (saved or {}).items():
            indices, tensors = self._indices(name), state[name]
            sizes = [t.numel() if i is None else self.parts[i].size for i, t in zip(indices, tensors, strict=True)]
            for index, target, source in zip(indices, tensors, split_saved(name, vector, sizes), strict=True):
                if index is None:
                    target.copy_(source)
                else:
                    unpacked = FlatLayout((self.parts[index],)).unpack([source])
                    self._load(index, target, unpacked[self.names[index]])
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # parameters that are still gathered from an earlier forward pass are outdated
        self.backend.synchronise()

    def _load(self, index: int, target: Tensor, full: Tensor) -> None:
        """Copy this rank's shard of a full parameter, or of one of its moments, without reading the other shards."""
        sharded = self._empty_like(index)
        load_shard(sharded, full, self._fused[index])
        target.copy_(local_shard(sharded))


def _add(sums: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    return [total + grad for total, grad in zip(sums, grads, strict=True)]


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([(tensor * tensor).sum() for tensor in tensors]).sum()


_ONE_VECTOR_MIB = 2.0**40
