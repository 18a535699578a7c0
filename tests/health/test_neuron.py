"""Driver and runtime, the kernel's log, and nccom-test: how it is called, what it prints, and what is believed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.machines import MACHINES
from pipeline.core.neuron_errors import device_error
from pipeline.core.stop import StopSignal
from pipeline.health import node as neuron
from pipeline.health.check import CheckResult, Verdict, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.node import (
    DRIVER_FIT,
    TESTS,
    VERSIONS,
    check_kernel_log,
    find_versions,
    judge_driver,
    judge_nccom,
    judge_rank_count,
    neuron_checks,
    parse_table,
)
from pipeline.proc.tool import NOT_INSTALLED, ToolRun
from tests.health.fake_tools import environment, says

PASS, WARN, RETRY, FIX = Verdict.PASS, Verdict.WARN, Verdict.RETRY, Verdict.FIX
ROOT = Path(__file__).parents[2]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("driver", "runtime", "verdict"),
    [
        ("2.28.0.0", "2.31.24.0", PASS),
        ("2.29.0.0", "2.31.24.0", FIX),
        ("2.30.2.0", "2.33.1.0", PASS),
        ("2.100.1.0", "2.32.1.0", FIX),  # numbers, no text
        ("2.30.2.0", "2.31.24.0, 2.33.1.0", PASS),  # which one is loaded is not known
        ("2.30.2.0", None, WARN),
        ("2.27.4.0", None, PASS),
        ("", "2.31.24.0", WARN),
    ],
)
def test_driver_and_runtime(driver: str, runtime: str | None, verdict: Verdict) -> None:
    versions = {"driver": driver} | ({"runtime": runtime} if runtime is not None else {})
    result = judge_driver(versions)
    assert result is not None and result.verdict is verdict, result
    if verdict is not PASS:
        assert "2.33" in result.expected and result.next_command
    if verdict is FIX:
        assert "**When no such machine image is left**" in (ROOT / "docs" / "neuron.md").read_text()
        assert "docs/neuron.md, When no such machine image is left" in result.next_command
    assert judge_driver({"runtime": "2.31.24.0"}) is None, "no driver: no Neuron machine"


@pytest.mark.unit
def test_versions_come_before_whatever_opens_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnrt.so.2.31.24.0").touch()
    (tmp_path / "libnrt.so.1").symlink_to("libnrt.so.2.31.24.0")
    (tmp_path / "version").write_text("2.30.2.0\n")
    found = find_versions(driver_file=tmp_path / "version", libraries=tmp_path)
    assert (found["driver"], found["runtime"]) == ("2.30.2.0", "2.31.24.0") and found["torch"]
    monkeypatch.setattr(neuron, "find_versions", lambda: found)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = HealthConfig()
    checks = neuron_checks(config, "trn1.32xlarge", {"code": "abc"}, num_nodes=1, processes=32, on_neuron=True)
    report = run_checks(checks, config, node_rank=0, host="h", stop=StopSignal())
    names = [(one.name, one.verdict) for one in report.results]
    assert names[:3] == [("processes", PASS), (VERSIONS, PASS), (DRIVER_FIT, FIX)]
    assert report.results[1].figures["code"] == "abc"
    spared = [one.name for one in report.results if one.seen.startswith("not run")]
    assert spared == ["nccom-test all_reduce", "nccom-test all_gather", "nccom-test all_reduce bandwidth"]
    elsewhere = neuron_checks(config, "", {}, num_nodes=1, processes=2, on_neuron=False)
    assert [one.name for one in elsewhere] == [VERSIONS, "kernel log"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("instance", "processes", "num_nodes", "verdict"),
    [
        ("trn1.32xlarge", 32, 2, PASS),
        ("trn1.32xlarge", 8, 1, PASS),
        ("trn1.32xlarge", 8, 2, FIX),
        ("trn1.32xlarge", 31, 1, FIX),
        ("trn1.2xlarge", 2, 1, PASS),
    ],
)
def test_how_many_ranks_fit(instance: str, processes: int, num_nodes: int, verdict: Verdict) -> None:
    assert judge_rank_count(MACHINES[instance], processes, num_nodes=num_nodes).verdict is verdict


@pytest.mark.parametrize(
    ("text", "on_neuron", "verdict"),
    [
        ("[ 1.0] usb 1-1: new device\n", True, PASS),
        ("[ 9.1] NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR instance-id=i-05 nd-id=0\n", True, RETRY),
        (None, True, WARN),
        (None, False, PASS),
    ],
)
def test_the_kernel_log(tmp_path: Path, text: str | None, on_neuron: bool, verdict: Verdict) -> None:
    says(tmp_path, "dmesg", text or "dmesg: read kernel buffer failed\n", exit_code=0 if text else 1)
    result = check_kernel_log(on_neuron=on_neuron, stop=StopSignal(), env=environment(tmp_path))
    assert result.verdict is verdict


# nccom-test: outputs as its documentation shows them.

OLD = """\
     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
     1048576          262144     fp32          95          10.28          19.92
     8388608         2097152     fp32         300          26.04          50.46
    67108864        16777216     fp32        1893          33.01          63.97
