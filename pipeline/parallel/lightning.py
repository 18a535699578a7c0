"""PyTorch Lightning: `Trainer(strategy=Strategy(plan))`, and the ranks of a launcher as a cluster environment.

The only importer of lightning, which is optional: without it, importing this module raises ModuleNotFoundError. A
LightningModule is spread as `transform` spreads a model; its checkpoints are those of a plain Trainer, plain tensors
under plain names, and are continued by either.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from pipeline.backends import on_neuron
from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.parallel.adopt import TIMEOUT_S, mesh_of
from pipeline.parallel.config import Plan
from pipeline.parallel.files import check_shapes
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import parallelize
from pipeline.parallel.parts import LIMITS
from pipeline.parallel.tensor_plan import TensorPlan, fused_parts
from pipeline.parallel.tensors import clip_grad_norm, full_cpu_tensor, load_shard
from pipeline.parallel.units import UnitRule, find_units
from pipeline.parallel.world import NUM_NODES, World, world_from_env


class Environment(ClusterEnvironment):
    """The ranks that torchrun or `trnpipe launch` started, here or on each node of a multi-node job; else one."""

    def __init__(self) -> None:
        self._world: World = world_from_env()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "29500"))

    @staticmethod
    def detect() -> bool:
        return "WORLD_SIZE" in os.environ or NUM_NODES in os.environ

    def world_size(self) -> int:
        return self._world.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher's stays."""

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher's stays."""

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises ConfigError where the Trainer counts ranks differently."""
        each, size = self._world.local_world_size, self._world.world_size
        if (num_devices, num_nodes * num_devices) == (each, size):
            return
        launched = f"Trainer(devices={each}, num_nodes={size // each})"
        raise ConfigError(
            f"Trainer(devices={num_devices}, num_nodes={num_nodes}) in a run of {size} ranks, {each} on each node",
            expected="as many devices as there are ranks on a node",
            next_command=launched if size > 1 else f"trnpipe launch --launch.processes {num_devices} -- your_script.py",
        )


class ClippedPrecision(Precision):
    """fp32 for Lightning: what is less is in the plan. Norms of gradients are over all ranks' parts."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm(self.main_params(optimizer), float(clip_val))


