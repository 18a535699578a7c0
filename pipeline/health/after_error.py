"""An error of the device in the middle of training: is it the machine, the settings, or a bug of ours?"""

from pipeline.backends import Backend, device_guard
from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckContext, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.device import check_operations
from pipeline.health.neuron_errors import device_error
from pipeline.health.verdict import CheckResult, Verdict

_ASSERT = "device-side assert triggered"
"""Of CUDA, for an index beyond a table and the like: a bug, after which the process cannot use the device any more."""


def informed(
    error: RuntimeError, backend: Backend, config: HealthConfig, *, num_nodes: int, stop: StopSignal
) -> BaseException:
    """What to raise for `error`: that of the table of Neuron errors, else TransientError on a device that fails the
    short checks, else the error itself. Never raises for what it finds; Preempted when stopped.
    """
    known = device_error(str(error), num_nodes=num_nodes)
    if known is not None:
        return known
    if _ASSERT in str(error):
        return error

    def operations(ctx: CheckContext) -> CheckResult:
        ctx.doing = "checking tensor operations after an error of the device"
        with device_guard(backend.device):
            return check_operations(backend, seed=1, repeats=1, stop=ctx.stop, tolerances=config.tolerances)

    limit_s = config.check_limit_s * config.patience(on_neuron=backend.is_neuron)
    check = Check("operations", operations, time_limit_s=limit_s)
    report = run_checks([check], config, node_rank=0, host="this rank", stop=stop)
    if report.verdict < Verdict.RETRY:
        return error
    (result,) = report.results
    return TransientError(
        f"{str(error).splitlines()[0]}; and the device fails its check: {result.seen}",
        expected="a device that computes",
        next_command="trnpipe health on that machine; the job itself may be retried elsewhere",
    )
