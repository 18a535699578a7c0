"""AWS tools as checks of a node: devices, error counters, the kernel log, EFA, and collectives within it."""

import os
from dataclasses import replace

from pipeline.core.footprint import GIB
from pipeline.core.health import CheckResult
from pipeline.health.check import BOTH, Check, CheckContext
from pipeline.health.config import HealthConfig, Profile
from pipeline.health.efa import check_efa
from pipeline.health.instances import NeuronInstance, judge_rank_count
from pipeline.health.kernel_log import check_kernel_log
from pipeline.health.nccom import NAME as NCCOM
from pipeline.health.nccom import NccomTest, check_nccom
from pipeline.health.neuron_ls import check_neuron_ls
from pipeline.health.neuron_monitor import check_neuron_monitor

NCCOM_LIMIT_S, NCCOM_LEAVE_S = 120.0, 20.0
MORE_OPERATIONS = ("all_gather", "reduce_scatter", "alltoall")
CHANGED_LNC = "NEURON_LOGICAL_NC_CONFIG"  # then the numbers of cores are others than the usual ones


def tool_checks(
    instance: NeuronInstance | None, config: HealthConfig, *, num_nodes: int, processes: int
) -> tuple[Check, ...]:
    """For a machine that is, or should be, `instance`; None: no Neuron machine, where nothing is expected of them."""

    def devices(ctx: CheckContext) -> tuple[CheckResult, ...]:
        ctx.doing = "running neuron-ls"
        return check_neuron_ls(instance, stop=ctx.stop)

    def monitor(ctx: CheckContext) -> tuple[CheckResult, ...]:
        ctx.doing = "running neuron-monitor"
        return check_neuron_monitor(instance, stop=ctx.stop)

    def kernel(ctx: CheckContext) -> CheckResult:
        ctx.doing = "reading the kernel log"
        return check_kernel_log(instance, stop=ctx.stop)

    checks = (
        Check("kernel log", kernel, "tools", cost_s=0.5),
        Check("neuron devices", devices, "tools", cost_s=1.0),
        Check("neuron monitor", monitor, "tools", cost_s=2.0),
    )
    if instance is None:
        return checks

    def count(ctx: CheckContext) -> CheckResult:
        known = instance if CHANGED_LNC not in os.environ else replace(instance, rank_counts=())
        return judge_rank_count(known, processes, num_nodes=num_nodes)

    return (
        *checks,
        Check("processes", count, "tools", cost_s=0.0),
        Check("EFA", lambda ctx: check_efa(instance, num_nodes=num_nodes), "tools", cost_s=0.1),
        *(nccom_checks(instance, config, processes) if processes > 1 else ()),
    )


def nccom_checks(instance: NeuronInstance, config: HealthConfig, num_ranks: int) -> tuple[Check, ...]:
    """All-reduce from 8 bytes to more than a gradient bucket; in the full profile the other operations, too."""
    usual_gib_s = instance.bus_gib_s if (num_ranks,) == instance.rank_counts[-1:] else None

    def check(test: NccomTest, profiles: frozenset[Profile], least: float | None, usual: float | None) -> Check:
        name = f"{NCCOM} {test.operation}"

        def run(ctx: CheckContext) -> CheckResult:
            ctx.doing = f"running {name}"
            limits = {"min_busbw_gib_s": least, "usual_busbw_gib_s": usual}
            found = check_nccom(
                instance, test, env=os.environ, stop=ctx.stop, timeout_s=NCCOM_LIMIT_S - NCCOM_LEAVE_S, **limits
            )
            return replace(found, name=name)

        return Check(name, run, "tools", profiles, time_limit_s=NCCOM_LIMIT_S, cost_s=20.0)

    more = [check(NccomTest(num_ranks, one), frozenset(("full",)), None, None) for one in MORE_OPERATIONS]
    return (check(all_reduce(num_ranks), BOTH, least_gib_s(config), usual_gib_s), *more)


def all_reduce(num_ranks: int, hosts: tuple[str, ...] = ()) -> NccomTest:
    """8 bytes, 2 KiB, 512 KiB and 128 MiB."""
    return NccomTest(num_ranks, "all_reduce", min_bytes=8, max_bytes=2**27, step_factor=256, hosts=hosts)


def least_gib_s(config: HealthConfig) -> float | None:
    """The setting, in the unit of the tool."""
    return config.min_bus_gb_s * 1e9 / GIB or None
