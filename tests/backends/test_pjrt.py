"""The device that PyTorch/XLA will take."""

import pytest

from pipeline.backends import base
from pipeline.backends.base import pjrt_device


@pytest.mark.parametrize(
    ("env", "plugin", "expected"),
    [
        ({}, False, "CPU"),
        ({}, True, "NEURON"),
        ({"PJRT_DEVICE": "CPU"}, True, "CPU"),
        ({"PJRT_DEVICE": "NEURON"}, False, "NEURON"),
        ({"PJRT_DEVICE": ""}, True, "NEURON"),
    ],
)
def test_what_is_set_goes_before_what_is_installed(
    env: dict[str, str], plugin: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: object() if plugin and name == "libneuronxla" else None)
    assert pjrt_device(env) == expected
