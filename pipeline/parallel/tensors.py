"""Utilities for sharded tensors.

These include the tensor parallel styles, conversion between shards and full tensors, gradient clipping, and checks that
detect incorrect uses of DTensors in user scripts.
"""

import copyreg
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipeline.core.errors import ConfigError
from pipeline.core.layout import Layout
from pipeline.model.encoder import BertEncoder
from pipeline.model.relevance import RelevanceModel

Style = str | ParallelStyle
"""A ParallelStyle from torch.distributed.tensor.parallel, or its name in Hugging Face's tensor parallel plans."""
TensorPlan = Mapping[str, Style]
"""Parallel styles keyed by module name, where `*` matches one component of the name.

For example: `{"layers.*.up": "colwise", "layers.*.down": "rowwise"}`.
"""

FUSED_PARTS = "fused_parts"
"""Attribute that marks modules with interleaved rows, where row n of part p is stored at n * parts + p."""
_FUSED_NAMES = re.compile(r"qkv|query_key_value|c_attn|in_proj|gate_up|up_gate", re.IGNORECASE)


class FusedColwise(ColwiseParallel):
    """Column-wise style for a linear layer that fuses several matrices of the same size, such as q, k and v.

    The output of the layer must be split by `chunk(parts, -1)`. The rows of the weight are interleaved, so that each
    rank gets a slice of every matrix, but are saved in their original order. Set `parts` to 1 for layers whose rows are
    already grouped by head (as in GPT-NeoX), in which case no rows are reordered.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in module.parameters():
            if not parameter.is_meta:
                parameter.data = interleave_rows(parameter.data, self.parts)
        setattr(module, FUSED_PARTS, self.parts)
        parallel: nn.Module = super()._apply(module, device_mesh)
        # This hook runs after that of ColwiseParallel, so it reorders the columns of this rank from [..., N * parts] to
        # [..., parts * N].
        parallel.register_forward_hook(
            lambda _module, _inputs, columns: columns.unflatten(-1, (-1, self.parts)).transpose(-1, -2).flatten(-2)
        )
        return parallel


def fused_parts(model: nn.Module) -> dict[str, int]:
    """Return a mapping from the names of all parameters with interleaved rows to their number of parts."""
    modules = [(name, module, getattr(module, FUSED_PARTS, 1)) for name, module in model.named_modules()]
    return {
        f"{name}.{key}": parts for name, module, parts in modules if parts > 1 for key, _ in module.named_parameters()
    }


def interleave_rows(rows: Tensor, parts: int) -> Tensor:
    """Reorder rows from [parts * N, ...], where parts are consecutive, to [N * parts, ...]."""
    return rows.reshape(parts, rows.shape[0] // parts, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # Used for norms that are applied to each head, with shape [B, T, H, E]. Gradients need to be summed, because each
    # rank only has some of the heads.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
_RELEVANCE_PLAN: TensorPlan = {
    "encoder.layers.*.qkv": FusedColwise(3),
    "encoder.layers.*.attention_output": "rowwise",
    "encoder.layers.*.intermediate": "colwise",
    "encoder.layers.*.output": "rowwise",
}


def tensor_styles(model: nn.Module, plan: TensorPlan | None, layout: Layout) -> list[tuple[str, ParallelStyle]]:
    """Resolve a tensor parallel plan, which defaults to the model's own plan, to (module name, style) pairs.

    Raises ConfigError if there is no plan, if a name or style is unknown, or if a layer can't be divided evenly.
    """
    styles = []
    for pattern, style in (plan or _default_plan(model, layout.tensor_size)).items():
        matches = [name for name, _ in model.named_modules() if _matches(name, pattern)]
        if not matches:
            raise ConfigError(
                f"tensor plan: no module of {type(model).__name__} matches {pattern!r}",
                expected="names as in model.named_modules(), where * matches one component of a name",
            )
        parallel_style = _style(pattern, style)
        for name in matches:
            _check_split(model, name, parallel_style, layout)
        styles += [(name, parallel_style) for name in matches]
    return styles


def split(model: nn.Module, styles: list[tuple[str, ParallelStyle]], mesh: DeviceMesh) -> None:
    """Split modules over a tensor parallel mesh in place.

    Every rank must have the full weights, unless the weights are on the meta device.
    """
    for name, style in styles:
        module = model.get_submodule(name)
        requires_grad = {key: parameter.requires_grad for key, parameter in module.named_parameters()}
        parallelize_module(module, mesh, style, src_data_rank=None)
        for key, parameter in module.named_parameters():
            parameter.requires_grad_(requires_grad[key])  # styles create new parameters, which always require gradients


def _default_plan(model: nn.Module, degree: int) -> TensorPlan:
    """Return the tensor parallel plan of a RelevanceModel or a Hugging Face model.

    Raises ConfigError if the model has no plan, or if attention heads can't be divided evenly between ranks.
    """
    config: Any = getattr(model, "config", None)
    if isinstance(model, RelevanceModel):
        if not isinstance(model.encoder, BertEncoder):
            raise ConfigError(
                f"{type(model.encoder).__name__} does not support tensor_degree above 1",
                expected="model.architecture bert, which is the only one that supports tensor parallelism",
                next_command="--train.parallel.tensor-degree 1",
            )
        plan = _RELEVANCE_PLAN
        heads: list[Any] = [model.encoder.layers[0].num_heads]
    elif hf_plan := getattr(config, "base_model_tp_plan", None):
        prefix = str(getattr(model, "base_model_prefix", ""))
        prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        plan = {prefix + pattern: style for pattern, style in hf_plan.items()}
        heads = [getattr(config, name, 0) or 0 for name in ("num_attention_heads", "num_key_value_heads")]
    else:
        raise ConfigError(
            f"tensor_degree above 1 requires a tensor plan, but {type(model).__name__} doesn't have one",
            expected="a model whose configuration has base_model_tp_plan, or the argument tensor_plan",
            next_command='transform(..., tensor_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})',
        )
    if any(count % degree for count in heads):
        raise _indivisible(f"tensor_degree {degree}", f"the number of heads ({', '.join(map(str, heads))})")
    return plan


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _style(pattern: str, style: Style) -> ParallelStyle:
    if isinstance(style, str):
        if style not in _STYLES:
            raise ConfigError(
                f"tensor plan: {pattern!r} has the unknown style {style!r}",
                expected=f"one of {', '.join(_STYLES)}, or a ParallelStyle of torch.distributed.tensor.parallel",
            )
        style = _STYLES[style]()
    if type(style) is ColwiseParallel and _FUSED_NAMES.search(pattern.rsplit(".", 1)[-1]):
        raise ConfigError(
            f"tensor plan: {pattern!r} is colwise, but its name suggests that it fuses several matrices, which would"
            " then be assigned to different ranks",
            expected="FusedColwise(parts) if the output is split by chunk(parts, -1), or with parts 1 if split by head",
            next_command="from pipeline.parallel.tensors import FusedColwise",
        )
    return style


def _check_split(model: nn.Module, name: str, style: ParallelStyle, layout: Layout) -> None:
    """Raise ConfigError if a module has tied parameters or its size is not divisible by the parallel degrees."""
    module = model.get_submodule(name)
    names = Counter(map(id, dict(model.named_parameters(remove_duplicate=False)).values()))
    if any(names[id(parameter)] > 1 for parameter in module.parameters()):
        raise ConfigError(
            f"tensor plan: {name!r} shares a parameter with another module, which would not be split",
            expected="modules without tied parameters",
            next_command=f"leave {name!r} out of tensor_plan",
        )
    if not isinstance(module, nn.Linear):
        return
    degree = f"tensor_degree {layout.tensor_size}"
    if isinstance(style, RowwiseParallel) and module.in_features % layout.tensor_size:
        raise _indivisible(degree, f"{module.in_features} inputs of {name!r}")
    if isinstance(style, ColwiseParallel):
        outputs = module.out_features // (style.parts if isinstance(style, FusedColwise) else 1)
        if outputs % layout.tensor_size:
            raise _indivisible(degree, f"{outputs} outputs of {name!r}")
        # If rows are sharded twice and unevenly, torch gathers them in the wrong order (2.9).
        if module.out_features % (layout.tensor_size * layout.shard_size):
            raise _indivisible(
                f"shard_degree {layout.shard_size} by {degree}", f"{module.out_features} outputs of {name!r}"
            )


def _indivisible(degree: str, size: str) -> ConfigError:
    return ConfigError(
        f"{degree} does not divide {size}", expected="a degree that divides it", next_command="change the degree"
    )


# Conversion between shards and full tensors, and gradient clipping.


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups that a tensor is sharded (not replicated) over, if they have more than one rank."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    # Don't check for Shard, since torch 2.14 uses a different placement for a dimension that is sharded twice.
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1)


@torch.no_grad()
def clip_grad_norm(model: nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients in place so that their global norm is at most `max_norm`.

    This must be called on every rank after the last backward pass of a step. It doesn't synchronize with the device.
    Use this instead of `torch.nn.utils.clip_grad_norm_`, which fails if only some of the parameters are tensor parallel
    (pytorch issue 180346).

    `model`: a module, or the parameters whose gradients to clip. Returns the norm before clipping as an fp32 scalar.
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
    """Gather a tensor in host memory on every rank, restoring the original row order if it has `parts` fused parts."""
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
    return interleave_rows(full, full.shape[0] // parts) if parts > 1 else full


@torch.no_grad()
def load_shard(tensor: Tensor, full: Tensor, parts: int = 1) -> None:
    """Copy this rank's shard of `full` into `tensor`. If `full` is memory-mapped, only this shard is read.

    `parts`: number of fused matrices. Their rows are interleaved in `tensor`, but not in `full`.
    """
    target = local_shard(tensor)
    if not target.numel():
        return
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        # This is a private function, but no public one handles the order of shards over two axes (torch 2.9 to 2.14).
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    rows, *others = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)] or [slice(None)]
    if parts > 1:
        numbers = torch.arange(tensor.shape[0])[rows]
        target.copy_(full[numbers % parts * (tensor.shape[0] // parts) + numbers // parts][(slice(None), *others)])
    else:
        target.copy_(full[(rows, *others)] if tensor.ndim else full)


# Detection of incorrect uses of sharded tensors in user scripts. A sharded tensor, or the norm of one, is a DTensor,
# and torch silently allows scripts to read its local value as if it were the full value.

LIMITS = "docs/parallel.md, Limits"
_TORCH = str(Path(torch.__file__).parent)
_UNSUPPORTED_OPTIMIZERS = (torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers that fail or compute wrong values for DTensors, even if the group has one rank (torch 2.9 to 2.14)."""
_stepping: list[str] = []
"""Class name of the optimizer that is currently running a step, if any."""
_warned: set[str] = set()
_is_watching = False


