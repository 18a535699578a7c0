"""What neuron-monitor tells: hardware, and error counters beside those of sysfs (AWS: neuron-monitor user guide)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel

from pipeline.core.stop import StopSignal
from pipeline.health.instances import NeuronInstance
from pipeline.health.neuron_ls import SYSFS, numbered
from pipeline.health.verdict import CheckResult, Verdict
from pipeline.proc.tool import Count, ToolRun, json_in, run_tool

# Memory errors by device: the driver's counters in sysfs, and what any counters mean.
#
# Facts: AWS Neuron documentation, user guides of sysfs and neuron-monitor.

ECC = "neuron-ecc"


@dataclass(frozen=True)
class DeviceCounts:
    """Errors of one device since its driver was loaded. `hw_errors`: executions that ended with a hardware error."""

    device: int
    mem_uncorrected: int = 0
    sram_uncorrected: int = 0
    mem_repairable: int = 0
    mem_corrected: int = 0
    sram_corrected: int = 0
    hw_errors: int = 0


def read_sysfs(root: Path = SYSFS) -> tuple[DeviceCounts, ...]:
    """The driver's own counters, for each device that has one that can be read."""
    found = []
    for index in sorted(numbered(root, "neuron")):
        device = root / f"neuron{index}"
        memory, sram, repairable = (
            _number(device / "stats" / "hardware" / name)
            for name in ("mem_ecc_uncorrected", "sram_ecc_uncorrected", "mem_ecc_repairable_uncorrected")
        )
        cores = [_number(path) for path in device.glob("neuron_core*/stats/status/hw_error")]
        if any(value is not None for value in (memory, sram, repairable, *cores)):
            hw_errors = sum(value or 0 for value in cores)
            found.append(DeviceCounts(index, memory or 0, sram or 0, repairable or 0, hw_errors=hw_errors))
    return tuple(found)


def merge(*sources: Sequence[DeviceCounts]) -> tuple[DeviceCounts, ...]:
    """One for each device, with the higher value of each counter: both sources read the same ones."""
    merged: dict[int, DeviceCounts] = {}
    for counts in (counts for source in sources for counts in source):
        known = merged.get(counts.device, counts)
        merged[counts.device] = DeviceCounts(*map(max, astuple(known), astuple(counts)))
    return tuple(merged[device] for device in sorted(merged))


def judge_ecc(counts: Iterable[DeviceCounts]) -> CheckResult:
    """An uncorrected error: RETRY. A corrected one, or a hardware error of an earlier run: WARN."""
    counts = tuple(counts)
    totals = {field.name: sum(getattr(c, field.name) for c in counts) for field in fields(DeviceCounts)[1:]}
    grave = [c for c in counts if c.mem_uncorrected or c.sram_uncorrected or c.mem_repairable]
    light = [c for c in counts if c.mem_corrected or c.sram_corrected or c.hw_errors]
    expected = "no uncorrected memory error"
    if grave:
        reload_helps = not any(c.mem_uncorrected or c.sram_uncorrected for c in grave)
        do = "reload the driver (modprobe -r neuron; modprobe neuron) or reboot" if reload_helps else "replace it"
        return CheckResult(
            ECC, Verdict.RETRY, _told(grave), expected, f"this job elsewhere; this machine: {do}", totals
        )
    if light:
        return CheckResult(ECC, Verdict.WARN, _told(light), expected, "watch this machine; dmesg", totals)
    return CheckResult(ECC, Verdict.PASS, figures=totals)


def _number(path: Path) -> int | None:
    """A counter: a file, or a folder with the file `total`."""
    try:
        return int((path / "total" if path.is_dir() else path).read_text())
    except (OSError, ValueError):
        return None


def _told(counts: Iterable[DeviceCounts]) -> str:
    names = [field.name for field in fields(DeviceCounts)[1:]]
    return ", ".join(
        f"neuron{c.device} {name.replace('_', ' ')} {getattr(c, name)}"
        for c in counts
        for name in names
        if getattr(c, name)
    )


HARDWARE = "neuron-hardware"
_CONFIG = {
    "period": "1s",
    "neuron_runtimes": [],
    "system_metrics": [{"type": "neuron_hw_counters", "period": "1s"}],
}


class _Ecc(BaseModel):
    neuron_device_index: Count
    mem_ecc_corrected: Count | None = None
    mem_ecc_uncorrected: Count | None = None
    sram_ecc_corrected: Count | None = None  # not in older versions
    sram_ecc_uncorrected: Count | None = None


class _Counters(BaseModel):
    neuron_devices: list[_Ecc] | None = None
    error: str | None = None


class _System(BaseModel):
    neuron_hw_counters: _Counters | None = None


