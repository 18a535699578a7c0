"""nccom-test: how it is called, what it prints, and what is believed."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.core.stop import StopSignal
from pipeline.health.check import CheckResult, Verdict
from pipeline.health.neuron import neuron_instance
from pipeline.health.tools import NccomTest, check_nccom, judge_nccom, parse_table
from pipeline.proc import tool
from pipeline.proc.tool import ToolRun
from tests.health import fake_tools
from tests.health.fake_tools import NCCOM_FAILED, NCCOM_NO_DRIVER, NCCOM_TABLE_NEW, NCCOM_TABLE_OLD, nccom_table

PASS, WARN, RETRY, FIX = Verdict.PASS, Verdict.WARN, Verdict.RETRY, Verdict.FIX
TEST = NccomTest(32)
USAGE = "usage: nccom-test [-h] ...\nnccom-test: error: unrecognized arguments: --non-interactive\n"


def ran(stdout: str, *, exit_code: int | None = 0, failure: str = "", stderr: str = "", num_left: int = 0) -> ToolRun:
    run = ToolRun(("nccom-test",), exit_code, stdout, stderr, timed_out=exit_code is None, failure=failure)
    return replace(run, num_left=num_left)


def late(stdout: str, *, num_left: int = 0) -> ToolRun:
    return ran(stdout, exit_code=None, failure="did not end within 300 s", num_left=num_left)


TWO_ROWS = "".join(NCCOM_TABLE_OLD.splitlines(True)[:3])


@pytest.mark.unit
def test_command() -> None:
    words = TEST.command()
    assert words[:4] == ["nccom-test", "all_reduce", "-r", "32"]
    # A bare --check takes the next word for its value, unless that is a flag.
    assert words[-2:] == ["--check", "--non-interactive"]


@pytest.mark.unit
def test_sizes() -> None:
    assert TEST.sizes == (2**20, 2**23, 2**26)
    assert NccomTest(2, min_bytes=8, max_bytes=100, step_factor=2).sizes == (8, 16, 32, 64)
    assert NccomTest(2, step_factor=1).sizes == (2**20,)


@pytest.mark.unit
@pytest.mark.parametrize("text", [NCCOM_TABLE_OLD, NCCOM_TABLE_NEW])
def test_tables_of_older_and_newer_tools(text: str) -> None:
    rows = parse_table(text)
    assert rows == {2**20: 19.92, 2**23: 50.46, 2**26: 63.97}
    assert parse_table(NCCOM_FAILED) == parse_table("") == {}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("run", "verdict", "seen"),
    [
        (ran(NCCOM_TABLE_OLD), PASS, "bus bandwidth 63.97"),
        (ran(NCCOM_TABLE_NEW), PASS, "bus bandwidth 63.97"),
        (ran(NCCOM_TABLE_NEW, stderr="0 errors found\n"), PASS, ""),
        (ran(NCCOM_TABLE_NEW, exit_code=1), WARN, "all sizes are right, but exit code 1"),
        (ran(NCCOM_FAILED, exit_code=0), RETRY, "1048576    Failure running neuron-bench"),
        (ran(NCCOM_TABLE_NEW + "2 errors found - test failed\n"), RETRY, "2 errors found - test failed"),
        (ran(NCCOM_NO_DRIVER, exit_code=0), RETRY, "Neuron DKMS Driver is not running!"),
        (ran("", exit_code=0), RETRY, "no result for 3 sizes"),
        (ran(TWO_ROWS), RETRY, "no result for 1 sizes, first 67108864"),
        (ran(nccom_table(19.9, 50.4, 0.0)), RETRY, "a bandwidth that is no positive number"),
        (ran(nccom_table(19.9, 50.4, float("nan"))), RETRY, "a bandwidth that is no positive"),
        (ran(nccom_table(0.0, 50.4, 63.97)), PASS, "bus bandwidth 63.97"),
        (ran(nccom_table(-1.0, 50.4, 63.97)), RETRY, "a bandwidth that is no positive"),
        (ran(nccom_table(19.9, 50.4, 47.0)), WARN, "bus bandwidth 47.00 GiB/s at 67108864 bytes"),
        (ran(nccom_table(19.9, 50.4, 41.0)), RETRY, "bus bandwidth 41.00 GiB/s at 67108864 bytes"),
        (ran("", exit_code=None, failure="did not end within 60 s"), RETRY, "nccom-test: did not end within 60 s"),
        (late(TWO_ROWS), WARN, "did not end within 300 s; no fault in the sizes it came to: 1048576, 8388608"),
        (late(NCCOM_FAILED), RETRY, "1048576    Failure running"),
        (late(TWO_ROWS + "67108864    Failure running neuron-bench\n"), RETRY, "67108864    Failure running"),
        (late(TWO_ROWS + "nrt_execute: status=6 NRT_HW_ERROR\n"), RETRY, "nccom-test: did not end within 300 s"),
        (late(TWO_ROWS, num_left=2), RETRY, "nccom-test: did not end within 300 s"),
        (ran("", exit_code=2, stderr=USAGE), FIX, "nccom-test: exit code 2"),
        (ran(NCCOM_FAILED + "Error opening libnccom.so\n"), FIX, "no libnccom: Error opening"),
        (ran(NCCOM_FAILED + "Error opening libnccom.so\nNRT_HW_ERROR\n"), RETRY, "1048576    Failure"),
    ],
)
def test_verdicts(run: ToolRun, verdict: Verdict, seen: str) -> None:
    result = judge_nccom(run, TEST, min_busbw_gib_s=45.0, usual_busbw_gib_s=96.0)
    assert (result.verdict, result.seen.startswith(seen)) == (verdict, True), result
    if verdict is PASS:
        assert result.figures["busbw_gib_s"] == 63.97 and result.figures["num_sizes"] == 3
    else:
        assert result.expected and result.next_command


@pytest.mark.unit
def test_small_sizes_are_rounded_and_their_bandwidth_is_printed_as_nothing() -> None:
    """The figures are those of an example of AWS's."""
    sizes, found = (8, 64, 512, 4096), (8, 32, 512, 4096)
    table = "size(B) count(elems) type time(us) algbw(GB/s) busbw(GB/s)\n"
    table += "".join(f"{size} {size // 4} fp32 520 0.00 {0.01 if size == 4096 else 0:.2f}\n" for size in found)
    test = NccomTest(64, min_bytes=8, max_bytes=4096, step_factor=8)
    assert test.sizes == sizes
    assert judge_nccom(ran(table), test).verdict is PASS
    assert judge_nccom(ran(table.replace("4096", "4000")), test).verdict is RETRY


