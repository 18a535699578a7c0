"""Tensors in shards: their norm, the whole of one, a rank's part of one, and what a script must not do with them."""

import copyreg
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipeline.core.errors import ConfigError
from pipeline.parallel.tensor_plan import interleaved


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of several ranks over which a tensor is cut. Over the others there are copies of it."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    # A second cut of one dimension is no Shard any more (torch 2.14).
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1)


@torch.no_grad()
def clip_grad_norm(model: nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients, in place, so that their norm is at most `max_norm`. Return the norm before, fp32.

    `model`: or those of its parameters that count. That of torch.nn.utils fails where some parameters are split over
    tensor peers and some are not (pytorch issue 180346). Nothing waits for the device. After the last backward pass of
    a step, on every rank.
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


@torch.no_grad()
def full_cpu_tensor(tensor: Tensor, parts: int = 1) -> Tensor:
    """Return the whole tensor in host memory, on every rank; the rows of fused matrices one part after the other."""
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
    return interleaved(full, full.shape[0] // parts) if parts > 1 else full


@torch.no_grad()
def load_shard(tensor: Tensor, full: Tensor, parts: int = 1) -> None:
    """Copy this rank's part of `full` into `tensor`. Of a tensor that is mapped from a file nothing else is read.

    `parts`: of so many matrices `tensor` is fused, with its rows interleaved; `full` has one after the other.
    """
    target = local_shard(tensor)
    if not target.numel():
        return
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        # Private, but the one that knows the order of shards over two axes (torch 2.9 to 2.14).
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    rows, *others = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)] or [slice(None)]
    if parts > 1:
        numbers = torch.arange(tensor.shape[0])[rows]
        target.copy_(full[numbers % parts * (tensor.shape[0] // parts) + numbers // parts][(slice(None), *others)])
    else:
        target.copy_(full[(rows, *others)] if tensor.ndim else full)


# What a script does with a spread model where each rank would get its own part for the whole: refused, or warned of.
# A tensor in shards, or a norm of one, is a DTensor; torch lets a script read the local number of it without a word.

LIMITS = "docs/parallel.md, Limits"
_TORCH = str(Path(torch.__file__).parent)
_OF_WHOLE = (torch.optim.Adafactor, torch.optim.Rprop)
"""Wrong numbers and an error of torch where parameters are DTensors, also over a group of one (torch 2.9 to 2.14)."""
_stepping: list[str] = []
"""The optimizer at work, by the name of its class."""
_warned: set[str] = set()
_is_watching = False


def watch_tensors() -> None:
    """Watch the tensors and optimizers of this process, once."""
    global _is_watching
    if not _is_watching:
        # The one place through which item(), float() and bool() of every DTensor go; no public hook is there.
        DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _read_number
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(lambda *_: _stepping.clear())
        copyreg.pickle(DTensor, _pickled)
    _is_watching = True


def _read_number(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Read the local number, as torch does, with a warning at the first one that is not that of the whole.

    Raises ConfigError within the step of an optimizer.
    """
    tensor: Any = args[0]
    if shard_groups(tensor):
        if _stepping:
            raise _no_optimizer(_stepping.pop(), "reads numbers of a rank's own part, so ranks would take other steps")
        _warn_once(
            "a number was read from a tensor that is spread over ranks: it is that of this rank's part",
            "tensor.full_tensor().item() on all ranks, and trn.clip_grad_norm for the norm of gradients",
        )
    with torch.no_grad():
        return op_call(tensor.to_local())


def _pickled(tensor: DTensor) -> Any:
    """Pickle a DTensor as torch does it, with a warning."""
    if shard_groups(tensor):
        _warn_once(
            "a tensor that is spread over ranks was pickled: the file has this rank's part of it",
            "trn.save(folder, model, optimizer) on all ranks, which writes whole tensors",
        )
    return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def _warn_once(seen: str, way_out: str) -> None:
    """Print a warning on rank 0, with the line of the script."""
    if seen in _warned or dist.get_rank() > 0:
        return
    _warned.add(seen)
    frames = [one for one in traceback.extract_stack() if not one.filename.startswith((_TORCH, __file__, "<"))]
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    print(f"trnpipe: {where}{seen}\n  next: {way_out}; {LIMITS}", file=sys.stderr, flush=True)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    name = type(optimizer).__name__
    _stepping[:] = [name]  # one that has raised left its name here
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, _OF_WHOLE) and any(isinstance(one, DTensor) for one in parameters):
        raise _no_optimizer(name, "takes parameters to be whole")


def _no_optimizer(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"optimizer {name} of a model that trn.transform has spread: it {why}",
        expected="one that updates each element by itself, such as AdamW, or SGD",
        next_command=f"another optimizer; or DistributedDataParallel in place of transform; {LIMITS}",
    )
