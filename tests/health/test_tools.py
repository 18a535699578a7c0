"""Which tools are run where."""

import pytest

from pipeline.core.stop import StopSignal
from pipeline.health import tools
from pipeline.health.check import Check, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.instances import neuron_instance
from pipeline.health.nccom import command
from pipeline.health.tools import (
    bandwidth_test,
    correctness_test,
    least_gib_s,
    nccom_checks,
    tool_checks,
    tools_limit_s,
)
from pipeline.health.verdict import CheckResult, Verdict

EVERYWHERE = ["kernel log", "neuron devices", "neuron monitor"]
ON_NEURON = [*EVERYWHERE, "processes", "EFA"]
NCCOM = ["nccom-test all_reduce", "nccom-test all_gather", "nccom-test all_reduce bandwidth"]


def names(instance: str, processes: int, *, on_neuron: bool = False, **values: object) -> list[str]:
    config = HealthConfig.model_validate(values)
    found: tuple[Check, ...] = tool_checks(
        neuron_instance(instance), config, num_nodes=1, processes=processes, on_neuron=on_neuron
    )
    return [check.name for check in found if config.profile in check.profiles and config.wants(check.group)]


@pytest.mark.unit
def test_what_is_run() -> None:
    assert names("", 2) == EVERYWHERE
    assert names("trn1.2xlarge", 1) == ON_NEURON, "one process has nothing to exchange"
    assert names("trn1.2xlarge", 2) == [*ON_NEURON, *NCCOM]
    more = ["nccom-test reduce_scatter", "nccom-test alltoall"]
    assert names("trn1.2xlarge", 2, profile="full") == [*ON_NEURON, *NCCOM, *more]
    assert names("trn1.2xlarge", 2, only=("host", "cores")) == []


@pytest.mark.unit
def test_whoever_holds_a_core_is_looked_for_before_ranks_open_it() -> None:
    for instance in ("trn1.2xlarge", ""):
        for group in ("cores", "collectives"):
            assert names(instance, 2, on_neuron=True, only=(group,)) == ["neuron devices"]
        assert names(instance, 2, on_neuron=True, only=("host",)) == []


@pytest.mark.unit
def test_results_are_checked_up_to_8_mib_and_the_bandwidth_is_that_of_128_mib() -> None:
    reduce, gather, large = correctness_test(32, "all_reduce"), correctness_test(32, "all_gather"), bandwidth_test(32)
    assert (reduce.sizes, gather.sizes, large.sizes) == ((8, 2**13, 2**23), (2**13, 2**23), (2**27,))
    assert "--check" in command(reduce) and "--check" in command(gather) and "--check" not in command(large)
    assert command(large)[-1] == "--non-interactive"


@pytest.mark.unit
def test_each_has_five_minutes_and_some_to_leave_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def check(*args: object, **kwargs: object) -> CheckResult:
        asked.append(kwargs["timeout_s"])
        return CheckResult("nccom-test", Verdict.PASS)

    monkeypatch.setattr(tools, "check_nccom", check)
    instance, config = neuron_instance("trn1.2xlarge"), HealthConfig()
    assert instance is not None
    checks = nccom_checks(instance, config, 2)
    run_checks(checks, config, node_rank=0, host="h", stop=StopSignal())
    assert asked == [300.0] * 3 and tools_limit_s(checks, config) == 3 * 360.0
    assert tools_limit_s(checks, HealthConfig(only=("host",))) == 0.0


@pytest.mark.unit
def test_the_least_bandwidth_in_the_unit_of_the_tool() -> None:
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