def watch_tensors() -> None:
    """Install the checks for DTensors and optimizers in this process, if they are not installed yet."""
    global _is_watching
    if not _is_watching:
        # All calls of item(), float() and bool() on a DTensor are dispatched here. There is no public hook.
        DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _read_scalar
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(lambda *_: _stepping.clear())
        copyreg.pickle(DTensor, _pickle_with_warning)
    _is_watching = True


def _read_scalar(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Read the local value of a DTensor as torch does, but print a warning if the tensor is sharded.

    Raises ConfigError if this happens in an optimizer step.
    """
    tensor: Any = args[0]
    if shard_groups(tensor):
        if _stepping:
            raise _optimizer_error(
                _stepping.pop(), "reads values from local shards, so the updates would differ by rank"
            )
        _warn_once(
            "a value was read from a sharded tensor, but it only reflects this rank's shard",
            "call tensor.full_tensor().item() on all ranks, or trn.clip_grad_norm for the gradient norm",
        )
    with torch.no_grad():
        return op_call(tensor.to_local())


def _pickle_with_warning(tensor: DTensor) -> Any:
    if shard_groups(tensor):
        _warn_once(
            "a sharded tensor was pickled, but the file only contains this rank's shard",
            "call trn.save(folder, model, optimizer) on all ranks, which writes full tensors",
        )
    return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def _warn_once(message: str, next_command: str) -> None:
    """Print a warning with the current line of the user script, but only on rank 0 and only once per message."""
    if message in _warned or dist.get_rank() > 0:
        return
    _warned.add(message)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((_TORCH, __file__, "<"))]
    origin = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    print(f"trnpipe: {origin}{message}\n  next: {next_command}; {LIMITS}", file=sys.stderr, flush=True)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check the optimizer, and pass it a closure during which values of shards may be read, because it is the user's.

    `args`: the optimizer, and the closure unless `kwargs` has it.
    """
    name = type(optimizer).__name__
    _stepping[:] = [name]  # also replaces the name of an optimizer whose last step raised an error
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, _UNSUPPORTED_OPTIMIZERS) and any(isinstance(tensor, DTensor) for tensor in parameters):
        raise _optimizer_error(name, "requires unsharded parameters")

    def outside(closure: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            _stepping.clear()
            loss = closure(*args, **kwargs)
            _stepping[:] = [name]
            return loss

        return call

    if len(args) > 1 and callable(args[1]):
        args = (args[0], outside(args[1]), *args[2:])
    if callable(kwargs.get("closure")):
        kwargs = {**kwargs, "closure": outside(kwargs["closure"])}
    return args, kwargs


def _optimizer_error(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"optimizer {name} cannot be used with a model that was sharded by trn.transform, because it {why}",
        expected="an optimizer that updates each element independently, such as AdamW or SGD",
        next_command=f"use a different optimizer, or DistributedDataParallel instead of transform; see {LIMITS}",
    )
