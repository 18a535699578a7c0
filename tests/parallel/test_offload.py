"""Offload with a loading horizon: the same bits, few inputs on the device, loads ahead of need, nothing left behind."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline.backends import Backend, module_device, open_backend
from pipeline.backends.cpu import CpuBackend
from pipeline.parallel import adopt
from pipeline.parallel.offload import offload_units
from pipeline.parallel.recompute import recompute_units
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:offload_horizon on a device that is the host")
CASES = "tests.parallel.test_offload"
UNITS, PASSES = 4, 2


class Recording(CpuBackend):
    """Notes what is moved and run, and how many calls of units have inputs on the device."""

    shares_host_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self._moved: dict[int, int] = {}
        """Calls, by the address of a host copy."""
        self._alive: list[tuple[int, Any]] = []
        self.most_resident = self.calls = 0

    def move(self, tensors: Sequence[Tensor], *, to_host: bool) -> tuple[list[Tensor], Callable[[], None]]:
        copies, _ = super().move(tensors, to_host=to_host)
        for tensor, moved in zip(tensors, copies, strict=True):
            if to_host:
                self._moved[moved.data_ptr()] = self.calls
                self.calls += 1
            number = self._moved[(moved if to_host else tensor).data_ptr()]
            on_device = tensor if to_host else moved
            self._alive.append((number, StorageWeakRef(on_device.untyped_storage())))  # type: ignore[no-untyped-call]
            if not to_host:
                self.events.append(f"load {number}")
        self.note()
        return copies, lambda: self.events.append(f"{'left' if to_host else 'use'} {number}")

    def note(self) -> None:
        self.most_resident = max(self.most_resident, len(self.resident()))

    def resident(self) -> set[int]:
        self._alive = [(number, storage) for number, storage in self._alive if not storage.expired()]
        return {number for number, _ in self._alive}

    def late(self) -> int:
        """Loads that were waited for before anything was computed."""
        pending, late = set[str](), 0
        for event in self.events:
            kind, _, number = event.partition(" ")
            if kind == "load":
                pending.add(number)
            elif kind == "run":
                pending.clear()
            elif kind == "use" and number in pending:
                late += 1
        return late


class Unit(nn.Module):
    """Notes that it runs. Half of what it is given is a mask, which no unit owns."""

    def __init__(self, width: int, backend: Any) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self._backend = backend

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if isinstance(self._backend, Recording):
            self._backend.events.append("run")
            self._backend.note()
        inner = nn.functional.dropout(torch.relu(self.wide(hidden)), 0.2, self.training)
        result: Tensor = torch.tanh(self.narrow(inner)) * mask
        return result


class Model(nn.Module):
    def __init__(self, backend: Backend, horizon: int | None = 0) -> None:
        """`horizon` None: neither recompute nor offload; 0: no offload."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.first = nn.Linear(8, 8)
            self.units = nn.ModuleList(Unit(8, backend) for _ in range(UNITS))
        if horizon is not None:
            recompute_units(list(self.units))
        if horizon:
            offload_units(list(self.units), horizon, backend)
        self.to(backend.device)

    def forward(self, rows: int) -> Tensor:
        """The units run twice, as an encoder of queries and of products does."""
        ends = []
        for number in range(1, PASSES + 1):
            place = self.first.weight.device
            hidden = self.first(torch.linspace(-1, number, rows * 8).to(place).reshape(rows, 8))
            mask = torch.ones(rows, 1, device=place)
            for unit in self.units:
                hidden = unit(hidden, mask)
            ends.append(hidden.sum(1))
        return torch.stack(ends).prod(0).sum()


def stepped(model: nn.Module, rows: int = 16) -> list[Tensor]:
    """The loss, and the gradients after two micro-steps, forward passes first."""
    torch.manual_seed(5)
    losses = [model(rows), model(rows + 1)]
    for loss in reversed(losses):
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    found = [*(loss.detach() for loss in losses), *(g.detach() for g in gradients if g is not None)]
    model.zero_grad()
    return found


def test_the_same_bits_whatever_the_horizon() -> None:
    expected = stepped(Model(CpuBackend(), None))
    assert len(expected) == 2 + 2 + 4 * UNITS
    for horizon in (0, 1, 2, 4, 100):
        model = Model(CpuBackend(), horizon)
        assert list(model.state_dict()) == list(Model(CpuBackend()).state_dict())
        for _ in range(2):  # a second step starts anew
            assert all(torch.equal(*pair) for pair in zip(stepped(model), expected, strict=True))