class Strategy(ModelParallelStrategy):
    """A LightningModule over devices as a plan says: `Trainer(strategy=trnpipe.Strategy({"shard_degree": 8}))`.

    `plan` as for `init`, and that of `init` where it was called; `units`, `tensor_plan` as for `transform`. The module
    is as it was for one process: no configure_model is needed, and its optimizers are made of the parameters that it
    has then. Raises ConfigError for a plan that cannot be, and on Neuron devices, for which Lightning has no
    accelerator (Lightning-AI/pytorch-lightning issue 15172).
    """

    def __init__(
        self,
        plan: Plan | Mapping[str, Any] | str | Path | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        units: UnitRule = find_units,
        tensor_plan: TensorPlan | None = None,
    ) -> None:
        super().__init__(save_distributed_checkpoint=False)
        if on_neuron("auto", os.environ):
            raise ConfigError(
                "Lightning beside Neuron devices: it has no accelerator for them and would train on the host",
                expected="GPUs, or PJRT_DEVICE=CPU to train on the host on purpose",
                next_command="trnpipe train, which runs on Neuron devices",
            )
        self._environment = self.cluster_environment = Environment()
        self._plan, self._timeout_s = plan, timeout_s
        self._units, self._tensor_plan = units, tensor_plan
        self._mesh: Mesh | None = None

    @property
    def precision_plugin(self) -> Precision:
        return ClippedPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and plugin.precision != "32-true":
            raise ConfigError(
                f"Trainer(precision={plugin.precision!r}) with a plan, which says itself what is computed in bf16",
                expected="Trainer(precision='32-true'), its default",
                next_command='Strategy({"precision": "bf16", ...})',
            )

    @property
    def mesh(self) -> Mesh:
        """Once the Trainer has set up this rank. Raises ConfigError before."""
        if self._mesh is None:
            raise ConfigError("the Trainer has not set up its ranks yet", expected="in or after `setup` of the module")
        return self._mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.layout.data_size, "rank": self.mesh.layout.data_rank}

    @property
    def _module(self) -> Any:
        """The LightningModule: the same object when it is spread, then an FSDPModule too."""
        return self.lightning_module

    def setup_environment(self) -> None:
        """Raises ConfigError for a Trainer that does not fit the ranks, or that has a callback of whole weights."""
        _check_callbacks(self._module.trainer)
        self._environment.validate_settings(self.num_processes, self.num_nodes)
        reset_seed()
        self.set_world_ranks()
        self._mesh = mesh_of(self._plan, device=self.root_device.type, timeout_s=self._timeout_s)
        self._device_mesh = self._module._device_mesh = self._mesh.devices

    def setup(self, trainer: Trainer) -> None:
        trainer.accelerator.setup(trainer)
        if not isinstance(self._module, FSDPModule):
            parallelize(self._module, self.mesh, units=self._units, tensor_plan=self._tensor_plan)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Micro-steps but the last of an accumulated batch exchange no gradients."""
        self._module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._module.set_requires_gradient_sync(True)

    # A step is a call of the module itself: that is when FSDP gathers the parameters that are in no unit.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self._module, self._module, "training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self._module, self._module, "validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self._module, self._module, "test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self._module, self._module, "predict_step", *args, **kwargs)

    # Checkpoints: as of one process.

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole on rank 0, empty on the others, which take part in gathering it."""
        parts = fused_parts(self._module)
        found: dict[str, Any] = {}
        ties: dict[int, str] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            first = ties.setdefault(id(value), name)
            if first != name:
                found[name] = found[first]
            elif isinstance(value, Tensor):
                full = full_cpu_tensor(value, parts.get(name, 1))
                found[name] = full if self.is_global_zero else None
            else:
                found[name] = value
        return found if self.is_global_zero else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Raises CheckpointError for other shapes than the module's, and, where `strict`, for other names."""
        given, mine = checkpoint["state_dict"], self._module.state_dict(keep_vars=True)
        if strict and mine.keys() != given.keys():
            missing, unknown = sorted(mine.keys() - given.keys()), sorted(given.keys() - mine.keys())
            raise CheckpointError(
                f"a checkpoint of another module: it has no {missing}, and has {unknown} beside",
                expected=f"one of {type(self._module).__name__}",
                next_command="strict_loading = False in the module takes what is in both",
            )
        parts = fused_parts(self._module)
        tensors = [name for name in mine if name in given and isinstance(mine[name], Tensor)]
        ours, theirs = ({name: list(one[name].shape) for name in tensors} for one in (mine, given))
        check_shapes("the checkpoint", ours, theirs)
        for name in tensors:
            load_shard(mine[name], given[name].__getitem__, parts.get(name, 1))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As its own state_dict; whole on rank 0, empty on the others."""
        state, parts, found = optimizer.state_dict(), self._parts_of(optimizer), dict[int, Any]()
        for number, values in state["state"].items():
            found[number] = {
                key: full_cpu_tensor(value, parts[number] if value.ndim else 1) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
            if not self.is_global_zero:
                found.clear()
        return {**state, "state": found} if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            parts, found = self._parts_of(optimizer), dict[int, Any]()
            for number, values in state["state"].items():
                found[number] = dict(values)
                for key, value in values.items():
                    if isinstance(value, Tensor) and value.shape == parameters[number].shape:
                        found[number][key] = torch.empty_like(parameters[number], dtype=value.dtype)
                        load_shard(found[number][key], value.__getitem__, parts[number])
            optimizer.load_state_dict({**state, "state": found})

    def _parts_of(self, optimizer: Optimizer) -> list[int]:
        """Of how many parts each of its parameters is fused, by number."""
        parts = fused_parts(self._module)
        by_id = {id(parameter): parts.get(name, 1) for name, parameter in self._module.named_parameters()}
        return [by_id.get(id(parameter), 1) for group in optimizer.param_groups for parameter in group["params"]]

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Tensors stay in the file until they are copied: each rank reads its slices alone."""
        found: dict[str, Any] = torch.load(
            checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only is not False
        )
        return found


def _check_callbacks(trainer: Trainer) -> None:
    """Raises ConfigError for a callback that copies or prunes weights as if each rank had all of them."""
    from lightning.pytorch import callbacks

    if trainer.state.fn != TrainerFn.FITTING:
        return
    whole = (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging, callbacks.ModelPruning)
    for one in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(one, whole):
            raise ConfigError(
                f"callback {type(one).__name__} with a model that is spread over ranks: it takes weights to be whole",
                expected="none that averages or prunes weights; DDPStrategy can have them",
                next_command=f"an average kept by name in on_train_batch_end: {LIMITS}, shows one",
            )
