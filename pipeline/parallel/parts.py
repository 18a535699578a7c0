"""What a script does with a spread model where each rank would get its own part for the whole: refused, or warned of.

A tensor in shards, or a norm of one, is a DTensor; torch lets a script read the local number of it without a word.
"""

import copyreg
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pipeline.core.errors import ConfigError
from pipeline.parallel.tensors import shard_groups

LIMITS = "docs/parallel.md, Limits"
_TORCH = str(Path(torch.__file__).parent)
_OF_WHOLE = (torch.optim.Adafactor, torch.optim.Rprop)
"""Wrong numbers and an error of torch where parameters are DTensors, also over a group of one (torch 2.9 to 2.14)."""
_stepping: list[str] = []
"""The optimizer at work, by the name of its class."""
_said: set[str] = set()
_is_watching = False


def guard(model: nn.Module) -> None:
    """Watch a spread model, its tensors and the optimizers of this process."""
    _watch_process()
    for module in model.modules():
        if isinstance(module, FSDPModule):  # its class is torch's own for it
            module.__class__.__deepcopy__ = _copied  # type: ignore[attr-defined]
            module.__class__.__reduce_ex__ = _pickled  # type: ignore[assignment, method-assign]
        module.register_load_state_dict_pre_hook(_check_loaded)  # type: ignore[no-untyped-call]


def _watch_process() -> None:
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    # The one place through which item(), float() and bool() of every DTensor go; no public hook is there.
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _read
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    copyreg.pickle(DTensor, _reduced)


def _read(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Read the local number, as torch does."""
    tensor: Any = args[0]
    if shard_groups(tensor):
        if _stepping:
            why = "reads numbers of a rank's own part, so ranks would take other steps"
            raise _no_optimizer(_stepping.pop(), why)
        _warn_once(
            "a number was read from a tensor that is spread over ranks: it is that of this rank's part",
            "tensor.full_tensor().item() on all ranks, and trn.clip_grad_norm for the norm of gradients",
        )
    with torch.no_grad():
        return op_call(tensor.to_local())


def _reduced(tensor: DTensor) -> Any:
    """How a DTensor is pickled: as torch does it."""
    if shard_groups(tensor):
        _warn_once(
            "a tensor that is spread over ranks was pickled: the file has this rank's part of it",
            "trn.save(folder, model, optimizer) on all ranks, which writes whole tensors",
        )
    return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    name = type(optimizer).__name__
    _stepping[:] = [name]  # one that has raised left its name here
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, _OF_WHOLE) and any(isinstance(one, DTensor) for one in parameters):
        raise _no_optimizer(name, "takes parameters to be whole")


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    _stepping.clear()


def _no_optimizer(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"optimizer {name} of a model that trn.transform has spread: it {why}",
        expected="one that updates each element by itself, such as AdamW, or SGD",
        next_command=f"another optimizer; or DistributedDataParallel in place of transform; {LIMITS}",
    )


def _copied(module: nn.Module, memo: object) -> NoReturn:
    raise ConfigError(
        f"a copy of {type(module).__name__}, which is spread over ranks",
        expected="an average of its weights that is kept by name, parameter by parameter",
        next_command=f"{LIMITS}, shows one",
    )


def _pickled(module: nn.Module, protocol: object) -> NoReturn:
    raise ConfigError(
        f"{type(module).__name__}, which is spread over ranks, was to be pickled",
        expected="files of whole tensors",
        next_command="trn.save(folder, model, optimizer) on all ranks",
    )


def _check_loaded(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Raises ConfigError for a plain tensor where the module has a part of one."""
    for name, parameter in module.named_parameters(recurse=False):
        given = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(given, Tensor) and not isinstance(given, DTensor):
            raise ConfigError(
                f"load_state_dict of the whole tensor {prefix + name!r} into a model that is spread over ranks",
                expected="weights that are loaded before transform, or read by trn.load(folder, model)",
                next_command="model.load_state_dict(...) first, then trn.transform(model)",
            )


def _warn_once(seen: str, way_out: str) -> None:
    """On rank 0, with the line of the script."""
    if seen in _said:
        return
    _said.add(seen)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return
    frames = [one for one in traceback.extract_stack() if not one.filename.startswith((_TORCH, __file__, "<"))]
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    print(f"trnpipe: {where}{seen}\n  next: {way_out}; {LIMITS}", file=sys.stderr, flush=True)