class Slow(CpuBackend):
    """Its copies are made when they are waited for, and not a moment before, as a stream may."""

    too_early = 0
    """Times that memory of a copy under way was let go."""

    def move(self, tensors: Sequence[Tensor], *, to_host: bool) -> tuple[list[Tensor], Callable[[], None]]:
        copies = [torch.full_like(tensor, float("nan")) for tensor in tensors]
        pending = [True]

        def gone(_: weakref.ref[Tensor]) -> None:
            self.too_early += len(pending)

        sides = [
            (weakref.ref(copy, gone), weakref.ref(tensor, gone)) for copy, tensor in zip(copies, tensors, strict=True)
        ]

        def wait() -> None:
            for ours, theirs in sides if pending else ():
                copy, tensor = ours(), theirs()
                assert copy is not None and tensor is not None
                copy.data.copy_(tensor)  # its first values: no change of its version
            pending.clear()

        return copies, wait


def test_copies_are_waited_for() -> None:
    expected, backend = stepped(Model(CpuBackend(), None)), Slow()
    for horizon in (1, 2, 4):
        model = Model(backend, horizon)
        model(16)  # and no backward
        assert all(torch.equal(*pair) for pair in zip(stepped(model), expected, strict=True))
    assert backend.too_early == 0


@pytest.mark.parametrize(("horizon", "late"), [(1, UNITS * PASSES - 1), (2, 0), (4, 0)])
def test_few_are_on_the_device_and_come_ahead_of_need(horizon: int, late: int) -> None:
    backend = Recording()
    model = Model(backend, horizon)
    for step in (1, 2):
        backend.events.clear()
        loss = model(16)
        loss.backward()
        assert backend.calls == step * UNITS * PASSES, "inputs that left; the mask and the weights did not"
        assert sum(event.startswith("load") for event in backend.events) == UNITS * PASSES - horizon
        assert backend.late() == late
    assert backend.most_resident == horizon
    assert backend.resident() == set()


def test_nothing_is_left_when_backward_does_not_come() -> None:
    backend = Recording()
    model = Model(backend, 2)
    copies: list[weakref.ref[Tensor]] = []
    move = backend.move

    def noted(tensors: Sequence[Tensor], *, to_host: bool) -> Any:
        found, wait = move(tensors, to_host=to_host)
        copies.extend(map(weakref.ref, found))
        return found, wait

    backend.move = noted  # type: ignore[method-assign]
    model(16)
    assert len(copies) == UNITS * PASSES
    assert_gone(copies, backend)
    with suppress(ZeroDivisionError), stopping_at(model.units[1]):
        model(16).backward()
    one = torch.ones(1, requires_grad=True)
    torch.autograd.grad(one.sum(), one)  # autograd's queue has what was left of it until the next one
    gc.collect()
    assert_gone(copies, backend)
    with torch.no_grad():
        model(16)
    assert backend.calls == 2 * UNITS * PASSES
    assert all(torch.equal(*pair) for pair in zip(stepped(model), stepped(Model(backend, None)), strict=True))


def assert_gone(copies: list[weakref.ref[Tensor]], backend: Recording) -> None:
    assert [copy for copy in copies if copy() is not None] == []
    assert backend.resident() == set()


@contextmanager
def stopping_at(unit: nn.Module) -> Iterator[None]:
    """Its backward fails."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = unit.register_full_backward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def test_a_graph_that_is_kept_can_be_gone_through_twice() -> None:
    model = Model(CpuBackend(), 2)
    loss = model(16)
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_an_input_that_is_changed_in_place_is_an_error() -> None:
    model = Model(CpuBackend(), 2)
    hidden, mask = model.first(torch.ones(2, 8)), torch.ones(2, 1)
    loss = model.units[0](hidden, mask).sum()
    hidden.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_host_is_told_that_it_saves_nothing() -> None:
    with pytest.warns(UserWarning, match="saves no memory"):
        offload_units([nn.Linear(2, 2)], 2, CpuBackend())


def sharded(_: str) -> bool:
    """Whether a horizon changes a bit of what the same ranks compute without."""
    adopt.init({"shard_degree": 2})
    mesh, found = adopt.current_mesh(), []
    for horizon in (None, 2):
        model = Model(mesh.backend, horizon)
        for module in (*model.units, model):
            fully_shard(module, mesh=mesh.data_axes)
        found.append([tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in stepped(model)])
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_under_fully_shard(tmp_path: Path) -> None:
    assert run_ranks(f"{CASES}:sharded", 2, tmp_path, "") == [True, True]


@pytest.mark.skipif(module_device() == "cpu", reason="a device with memory of its own")
def test_on_a_device_with_memory_of_its_own() -> None:
    backend = open_backend(module_device())
    found, peaks = [], []
    for horizon in (None, 0, 1, 2):
        model = Model(backend, horizon)
        for rows in (16, 2**16):
            values = stepped(model, rows)
        backend.synchronise()
        torch.cuda.reset_peak_memory_stats()
        values = stepped(model, 2**16)
        peaks.append(torch.cuda.max_memory_allocated())
        found.append([value.cpu() for value in values])
    plain, *others = found
    assert all(torch.equal(*pair) for other in others for pair in zip(other, plain, strict=True))
    assert peaks[0] > peaks[1] > peaks[3] >= peaks[2]
