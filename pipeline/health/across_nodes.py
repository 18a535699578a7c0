"""nccom-test over all nodes of a job, driven by the main node. For those who have set up what it needs.

It starts a program on each host through mpirun, which as a rule comes in by ssh (AWS: nccom-test user guide):
containers of AWS Batch have no ssh daemon unless the image brings one. The ranks' own collectives cross the nodes
without any of this.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from pipeline.health.check import Check, CheckContext
from pipeline.health.config import HealthConfig
from pipeline.health.instances import NeuronInstance
from pipeline.health.nccom import NAME as NCCOM
from pipeline.health.nccom import check_nccom
from pipeline.health.tools import BANDWIDTH, NCCOM_LEAVE_S, NCCOM_LIMIT_S, bandwidth_test, correctness_test, least_gib_s
from pipeline.health.verdict import CheckResult, NodeReport, Verdict
from pipeline.parallel.network import own_address

ADDRESS, ACROSS = "address", f"{NCCOM} across nodes"
LIMIT_S = 2 * (NCCOM_LIMIT_S + NCCOM_LEAVE_S)


def address_check(own: Callable[[], str] = own_address) -> Check:
    """Tells the others where this node is."""
    return Check(ADDRESS, lambda ctx: CheckResult(ADDRESS, Verdict.PASS, figures={ADDRESS: own()}), "tools", cost_s=0.0)


def across_check(
    instance: NeuronInstance,
    config: HealthConfig,
    reports: Sequence[NodeReport],
    *,
    processes: int,
    env: Mapping[str, str] = os.environ,
) -> Check:
    """All-reduce over `processes` ranks of each of the nodes that have reported; to be run on one of them."""

    def run(ctx: CheckContext) -> Iterator[CheckResult]:
        hosts = addresses(reports)
        if shutil.which("mpirun", path=env.get("PATH")) is None:
            yield CheckResult(
                ACROSS,
                Verdict.FIX,
                "mpirun is not installed",
                "Open MPI in the image, as AWS's training images have it",
                "install it, or --no-health.nccom-across-nodes",
            )
            return
        ctx.doing = f"running {NCCOM} over {', '.join(hosts)}"
        run_test = partial(check_nccom, instance, env=env, stop=ctx.stop, timeout_s=NCCOM_LIMIT_S)
        yield (checked := replace(run_test(correctness_test(processes * len(hosts), "all_reduce", hosts)), name=ACROSS))
        if checked.verdict >= Verdict.RETRY:
            return
        measured = run_test(
            bandwidth_test(processes * len(hosts), hosts),
            min_busbw_gib_s=least_gib_s(config),
            usual_busbw_gib_s=instance.bus_gib_s if len(hosts) == 2 else None,
        )
        yield replace(measured, name=f"{ACROSS} {BANDWIDTH}")

    return Check(ACROSS, run, "tools", time_limit_s=LIMIT_S, cost_s=20.0)


def addresses(reports: Sequence[NodeReport]) -> tuple[str, ...]:
    """In rank order: the main node first, where the ranks of the runtime meet."""
    ordered = sorted(reports, key=lambda report: report.node_rank)
    return tuple(
        str(result.figures[ADDRESS]) for report in ordered for result in report.results if result.name == ADDRESS
    )
