"""Memory errors by device: the driver's counters in sysfs, and what any counters mean.

Facts: AWS Neuron documentation, user guides of sysfs and neuron-monitor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from pipeline.health.neuron_ls import SYSFS, numbered
from pipeline.health.verdict import CheckResult, Verdict

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
