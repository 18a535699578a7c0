"""A Neuron machine: what it should be, and what driver, kernel and `neuron-ls` say of it.

Facts: AWS Neuron documentation, user guides of neuron-ls and sysfs, runtime troubleshooting and release notes.
"""

import importlib.metadata
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from pipeline.core.format import format_bytes
from pipeline.core.machines import MACHINES
from pipeline.core.neuron_errors import Evidence, classify
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckContext, CheckResult, Verdict
from pipeline.proc.tool import Count, ToolRun, json_in, run_tool

SYSFS = Path("/sys/devices/virtual/neuron_device")
INFINIBAND = Path("/sys/class/infiniband")  # devices of the host
DEV = Path("/dev")
_ELSEWHERE = "this job elsewhere; on this machine: dmesg | grep -i neuron, then replace it"


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
    return NeuronInstance(**{one.name: getattr(machine, one.name) for one in fields(NeuronInstance)})


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


# Versions, and whether driver and runtime fit.

VERSIONS, DRIVER_FIT = "versions", "driver and runtime"
DISTRIBUTIONS = ("neuronx-cc", "torch", "torch-xla", "torch-neuronx", "libneuronxla")
DRIVER_FILE = Path("/sys/module/neuron/version")
NEURON_LIBRARIES = Path("/opt/aws/neuron/lib")
# "Neuron Driver 2.29 requires Neuron Runtime Library 2.33 or later", else nrt_init() fails: AWS Neuron release notes,
# runtime component, SDK 2.31.0.
NEW_DRIVER, LEAST_RUNTIME = (2, 29), (2, 33)


def find_versions(*, driver_file: Path = DRIVER_FILE, libraries: Path = NEURON_LIBRARIES) -> dict[str, str]:
    """Version by part; what is not there is left out."""
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # Links of the package aws-neuronx-runtime-lib lead to a file named by its version.
    if runtimes := {path.resolve().name.removeprefix("libnrt.so.") for path in libraries.glob("libnrt.so.*")}:
        found["runtime"] = ", ".join(sorted(runtimes))
    if driver_file.is_file():
        found["driver"] = driver_file.read_text().strip()
    return found


def judge_driver(versions: Mapping[str, str]) -> CheckResult | None:
    """Can the runtime of the image work with the driver of the machine; None where there is no driver.

    The driver comes with the machine image, so every machine of it would say the same.
    """
    driver, runtime = versions.get("driver"), versions.get("runtime")
    if driver is None:
        return None
    # Where several runtimes lie side by side the loader's choice is not known: only all of them together are wrong.
    numbers = [number for text in (runtime or "").split(", ") if (number := _release(text))]
    new, seen = _release(driver), f"driver {driver}, runtime {runtime or 'not found'}"
    least, limit = (".".join(map(str, release)) for release in (LEAST_RUNTIME, NEW_DRIVER))
    expected = f"runtime {least} or later with driver {limit} or later"
    if new is None or (new >= NEW_DRIVER and not numbers):
        look = f"cat {DRIVER_FILE}; ls {NEURON_LIBRARIES}"
        return CheckResult(DRIVER_FIT, Verdict.WARN, f"{seen}: cannot be compared", expected, look)
    if new >= NEW_DRIVER and max(numbers) < LEAST_RUNTIME:
        fix = (
            f"a machine image with a driver before {limit} (Terraform: ami_id); where nobody can choose it, as on "
            f"SageMaker, a container image with runtime {least}: docs/neuron.md, When no such machine image is left"
        )
        return CheckResult(DRIVER_FIT, Verdict.FIX, f"{seen}: nrt_init fails", expected, fix)
    return CheckResult(DRIVER_FIT, Verdict.PASS, seen)


def versions_check(more: Mapping[str, str], find: Callable[[], Mapping[str, str]] = find_versions) -> Check:
    """Reports versions and `more`. Before anything that opens a device: where driver and runtime do not fit, that fails
    in less clear words.
    """

    def run(ctx: CheckContext) -> Iterator[CheckResult]:
        ctx.doing = "looking for installed versions"
        found = find()
        yield CheckResult(VERSIONS, Verdict.PASS, figures={**found, **more})
        if (fit := judge_driver(found)) is not None:
            yield fit

    return Check(VERSIONS, run, cost_s=0.1)


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor number; None where it does not start with them."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})(?!\d)", version)
    return (int(match[1]), int(match[2])) if match else None


# What the kernel knows: broken hardware in its log, the driver's error counters, network devices.

COUNTERS = ("mem_ecc_uncorrected", "sram_ecc_uncorrected", "mem_ecc_repairable_uncorrected")


def check_kernel_log(
    instance: NeuronInstance | None, *, stop: StopSignal, env: Mapping[str, str] | None = None, timeout_s: float = 10.0
) -> CheckResult:
    """Hardware errors since boot, with `dmesg`. Containers may not read it, as a rule: a warning."""
    run = run_tool(["dmesg"], timeout_s=timeout_s, stop=stop, env=env)
    for match in classify(run.stdout):
        if match.row.evidence is Evidence.PROOF:
            do, expected = f"this job elsewhere; {match.row.action}", "no hardware error since boot"
            return CheckResult("kernel-log", Verdict.RETRY, match.line, expected, do, seconds=run.seconds)
    if run.exit_code == 0 or instance is None:
        return CheckResult("kernel-log", Verdict.PASS, "" if run.exit_code == 0 else f"not readable ({run.told()})")
    return CheckResult(
        "kernel-log",
        Verdict.WARN,
        f"not readable ({run.told()})",
        expected="the kernel log: it names the device that broke",
        next_command="on the host: dmesg | grep NEURON_HW_ERR; a container needs the capability SYSLOG",
        seconds=run.seconds,
    )


