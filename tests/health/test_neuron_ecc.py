"""Error counters: the driver's files, and what counters mean."""

from pathlib import Path

import pytest

from pipeline.health.neuron_monitor import DeviceCounts, judge_ecc, merge, read_sysfs
from pipeline.health.verdict import Verdict

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("counts", "verdict", "seen"),
    [
        (DeviceCounts(3), Verdict.PASS, ""),
        (DeviceCounts(3, mem_corrected=12), Verdict.WARN, "neuron3 mem corrected 12"),
        (DeviceCounts(3, sram_corrected=1), Verdict.WARN, "neuron3 sram corrected 1"),
        (DeviceCounts(3, hw_errors=2), Verdict.WARN, "neuron3 hw errors 2"),
        (DeviceCounts(3, mem_uncorrected=1), Verdict.RETRY, "neuron3 mem uncorrected 1"),
        (DeviceCounts(3, sram_uncorrected=1), Verdict.RETRY, "neuron3 sram uncorrected 1"),
        (DeviceCounts(3, mem_repairable=1), Verdict.RETRY, "neuron3 mem repairable 1"),
    ],
)
def test_classes(counts: DeviceCounts, verdict: Verdict, seen: str) -> None:
    result = judge_ecc([DeviceCounts(0), counts])
    assert (result.verdict, result.seen) == (verdict, seen)


def test_only_a_repairable_error_is_cured_by_the_driver() -> None:
    assert "modprobe" in judge_ecc([DeviceCounts(0, mem_repairable=1)]).next_command
    assert "replace" in judge_ecc([DeviceCounts(0, mem_repairable=1, mem_uncorrected=1)]).next_command


def test_two_sources_of_the_same_counters_are_not_added() -> None:
    one = (DeviceCounts(0, mem_uncorrected=2), DeviceCounts(1))
    other = (DeviceCounts(0, mem_uncorrected=2, mem_corrected=5), DeviceCounts(2))
    assert merge(one, other) == (DeviceCounts(0, mem_uncorrected=2, mem_corrected=5), DeviceCounts(1), DeviceCounts(2))
    assert merge() == ()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_reading_sysfs(tmp_path: Path) -> None:
    assert read_sysfs(tmp_path / "none") == ()
    for device in (0, 1, 10):
        hardware = tmp_path / f"neuron{device}" / "stats" / "hardware"
        write(hardware / "mem_ecc_uncorrected", "1\n" if device == 10 else "0\n")
        write(hardware / "sram_ecc_uncorrected", "0\n")
        for core in (0, 1):
            status = tmp_path / f"neuron{device}" / f"neuron_core{core}" / "stats" / "status" / "hw_error"
            write(status / "total", "2\n" if device == 1 else "0\n")
            write(status / "present", "0\n")
    write(tmp_path / "neuron2" / "core_count", "2\n")  # an older driver: no counter
    write(tmp_path / "neuron3" / "stats" / "hardware" / "mem_ecc_uncorrected", "not a number")
    assert read_sysfs(tmp_path) == (
        DeviceCounts(0),
        DeviceCounts(1, hw_errors=4),
        DeviceCounts(10, mem_uncorrected=1),
    )
