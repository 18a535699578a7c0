"""AWS tools as checks of a node: devices, error counters, the kernel log, EFA, and collectives within it."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pipeline.core.machines import GIB
from pipeline.health.check import BOTH, Check, CheckContext
from pipeline.health.config import HealthConfig, Profile
from pipeline.health.instances import NeuronInstance, judge_rank_count
from pipeline.health.kernel_log import check_kernel_log
from pipeline.health.nccom import NAME as NCCOM
from pipeline.health.nccom import NccomTest, check_nccom
from pipeline.health.neuron_ls import check_neuron_ls, numbered
from pipeline.health.neuron_monitor import check_neuron_monitor
from pipeline.health.verdict import CheckResult, Verdict

# Is the network for many nodes there: EFA devices against the instance table.
#
# Read from sysfs, which shows those of the host, and from /dev/infiniband, which shows those this container may open.

NAME = "efa"
INFINIBAND = Path("/sys/class/infiniband")
DEV = Path("/dev/infiniband")
_AMAZON = "0x1d0f"  # PCI vendor


def num_efa(infiniband: Path = INFINIBAND) -> int:
    """RDMA devices of Amazon's; one whose vendor cannot be read counts too."""
    try:
        devices = list(infiniband.iterdir())
    except OSError:  # no RDMA device: then the kernel makes no such folder
        return 0
    return sum(_vendor(device) in (_AMAZON, "") for device in devices)


def judge_efa(count: int, openable: int, instance: NeuronInstance | None, *, num_nodes: int) -> CheckResult:
    """One node needs no EFA, so that a fault is only a WARN there."""
    figures = {"num_efa": count, "num_openable": openable}
    if instance is None:
        return CheckResult(NAME, Verdict.PASS, f"not a Neuron machine; {count} EFA devices", figures=figures)
    gang = num_nodes > 1
    wanted = instance.num_efa
    expected = f"{'some' if wanted is None else wanted} on {instance.name}"

    def bad(verdict: Verdict, seen: str, next_command: str) -> CheckResult:
        return CheckResult(NAME, verdict if gang else Verdict.WARN, seen, expected, next_command, figures)

    if wanted == 0 and gang:
        return bad(Verdict.FIX, f"{instance.name} has no EFA", "run on one node, or choose trn1.32xlarge")
    if count == 0 and wanted != 0 and (gang or wanted):
        # An instance loses one device, not all: then it was started without.
        return bad(Verdict.FIX, "no EFA device", "launch template: network interfaces with InterfaceType efa")
    if wanted and count < wanted:
        return bad(
            Verdict.RETRY, f"{count} EFA devices", "this job elsewhere; launch template if all machines have as few"
        )
    if openable < count:
        return bad(
            Verdict.FIX,
            f"{openable} of {count} EFA devices are mapped into this container",
            "add /dev/infiniband/uverbs0.. to linuxParameters.devices of the job definition",
        )
    return CheckResult(NAME, Verdict.PASS, f"{count} EFA devices", figures=figures)


def check_efa(
    instance: NeuronInstance | None, *, num_nodes: int, infiniband: Path = INFINIBAND, dev: Path = DEV
) -> CheckResult:
    """Count and judge."""
    return judge_efa(num_efa(infiniband), len(numbered(dev, "uverbs")), instance, num_nodes=num_nodes)


def _vendor(device: Path) -> str:
    try:
        return (device / "device" / "vendor").read_text().strip().lower()
    except (OSError, ValueError):
        return ""


NCCOM_LIMIT_S = 300.0  # each size is compiled first
NCCOM_LEAVE_S = 60.0  # for one that is killed to leave its cores
MORE_OPERATIONS = ("reduce_scatter", "alltoall")
BANDWIDTH = "bandwidth"
CHANGED_LNC = "NEURON_LOGICAL_NC_CONFIG"  # then the numbers of cores are others than the usual ones


