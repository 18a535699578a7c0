"""The resources of a job, which are derived from the settings and the table of machines, and its price."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jobs.plan.spec import Dependency, JobSpec, Resources, Retry, Ulimit
from jobs.settings import JobsConfig, StageJob
from pipeline.core.errors import ConfigError
from pipeline.core.machines import NODES, PRICES_USD_PER_HOUR, Node

SHARED_MEMORY_SHARE = 8  # Use an eighth of the memory, because Docker's default of 64 MiB causes SIGBUS.
OPEN_FILES = Ulimit(name="nofile", soft=65_536, hard=65_536)  # the main node has a connection to each of the others
LOCKED_MEMORY = Ulimit(name="memlock", soft=-1, hard=-1)  # Neuron devices and EFA need buffers that are never swapped


def job_of(
    jobs: JobsConfig,
    config: StageJob,
    *,
    name: str,
    stage: str,
    command: tuple[str, ...],
    environment: Mapping[str, str],
    timeout_s: int,
    after: Iterable[str],
) -> JobSpec:
    """Build a job, deriving its resources from its settings and its instance type.

    Raises ConfigError if the instance type is unknown and its size is not set explicitly, or if the command or the
    environment contains a zero byte.
    """
    texts = {"its command": "".join(command)} | {f"environment {key}": key + text for key, text in environment.items()}
    if bad := next((where for where, text in texts.items() if "\0" in text), ""):
        raise ConfigError(
            f"{name}: {bad!r} contains a zero byte",
            expected="no zero bytes, because the kernel does not accept them",
            next_command="correct [jobs], then trnjobs plan",
        )
    if config.instance and config.instance not in NODES and None in (config.vcpus, config.memory_mib):
        raise ConfigError(
            f"jobs.{name}.instance is {config.instance}, which is not a known instance type",
            expected=f"one of {', '.join(NODES)}, or any instance type if vcpus and memory_mib are also set",
            next_command=f"set jobs.{name}.vcpus and jobs.{name}.memory_mib, then trnjobs plan",
        )
    machine = NODES.get(config.instance, Node(vcpus=1, memory_mib=2048, num_devices=0, num_efa=0))
    memory_mib = config.memory_mib or machine.memory_mib
    devices = [f"/dev/neuron{index}" for index in range(machine.num_devices)]
    if config.nodes > 1:
        devices += [f"/dev/infiniband/uverbs{index}" for index in range(machine.num_efa)]
    return JobSpec(
        name=name,
        stage=stage,
        command=command,
        resources=Resources(
            vcpus=config.vcpus or machine.vcpus,
            memory_mib=memory_mib,
            shared_memory_mib=max(64, memory_mib // SHARED_MEMORY_SHARE),
            devices=tuple(devices),
            ulimits=(OPEN_FILES, LOCKED_MEMORY) if machine.num_devices else (OPEN_FILES,),
            instance_type=config.instance,
            processes_per_node=config.processes,
        ),
        image=config.image or jobs.image,
        num_nodes=config.nodes if config.nodes > 1 else 0,
        array_size=config.workers if config.workers > 1 else 0,
        environment=environment,
        retry=Retry.of(config.attempts, jobs.preemptions),
        timeout_s=timeout_s,
        depends_on=tuple(Dependency(job=job) for job in after),
    )


# On SageMaker, a job always gets a whole machine. If it has an instance type, we use the one with the same name and the
# prefix `ml.`. If it only has a number of vCPUs and memory, we choose the smallest M7i machine that is large enough.
# See "Amazon EC2 instance types" for their sizes, and TrainingInstanceType in the SageMaker API for those available.

PREFIX = "ml."
_FAMILY = "m7i"
_VCPUS = {"large": 2, "xlarge": 4} | {f"{n}xlarge": 4 * n for n in (2, 4, 8, 12, 16, 24, 48)}
_MIB_PER_VCPU = 4 * 1024
_USABLE = 0.9  # fraction of the memory that the kernel and the SageMaker agents leave to the job


def ml_name(instance_type: str) -> str:
    """Return the name that SageMaker uses for an instance type, such as `ml.trn1.32xlarge`."""
    return PREFIX + instance_type.removeprefix(PREFIX)


def ml_machine(needs: Resources) -> str:
    """Return the SageMaker machine for a job, such as `ml.trn1.32xlarge`, or "" if no machine is large enough."""
    if needs.instance_type:
        return ml_name(needs.instance_type)
    vcpus = max(needs.vcpus, needs.memory_mib / _MIB_PER_VCPU / _USABLE)
    size = next((size for size, available in _VCPUS.items() if vcpus <= available), "")
    return f"{PREFIX}{_FAMILY}.{size}" if size else ""


# Prices. AWS Batch can place several containers on one machine, so a container is charged for a fraction of the machine
# according to its vCPUs. Nodes of a multi-node job always occupy a whole machine. If the price of a machine is unknown,
# we use the price per vCPU from the settings, if it is set.

SAGEMAKER_PRICE_FACTOR = 1.15
"""Ratio of SageMaker to EC2 prices, for machines without an ml.* price in jobs.prices.

This is the ratio of the published prices for ml.p5.48xlarge and ml.p4d.24xlarge.
"""


@dataclass(frozen=True)
class Prices:
    """Prices in USD per hour. `vcpu` is the price per vCPU for machines that are not in `by_instance`, if known."""

    by_instance: Mapping[str, float]
    vcpu: float | None = None
    whole_machines: bool = False  # whether each job gets a whole machine, as on SageMaker


def prices_of(jobs: JobsConfig, target: str = "") -> Prices:
    """Return the prices on a target. Prices in the settings override those in our table."""
    by_instance, vcpu = PRICES_USD_PER_HOUR | jobs.prices, jobs.vcpu_usd_per_hour
    if target != "sagemaker":
        return Prices(by_instance, vcpu)
    derived = {ml_name(name): SAGEMAKER_PRICE_FACTOR * usd for name, usd in by_instance.items()}
    explicit = {name: usd for name, usd in by_instance.items() if name.startswith(PREFIX)}
    return Prices(derived | explicit, None if vcpu is None else SAGEMAKER_PRICE_FACTOR * vcpu, whole_machines=True)


def node_usd_per_hour(job: JobSpec, prices: Prices) -> float | None:
    """Return the price per hour of a single node or array task, or None if it is unknown."""
    needs = job.resources
    if prices.whole_machines:
        machine = ml_machine(needs)
        price, vcpus = prices.by_instance.get(machine), needs.vcpus
        if not needs.instance_type:
            vcpus = _VCPUS.get(machine.rpartition(".")[2], vcpus)
    else:
        price, vcpus = prices.by_instance.get(needs.instance_type), needs.vcpus
    if price is None:
        return None if prices.vcpu is None else prices.vcpu * vcpus
    # AWS Batch does not place other jobs on the machines of a multi-node job (see "Multi-node parallel jobs" in the
    # user guide, which calls them single-tenant).
    shared = None if prices.whole_machines or job.num_nodes else NODES.get(needs.instance_type)
    return price * min(1.0, needs.vcpus / shared.vcpus) if shared else price


def job_usd(job: JobSpec, seconds: float, prices: Prices) -> float | None:
    """Return the price of a job if each of its nodes or array tasks runs for `seconds`, or None if it is unknown."""
    price = node_usd_per_hour(job, prices)
    return None if price is None else price * seconds / 3600 * max(1, job.num_nodes, job.array_size)
