"""Are all Neuron devices there, whole and free: `neuron-ls -j` against the instance table (AWS: its user guide)."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from pipeline.core.format import format_bytes
from pipeline.core.stop import StopSignal
from pipeline.health.instances import NeuronInstance, without_answer
from pipeline.health.verdict import CheckResult, Verdict
from pipeline.proc.tool import Count, ToolRun, json_in, run_tool

DEVICES, PROCESSES = "neuron-devices", "neuron-processes"
SYSFS = Path("/sys/devices/virtual/neuron_device")
DEV = Path("/dev")
# Calls at the same time could fail before SDK 2.28; cores are free 5-10 s after their holder was killed.
NUM_TRIES = 3
WAIT_S = 5.0
_MEMORY_SHARE = 0.95
_TOOLS = ("neuron-ls", "neuron-top", "neuron-monitor")  # they open a device, and hold no core


class DeviceProcess(BaseModel):
    pid: Count = 0
    command: str | None = None  # empty where the process is in another container
    neuron_runtime_version: str | None = None


class Device(BaseModel):
    """One object of the list. Older tools leave out what has a default; unknown keys are passed over."""

    neuron_device: Count
    nc_count: Count
    memory_size: Count
    logical_neuroncore_config: Count | None = None
    neuroncore_ids: list[int] | None = None
    connected_to: list[int] | None = None
    neuron_processes: list[DeviceProcess] | None = None
    instance_type: str | None = None


def parse_neuron_ls(text: str) -> tuple[Device, ...] | None:
    """The devices; None where the answer is no list of them: `null`, text, or cut off."""
    try:
        return tuple(TypeAdapter(list[Device]).validate_python(json_in(text)))
    except ValueError:
        return None


def judge_devices(
    devices: Collection[Device], instance: NeuronInstance, *, unmapped: Collection[int] = ()
) -> CheckResult:
    """All devices, each with its cores and memory. `unmapped`: the driver has them, this container has not."""
    found = {device.neuron_device for device in devices}
    figures = {"num_devices": len(found), "num_cores": sum(device.nc_count for device in devices)}
    wanted = f"{instance.num_devices or 'all'} devices as on {instance.name}"

    def result(verdict: Verdict, seen: str, expected: str = wanted, next_command: str = "") -> CheckResult:
        return CheckResult(DEVICES, verdict, seen, expected, next_command, figures)

    types = {device.instance_type for device in devices if device.instance_type}
    if instance.num_devices and types and types != {instance.name}:
        return result(
            Verdict.FIX, f"this is a {', '.join(sorted(types))}", instance.name, "correct the instance type in settings"
        )
    missing = set(range(instance.num_devices or 0)) - found
    if missing and missing <= set(unmapped):
        return result(
            Verdict.FIX,
            f"{_names(missing)} are not mapped into this container",
            next_command="add /dev/neuron0.. to linuxParameters.devices of the job definition",
        )
    if missing or not found:
        return result(Verdict.RETRY, f"missing: {_names(missing) or 'every device'}", next_command=_ELSEWHERE)
    if instance.num_devices and len(found) > instance.num_devices:
        return result(Verdict.FIX, f"{len(found)} devices", next_command="correct the instance type in settings")
    for device in devices:
        cores = _core_counts(device, instance)
        if cores and device.nc_count not in cores:
            seen = f"neuron{device.neuron_device} has {device.nc_count} cores"
            return result(Verdict.RETRY, seen, " or ".join(map(str, sorted(cores))), _ELSEWHERE)
        if device.memory_size < _MEMORY_SHARE * (instance.device_memory_bytes or 0):
            seen = f"neuron{device.neuron_device} has {format_bytes(device.memory_size)} of memory"
            return result(Verdict.RETRY, seen, format_bytes(instance.device_memory_bytes or 0), _ELSEWHERE)
    seen = f"{len(found)} devices, {figures['num_cores']} cores"
    return CheckResult(DEVICES, Verdict.PASS, seen, figures=figures)


def judge_processes(devices: Iterable[Device], *, own_pids: Collection[int] = ()) -> CheckResult:
    """Nobody else holds a core."""
    holders: dict[int, tuple[str, list[int]]] = {}
    for device in devices:
        for process in device.neuron_processes or ():
            command = process.command or ""
            if process.pid not in own_pids and Path(command.partition(" ")[0]).name not in _TOOLS:
                holders.setdefault(process.pid, (command, []))[1].append(device.neuron_device)
    if not holders:
        return CheckResult(PROCESSES, Verdict.PASS)
    pid, (command, where) = next(iter(holders.items()))
    more = f" and {len(holders) - 1} more processes" if len(holders) > 1 else ""
    return CheckResult(
        PROCESSES,
        Verdict.RETRY,
        seen=f"process {pid} ({command[:80] or 'of another container'}) holds {_names(where)}{more}",
        expected="no process on the devices before the job starts",
        next_command=f"kill {' '.join(str(pid) for pid in holders)}; wait 10 s; neuron-ls",
        figures={"num_processes": len(holders)},
    )


def check_neuron_ls(
    instance: NeuronInstance | None,
    *,
    stop: StopSignal,
    timeout_s: float = 20.0,
    wait_s: float = WAIT_S,
    own_pids: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    sysfs: Path = SYSFS,
    dev: Path = DEV,
) -> tuple[CheckResult, ...]:
    """Run the tool and judge. `instance`: what this machine should be; None where no Neuron machine is expected."""
    for attempt in range(1, NUM_TRIES + 1):
        run = run_tool(["neuron-ls", "-j"], timeout_s=timeout_s, stop=stop, env=env)
        devices = _answer(run)
        held = judge_processes(devices or (), own_pids={os.getpid(), *own_pids})
        final = run.missing or run.timed_out or instance is None or (devices and held.verdict is Verdict.PASS)
        if final or attempt == NUM_TRIES:
            break
        stop.wait(wait_s)
    if devices is None or (instance is None and not devices):
        return (without_answer(DEVICES, run, instance),)
    unmapped = numbered(sysfs, "neuron") - numbered(dev, "neuron")
    return judge_devices(devices, instance or NeuronInstance("this machine"), unmapped=unmapped), held


def numbered(folder: Path, prefix: str) -> set[int]:
    """The numbers of the entries `<prefix><number>`; none where the folder cannot be read."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return set()
    return {int(match[1]) for name in names if (match := re.fullmatch(rf"{prefix}(\d{{1,6}})", name))}


_ELSEWHERE = "this job elsewhere; on this machine: dmesg | grep -i neuron, then replace it"


def _answer(run: ToolRun) -> tuple[Device, ...] | None:
    return None if run.missing or run.timed_out else parse_neuron_ls(run.stdout)


def _core_counts(device: Device, instance: NeuronInstance) -> set[int]:
    """Right values of nc_count: logical cores, or physical ones as some versions count on trn2."""
    physical, told = instance.device_cores, device.logical_neuroncore_config
    if physical is None:
        return set()
    configs = (told,) if told in instance.core_configs else instance.core_configs
    return {physical // config for config in configs if config} | {physical}


def _names(indices: Iterable[int]) -> str:
    return ", ".join(f"neuron{index}" for index in sorted(set(indices)))
