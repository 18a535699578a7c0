"""What is known of a device before it is open, what kinds of device answer, and batches that are made ahead."""

import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.backends import (
    Backend,
    Batch,
    auto_uses_xla_cpu,
    base,
    is_lazy_host,
    lazy_device_name,
    may_use_neuron,
    on_neuron,
    open_backend,
    open_host,
    prefetched,
)
from pipeline.backends.base import pjrt_device
from pipeline.backends.cpu import CpuBackend
from pipeline.backends.cuda import CudaBackend
from pipeline.backends.neuron import NeuronBackend
from pipeline.backends.xla import XlaBackend, core_memory_bytes
from pipeline.core.errors import ConfigError
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
    assert auto_uses_xla_cpu(name, {"PJRT_DEVICE": device}) is expected


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


# Batches made ahead: nothing is lost, errors surface, threads end.


def batch(number: int) -> Batch:
    return {"x": torch.tensor([number])}


def numbers(batches: Iterator[Batch]) -> list[int]:
    return [int(b["x"]) for b in batches]


def threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("total", [0, 1, 4, 23])
def test_all_in_order_and_the_end_is_the_end(depth: int, total: int) -> None:
    with prefetched((batch(i) for i in range(total)), depth) as ready:
        assert numbers(ready) == list(range(total))
        assert next(ready, None) is None
    assert threads() == 0


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt()])
def test_an_error_comes_after_the_good_batches(error: BaseException) -> None:
    def source() -> Iterator[Batch]:
        yield batch(0)
        yield batch(1)
        raise error

    seen = []
    with CpuBackend().loader(source()) as ready, pytest.raises(type(error)) as caught:
        for item in ready:
            seen.append(int(item["x"]))
    assert seen == [0, 1] and caught.value is error


def test_leaving_early_ends_the_thread_and_closes_the_source() -> None:
    made: list[int] = []

    def source() -> Iterator[Batch]:
        for number in count():
            made.append(number)
            yield batch(number)

    with prefetched(source(), depth=2) as ready:
        next(ready)
    assert threads() == 0
    assert len(made) <= 5  # one taken, two ready, one waiting, one more after the first was taken
    after = len(made)
    time.sleep(0.15)
    assert len(made) == after


def test_a_failing_consumer_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), prefetched((batch(i) for i in count()), depth=2) as ready:
        next(ready)
        raise ZeroDivisionError
    assert threads() == 0


def test_backends_by_name() -> None:
    assert open_backend("cpu").name == "cpu"
    with pytest.raises(ConfigError, match="backend 'tpu'"):
        open_backend("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            open_backend("cuda")


def test_cpu_to_host_is_a_copy() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    (copy,) = CpuBackend().to_host([tensor])
    tensor.data += 1
    assert copy.tolist() == [0, 0, 0] and not copy.requires_grad


# Device memory of a core, read from a tree as the Neuron Sysfs User Guide draws it.


def core_folder(root: Path, number: int, arch: str = "NCv2") -> Path:
    """Make a core of a machine with two a device: 100 bytes of tensors for each core before it, and 5 of code."""
    device = root / f"neuron{number // 2}"
    folder = device / f"neuron_core{number % 2}"
    files = {"tensors/total": f"{100 * number}\n", "tensors/peak": "9999\n", "model_code/total": "5\n"}
    texts = {f"stats/memory_usage/device_mem/{name}": text for name, text in files.items()}
    for name, text in (texts | {"info/architecture/arch_type": f"{arch}\n"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (root / "neuron0").mkdir(exist_ok=True)
    (root / "neuron0" / "core_count").write_text("2\n")
    return folder


@pytest.mark.parametrize("cores", ["0", "3", "", "0-3", "0,1", "4", None])
def test_memory_is_that_of_the_core_of_this_process_which_must_be_certain(tmp_path: Path, cores: str | None) -> None:
    for number in range(4):
        core_folder(tmp_path, number)
    env = {} if cores is None else {"NEURON_RT_VISIBLE_CORES": cores}
    assert core_memory_bytes(env, tmp_path) == {"0": 5, "3": 305}.get(cores or "")


def test_memory_is_unknown_where_the_driver_says_it_otherwise(tmp_path: Path) -> None:
    env = {"NEURON_RT_VISIBLE_CORES": "0"}
    assert core_memory_bytes(env, tmp_path) is None
    core_folder(tmp_path, 0, arch="NCv3")
    assert core_memory_bytes(env, tmp_path) is None
    (core_folder(tmp_path, 0) / "stats/memory_usage/device_mem/tensors/total").write_text("n/a")
    assert core_memory_bytes(env, tmp_path) is None


def test_a_precision_that_is_slow_on_the_device_is_named() -> None:
    cpu, gpu = CpuBackend(), object.__new__(CudaBackend)  # there need not be a GPU
    cpu.emulates_bf16 = True
    assert cpu.precision_warning("train.precision", "autocast").endswith("lacks bf16: --train.precision fp32")
    assert gpu.precision_warning("embed.precision", "fp32").endswith("than bf16 on this device: --embed.precision bf16")
    assert not cpu.precision_warning("train.precision", "fp32") and not gpu.precision_warning("embed.precision", "bf16")
