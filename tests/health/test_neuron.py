"""A Neuron machine: hardware errors in its kernel log, error counters, EFA devices, and what it should be."""

from pathlib import Path

import pytest

from pipeline.core.machines import MACHINES
from pipeline.core.stop import StopSignal
from pipeline.health.neuron import (
    NeuronInstance,
    check_counters,
    check_efa,
    check_kernel_log,
    judge_rank_count,
    neuron_instance,
    without_answer,
)
from pipeline.health.report import Verdict
from pipeline.proc.tool import ToolRun
from tests.health.fake_tools import environment, fake_tool, says

PASS, WARN, RETRY, FIX = Verdict.PASS, Verdict.WARN, Verdict.RETRY, Verdict.FIX
TRN1 = neuron_instance("trn1.32xlarge")
QUIET = "[    0.000000] Linux version 6.1\n[298850.502143] neuron:npid_detach: pid=1, slot=0\n"
# The line of the AWS Neuron documentation (runtime troubleshooting).
BROKEN = (
    "[298850.502143] neuron: NEURON_HW_ERR={} instance-id=i-0592464924bd45322 hostname=ip-172-31-61-252 nd-id=3"
    " nc-id=1 serial-num=19fcda00f5ff6eb9 action=TERMINATE_INSTANCE\n"
)


