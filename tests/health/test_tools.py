"""Which tools are run where."""

import pytest

from pipeline.core.health import Verdict
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.instances import neuron_instance
from pipeline.health.tools import all_reduce, least_gib_s, tool_checks

EVERYWHERE = ["kernel log", "neuron devices", "neuron monitor"]
ON_NEURON = [*EVERYWHERE, "processes", "EFA"]


def names(instance: str, processes: int, **values: object) -> list[str]:
    config = HealthConfig.model_validate(values)
    found: tuple[Check, ...] = tool_checks(neuron_instance(instance), config, num_nodes=1, processes=processes)
    return [check.name for check in found if config.profile in check.profiles and config.wants(check.group)]


@pytest.mark.unit
def test_what_is_run() -> None:
    assert names("", 2) == EVERYWHERE
    assert names("trn1.2xlarge", 1) == ON_NEURON, "one process has nothing to exchange"
    assert names("trn1.2xlarge", 2) == [*ON_NEURON, "nccom-test all_reduce"]
    more = ["nccom-test all_gather", "nccom-test reduce_scatter", "nccom-test alltoall"]
    assert names("trn1.2xlarge", 2, profile="full") == [*ON_NEURON, "nccom-test all_reduce", *more]
    assert names("trn1.2xlarge", 2, only=("host", "cores")) == []


@pytest.mark.unit
def test_all_reduce_goes_from_8_bytes_to_more_than_a_gradient_bucket() -> None:
    assert all_reduce(32).sizes == (8, 2**11, 2**19, 2**27)
    assert least_gib_s(HealthConfig()) is None
    assert least_gib_s(HealthConfig(min_bus_gb_s=2**30 / 1e9)) == pytest.approx(1.0)


@pytest.mark.unit
def test_a_number_of_processes_that_the_runtime_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(processes: int) -> Verdict:
        checks = tool_checks(neuron_instance("trn2.48xlarge"), HealthConfig(), num_nodes=1, processes=processes)
        (one,) = (check for check in checks if check.name == "processes")
        return run_checks([one], HealthConfig(), node_rank=0, host="h", stop=StopSignal()).verdict

    assert (verdict(64), verdict(8)) == (Verdict.PASS, Verdict.FIX)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert verdict(128) == Verdict.PASS, "of that nothing is known"