def check_counters(sysfs: Path = SYSFS) -> CheckResult:
    """Memory errors that were not corrected, since the driver was loaded. Nothing where it counts none."""
    found: dict[str, int] = {}
    for device in sorted(numbered(sysfs, "neuron")):
        for name in COUNTERS:
            path = sysfs / f"neuron{device}" / "stats" / "hardware" / name
            try:
                count = int((path / "total" if path.is_dir() else path).read_text())
            except (OSError, ValueError):  # an older driver has fewer
                continue
            found |= {f"neuron{device} {name.replace('_', ' ')}": count} if count else {}
    if not found:
        return CheckResult("neuron-ecc", Verdict.PASS)
    return CheckResult(
        "neuron-ecc",
        Verdict.RETRY,
        ", ".join(f"{name} {count}" for name, count in found.items()),
        "no uncorrected memory error",
        "this job elsewhere; reload the driver (modprobe -r neuron; modprobe neuron); if it repeats, another machine",
        {"num_errors": sum(found.values())},
    )


def check_efa(
    instance: NeuronInstance, *, num_nodes: int, infiniband: Path = INFINIBAND, dev: Path = DEV / "infiniband"
) -> CheckResult:
    """EFA devices of the host, and those this container may open. One node needs none."""
    count = len(list(infiniband.iterdir())) if infiniband.is_dir() else 0
    openable, wanted = len(numbered(dev, "uverbs")), instance.num_efa
    figures = {"num_efa": count, "num_openable": openable}
    expected = f"{'some' if wanted is None else wanted} on {instance.name}"
    if num_nodes == 1 or (count and count >= (wanted or 1) and openable >= count):
        return CheckResult("efa", Verdict.PASS, f"{count} EFA devices", figures=figures)
    if wanted == 0:
        return CheckResult(
            "efa", Verdict.FIX, f"{instance.name} has no EFA", expected, "run on one node, or another type", figures
        )
    if count == 0:  # an instance loses one device, not all: then it was started without
        do = "launch template: network interfaces with InterfaceType efa"
        return CheckResult("efa", Verdict.FIX, "no EFA device", expected, do, figures)
    if wanted and count < wanted:
        do = "this job elsewhere; launch template if all machines have as few"
        return CheckResult("efa", Verdict.RETRY, f"{count} EFA devices", expected, do, figures)
    seen = f"{openable} of {count} EFA devices are mapped into this container"
    do = "add /dev/infiniband/uverbs0.. to linuxParameters.devices of the job definition"
    return CheckResult("efa", Verdict.FIX, seen, expected, do, figures)


def numbered(folder: Path, prefix: str) -> set[int]:
    """The numbers of the entries `<prefix><number>`; none where the folder cannot be read."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return set()
    return {int(match[1]) for name in names if (match := re.fullmatch(rf"{prefix}(\d{{1,6}})", name))}


# Are all Neuron devices there, whole and free: `neuron-ls -j` against the table.

DEVICES, PROCESSES = "neuron-devices", "neuron-processes"
# Calls at the same time could fail before SDK 2.28; cores are free 5-10 s after their holder was killed.
NUM_TRIES = 3
WAIT_S = 5.0
_MEMORY_SHARE = 0.95
_TOOLS = ("neuron-ls", "neuron-top", "neuron-monitor")  # they open a device, and hold no core


class DeviceProcess(BaseModel):
    pid: Count = 0
    command: str | None = None  # empty where the process is in another container


class Device(BaseModel):
    """One object of the list. Older tools leave out what has a default; unknown keys are passed over."""

    neuron_device: Count
    nc_count: Count
    memory_size: Count
    logical_neuroncore_config: Count | None = None
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
        # Right values of nc_count: logical cores, or physical ones as some versions count on trn2.
        physical, told, cores = instance.device_cores, device.logical_neuroncore_config, set[int]()
        if physical is not None:
            configs = (told,) if told in instance.core_configs else instance.core_configs
            cores = {physical // config for config in configs if config} | {physical}
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
    env: Mapping[str, str] | None = None,
    sysfs: Path = SYSFS,
    dev: Path = DEV,
) -> tuple[CheckResult, ...]:
    """Run the tool and judge. `instance`: what this machine should be; None where no Neuron machine is expected."""
    for attempt in range(1, NUM_TRIES + 1):
        run = run_tool(["neuron-ls", "-j"], timeout_s=timeout_s, stop=stop, env=env)
        devices = None if run.missing or run.timed_out else parse_neuron_ls(run.stdout)
        held = judge_processes(devices or (), own_pids={os.getpid()})
        final = run.missing or run.timed_out or instance is None or (devices and held.verdict is Verdict.PASS)
        if final or attempt == NUM_TRIES:
            break
        stop.wait(wait_s)
    if devices is None or (instance is None and not devices):
        return (without_answer(DEVICES, run, instance),)
    unmapped = numbered(sysfs, "neuron") - numbered(dev, "neuron")
    return judge_devices(devices, instance or NeuronInstance("this machine"), unmapped=unmapped), held


def _names(indices: Iterable[int]) -> str:
    return ", ".join(f"neuron{index}" for index in sorted(set(indices)))
