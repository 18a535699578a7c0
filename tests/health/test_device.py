"""The checks of one core: sound backends pass, and each seeded fault gets its verdict."""

from collections.abc import Callable, Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor

from pipeline.backends.cpu import CpuBackend
from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.health.check import Verdict
from pipeline.health.config import HealthConfig, OperationName
from pipeline.health.device import (
    OPERATIONS,
    Operation,
    check_burn,
    check_memory,
    check_operations,
    diagnose_device_error,
    reference,
    worst_error,
)

MIB = 2**20


class Faulty(CpuBackend):
    """A core that hands over something else than it computed, from the `after`th transfer on."""

    def __init__(self, spoil: Callable[[Tensor], Tensor], after: int = 0) -> None:
        super().__init__()
        self._spoil, self._left = spoil, after

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._left -= 1
        host = super().to_host(tensors)
        return [self._spoil(tensor) for tensor in host] if self._left < 0 else host


def flipped(tensor: Tensor) -> Tensor:
    """One bit of one number, high enough to matter in any dtype."""
    bits = tensor.reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    bits[min(3, len(bits) - 1)] ^= 1 << (8 * tensor.element_size() - 3)
    return tensor


def not_a_number(tensor: Tensor) -> Tensor:
    tensor.reshape(-1)[0] = float("nan")
    return tensor


def nudged(tensor: Tensor) -> Tensor:
    """Within every tolerance, but not the same bits."""
    return tensor * (1 + 1e-6)


def test_a_sound_core_passes_with_its_errors_as_figures() -> None:
    result = check_operations(CpuBackend(), seed=3, repeats=2, stop=StopSignal())
    assert result.verdict is Verdict.PASS
    assert len(result.figures) == len(OPERATIONS)
    assert 0 < float(result.figures["matmul_bf16_error"]) < 2e-2


@pytest.mark.parametrize(
    ("spoil", "after", "told"),
    [
        pytest.param(flipped, 0, "matmul fp32: relative error", id="a corrupted matmul"),
        pytest.param(flipped, 2, "matmul bf16: relative error", id="a corrupted bf16 matmul"),
        pytest.param(not_a_number, 0, "matmul fp32: a value that is not finite", id="NaN"),
        pytest.param(nudged, 1, "matmul fp32: two runs on equal inputs differ", id="not deterministic"),
    ],
)
def test_a_wrong_core_is_sent_back(spoil: Callable[[Tensor], Tensor], after: int, told: str) -> None:
    result = check_operations(Faulty(spoil, after), seed=3, repeats=2, stop=StopSignal())
    assert result.verdict is Verdict.RETRY
    assert result.seen.startswith(told)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_tolerance_of_each_operation_finds_a_wrong_element(operation: Operation) -> None:
    inputs = operation.inputs(torch.Generator().manual_seed(5))
    for right in reference(operation, inputs):
        wrong = right.clone().reshape(-1)
        wrong[0] += float(right.abs().max()) * max(0.1, 2 * operation.tolerance)
        assert worst_error(wrong.reshape(right.shape), right) > operation.tolerance


def test_memory_that_changes_is_found() -> None:
    assert check_memory(CpuBackend(), sweep_bytes=128 * MIB, stop=StopSignal()).verdict is Verdict.PASS
    result = check_memory(Faulty(flipped, after=1), sweep_bytes=128 * MIB, stop=StopSignal())
    assert result.verdict is Verdict.RETRY
    assert result.seen.startswith("1 words of chunk 1 of 2")


def test_the_burn_gives_the_figures_that_peers_are_compared_by() -> None:
    ticks = iter(float(tick) for tick in range(1000))
    result = check_burn(CpuBackend(), seconds=4.0, stop=StopSignal(), clock=lambda: next(ticks))
    assert result.figures["fastest_round_s"] == 1.0
    assert int(result.figures["rounds"]) >= 3


def test_a_stop_ends_it() -> None:
    stop, backend = StopSignal(), CpuBackend()
    stop.set("SIGTERM")
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_operations(backend, seed=1, repeats=1, stop=stop),
        lambda: check_memory(backend, sweep_bytes=64 * MIB, stop=stop),
        lambda: check_burn(backend, seconds=1.0, stop=stop),
    )
    for check in checks:
        with pytest.raises(Preempted):
            check()


@pytest.mark.parametrize(
    ("text", "backend", "kind"),
    [
        ("nrt_execute: status=5 NRT_TIMEOUT", CpuBackend(), TransientError),
        ("NRT_INVALID: nrt_init failed", CpuBackend(), ConfigError),
        ("INTERNAL: something nobody has seen", Faulty(not_a_number), TransientError),
        ("the loader ended at step 3 of 4", CpuBackend(), RuntimeError),
        ("CUDA error: device-side assert triggered", Faulty(not_a_number), RuntimeError),
    ],
)
def test_the_error_tells_what_to_do(text: str, backend: CpuBackend, kind: type[BaseException]) -> None:
    error = RuntimeError(text)
    better = diagnose_device_error(error, backend, HealthConfig(), stop=StopSignal())
    assert type(better) is kind
    assert (better is error) == (kind is RuntimeError)
    assert text.split(" ")[0].rstrip(":") in str(better)


def test_what_the_settings_allow_is_no_fault_of_the_device() -> None:
    error = RuntimeError("the loader ended at step 3 of 4")
    coarse = Faulty(lambda tensor: tensor.to(torch.bfloat16).to(tensor.dtype))
    for config, kind in (
        (HealthConfig(), TransientError),
        (HealthConfig(tolerances=dict.fromkeys(get_args(OperationName), 0.05)), RuntimeError),
    ):
        assert type(diagnose_device_error(error, coarse, config, stop=StopSignal())) is kind
