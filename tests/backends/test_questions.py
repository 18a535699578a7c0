"""What is known of a device before it is open, and what kinds of device answer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.backends import (
    Backend,
    auto_on_host,
    base,
    is_lazy_host,
    lazy_device_name,
    may_use_neuron,
    on_neuron,
    open_host,
)
from pipeline.backends.base import pjrt_device
from pipeline.backends.cpu import CpuBackend
from pipeline.backends.cuda import CudaBackend
from pipeline.backends.neuron import NeuronBackend
from pipeline.backends.xla import XlaBackend
from pipeline.embed.config import EmbedConfig
from tests.backends.xla_process import needs_xla


@pytest.mark.parametrize(
    ("name", "device", "may", "does"),
    [
        ("auto", "NEURON", True, True),
        ("xla", "NEURON", True, True),
        ("xla", "CPU", True, False),
        ("auto", "CUDA", True, False),
        ("cpu", "NEURON", False, False),
        ("cuda", "NEURON", False, False),
    ],
)
def test_who_runs_on_neuron(name: str, device: str, may: bool, does: bool) -> None:
    assert may_use_neuron(name) is may
    assert on_neuron(name, {"PJRT_DEVICE": device}) is does


@needs_xla
@pytest.mark.parametrize(
    ("name", "device", "expected"), [("auto", "CPU", True), ("auto", "NEURON", False), ("xla", "CPU", False)]
)
def test_where_auto_would_compile_for_the_host(name: str, device: str, expected: bool) -> None:
    assert auto_on_host(name, {"PJRT_DEVICE": device}) is expected


def test_the_name_of_a_device_that_is_not_open() -> None:
    assert lazy_device_name({"PJRT_DEVICE": "NEURON"}) == "xla:NEURON"
    assert [name for name in ("cpu", "xla:CPU", "xla:NEURON", "xla:traced") if is_lazy_host(name)] == ["xla:CPU"]


def test_the_host() -> None:
    host: Backend = open_host()
    assert isinstance(host, CpuBackend)
    assert host.shares_host_memory and not (host.is_lazy or host.is_neuron or host.can_compile)


def test_the_tokens_of_a_batch_are_those_the_settings_tell() -> None:
    told = EmbedConfig.model_fields["tokens_per_batch"].description or ""
    kinds = (CpuBackend, XlaBackend, NeuronBackend, CudaBackend)
    assert told.endswith("0: " + ", ".join(f"{kind.default_tokens} on {kind.name}" for kind in kinds))


@pytest.mark.parametrize("kind", [CpuBackend, CudaBackend, NeuronBackend, XlaBackend])
def test_a_seed_is_also_that_of_what_a_module_draws_on_the_host(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerDrop of transformers draws torch.rand([]) there; the device itself is not opened here."""
    backend, seeds = object.__new__(kind), list[int]()
    backend._xm, backend.device = SimpleNamespace(set_rng_state=lambda seed, device: seeds.append(seed)), "xla:0"
    monkeypatch.setattr(torch, "neuron", SimpleNamespace(manual_seed=seeds.append), raising=False)
    with torch.random.fork_rng(devices=[]):
        drawn = []
        for seed in (3, 4, 3):
            backend.seed(seed)
            drawn.append(float(torch.rand([])))
    assert drawn[0] == drawn[2] != drawn[1]
    assert seeds == ([3, 4, 3] if kind in (NeuronBackend, XlaBackend) else [])


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
