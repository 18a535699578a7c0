"""How the matrices of a model's layers are split over tensor peers: by the model, its configuration, or its user."""

import re
from collections import Counter
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
            next_command="from pipeline.parallel.tensor_plan import FusedColwise",
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
