"""Sides that take turns, what their figures are made of, and the texts they share."""

import os
import sys
from pathlib import Path

import pytest

from bench.peer_speed import DEVICES, PEER, Measured, Turns, alternate, figures_of, of_precision
from bench.side_process import Side, peak_resident_mib

pytestmark = pytest.mark.unit
STAND_IN = """
import sys
print("ready", 5, flush=True)
for line in sys.stdin:
    print(int(line) * {each}, 7, flush=True)
"""


def stand_in(each: float) -> list[str]:
    """A side that says each of its steps took so many seconds."""
    return [sys.executable, "-c", STAND_IN.format(each=each)]


def test_rates_are_of_all_blocks_and_memory_of_each_process() -> None:
    found = alternate({PEER: stand_in(2.0), "cpu": stand_in(0.5)}, Turns(repeats=2, blocks=3, block=4), pairs=64)
    assert found[PEER].rates == [32.0, 32.0] and found["cpu"].rates == [128.0, 128.0]
    assert found["cpu"].compiles == 4
    assert all(1 < peak < 1000 for side in found.values() for peak in side.peaks)


def test_a_side_that_ends_is_named() -> None:
    with pytest.raises(RuntimeError, match="a side ended without an answer"), Side([sys.executable, "-c", ""]):
        pass


def test_ratios_are_those_of_the_same_repeat() -> None:
    sides = {PEER: Measured([10.0, 20.0, 40.0], [900.0] * 3), "cpu": Measured([20.0, 30.0, 50.0], [800.0] * 3, 1)}
    found = {one.name: one for one in figures_of("fp32", sides)}
    ratio = found["fp32_cpu_ratio"]
    assert (ratio.value, ratio.low, ratio.high, ratio.repeats) == (1.5, 1.25, 2.0, 3)
    assert (found["fp32_peer_memory"].value, found["fp32_cpu_memory"].value) == (900.0, 800.0)
    assert found["fp32_compiles"].value == 1


def test_a_precision_that_a_device_lacks_is_left_out() -> None:
    assert of_precision("fp32", DEVICES) == ["cpu", "xla"] and of_precision("autocast", DEVICES) == ["cpu"]
    with pytest.raises(SystemExit, match="no autocast on xla; autocast runs on cpu"):
        of_precision("autocast", ["xla"])


def test_peak_memory_is_that_of_the_process(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t 4096 kB\nVmHWM:\t 2048 kB\nVmRSS:\t 1024 kB\n")
    assert peak_resident_mib(status) == 2.0
    assert peak_resident_mib(Path(f"/proc/{os.getpid()}/status")) > 5
