"""An error of the device during training gets the exit code that fits: the machine, the settings, or a bug."""

from typing import get_args

import pytest
import torch

from pipeline.backends.cpu import CpuBackend
from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.health.config import HealthConfig, OperationName
from pipeline.health.device import informed
from tests.health.test_device import Faulty, not_a_number


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
    better = informed(error, backend, HealthConfig(), num_nodes=1, stop=StopSignal())
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
        assert type(informed(error, coarse, config, num_nodes=1, stop=StopSignal())) is kind
