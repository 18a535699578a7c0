"""Offload: inputs of recomputed units wait in host memory, but for those that the computation is about to need.

The horizon is SageMaker's `activation_loading_horizon`: of how many calls of units the inputs may be in device memory
at a time. Copies run beside the computation: out during forward, and back, in the opposite order, ahead of need.
torch's checkpoint keeps the inputs of what it will run again through the saved-tensor hooks around it (torch 2.9,
utils/checkpoint.py, _NoopSaveInputs), so what is seen here is a unit's inputs and nothing else.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeline.backends import Backend


def offload_units(units: Sequence[nn.Module], horizon: int, backend: Backend) -> None:
    """Each unit in place, after recompute_units. Inputs of at most `horizon` calls stay in device memory.

    What has no gradient, such as masks, one tensor for all units, stays where it is. With a horizon of 1 nothing is
    loaded ahead.
    """
    if backend.shares_host_memory:
        warnings.warn(
            "offload_horizon on a device that is the host: it saves no memory, and costs copies", stacklevel=2
        )
    window = _Window(horizon, backend)
    for unit in units:
        unit.forward = partial(window.run, unit.forward)


class _Call:
    """What one call of a unit was given. Lives as long as the graph that will need it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._on_host: list[Tensor] = []
        self._on_device: list[Tensor] = []  # none, or all
        self._versions: list[int] = []
        self._waits: list[Callable[[], None]] = []
        self.before: Callable[[], _Call | None] = lambda: None

    def keep(self, tensor: Tensor) -> tuple["_Call", int]:
        tensor = tensor.detach()  # its graph is not for us to keep
        (copy,), wait = self._backend.move([tensor], to_host=True)
        self._on_host.append(copy)
        self._on_device.append(tensor)
        self._versions.append(tensor._version)
        self._waits.append(wait)
        return self, len(self._on_host) - 1

    def load(self) -> None:
        if not self._on_device:
            self._on_device, wait = self._backend.move(self._on_host, to_host=False)
            self._versions = [tensor._version for tensor in self._on_device]
            self._waits.append(wait)

    def use(self) -> list[Tensor]:
        """On the device. Raises RuntimeError, as autograd does, for what was changed in place since."""
        self._wait()
        if self._versions != [tensor._version for tensor in self._on_device]:
            raise RuntimeError("an input of a recomputed unit was modified by an inplace operation after its call")
        return self._on_device

    def leave(self) -> None:
        self.use()
        self._on_device, self._versions = [], []

    def _wait(self) -> None:
        """Memory that a copy reads or writes is not free before."""
        for wait in self._waits:
            wait()
        self._waits.clear()

    def __del__(self) -> None:
        self._wait()


class _Window:
    """The calls of all units, one after the other, and the few whose inputs are on the device."""

    def __init__(self, horizon: int, backend: Backend) -> None:
        self._horizon, self._backend = horizon, backend
        self._resident: list[weakref.ref[_Call]] = []
        self._latest: Callable[[], _Call | None] = lambda: None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A unit's call; without a gradient nothing is kept."""
        call = _Call(self._backend)

        def pack(tensor: Tensor) -> Tensor | tuple[_Call, int]:
            if not tensor.requires_grad or tensor.device != self._backend.device or not tensor.numel():
                return tensor
            if self._latest() is not call:
                call.before, self._latest = self._latest, weakref.ref(call)
                self._slide(call, loads=False)
            return call.keep(tensor)

        def unpack(packed: Tensor | tuple[_Call, int]) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            kept, number = packed
            self._slide(kept, loads=True)
            return kept.use()[number]

        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    def _slide(self, call: _Call, *, loads: bool) -> None:
        """To this call and those before it, as many as the horizon has: others leave, and only then these come."""
        calls, before = [call], call.before()
        while len(calls) < self._horizon and before is not None:
            calls.append(before)
            before = before.before()
        for resident in filter(None, (found() for found in self._resident)):
            if resident not in calls:
                resident.leave()
        for one in calls if loads else ():
            one.load()
        self._resident = [weakref.ref(one) for one in calls]
