"""Device memory of a core, read from a tree as the Neuron Sysfs User Guide draws it."""

from pathlib import Path

import pytest

from pipeline.backends.xla import core_memory_bytes


def make_core(root: Path, device: int, core: int, *, tensors: int, code: int, arch: str = "NCv2") -> None:
    folder = root / f"neuron{device}" / f"neuron_core{core}"
    for path, text in (
        ("info/architecture/arch_type", f"{arch}\n"),
        ("stats/memory_usage/device_mem/tensors/total", f"{tensors}\n"),
        ("stats/memory_usage/device_mem/tensors/present", "7\n"),
        ("stats/memory_usage/device_mem/tensors/peak", "9999\n"),
        ("stats/memory_usage/device_mem/model_code/total", f"{code}\n"),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (root / f"neuron{device}" / "core_count").write_text("2\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for core in range(4):
        make_core(tmp_path, *divmod(core, 2), tensors=100 * core, code=5)
    return tmp_path


@pytest.mark.parametrize("core", range(4))
def test_of_the_core_of_this_process(root: Path, core: int) -> None:
    assert core_memory_bytes({"NEURON_RT_VISIBLE_CORES": str(core)}, root) == 100 * core + 5


@pytest.mark.parametrize("cores", ["", "0-3", "0,1", "4"])
def test_which_core_it_is_must_be_certain(root: Path, cores: str) -> None:
    assert core_memory_bytes({"NEURON_RT_VISIBLE_CORES": cores}, root) is None
    assert core_memory_bytes({}, root) is None


def test_unknown_where_the_driver_says_it_otherwise(tmp_path: Path) -> None:
    env = {"NEURON_RT_VISIBLE_CORES": "0"}
    assert core_memory_bytes(env, tmp_path) is None
    make_core(tmp_path, 0, 0, tensors=1, code=1, arch="NCv3")
    assert core_memory_bytes(env, tmp_path) is None
    make_core(tmp_path, 0, 0, tensors=1, code=1)
    assert core_memory_bytes(env, tmp_path) == 2
    (tmp_path / "neuron0/neuron_core0/stats/memory_usage/device_mem/tensors/total").write_text("n/a")
    assert core_memory_bytes(env, tmp_path) is None
