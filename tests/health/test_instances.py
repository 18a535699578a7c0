"""The instance table against the Trn1 and Trn2 architecture pages of the AWS Neuron documentation."""

import pytest

from pipeline.core.machines import MACHINES
from pipeline.health.neuron import NeuronInstance, judge_rank_count, neuron_instance, without_answer
from pipeline.health.report import Verdict
from pipeline.proc.tool import ToolRun

GIB = 2**30
pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "devices", "cores", "memory_gib", "efa"),
    [
        ("trn1.2xlarge", 1, 2, 32, 0),
        ("trn1.32xlarge", 16, 2, 32, 8),
        ("trn1n.32xlarge", 16, 2, 32, 16),
        ("trn2.3xlarge", 1, 8, 96, None),
        ("trn2.48xlarge", 16, 8, 96, 16),
    ],
)
def test_figures(name: str, devices: int, cores: int, memory_gib: int, efa: int | None) -> None:
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
        ("trn2.3xlarge", 3, 1, Verdict.PASS),  # not known
        ("trn9.48xlarge", 3, 2, Verdict.PASS),
    ],
)
def test_how_many_ranks_the_runtime_joins(name: str, processes: int, num_nodes: int, verdict: Verdict) -> None:
    instance = neuron_instance(name)
    assert instance is not None
    result = judge_rank_count(instance, processes, num_nodes=num_nodes)
    assert result.verdict is verdict
    assert bool(result.next_command) is (verdict is Verdict.FIX)
