"""Tensors over ranks: how the matrices of layers are split over tensor peers, parts and wholes, and the norm of all.

How they are split: by the model, its configuration, or its user. Last, what a script must not do with a spread tensor.
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
"""An object of torch.distributed.tensor.parallel, or a name as in Hugging Face's plans."""
TensorPlan = Mapping[str, Style]
"""Styles by name of a module, `*` for one part of it: {"layers.*.up": "colwise", "layers.*.down": "rowwise"}."""

FUSED_PARTS = "fused_parts"
"""Attribute of a module: its rows lie interleaved, row n of part p at n * parts + p, not one part after the other."""
_FUSED_NAMES = re.compile(r"qkv|query_key_value|c_attn|in_proj|gate_up|up_gate", re.IGNORECASE)


class FusedColwise(ColwiseParallel):
    """A linear layer of several equal matrices, one below the other, whose output is cut by `chunk(parts, -1)`.

    Rows are interleaved, so that a rank has its share of each part; files have them as they were. `parts` 1: the rows
    of what belongs together are neighbours already (as in GPT-NeoX), and nothing is moved.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in module.parameters():
            if not parameter.is_meta:
                parameter.data = interleaved(parameter.data, self.parts)
        setattr(module, FUSED_PARTS, self.parts)
        split: nn.Module = super()._apply(module, device_mesh)
        # After the hook of ColwiseParallel, so of this rank's columns: [..., N * parts] to [..., parts * N].
        split.register_forward_hook(
            lambda _module, _inputs, columns: columns.unflatten(-1, (-1, self.parts)).transpose(-1, -2).flatten(-2)
        )
        return split


def fused_parts(model: nn.Module) -> dict[str, int]:
    """Return of how many parts the rows of a parameter are interleaved, by name, where they are."""
    modules = [(name, module, getattr(module, FUSED_PARTS, 1)) for name, module in model.named_modules()]
    return {
        f"{name}.{key}": parts for name, module, parts in modules if parts > 1 for key, _ in module.named_parameters()
    }


def interleaved(rows: Tensor, parts: int) -> Tensor:
    """Return the rows [parts * N, ...], one part after the other, as [N * parts, ...]."""
    return rows.reshape(parts, rows.shape[0] // parts, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # Norms of heads, [B, T, H, E]: a rank sees its own heads, so gradients are summed.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
_OURS: TensorPlan = {
    "encoder.layers.*.qkv": FusedColwise(3),
    "encoder.layers.*.attention_output": "rowwise",
    "encoder.layers.*.intermediate": "colwise",
    "encoder.layers.*.output": "rowwise",
}


def tensor_styles(model: nn.Module, given: TensorPlan | None, layout: Layout) -> list[tuple[str, ParallelStyle]]:
    """Return (name of a module, its style), of the plan that was given or that the model has.

    Raises ConfigError for a model without one, for styles that are not known here, and for what does not divide.
    """
    found = []
    for pattern, style in (given or _plan_of(model, layout.tensor_size)).items():
        matches = [name for name, _ in model.named_modules() if _matches(name, pattern)]
        if not matches:
            raise ConfigError(
                f"tensor plan: no module of {type(model).__name__} is called {pattern!r}",
                expected="names as model.named_modules() gives them, * for one part of a name",
            )
        made = _style(pattern, style)
        for name in matches:
            _check_split(model, name, made, layout)
        found += [(name, made) for name in matches]
    return found


def split(model: nn.Module, styles: list[tuple[str, ParallelStyle]], peers: DeviceMesh) -> None:
    """Split modules in place. Each tensor peer has the whole weights, or all have them on meta."""
    for name, style in styles:
        module = model.get_submodule(name)
        trained = {key: parameter.requires_grad for key, parameter in module.named_parameters()}
        parallelize_module(module, peers, style, src_data_rank=None)
        for key, parameter in module.named_parameters():
            parameter.requires_grad_(trained[key])  # styles make new parameters, which are all trained


def _plan_of(model: nn.Module, degree: int) -> TensorPlan:
    """Return the plan of our own model, or of a Hugging Face model's configuration. A rank has whole heads."""
    config: Any = getattr(model, "config", None)
    if isinstance(model, RelevanceModel):
        if not isinstance(model.encoder, BertEncoder):
            raise ConfigError(
                f"tensor_degree above 1 for a {type(model.encoder).__name__}",
                expected="model.architecture bert, the one of ours whose layers are split over ranks",
                next_command="--train.parallel.tensor-degree 1",
            )
        plan = _OURS
        heads: list[Any] = [model.encoder.layers[0].num_heads]
    elif theirs := getattr(config, "base_model_tp_plan", None):
        prefix = str(getattr(model, "base_model_prefix", ""))
        prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        plan = {prefix + pattern: style for pattern, style in theirs.items()}
        heads = [getattr(config, name, 0) or 0 for name in ("num_attention_heads", "num_key_value_heads")]
    else:
        raise ConfigError(
            f"tensor_degree above 1 for {type(model).__name__}, which has no plan of how it is split",
            expected="a model whose configuration has base_model_tp_plan, or a plan that is given",
            next_command='transform(..., tensor_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})',
        )
    if any(count % degree for count in heads):
        raise _not_divided(f"tensor_degree {degree}", f"heads ({', '.join(map(str, heads))})")
    return plan


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _style(pattern: str, style: Style) -> ParallelStyle:
    if isinstance(style, str):
        if style not in _STYLES:
            raise ConfigError(
                f"tensor plan: {pattern!r} is {style!r}",
                expected=f"one of {', '.join(_STYLES)}, or a ParallelStyle of torch.distributed.tensor.parallel",
            )
        style = _STYLES[style]()
    if type(style) is ColwiseParallel and _FUSED_NAMES.search(pattern.rsplit(".", 1)[-1]):
        raise ConfigError(
            f"tensor plan: {pattern!r} is split by columns, and by its name it is several matrices in one: a rank would"
            " get all of the first and none of the last",
            expected="FusedColwise(parts) where its output is cut by chunk(parts, -1); parts 1 where it is cut by head",
            next_command="from pipeline.parallel.tensors import FusedColwise",
        )
    return style


