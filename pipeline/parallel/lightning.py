"""PyTorch Lightning integration, which provides a `Strategy` and a cluster environment.

Lightning is an optional dependency and is only imported here, so importing this module raises ModuleNotFoundError if it
is not installed. A LightningModule is sharded the same way as by `transform`. Checkpoints have the same format as those
of a regular Trainer, with full tensors under their original names, so training can be resumed with or without this
strategy.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from pipeline.backends import on_neuron
from pipeline.core.errors import ConfigError
from pipeline.parallel.checkpoint import check_shapes, frozen_except, reshard, tensor_shapes
from pipeline.parallel.config import Plan
from pipeline.parallel.mesh import TIMEOUT_S, current_mesh, mesh_of
from pipeline.parallel.parallelize import UnitRule, find_units, no_sync, parallelize, sync_buffers
from pipeline.parallel.tensors import LIMITS, TensorPlan, clip_grad_norm, fused_parts
from pipeline.parallel.world import world_from_env

_UNSUPPORTED_CALLBACKS = (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging, callbacks.ModelPruning)


class Environment(TorchElasticEnvironment):
    """Cluster environment for ranks started by torchrun or `trnpipe launch`, or for a single rank without either."""

    def __init__(self) -> None:
        super().__init__()
        self._world = world_from_env()

    def world_size(self) -> int:
        return self._world.world_size

    def global_rank(self) -> int:
        return self._world.rank

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ConfigError if the Trainer's devices and nodes don't match the ranks that were launched."""
        local_size, size = self._world.local_world_size, self._world.world_size
        if (num_devices, num_nodes * num_devices) != (local_size, size):
            trainer = f"Trainer(devices={local_size}, num_nodes={size // local_size})"
            launch = f"trnpipe launch --launch.processes {num_devices} -- your_script.py"
            raise ConfigError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) for {size} ranks, {local_size} per node",
                expected="the number of devices to equal the number of ranks per node",
                next_command=trainer if size > 1 else launch,
            )


class ClippedPrecision(Precision):
    """fp32 precision plugin that clips gradients by their global norm. Lower precision is configured by the plan."""

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm(self.main_params(optimizer), float(clip_val))


class Strategy(ModelParallelStrategy):
    """Lightning strategy that shards a LightningModule according to a plan.

    For example: `Trainer(strategy=trnpipe.Strategy({"shard_degree": 8}))`. A module that was written for a single
    process can be used without changes, since configure_model is not required and configure_optimizers is called after
    the parameters have been sharded.

    `plan`: see `init`. Defaults to the plan that was passed to `init`, if any. `units`, `tensor_plan`: see `transform`.
    Raises ConfigError if the plan is invalid, and on Neuron devices, because Lightning doesn't have an accelerator for
    them (Lightning-AI/pytorch-lightning issue 15172).
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
                "Lightning has no accelerator for Neuron devices and would train on the host",
                expected="GPUs, or PJRT_DEVICE=CPU to explicitly train on the host",
                next_command="trnpipe train, which runs on Neuron devices",
            )
        self._environment = self.cluster_environment = Environment()
        self._plan, self._timeout_s = plan, timeout_s
        self._units, self._tensor_plan = units, tensor_plan

    @property
    def precision_plugin(self) -> Precision:
        return ClippedPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and plugin.precision != "32-true":
            raise ConfigError(
                f"Trainer(precision={plugin.precision!r}) conflicts with the precision of the plan",
                expected="Trainer(precision='32-true'), the default",
                next_command='Strategy({"precision": "bf16", ...})',
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        layout = current_mesh().layout
        return {"num_replicas": layout.data_size, "rank": layout.data_rank}

    @property
    def _module(self) -> Any:
        """The LightningModule, which is converted to an FSDPModule in place by sharding it."""
        return self.lightning_module

    def setup_environment(self) -> None:
        """Join the other ranks. Raises ConfigError if a callback isn't supported or the Trainer's ranks don't match."""
        trainer = self._module.trainer
        for callback in trainer.callbacks if trainer.state.fn == TrainerFn.FITTING else ():
            if isinstance(callback, _UNSUPPORTED_CALLBACKS):
                raise ConfigError(
                    f"callback {type(callback).__name__} requires unsharded weights, but the model is sharded",
                    expected="no callback that averages or prunes weights (DDPStrategy supports them)",
                    next_command=f"average weights by name in on_train_batch_end, as shown in {LIMITS}",
                )
        self._environment.validate_settings(self.num_processes, self.num_nodes)
        reset_seed()
        self.set_world_ranks()
        mesh = mesh_of(self._plan, device=self.root_device.type, timeout_s=self._timeout_s)
        self._device_mesh = self._module._device_mesh = mesh.devices

    def setup(self, trainer: Trainer) -> None:
        trainer.accelerator.setup(trainer)
        if not isinstance(self._module, FSDPModule):
            parallelize(self._module, current_mesh(), units=self._units, tensor_plan=self._tensor_plan)
            sync_buffers(self._module)
        if fused_parts(self._module):
            raise ConfigError(
                "FusedColwise with several parts would interleave rows in Lightning's checkpoints",
                expected="q, k and v, or gate and up, as separate layers",
                next_command="use trn.transform and your own training loop with trn.save, which restores the order",
            )
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint. Raises CheckpointError if shapes don't match, since torch would silently truncate them."""
        content = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only is not False)
        saved, expected = tensor_shapes(content["state_dict"]), tensor_shapes(self._module.state_dict())
        common = saved.keys() & expected.keys()
        check_shapes(str(checkpoint_path), *({name: shapes[name] for name in common} for shapes in (expected, saved)))
        ordered = [name for name, _ in self._module.named_parameters()]
        keys = {key for state in content.get("optimizer_states", ()) for key in state["state"]}
        names = [name for number, name in enumerate(ordered) if number in keys or name in keys]
        reshard(self._module)
        with frozen_except(self._module, names):
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Disable gradient reduction inside the block. Used for all but the last micro-step of an accumulated batch."""
        with no_sync(self._module):
            yield

    def _call_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step method through the module's forward, where FSDP gathers the parameters that belong to no unit."""
        return self._forward_redirection(self._module, self._module, name, *args, **kwargs)

    training_step = partialmethod(_call_step, "training_step")
    validation_step = partialmethod(_call_step, "validation_step")
    test_step = partialmethod(_call_step, "test_step")
    predict_step = partialmethod(_call_step, "predict_step")