@pytest.mark.unit
def test_without_an_expectation_any_bandwidth_will_do() -> None:
    assert judge_nccom(ran(nccom_table(0.1, 0.1, 0.1)), TEST).verdict is PASS


@pytest.mark.unit
def test_output_cut_at_any_byte() -> None:
    for text in (NCCOM_TABLE_OLD, NCCOM_TABLE_NEW):
        whole = text.index("Avg")
        for end in range(len(text)):
            assert judge_nccom(ran(text[:end]), TEST).verdict is (RETRY if end < whole else PASS), text[:end]
    for end in range(len(NCCOM_FAILED)):
        assert judge_nccom(ran(NCCOM_FAILED[:end]), TEST).verdict is RETRY


def check(folder: Path, name: str = "trn1.32xlarge", timeout_s: float = 120.0) -> CheckResult:
    return check_nccom(
        neuron_instance(name),
        TEST,
        env={**os.environ, **fake_tools.environment(folder)},
        stop=StopSignal(),
        timeout_s=timeout_s,
        min_busbw_gib_s=45.0,
        free_s=0.01,
    )


@pytest.mark.unit
def test_running_it(tmp_path: Path) -> None:
    fake_tools.says(tmp_path, "nccom-test", NCCOM_TABLE_NEW)
    assert check(tmp_path).verdict is PASS
    fake_tools.says(tmp_path, "nccom-test", nccom_table(19.9, 50.4, 12.0))
    assert check(tmp_path).verdict is RETRY


@pytest.mark.fault
def test_none_and_one_that_hangs(tmp_path: Path) -> None:
    assert check(tmp_path).verdict is FIX
    assert check(tmp_path, "").verdict is PASS
    fake_tools.fake_tool(tmp_path, "nccom-test", f"printf '{NCCOM_TABLE_OLD[:100]}'; exec sleep 60")
    result = check(tmp_path, timeout_s=0.3)
    assert result.verdict is RETRY and "did not end within 0.3 s" in result.seen


@pytest.mark.fault
@pytest.mark.parametrize(("times_held", "verdict"), [(0, WARN), (1, WARN), (9, RETRY)])
def test_what_comes_after_one_that_was_killed_waits_for_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times_held: int, verdict: Verdict
) -> None:
    """A fake neuron-ls that still lists the killed process the first times it is asked."""

    def now() -> float:
        """The time of nccom-test is over when it has said its rows, however long that takes here."""
        return time.monotonic() + (1000.0 if (tmp_path / "said").exists() else 0.0)

    clock = SimpleNamespace(monotonic=now, monotonic_ns=time.monotonic_ns, sleep=time.sleep)
    monkeypatch.setattr(tool, "time", clock)
    held = fake_tools.neuron_ls()
    held[0]["neuron_processes"] = [{"pid": 77, "command": "neuron-bench", "neuron_runtime_version": "2.31"}]
    (tmp_path / "held").write_text(json.dumps(held))
    (tmp_path / "free").write_text(json.dumps(fake_tools.neuron_ls()))
    ask = f'echo x >> {tmp_path}/asked; [ "$(wc -l < {tmp_path}/asked)" -gt {times_held} ] && which=free || which=held'
    fake_tools.fake_tool(tmp_path, "neuron-ls", f"{ask}; cat {tmp_path}/$which")
    (tmp_path / "rows").write_text(TWO_ROWS)
    fake_tools.fake_tool(tmp_path, "nccom-test", f"cat {tmp_path}/rows; touch {tmp_path}/said; exec sleep 60")
    result = check(tmp_path)
    assert result.verdict is verdict, result
    asked = len((tmp_path / "asked").read_text().splitlines())
    assert asked == min(times_held + 1, 3)
    assert ("process 77 (neuron-bench) holds neuron0" in result.seen) == (verdict is RETRY)
