"""What one node of a job asks for, from its settings and the table of machines. Pure."""

from jobs.config import StageJob
from jobs.plan.spec import Resources, Ulimit
from pipeline.core.errors import ConfigError
from pipeline.core.machines import NODES, Node

SHARED_MEMORY_SHARE = 8  # an eighth of the memory: ranks exchange through it; Docker's own 64 MiB end in SIGBUS
OPEN_FILES = Ulimit(name="nofile", soft=65_536, hard=65_536)  # the main node of a gang holds a connection to each other
LOCKED_MEMORY = Ulimit(name="memlock", soft=-1, hard=-1)  # what Neuron devices and EFA read and write stays in memory


def check_instance(name: str, wanted: StageJob) -> None:
    """Raises ConfigError for a machine that is not in the table, without sizes beside it."""
    if wanted.instance and wanted.instance not in NODES and None in (wanted.vcpus, wanted.memory_mib):
        raise ConfigError(
            f"jobs.{name}.instance is {wanted.instance}, an unknown instance type",
            expected=f"one of {', '.join(NODES)}; or vcpus and memory_mib beside it",
            next_command=f"set jobs.{name}.vcpus and jobs.{name}.memory_mib, then trnjobs plan",
        )


def resources_of(wanted: StageJob) -> Resources:
    """What one node of the job asks for."""
    known = NODES.get(wanted.instance, Node(vcpus=1, memory_mib=2048, num_devices=0, num_efa=0))
    memory_mib = wanted.memory_mib or known.memory_mib
    devices = [f"/dev/neuron{index}" for index in range(known.num_devices)]
    if wanted.nodes > 1:
        devices += [f"/dev/infiniband/uverbs{index}" for index in range(known.num_efa)]
    return Resources(
        vcpus=wanted.vcpus or known.vcpus,
        memory_mib=memory_mib,
        shared_memory_mib=max(64, memory_mib // SHARED_MEMORY_SHARE),
        devices=tuple(devices),
        ulimits=(OPEN_FILES, LOCKED_MEMORY) if known.num_devices else (OPEN_FILES,),
        instance_type=wanted.instance,
        processes_per_node=wanted.processes,
    )
