"""PyTorch Lightning: `Trainer(strategy=Strategy(plan))`, and the ranks of a launcher as a cluster environment.

The only importer of lightning, which is optional: without it, importing this module raises ModuleNotFoundError. A
LightningModule is spread as `transform` spreads a model; its checkpoints are those of a plain Trainer, plain tensors
under plain names, and are continued by either.
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
from pipeline.parallel.checkpoint import check_shapes, tensor_shapes
from pipeline.parallel.config import Plan
from pipeline.parallel.mesh import TIMEOUT_S, current_mesh, mesh_of
from pipeline.parallel.parallelize import UnitRule, find_units, parallelize
from pipeline.parallel.tensors import LIMITS, TensorPlan, clip_grad_norm, fused_parts
from pipeline.parallel.world import world_from_env

_OF_WHOLE_WEIGHTS = (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging, callbacks.ModelPruning)


class Environment(TorchElasticEnvironment):
    """The ranks that torchrun or `trnpipe launch` started, here or on each node of a multi-node job; else one."""

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
        """Raise ConfigError if the Trainer counts ranks differently."""
        each, size = self._world.local_world_size, self._world.world_size
        if (num_devices, num_nodes * num_devices) != (each, size):
            launched = f"Trainer(devices={each}, num_nodes={size // each})"
            launch = f"trnpipe launch --launch.processes {num_devices} -- your_script.py"
            raise ConfigError(
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) in a run of {size} ranks, {each} on each node",
                expected="as many devices as there are ranks on a node",
                next_command=launched if size > 1 else launch,
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
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        layout = current_mesh().layout
        return {"num_replicas": layout.data_size, "rank": layout.data_rank}

    @property
    def _module(self) -> Any:
        """The LightningModule: the same object when it is spread, then an FSDPModule too."""
        return self.lightning_module

    def setup_environment(self) -> None:
        """Join the other ranks.

        Raises ConfigError for a Trainer that does not fit them, or that has a callback of whole weights.
        """
        trainer = self._module.trainer
        for callback in trainer.callbacks if trainer.state.fn == TrainerFn.FITTING else ():
            if isinstance(callback, _OF_WHOLE_WEIGHTS):
                raise ConfigError(
                    f"callback {type(callback).__name__} with a model that is spread over ranks: it takes weights to be"
                    " whole",
                    expected="none that averages or prunes weights; DDPStrategy can have them",
                    next_command=f"an average kept by name in on_train_batch_end: {LIMITS}, shows one",
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
        if fused_parts(self._module):
            raise ConfigError(
                "FusedColwise of several parts: a checkpoint of Lightning would have its rows interleaved",
                expected="q, k and v, or gate and up, as layers of their own",
                next_command="trn.transform and a loop of your own, whose trn.save puts them in order",
            )
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint. Raises CheckpointError for other shapes than the module's, which torch would cut."""
        whole = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only is not False)
        saved, own = tensor_shapes(whole["state_dict"]), tensor_shapes(self._module.state_dict())
        both = saved.keys() & own.keys()
        check_shapes(str(checkpoint_path), *({name: shapes[name] for name in both} for shapes in (own, saved)))
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return found

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Exchange no gradients in micro-steps but the last of an accumulated batch."""
        self._module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._module.set_requires_gradient_sync(True)

    def _called(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step as a call of the module: that is when FSDP gathers the parameters that are in no unit."""
        return self._forward_redirection(self._module, self._module, name, *args, **kwargs)

    training_step = partialmethod(_called, "training_step")
    validation_step = partialmethod(_called, "validation_step")
    test_step = partialmethod(_called, "test_step")
    predict_step = partialmethod(_called, "predict_step")