Avg bus bandwidth:      44.7833GB/s
"""
NEW = """\
2026-05-02 03:11:08.112 INFO using seed 1777689068
     size(B)    count(elems)  algorithm    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)  total_input_size(B)
     1048576          262144       mesh    fp32           95.04          10.28          19.92              1048576
     8388608         2097152       mesh    fp32          300.12          26.04          50.46              8388608
    67108864        16777216       ring    fp32         1893.31          33.01          63.97             67108864
Avg bus bandwidth:      44.7833GB/s
"""
FAILED = """\
     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
     1048576    Failure running neuron-bench - log file /tmp/nccom_test_log_7pqpdfjf.log
1 errors found - test failed
"""
NO_DRIVER = "Neuron DKMS Driver is not running! Read the troubleshooting guide at: https://awsdocs.example/\n"
USAGE = "usage: nccom-test [-h] ...\nnccom-test: error: unrecognized arguments: --non-interactive\n"
TEST = TESTS[0]


def ran(stdout: str, *, exit_code: int | None = 0, failure: str = "", stderr: str = "") -> ToolRun:
    return ToolRun(("nccom-test",), exit_code, stdout, stderr, failure)


@pytest.mark.unit
def test_command_and_sizes() -> None:
    assert TEST.command(32)[:6] == ["nccom-test", "all_reduce", "-r", "32", "-b", "8"]
    # A bare --check takes the next word for its value, unless that is a flag.
    assert TEST.command(32)[-2:] == ["--check", "--non-interactive"]
    assert [test.num_sizes for test in TESTS] == [3, 2, 1]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("run", "verdict", "seen"),
    [
        (ran(OLD), PASS, "bus bandwidth 63.97"),
        (ran(NEW, stderr="0 errors found\n"), PASS, "bus bandwidth 63.97"),
        (ran(NEW, exit_code=1), WARN, "all sizes are right, but exit code 1"),
        (ran(FAILED), RETRY, "1048576    Failure running neuron-bench"),
        (ran(NEW + "2 errors found - test failed\n"), RETRY, "2 errors found - test failed"),
        (ran(NO_DRIVER), RETRY, "Neuron DKMS Driver is not running!"),
        (ran(""), RETRY, "results for 0 of 3 sizes"),
        (ran("".join(OLD.splitlines(True)[:3])), RETRY, "results for 2 of 3 sizes"),
        (ran(NEW.replace("63.97", "0.00")), RETRY, "a bandwidth that is no positive number"),
        (ran(NEW.replace("63.97", "nan")), RETRY, "a bandwidth that is no positive number"),
        (ran(NEW.replace("63.97", "47.0")), WARN, "bus bandwidth 47.00 GiB/s at 67108864 bytes"),
        (ran(NEW.replace("63.97", "41.0")), RETRY, "bus bandwidth 41.00 GiB/s at 67108864 bytes"),
        (ran(OLD, exit_code=None, failure="did not end within 300 s"), RETRY, "did not end within 300 s"),
        (ran(USAGE, exit_code=2), FIX, "unrecognized arguments"),
        (ran(FAILED + "NEFF version mismatch\n"), FIX, "version skew"),
        (ran("", exit_code=None, failure=NOT_INSTALLED), FIX, "not installed"),
    ],
)
def test_what_is_believed(run: ToolRun, verdict: Verdict, seen: str) -> None:
    result = judge_nccom(run, TEST, min_gib_s=45.0, usual_gib_s=110.0)
    if verdict is PASS:
        result = judge_nccom(run, TEST, min_gib_s=45.0, usual_gib_s=60.0)
    assert result.verdict is verdict and seen in result.seen, result


@pytest.mark.unit
@given(st.text(max_size=200), st.integers(0, len(NEW)))
def test_whatever_a_tool_prints_gives_a_verdict(text: str, length: int) -> None:
    for output in (text, NEW[:length] + text):
        result = judge_nccom(ran(output), TEST, min_gib_s=45.0)
        assert isinstance(result, CheckResult) and (result.verdict is PASS or result.seen)
        assert set(parse_table(NEW[:length])) <= {2**20, 2**23, 2**26}
        device_error(output)
