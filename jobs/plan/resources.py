"""A job from its settings and the table of machines; the machine of SageMaker that holds it; what it costs. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jobs.plan.spec import Dependency, JobSpec, Resources, Retry, Ulimit
from jobs.settings import JobsConfig, StageJob
from pipeline.core.errors import ConfigError
from pipeline.core.machines import NODES, PRICES_USD_PER_HOUR, Node

SHARED_MEMORY_SHARE = 8  # an eighth of the memory: ranks exchange through it; Docker's own 64 MiB end in SIGBUS
OPEN_FILES = Ulimit(name="nofile", soft=65_536, hard=65_536)  # the main node holds a connection to each other
LOCKED_MEMORY = Ulimit(name="memlock", soft=-1, hard=-1)  # what Neuron devices and EFA read and write stays in memory


def job_of(
    jobs: JobsConfig,
    wanted: StageJob,
    *,
    name: str,
    stage: str,
    command: tuple[str, ...],
    environment: Mapping[str, str],
    timeout_s: int,
    after: Iterable[str],
) -> JobSpec:
    """Raises ConfigError for a machine that is not in the table, without sizes beside it, and for what no process can
    be given.
    """
    texts = {"its command": "".join(command)} | {f"environment {name}": name + one for name, one in environment.items()}
    if bad := next((where for where, text in texts.items() if "\0" in text), ""):
        raise ConfigError(
            f"{name}: {bad!r} holds a zero byte",
            expected="text without one, which is all that the kernel takes",
            next_command="correct [jobs], then trnjobs plan",
        )
    if wanted.instance and wanted.instance not in NODES and None in (wanted.vcpus, wanted.memory_mib):
        raise ConfigError(
            f"jobs.{name}.instance is {wanted.instance}, an unknown instance type",
            expected=f"one of {', '.join(NODES)}; or vcpus and memory_mib beside it",
            next_command=f"set jobs.{name}.vcpus and jobs.{name}.memory_mib, then trnjobs plan",
        )
    known = NODES.get(wanted.instance, Node(vcpus=1, memory_mib=2048, num_devices=0, num_efa=0))
    memory_mib = wanted.memory_mib or known.memory_mib
    devices = [f"/dev/neuron{index}" for index in range(known.num_devices)]
    if wanted.nodes > 1:
        devices += [f"/dev/infiniband/uverbs{index}" for index in range(known.num_efa)]
    return JobSpec(
        name=name,
        stage=stage,
        command=command,
        resources=Resources(
            vcpus=wanted.vcpus or known.vcpus,
            memory_mib=memory_mib,
            shared_memory_mib=max(64, memory_mib // SHARED_MEMORY_SHARE),
            devices=tuple(devices),
            ulimits=(OPEN_FILES, LOCKED_MEMORY) if known.num_devices else (OPEN_FILES,),
            instance_type=wanted.instance,
            processes_per_node=wanted.processes,
        ),
        image=wanted.image or jobs.image,
        num_nodes=wanted.nodes if wanted.nodes > 1 else 0,
        array_size=wanted.workers if wanted.workers > 1 else 0,
        environment=environment,
        retry=Retry.of(wanted.attempts),
        timeout_s=timeout_s,
        depends_on=tuple(Dependency(job=one) for one in after),
    )


# SageMaker lends whole machines. A job that names an instance gets that one with `ml.` before its name; a job that asks
# for vCPUs and memory alone gets the smallest machine of one family that holds them.
# Source: Amazon EC2 instance types, M7i; which of them SageMaker has is in the model of its API (TrainingInstanceType).

PREFIX = "ml."
_FAMILY = "m7i"
_VCPUS = {"large": 2, "xlarge": 4} | {f"{n}xlarge": 4 * n for n in (2, 4, 8, 12, 16, 24, 48)}
_MIB_PER_VCPU = 4 * 1024
_USABLE = 0.9  # of the memory; the rest is that of the kernel and of SageMaker's agents


def ml_name(instance_type: str) -> str:
    """Return SageMaker's name of a machine: `ml.trn1.32xlarge`."""
    return PREFIX + instance_type.removeprefix(PREFIX)


def has_accelerator(needs: Resources) -> bool:
    """True for the families of EC2 and SageMaker with Trainium, Inferentia or GPUs."""
    return re.match(r"(trn|inf|p|g|dl)\d", needs.instance_type.removeprefix(PREFIX)) is not None


def ml_machine(needs: Resources) -> str:
    """Return a name such as `ml.trn1.32xlarge`; empty for more than any machine of the family has."""
    if needs.instance_type:
        return ml_name(needs.instance_type)
    vcpus = max(needs.vcpus, needs.memory_mib / _MIB_PER_VCPU / _USABLE)
    size = next((size for size, has in _VCPUS.items() if vcpus <= has), "")
    return f"{PREFIX}{_FAMILY}.{size}" if size else ""


# What a job costs. A container costs the share of its machine that its vCPUs are, as AWS Batch places it. A node of a
# group has a machine of its own. Machines without a price in the table cost by the vCPU if the settings have its price.

SAGEMAKER_PRICE_FACTOR = 1.15
"""Price of a machine over that of EC2 if jobs.prices has no ml.* of it (read for ml.p5.48xlarge, ml.p4d.24xlarge)."""


@dataclass(frozen=True)
class Prices:
    """USD an hour: by instance type, and of a vCPU of any other machine (None: nobody knows)."""

    by_instance: Mapping[str, float]
    vcpu: float | None = None
    whole: bool = False
    """Whether jobs get whole machines, as on SageMaker."""


def prices_of(jobs: JobsConfig, target: str = "") -> Prices:
    known, vcpu = PRICES_USD_PER_HOUR | jobs.prices, jobs.vcpu_usd_per_hour
    if target != "sagemaker":
        return Prices(known, vcpu)
    derived = {ml_name(name): SAGEMAKER_PRICE_FACTOR * usd for name, usd in known.items()}
    own = {name: usd for name, usd in known.items() if name.startswith(PREFIX)}
    return Prices(derived | own, None if vcpu is None else SAGEMAKER_PRICE_FACTOR * vcpu, whole=True)


def node_usd_per_hour(job: JobSpec, prices: Prices) -> float | None:
    """Return the price of one node or child of an array; None if unknown. SageMaker lends whole machines."""
    needs = job.resources
    if prices.whole:
        machine = ml_machine(needs)
        price, vcpus = prices.by_instance.get(machine), needs.vcpus
        if not needs.instance_type:
            vcpus = _VCPUS.get(machine.rpartition(".")[2], vcpus)
    else:
        price, vcpus = prices.by_instance.get(needs.instance_type), needs.vcpus
    if price is None:
        return None if prices.vcpu is None else prices.vcpu * vcpus
    # AWS Batch puts no other job on the nodes of a group (user guide, multi-node parallel jobs: single-tenant).
    known = None if prices.whole or job.num_nodes else NODES.get(needs.instance_type)
    return price * min(1.0, needs.vcpus / known.vcpus) if known else price


def job_usd(job: JobSpec, seconds: float, prices: Prices) -> float | None:
    """Return the price of a job whose nodes, or children, run for `seconds` each; None if unknown."""
    price = node_usd_per_hour(job, prices)
    return None if price is None else price * seconds / 3600 * max(1, job.num_nodes, job.array_size)
