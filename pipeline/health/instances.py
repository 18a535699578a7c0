"""What a Neuron machine should have, by instance type: of core/machines what AWS's tools are held against."""

from dataclasses import dataclass

from pipeline.core.machines import MACHINES
from pipeline.health.verdict import CheckResult, Verdict
from pipeline.proc.tool import ToolRun


@dataclass(frozen=True)
class NeuronInstance:
    """None is not known. Cores are physical; `core_configs`: how many of them may make a logical one (LNC)."""

    name: str
    num_devices: int | None = None
    device_cores: int | None = None
    device_memory_bytes: int | None = None
    core_configs: tuple[int, ...] = (1,)
    num_efa: int | None = None
    rank_counts: tuple[int, ...] = ()
    """How many ranks may run on it; over many nodes only as many as there are cores, the last."""
    bus_gib_s: float | None = None
    """Bus bandwidth of an all-reduce of 128 MiB over all cores, in 2^30 bytes a second."""


def neuron_instance(instance_type: str) -> NeuronInstance | None:
    """None for a machine without Neuron devices; for a Neuron type that is not in the table nothing is known."""
    machine = MACHINES.get(instance_type)
    if machine is None:
        return NeuronInstance(instance_type) if instance_type.startswith(("trn", "inf")) else None
    return NeuronInstance(
        machine.name,
        machine.num_devices,
        machine.device_cores,
        machine.device_memory_bytes,
        machine.core_configs,
        machine.num_efa,
        machine.rank_counts,
        machine.bus_gib_s,
    )


def judge_rank_count(instance: NeuronInstance, processes: int, *, num_nodes: int) -> CheckResult:
    """The runtime joins cores only in some numbers; with another one it hangs or fails when it starts."""
    fits = instance.rank_counts[-1:] if num_nodes > 1 else instance.rank_counts
    if not fits or processes in fits:
        return CheckResult("processes", Verdict.PASS, figures={"processes": processes})
    many = f" for a job of {num_nodes} nodes" if num_nodes > 1 else ""
    return CheckResult(
        "processes",
        Verdict.FIX,
        f"{processes} processes on {instance.name}{many}",
        " or ".join(map(str, fits)),
        f"--launch.processes {fits[-1]}",
        {"processes": processes},
    )


def without_answer(name: str, run: ToolRun, instance: NeuronInstance | None) -> CheckResult:
    """The result of a check whose tool gave nothing to judge."""
    if instance is None:
        return CheckResult(name, Verdict.PASS, seen=f"not a Neuron machine ({run.told()})", seconds=run.seconds)
    if run.missing:
        # The image brings the tools, so every machine that runs it lacks them.
        return CheckResult(
            name,
            Verdict.FIX,
            seen=f"{run.command[0]} is not installed on this {instance.name}",
            expected="aws-neuronx-tools in the image",
            next_command="run the neuron image, or install aws-neuronx-tools in yours",
            seconds=run.seconds,
        )
    return CheckResult(
        name,
        Verdict.RETRY,
        seen=run.told(),
        expected="an answer: a tool that hangs or breaks off has a sick driver or device below it",
        next_command="this job elsewhere; on this machine: sudo modprobe -r neuron; sudo modprobe neuron",
        seconds=run.seconds,
    )