def test_the_kernel_log(tmp_path: Path) -> None:
    stop, env = StopSignal(), environment(tmp_path)
    for kind in ("HBM_UNCORRECTABLE_ERROR", "NC_UNCORRECTABLE_ERROR", "DMA_ERROR", "A_KIND_OF_NEXT_YEAR"):
        says(tmp_path, "dmesg", QUIET + BROKEN.format(kind))
        for machine in (TRN1, None):
            result = check_kernel_log(machine, stop=stop, env=env)
            assert result.verdict is RETRY and kind in result.seen and "terminate" in result.next_command
    says(tmp_path, "dmesg", QUIET + BROKEN.format("HANG_ON_COLLECTIVES"))
    assert check_kernel_log(TRN1, stop=stop, env=env).verdict is PASS, "its cause is usually a peer"
    fake_tool(tmp_path, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    refused = check_kernel_log(TRN1, stop=stop, env=env)
    assert refused.verdict is WARN and "Operation not permitted" in refused.seen
    assert check_kernel_log(None, stop=stop, env=env).verdict is PASS
    fake_tool(tmp_path, "dmesg", "exec sleep 60")
    assert check_kernel_log(TRN1, stop=stop, env=env, timeout_s=0.2).verdict is WARN


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_error_counters_of_the_driver(tmp_path: Path) -> None:
    """As the sysfs user guide lists them: a file, in some versions a folder with the file `total`."""
    assert check_counters(tmp_path / "none").verdict is PASS
    for device in (0, 1):
        write(tmp_path / f"neuron{device}/stats/hardware/mem_ecc_uncorrected", "0\n")
        write(tmp_path / f"neuron{device}/stats/hardware/sram_ecc_uncorrected/total", "0\n")
    write(tmp_path / "neuron3/stats/hardware/mem_ecc_uncorrected", "not a number")
    assert check_counters(tmp_path).verdict is PASS
    write(tmp_path / "neuron1/stats/hardware/mem_ecc_repairable_uncorrected", "2\n")
    write(tmp_path / "neuron10/stats/hardware/sram_ecc_uncorrected/total", "1\n")
    result = check_counters(tmp_path)
    assert result.verdict is RETRY and result.figures == {"num_errors": 3}
    assert result.seen == "neuron1 mem ecc repairable uncorrected 2, neuron10 sram ecc uncorrected 1"


@pytest.mark.parametrize(
    ("name", "count", "openable", "gang"),
    [
        ("trn1.32xlarge", 8, 8, PASS),
        ("trn1.32xlarge", 7, 7, RETRY),
        ("trn1.32xlarge", 0, 0, FIX),
        ("trn1.32xlarge", 8, 0, FIX),
        ("trn1n.32xlarge", 8, 8, RETRY),
        ("trn1.2xlarge", 0, 0, FIX),
        ("trn2.48xlarge", 16, 16, PASS),
        ("trn2.3xlarge", 1, 1, PASS),  # more than are attached
        ("trn2.3xlarge", 0, 0, FIX),
        ("trn9.48xlarge", 32, 32, PASS),
    ],
)
def test_efa_devices(tmp_path: Path, name: str, count: int, openable: int, gang: Verdict) -> None:
    instance = neuron_instance(name)
    assert instance is not None
    for index in range(count):
        (tmp_path / "infiniband" / f"rdmap{index}s6").mkdir(parents=True)
    for index in range(openable):
        (tmp_path / "dev" / f"uverbs{index}").mkdir(parents=True)
    for num_nodes, verdict in ((1, PASS), (4, gang)):
        result = check_efa(instance, num_nodes=num_nodes, infiniband=tmp_path / "infiniband", dev=tmp_path / "dev")
        assert result.verdict is verdict
        assert verdict is PASS or (result.seen and result.expected and result.next_command)


GIB = 2**30


@pytest.mark.parametrize(
    ("name", "devices", "cores", "memory_gib", "efa"),
    [
        ("trn1.2xlarge", 1, 2, 32, 0),
        ("trn1.32xlarge", 16, 2, 32, 8),
        ("trn1n.32xlarge", 16, 2, 32, 16),
        ("trn2.3xlarge", 1, 8, 96, 0),
        ("trn2.48xlarge", 16, 8, 96, 16),
    ],
)
def test_figures(name: str, devices: int, cores: int, memory_gib: int, efa: int) -> None:
    instance = neuron_instance(name)
    assert instance is not None
    assert (instance.num_devices, instance.device_cores, instance.num_efa) == (devices, cores, efa)
    assert instance.device_memory_bytes == memory_gib * GIB


def test_every_instance_of_the_table_is_known() -> None:
    assert all(instance and instance.num_devices for instance in map(neuron_instance, MACHINES))


def test_machines_that_are_not_in_the_table() -> None:
    assert neuron_instance("") is None and neuron_instance("c7i.4xlarge") is None
    assert neuron_instance("trn9.48xlarge") == NeuronInstance("trn9.48xlarge")


def test_a_tool_without_an_answer() -> None:
    missing = ToolRun(("neuron-ls", "-j"), missing=True, failure="is not installed")
    hung = ToolRun(("neuron-ls", "-j"), timed_out=True, failure="did not end within 20 s")
    trn1 = neuron_instance("trn1.32xlarge")
    elsewhere = without_answer("a", missing, None)
    assert elsewhere.verdict is Verdict.PASS and elsewhere.seen.startswith("not a Neuron machine")
    assert without_answer("a", missing, trn1).verdict is Verdict.FIX
    assert without_answer("a", hung, trn1).verdict is Verdict.RETRY
    assert "did not end within 20 s" in without_answer("a", hung, trn1).seen


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "processes", "num_nodes", "verdict"),
    [
        ("trn1.32xlarge", 8, 1, Verdict.PASS),
        ("trn1.32xlarge", 16, 1, Verdict.FIX),
        ("trn1.32xlarge", 8, 2, Verdict.FIX),
        ("trn1.32xlarge", 32, 2, Verdict.PASS),
        ("trn1.2xlarge", 4, 1, Verdict.FIX),
        ("trn2.3xlarge", 4, 1, Verdict.PASS),
        ("trn2.3xlarge", 3, 1, Verdict.FIX),
        ("trn9.48xlarge", 3, 2, Verdict.PASS),
    ],
)
def test_how_many_ranks_the_runtime_joins(name: str, processes: int, num_nodes: int, verdict: Verdict) -> None:
    instance = neuron_instance(name)
    assert instance is not None
    result = judge_rank_count(instance, processes, num_nodes=num_nodes)
    assert result.verdict is verdict
    assert bool(result.next_command) is (verdict is Verdict.FIX)
