"""Is the network for many nodes there: EFA devices against the instance table.

Read from sysfs, which shows those of the host, and from /dev/infiniband, which shows those this container may open.
"""

from pathlib import Path

from pipeline.health.instances import NeuronInstance
from pipeline.health.neuron_ls import numbered
from pipeline.health.verdict import CheckResult, Verdict

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