def _check_split(model: nn.Module, name: str, style: ParallelStyle, layout: Layout) -> None:
    """Raise ConfigError for a module that shares a parameter, or whose size does not divide evenly."""
    module = model.get_submodule(name)
    names = Counter(map(id, dict(model.named_parameters(remove_duplicate=False)).values()))
    if any(names[id(parameter)] > 1 for parameter in module.parameters()):
        raise ConfigError(
            f"tensor plan: {name!r} shares a parameter with another module, and only one would be split",
            expected="parameters of one name",
            next_command=f"leave {name!r} out of tensor_plan",
        )
    if not isinstance(module, nn.Linear):
        return
    degree = f"tensor_degree {layout.tensor_size}"
    if isinstance(style, RowwiseParallel) and module.in_features % layout.tensor_size:
        raise _not_divided(degree, f"{module.in_features} inputs of {name!r}")
    if isinstance(style, ColwiseParallel):
        outputs = module.out_features // (style.parts if isinstance(style, FusedColwise) else 1)
        if outputs % layout.tensor_size:
            raise _not_divided(degree, f"{outputs} outputs of {name!r}")
        # torch puts rows that are cut twice, and not evenly, together in a wrong order (2.9).
        if module.out_features % (layout.tensor_size * layout.shard_size):
            raise _not_divided(
                f"shard_degree {layout.shard_size} by {degree}", f"{module.out_features} outputs of {name!r}"
            )


def _not_divided(degree: str, what: str) -> ConfigError:
    return ConfigError(f"{degree} over {what}", expected="a degree that divides them", next_command="another degree")


# Tensors in shards: the norm of all, the whole of one, and a rank's part of one.


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
