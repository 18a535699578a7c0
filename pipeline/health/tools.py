"""AWS tools as checks of a node: devices, error counters, the kernel log, EFA, and collectives within it."""

import os

from pipeline.core.health import CheckResult
from pipeline.health.check import Check, CheckContext
from pipeline.health.efa import check_efa
from pipeline.health.instances import NeuronInstance
from pipeline.health.kernel_log import check_kernel_log
from pipeline.health.nccom import NccomTest, check_nccom
from pipeline.health.neuron_ls import check_neuron_ls
from pipeline.health.neuron_monitor import check_neuron_monitor

NCCOM_LIMIT_S = 120.0


def tool_checks(instance: NeuronInstance | None, *, num_nodes: int, num_ranks: int) -> tuple[Check, ...]:
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

    def collectives(ctx: CheckContext) -> CheckResult:
        ctx.doing = "running nccom-test"
        test = NccomTest(num_ranks)
        return check_nccom(instance, test, env=os.environ, stop=ctx.stop, timeout_s=NCCOM_LIMIT_S - 20)

    checks = (
        Check("kernel log", kernel, cost_s=0.5),
        Check("neuron devices", devices, cost_s=1.0),
        Check("neuron monitor", monitor, cost_s=2.0),
    )
    if instance is None:
        return checks
    return (
        *checks,
        Check("EFA", lambda ctx: check_efa(instance, num_nodes=num_nodes), cost_s=0.1),
        Check("nccom-test", collectives, time_limit_s=NCCOM_LIMIT_S, cost_s=20.0),
    )
