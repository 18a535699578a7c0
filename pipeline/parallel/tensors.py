"""What lies in shards: norms of it, whole tensors one at a time, and slices of files."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pipeline.parallel.tensor_plan import interleaved


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_grad_norm(model: nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients, in place, so that their norm is at most `max_norm`; the norm before, fp32, on every rank.

    `model`: or those of its parameters that count. That of torch.nn.utils fails where some parameters are split over
    tensor peers and some are not (pytorch issue 180346). Nothing waits for the device. After the last backward pass of
    a step.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    parameters = [*(model.parameters() if isinstance(model, nn.Module) else model)]
    for parameter in parameters:
        if parameter.grad is not None:
            by_groups.setdefault(shard_groups(parameter.grad), []).append(local_shard(parameter.grad))
    total = torch.zeros((), device=parameters[0].device)
    for groups, grads in by_groups.items():
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        squares = torch.stack(norms).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grads in by_groups.values():
        for grad in grads:
            grad.mul_(scale)
    return norm


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups over which it is cut; of one rank none. Over the others there are copies of it."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    # A second cut of one dimension is no Shard any more (torch 2.14).
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1)


def plain_entries(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name in a file, tensor as it is spread), a tied one once, under its first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            first.setdefault(id(value), (name, value))
    return list(first.values())


@torch.no_grad()
def full_cpu_tensor(tensor: Tensor, parts: int = 1) -> Tensor:
    """All of it, in host memory, on every rank; the rows of fused matrices one part after the other."""
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
    return interleaved(full, full.shape[0] // parts) if parts > 1 else full


Slices = tuple[slice, ...]


@torch.no_grad()
def load_shard(tensor: Tensor, read: Callable[[Slices], Tensor], parts: int = 1) -> None:
    """Put this rank's part in place; `read` gives slices of the whole, as a file has it, and of nothing else."""
    target = local_shard(tensor)
    if not target.numel():
        return
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        # Private, but the one that knows the order of shards over two axes (torch 2.9 to 2.14).
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    rows, *others = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)] or [slice(0)]
    if parts == 1:
        target.copy_(read((rows, *others) if tensor.ndim else ()))
        return
    height = tensor.shape[0] // parts
    for part in range(parts):  # row n of it lies at n * parts + part
        first, last = (-((part - end) // parts) for end in (rows.start, rows.stop))
        if first < last:
            piece = read((slice(part * height + first, part * height + last), *others))
            target[first * parts + part - rows.start :: parts].copy_(piece)