def tool_checks(
    instance: NeuronInstance | None, config: HealthConfig, *, num_nodes: int, processes: int, on_neuron: bool = False
) -> tuple[Check, ...]:
    """For a machine that is, or should be, `instance`; None: no Neuron machine, where nothing is expected of them.

    on_neuron: ranks are to run on its cores, so that whoever holds one is looked for whatever groups are chosen: a
    second runtime on a core fails, and may take the first one with it.
    """

    def devices(ctx: CheckContext) -> tuple[CheckResult, ...]:
        ctx.doing = "running neuron-ls"
        return check_neuron_ls(instance, stop=ctx.stop)

    def monitor(ctx: CheckContext) -> tuple[CheckResult, ...]:
        ctx.doing = "running neuron-monitor"
        return check_neuron_monitor(instance, stop=ctx.stop)

    def kernel(ctx: CheckContext) -> CheckResult:
        ctx.doing = "reading the kernel log"
        return check_kernel_log(instance, stop=ctx.stop)

    opens_cores = on_neuron and config.wants("cores", "collectives")
    checks = (
        Check("kernel log", kernel, "tools", cost_s=0.5),
        Check("neuron devices", devices, None if opens_cores else "tools", cost_s=1.0),
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
    """All-reduce and all-gather; all-reduce again for its bandwidth; in the full profile the other operations, too."""
    usual_gib_s = instance.bus_gib_s if (num_ranks,) == instance.rank_counts[-1:] else None

    def check(
        test: NccomTest,
        profiles: frozenset[Profile] = BOTH,
        *,
        least: float | None = None,
        usual: float | None = None,
    ) -> Check:
        name = f"{NCCOM} {test.operation}" if test.check else f"{NCCOM} {test.operation} {BANDWIDTH}"

        def run(ctx: CheckContext) -> CheckResult:
            ctx.doing = f"running {name}"
            found = check_nccom(
                instance,
                test,
                env=os.environ,
                stop=ctx.stop,
                timeout_s=NCCOM_LIMIT_S,
                min_busbw_gib_s=least,
                usual_busbw_gib_s=usual,
            )
            return replace(found, name=name)

        return Check(name, run, "tools", profiles, time_limit_s=NCCOM_LIMIT_S + NCCOM_LEAVE_S, cost_s=20.0)

    return (
        check(correctness_test(num_ranks, "all_reduce")),
        check(correctness_test(num_ranks, "all_gather")),
        check(bandwidth_test(num_ranks), least=least_gib_s(config), usual=usual_gib_s),
        *(check(correctness_test(num_ranks, one), frozenset(("full",))) for one in MORE_OPERATIONS),
    )


def correctness_test(num_ranks: int, operation: str, hosts: tuple[str, ...] = ()) -> NccomTest:
    """8 KiB and 8 MiB, with results checked; all-reduce from 8 bytes on, which is one number for every rank."""
    least = 8 if operation == "all_reduce" else 2**13
    return NccomTest(num_ranks, operation, min_bytes=least, max_bytes=2**23, step_factor=2**10, hosts=hosts)


def bandwidth_test(num_ranks: int, hosts: tuple[str, ...] = ()) -> NccomTest:
    """An all-reduce of 128 MiB, more than a gradient bucket."""
    return NccomTest(num_ranks, "all_reduce", min_bytes=2**27, max_bytes=2**27, check=False, hosts=hosts)


def tools_limit_s(checks: Iterable[Check], config: HealthConfig) -> float:
    """Seconds that those of these checks may take together which have a limit of their own, as nccom-test has."""
    chosen = (one for one in checks if config.profile in one.profiles and config.wants(one.group))
    return sum(one.time_limit_s or 0.0 for one in chosen)


def least_gib_s(config: HealthConfig) -> float | None:
    """The setting, in the unit of the tool."""
    return config.min_bus_gb_s * 1e9 / GIB or None