class HardwareInfo(BaseModel):
    neuron_device_count: Count | None = None
    neuroncore_per_device_count: Count | None = None
    neuron_device_type: str | None = None  # this and the next are not in older versions
    neuroncore_version: str | None = None
    error: str | None = None


class InstanceInfo(BaseModel):
    instance_type: str | None = None
    instance_id: str | None = None


class Snapshot(BaseModel):
    """One line. Groups that were not asked for, or are not known to this version, are None."""

    system_data: _System | None = None
    neuron_hardware_info: HardwareInfo | None = None
    instance_info: InstanceInfo | None = None

    def counts(self) -> tuple[DeviceCounts, ...]:
        counters = self.system_data and self.system_data.neuron_hw_counters
        return tuple(
            DeviceCounts(
                device.neuron_device_index,
                mem_uncorrected=device.mem_ecc_uncorrected or 0,
                sram_uncorrected=device.sram_ecc_uncorrected or 0,
                mem_corrected=device.mem_ecc_corrected or 0,
                sram_corrected=device.sram_ecc_corrected or 0,
            )
            for device in (counters and counters.neuron_devices) or ()
        )


def parse_neuron_monitor(text: str) -> Snapshot | None:
    """The last line that is whole and tells of this machine; None where there is none."""
    for line in reversed(text.splitlines()):
        try:
            snapshot = Snapshot.model_validate(json_in(line))
        except ValueError:
            continue
        if snapshot.neuron_hardware_info or snapshot.system_data:
            return snapshot
    return None


def judge_hardware(snapshot: Snapshot, instance: NeuronInstance) -> CheckResult:
    """The machine that answers is the one expected."""
    info, place = snapshot.neuron_hardware_info or HardwareInfo(), snapshot.instance_info or InstanceInfo()
    count = info.neuron_device_count
    figures: dict[str, int | str] = {name: value for name, value in info.model_dump().items() if value}
    figures |= {name: value for name, value in place.model_dump().items() if value}
    if instance.num_devices and place.instance_type and place.instance_type != instance.name:
        fix = "correct the instance type in settings"
        return CheckResult(HARDWARE, Verdict.FIX, f"this is a {place.instance_type}", instance.name, fix, figures)
    if info.error or not count:
        seen = f"neuron-monitor: {info.error or 'tells no device count'}"
        return CheckResult(HARDWARE, Verdict.WARN, seen, "its hardware info", "neuron-ls", figures)
    if instance.num_devices and count < instance.num_devices:
        do = "this job elsewhere; on this machine: neuron-ls, dmesg | grep -i neuron"
        return CheckResult(
            HARDWARE, Verdict.RETRY, f"{count} devices", f"{instance.num_devices} as on {instance.name}", do, figures
        )
    return CheckResult(HARDWARE, Verdict.PASS, f"{count} devices", figures=figures)


def check_neuron_monitor(
    instance: NeuronInstance | None,
    *,
    stop: StopSignal,
    timeout_s: float = 15.0,
    env: Mapping[str, str] | None = None,
    sysfs: Path = SYSFS,
) -> tuple[CheckResult, ...]:
    """Error counters from both sources, and the hardware.

    A tool that gives nothing is a WARN: neuron-ls says whether the machine can work, and sysfs has the grave counters.
    """
    run = _run(timeout_s, stop, env)
    snapshot = parse_neuron_monitor(run.stdout)
    counts = merge(read_sysfs(sysfs), snapshot.counts() if snapshot else ())
    if instance is None and not counts:
        seen = f"not a Neuron machine ({run.told()})"
        return (CheckResult(ECC, Verdict.PASS, seen, seconds=run.seconds),)
    nothing = CheckResult(
        ECC,
        Verdict.WARN,
        f"no error counters: none below {sysfs}; {run.told()}",
        "counters of each device",
        "neuron-ls",
    )
    silent = CheckResult(
        HARDWARE, Verdict.WARN, run.told(), "one line of JSON a second", "neuron-monitor", seconds=run.seconds
    )
    expected = instance or NeuronInstance("this machine")
    return judge_ecc(counts) if counts else nothing, judge_hardware(snapshot, expected) if snapshot else silent


def _run(timeout_s: float, stop: StopSignal, env: Mapping[str, str] | None) -> ToolRun:
    """It runs for ever: one whole line is enough."""
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            config = Path(folder) / "neuron-monitor.json"
            config.write_text(json.dumps(_CONFIG))
            return run_tool(
                ["neuron-monitor", "-c", str(config)],
                timeout_s=timeout_s,
                stop=stop,
                env=env,
                enough=lambda text: parse_neuron_monitor(text) is not None,
            )
    except OSError as error:  # no space for its settings
        return ToolRun(("neuron-monitor",), failure=f"no place for its settings: {error}")
