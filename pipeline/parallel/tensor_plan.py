"""How the matrices of a model's layers are split over tensor peers: by the model, its configuration, or its user."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pipeline.core.errors import ConfigError
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
        # After the hook of ColwiseParallel, so of this rank's columns.
        split.register_forward_hook(lambda _module, _inputs, columns: _one_after_the_other(columns, self.parts))
        return split


def fused_parts(model: nn.Module) -> dict[str, int]:
    """By name of a parameter: of how many parts its rows are interleaved, where they are."""
    modules = [(name, module, getattr(module, FUSED_PARTS, 1)) for name, module in model.named_modules()]
    return {
        f"{name}.{key}": parts for name, module, parts in modules if parts > 1 for key, _ in module.named_parameters()
    }


def interleaved(rows: Tensor, parts: int) -> Tensor:
    """[parts * N, ...], one part after the other, to [N * parts, ...]."""
    return rows.reshape(parts, rows.shape[0] // parts, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _one_after_the_other(columns: Tensor, parts: int) -> Tensor:
    """[..., N * parts] to [..., parts * N]."""
    return columns.reshape(*columns.shape[:-1], -1, parts).transpose(-1, -2).reshape(columns.shape)


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


def tensor_styles(model: nn.Module, given: TensorPlan | None, degree: int) -> list[tuple[str, ParallelStyle]]:
    """(name of a module, its style), of the plan that was given or that the model has.

    Raises ConfigError for a model without one, for styles that are not known here, and for what does not divide.
    """
    plan = given or _plan_of(model)
    modules = dict(model.named_modules())
    tied = _tied(model)
    found = []
    for pattern, style in plan.items():
        names = [name for name in modules if _matches(name, pattern)]
        if not names:
            raise ConfigError(
                f"tensor plan: no module of {type(model).__name__} is called {pattern!r}",
                expected="names as model.named_modules() gives them, * for one part of a name",
            )
        made = _style(pattern, style)
        for name in names:
            _check_split(name, modules[name], made, degree, tied)
        found += [(name, made) for name in names]
    if given is None:  # of a plan that was given, its giver knows
        _check_heads(model, degree)
    return found


def split(model: nn.Module, styles: list[tuple[str, ParallelStyle]], peers: DeviceMesh) -> None:
    """In place. Each tensor peer has the whole weights, or all have them on meta."""
    for name, style in styles:
        module = model.get_submodule(name)
        trained = {key: parameter.requires_grad for key, parameter in module.named_parameters()}
        parallelize_module(module, peers, style, src_data_rank=None)
        for key, parameter in module.named_parameters():
            parameter.requires_grad_(trained[key])  # styles make new parameters, which are all trained


def _plan_of(model: nn.Module) -> TensorPlan:
    """Of our own model, or of a Hugging Face model's configuration."""
    if isinstance(model, RelevanceModel):
        if not isinstance(model.encoder, BertEncoder):
            raise ConfigError(
                f"tensor_degree above 1 for a {type(model.encoder).__name__}",
                expected="model.architecture bert, the one of ours whose layers are split over ranks",
                next_command="--train.parallel.tensor-degree 1",
            )
        return _OURS
    theirs: Mapping[str, str] | None = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not theirs:
        raise ConfigError(
            f"tensor_degree above 1 for {type(model).__name__}, which has no plan of how it is split",
            expected="a model whose configuration has base_model_tp_plan, or a plan that is given",
            next_command='transform(..., tensor_plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})',
        )
    prefix = str(getattr(model, "base_model_prefix", ""))
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {prefix + pattern: style for pattern, style in theirs.items()}


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _style(pattern: str, style: Style) -> ParallelStyle:
    if isinstance(style, str):
        if style not in _STYLES:
            raise ConfigError(
                f"tensor plan: {pattern!r} is {style!r}",
                expected=f"one of {', '.join(_STYLES)}, or a ParallelStyle of torch.distributed.tensor.parallel",
                next_command="transform(..., tensor_plan=...) with styles of your own, or tensor_degree 1",
            )
        style = _STYLES[style]()
    if type(style) is ColwiseParallel and _FUSED_NAMES.search(pattern.rsplit(".", 1)[-1]):
        raise ConfigError(
            f"tensor plan: {pattern!r} is split by columns, and by its name it is several matrices in one: a rank would"
            " get all of the first and none of the last",
            expected="FusedColwise(parts) where its output is cut by chunk(parts, -1); parts 1 where it is cut by head",
            next_command="from pipeline.parallel.tensor_plan import FusedColwise",
        )
    return style


def _check_split(name: str, module: nn.Module, style: ParallelStyle, degree: int, tied: Mapping[str, str]) -> None:
    for key, _ in module.named_parameters():
        if (whole := f"{name}.{key}") in tied:
            raise ConfigError(
                f"tensor plan: {whole!r} is the same parameter as {tied[whole]!r}, and only one would be split",
                expected="parameters of one name",
                next_command=f"leave {name!r} out of tensor_plan",
            )
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    by_columns = isinstance(style, ColwiseParallel)
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"tensor plan: {name!r} is a {type(module).__name__}", expected="an nn.Linear or an nn.Embedding"
        )
    sizes = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
    size = sizes[0 if by_columns else 1] // (style.parts if isinstance(style, FusedColwise) else 1)
    if size % degree:
        raise ConfigError(
            f"tensor_degree {degree} over {size} {'outputs' if by_columns else 'inputs'} of {name!r}",
            expected="a degree that divides them",
            next_command="another tensor_degree",
        )


def _tied(model: nn.Module) -> dict[str, str]:
    """Names of parameters that have another name, with it."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    shared = [names for names in by_parameter.values() if len(names) > 1]
    return {name: names[name == names[0]] for names in shared for name in names}


def _check_heads(model: nn.Module, degree: int) -> None:
    """A rank has whole heads."""
    if isinstance(model, RelevanceModel):
        found: dict[str, Any] = {"num_heads": model.encoder.layers[0].num_heads}
    else:
        config: Any = getattr(model, "config", None)
        found = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    for name, heads in found.items():
        if isinstance(heads, int) and heads % degree:
            raise ConfigError(
                f"tensor_degree {degree} over {heads} heads ({name})",
                expected="a degree that divides them",
                next_command="another tensor_degree",
            )
