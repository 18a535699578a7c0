"""Machines of Amazon SageMaker: what a job asks for, as one of its instance types. Pure.

SageMaker lends whole machines. A job that names an instance gets that one under SageMaker's name, with `ml.` before it;
a job that asks for vCPUs and memory alone gets the smallest machine of one family that holds them.

Source: Amazon EC2 instance types, M7i; which of them SageMaker has is in the model of its API (TrainingInstanceType).
"""

from jobs.plan.spec import Resources

PREFIX = "ml."
_FAMILY = "m7i"
_SIZES = {  # vCPUs and GiB
    "large": (2, 8),
    "xlarge": (4, 16),
    "2xlarge": (8, 32),
    "4xlarge": (16, 64),
    "8xlarge": (32, 128),
    "12xlarge": (48, 192),
    "16xlarge": (64, 256),
    "24xlarge": (96, 384),
    "48xlarge": (192, 768),
}
_USABLE = 0.9  # of the memory; the rest is that of the kernel and of SageMaker's agents


def ml_machine(needs: Resources) -> str:
    """`ml.trn1.32xlarge`; empty for more than any machine of the family has."""
    if needs.instance_type:
        return PREFIX + needs.instance_type.removeprefix(PREFIX)
    fitting = (
        size
        for size, (vcpus, gib) in _SIZES.items()
        if needs.vcpus <= vcpus and needs.memory_mib <= 1024 * gib * _USABLE
    )
    size = next(fitting, "")
    return f"{PREFIX}{_FAMILY}.{size}" if size else ""


def ml_vcpus(needs: Resources) -> int:
    """Of the machine that a job without an instance type gets."""
    return _SIZES.get(ml_machine(needs).rpartition(".")[2], (needs.vcpus, 0))[0]
