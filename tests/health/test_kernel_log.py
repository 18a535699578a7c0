"""Hardware errors in the kernel log."""

from pathlib import Path

import pytest

from pipeline.core.stop import StopSignal
from pipeline.health.instances import neuron_instance
from pipeline.health.kernel_log import check_kernel_log, judge_kernel_log, parse_kernel_log
from pipeline.health.verdict import Verdict
from tests.health.fake_tools import environment, fake_tool, says

TRN1 = neuron_instance("trn1.32xlarge")
QUIET = (
    "[    0.000000] Linux version 6.1\n[   12.5] neuron: loaded\n[298850.502143] neuron:npid_detach: pid=1, slot=0\n"
)


def line(kind: str, at: str = "[298850.502143] ", core: int = 1) -> str:
    return (
        f"{at}neuron: NEURON_HW_ERR={kind} instance-id=i-0592464924bd45322 hostname=ip-172-31-61-252 nd-id=3"
        f" nc-id={core} serial-num=19fcda00f5ff6eb9 action=TERMINATE_INSTANCE\n"
    )


@pytest.mark.unit
def test_fields() -> None:
    (error,) = parse_kernel_log(QUIET + line("HBM_UNCORRECTABLE_ERROR") + QUIET)
    assert (error.kind, error.device, error.core, error.serial) == (
        "HBM_UNCORRECTABLE_ERROR",
        "3",
        "1",
        "19fcda00f5ff6eb9",
    )
    assert (error.instance_id, error.action) == ("i-0592464924bd45322", "TERMINATE_INSTANCE")
    assert error.at_s == 298850.502143


@pytest.mark.unit
@pytest.mark.parametrize(
    "kind", ["SRAM_UNCORRECTABLE_ERROR", "NC_UNCORRECTABLE_ERROR", "HBM_UNCORRECTABLE_ERROR", "DMA_ERROR", "NEW_KIND"]
)
@pytest.mark.parametrize("at", ["[    1.5] ", "<3>[1.5] ", "2026-05-02T03:11:08,123+00:00 ", "kern  :err   : ", ""])
def test_broken_hardware(kind: str, at: str) -> None:
    result = judge_kernel_log(QUIET + line(kind, at))
    assert result.verdict is Verdict.RETRY
    assert result.seen == f"{kind} on device 3 core 1 (serial 19fcda00f5ff6eb9)"


@pytest.mark.unit
def test_a_hang_is_a_warning_until_it_repeats() -> None:
    # All cores tell of one event.
    once = line("HANG_ON_COLLECTIVES", "[100.1] ", 0) + line("HANG_ON_COLLECTIVES", "[100.9] ", 1)
    again = line("HANG_ON_COLLECTIVES", "[4000.0] ")
    assert judge_kernel_log(once).verdict is Verdict.WARN
    result = judge_kernel_log(once + again)
    assert result.verdict is Verdict.RETRY and result.figures["num_hangs"] == 2
    assert judge_kernel_log(once + line("DMA_ERROR")).seen.startswith("DMA_ERROR")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("", Verdict.PASS),
        (QUIET, Verdict.PASS),
        ("efa 0000:a0:1a.0: Failed to process command DEREG_MR (opcode 8) comp_status 7 err -22", Verdict.PASS),
        ("[7.1] Out of memory: Killed process 4711 (neuronx-cc)", Verdict.WARN),
        ("[7.1] [MLA 0][NC 0] DMA TX engine 0 is in an abort state", Verdict.RETRY),
        ("NEURON_HW_ERR=DMA_ERROR", Verdict.RETRY),
    ],
)
def test_other_lines(text: str, verdict: Verdict) -> None:
    assert judge_kernel_log(text).verdict is verdict


@pytest.mark.unit
def test_a_log_cut_anywhere() -> None:
    text = QUIET + line("HBM_UNCORRECTABLE_ERROR")
    for end in range(len(text)):
        assert judge_kernel_log(text[:end]).verdict in (Verdict.PASS, Verdict.WARN, Verdict.RETRY)
    assert judge_kernel_log(text).verdict is Verdict.RETRY


@pytest.mark.unit
def test_reading_it(tmp_path: Path) -> None:
    stop, env = StopSignal(), environment(tmp_path)
    says(tmp_path, "dmesg", QUIET + line("DMA_ERROR"))
    assert check_kernel_log(TRN1, stop=stop, env=env).verdict is Verdict.RETRY
    assert check_kernel_log(None, stop=stop, env=env).verdict is Verdict.RETRY
    fake_tool(tmp_path, "dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    refused = check_kernel_log(TRN1, stop=stop, env=env)
    assert refused.verdict is Verdict.WARN and "Operation not permitted" in refused.seen
    assert check_kernel_log(None, stop=stop, env=env).verdict is Verdict.PASS
    fake_tool(tmp_path, "dmesg", "exec sleep 60")
    assert check_kernel_log(TRN1, stop=stop, env=env, timeout_s=0.2).verdict is Verdict.WARN
