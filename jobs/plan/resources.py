"""Resources of a job: its size from settings and the table of machines, its SageMaker machine, and its price. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jobs.plan.spec import Dependency, JobSpec, Resources, Retry, Ulimit
from jobs.settings import JobsConfig, StageJob
from pipeline.core.errors import ConfigError
from pipeline.core.machines import NODES, PRICES_USD_PER_HOUR, Node

SHARED_MEMORY_SHARE = 8  # an eighth of the memory, because Docker's default of 64 MiB ends in SIGBUS
OPEN_FILES = Ulimit(name="nofile", soft=65_536, hard=65_536)  # the main node has a connection to every other node
LOCKED_MEMORY = Ulimit(name="memlock", soft=-1, hard=-1)  # buffers of Neuron devices and EFA must stay in memory


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
    """Build a job. Raises ConfigError for an unknown instance type without explicit sizes, and for zero bytes."""
    texts = {"its command": "".join(command)} | {f"environment {key}": key + text for key, text in environment.items()}
    if bad := next((where for where, text in texts.items() if "\0" in text), ""):
        raise ConfigError(
            f"{name}: {bad!r} contains a zero byte",
            expected="text without zero bytes, which the kernel does not accept",
            next_command="correct [jobs], then trnjobs plan",
        )
    if config.instance and config.instance not in NODES and None in (config.vcpus, config.memory_mib):
        raise ConfigError(
            f"jobs.{name}.instance is {config.instance}, an unknown instance type",
            expected=f"one of {', '.join(NODES)}, or vcpus and memory_mib as well",
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
        retry=Retry.of(config.attempts),
        timeout_s=timeout_s,
        depends_on=tuple(Dependency(job=job) for job in after),
    )


# SageMaker provides whole machines. A job with an instance type gets it with the prefix `ml.`. A job with only vCPUs
# and memory gets the smallest sufficient machine of one family.
# Source: Amazon EC2 instance types, M7i. TrainingInstanceType in the SageMaker API lists the available ones.

PREFIX = "ml."
_FAMILY = "m7i"
_VCPUS = {"large": 2, "xlarge": 4} | {f"{n}xlarge": 4 * n for n in (2, 4, 8, 12, 16, 24, 48)}
_MIB_PER_VCPU = 4 * 1024
_USABLE = 0.9  # share of the memory that is not used by the kernel and SageMaker's agents


def ml_name(instance_type: str) -> str:
    """Return the SageMaker name of an instance type, such as `ml.trn1.32xlarge`."""
    return PREFIX + instance_type.removeprefix(PREFIX)


def has_accelerator(needs: Resources) -> bool:
    """Return True if the instance type has Trainium, Inferentia or GPUs."""
    return re.match(r"(trn|inf|p|g|dl)\d", needs.instance_type.removeprefix(PREFIX)) is not None


def ml_machine(needs: Resources) -> str:
    """Return the SageMaker machine of a job, such as `ml.trn1.32xlarge`. Empty if no machine is large enough."""
    if needs.instance_type:
        return ml_name(needs.instance_type)
    vcpus = max(needs.vcpus, needs.memory_mib / _MIB_PER_VCPU / _USABLE)
    size = next((size for size, available in _VCPUS.items() if vcpus <= available), "")
    return f"{PREFIX}{_FAMILY}.{size}" if size else ""


# Prices. A container costs a share of its machine, by vCPUs, as AWS Batch places it. A node of a node group occupies a
# whole machine. Machines without a price in the table cost by the vCPU if the settings have that price.

SAGEMAKER_PRICE_FACTOR = 1.15
"""Ratio to the EC2 price if jobs.prices has no ml.* price (as published for ml.p5.48xlarge and ml.p4d.24xlarge)."""


@dataclass(frozen=True)
class Prices:
    """Prices in USD per hour, by instance type and per vCPU of other machines (None: unknown)."""

    by_instance: Mapping[str, float]
    vcpu: float | None = None
    whole_machines: bool = False  # true if jobs get whole machines, as on SageMaker


def prices_of(jobs: JobsConfig, target: str = "") -> Prices:
    """Return the prices of a target, from the table and the settings."""
    by_instance, vcpu = PRICES_USD_PER_HOUR | jobs.prices, jobs.vcpu_usd_per_hour
    if target != "sagemaker":
        return Prices(by_instance, vcpu)
    derived = {ml_name(name): SAGEMAKER_PRICE_FACTOR * usd for name, usd in by_instance.items()}
    explicit = {name: usd for name, usd in by_instance.items() if name.startswith(PREFIX)}
    return Prices(derived | explicit, None if vcpu is None else SAGEMAKER_PRICE_FACTOR * vcpu, whole_machines=True)


def node_usd_per_hour(job: JobSpec, prices: Prices) -> float | None:
    """Return the hourly price of one node or array task, or None if unknown."""
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
    # AWS Batch places no other job on the nodes of a node group (user guide, multi-node parallel jobs: single-tenant).
    shared = None if prices.whole_machines or job.num_nodes else NODES.get(needs.instance_type)
    return price * min(1.0, needs.vcpus / shared.vcpus) if shared else price


def job_usd(job: JobSpec, seconds: float, prices: Prices) -> float | None:
    """Return the price of a job with nodes or array tasks that run for `seconds` each, or None if unknown."""
    price = node_usd_per_hour(job, prices)
    return None if price is None else price * seconds / 3600 * max(1, job.num_nodes, job.array_size)
