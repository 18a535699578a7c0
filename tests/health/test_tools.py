"""Which tools are run where, and how long the health stage may take, which its job must allow."""

import pytest

from pipeline.core.stop import StopSignal
from pipeline.health import tools
from pipeline.health.check import Check, CheckResult, Verdict, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.neuron import neuron_instance
from pipeline.health.tools import NccomTest, nccom_checks, ranks_limit_s, stage_limit_s, tool_checks, tools_limit_s

EVERYWHERE = ["kernel log", "neuron devices"]
ON_NEURON = [*EVERYWHERE, "processes", "EFA"]
NCCOM = ["nccom-test all_reduce", "nccom-test all_gather", "nccom-test all_reduce bandwidth"]


def names(instance: str, processes: int, *, on_neuron: bool = False, **values: object) -> list[str]:
    config = HealthConfig.model_validate(values)
    found: tuple[Check, ...] = tool_checks(
        neuron_instance(instance), config, num_nodes=1, processes=processes, on_neuron=on_neuron
    )
    return [check.name for check in found if config.wants(check.group)]


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
def test_each_has_five_minutes_and_some_to_leave_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are checked up to 8 MiB, the bandwidth is that of 128 MiB, and its bound in the unit of the tool."""
    asked: list[tuple[NccomTest, object, object]] = []

    def check(instance: object, test: NccomTest, **kwargs: object) -> CheckResult:
        asked.append((test, kwargs["timeout_s"], kwargs["min_busbw_gib_s"]))
        return CheckResult("nccom-test", Verdict.PASS)

    monkeypatch.setattr(tools, "check_nccom", check)
    instance, config = neuron_instance("trn1.2xlarge"), HealthConfig(min_bus_gb_s=2**30 / 1e9)
    assert instance is not None
    checks = nccom_checks(instance, config, 2)
    run_checks(checks, config, node_rank=0, host="h", stop=StopSignal())
    assert [one[1:] for one in asked] == [(300.0, None), (300.0, None), (300.0, pytest.approx(1.0))]
    reduce, gather, large = (one[0] for one in asked)
    assert (reduce.sizes, gather.sizes, large.sizes) == ((8, 2**13, 2**23), (2**13, 2**23), (2**27,))
    assert "--check" in reduce.command() and "--check" in gather.command() and "--check" not in large.command()
    assert large.command()[-1] == "--non-interactive"
    assert tools_limit_s(checks, config) == 3 * 360.0
    assert tools_limit_s(checks, HealthConfig(only=("host",))) == 0.0


@pytest.mark.unit
def test_a_number_of_processes_that_the_runtime_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(processes: int) -> Verdict:
        checks = tool_checks(neuron_instance("trn2.48xlarge"), HealthConfig(), num_nodes=1, processes=processes)
        (one,) = (check for check in checks if check.name == "processes")
        return run_checks([one], HealthConfig(), node_rank=0, host="h", stop=StopSignal()).verdict

    assert (verdict(64), verdict(8)) == (Verdict.PASS, Verdict.FIX)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert verdict(128) == Verdict.PASS, "of that nothing is known"


QUICK = HealthConfig()
HOST_ONLY = HealthConfig.model_validate({"only": ["host"]})


@pytest.mark.parametrize(
    ("config", "on_neuron", "seconds"),
    [
        (HealthConfig(), False, 450.0),
        (HealthConfig(), True, 3960.0),
        (HealthConfig(profile="full"), False, 3960.0),
        (HOST_ONLY, True, 0.0),
    ],
)
def test_the_limit_of_all_ranks(config: HealthConfig, on_neuron: bool, seconds: float) -> None:
    assert ranks_limit_s(config, on_neuron=on_neuron) == seconds


def test_the_stage_may_take_what_its_parts_may() -> None:
    def limit_s(config: HealthConfig = QUICK, instance: str = "trn1.32xlarge", nodes: int = 1) -> float:
        on_neuron = instance != ""
        return stage_limit_s(config, instance=instance, on_neuron=on_neuron, num_nodes=nodes, processes=32)

    assert limit_s(instance="") == 450
    assert limit_s(HOST_ONLY) == 0
    assert limit_s(nodes=4) == limit_s() + QUICK.nodes_wait_s
    assert limit_s(HealthConfig(profile="full")) > limit_s() > 3960  # nccom-test has a limit of its own
    assert limit_s(HealthConfig.model_validate({"only": ["cores"]})) == 3960
