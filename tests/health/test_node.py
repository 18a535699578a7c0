"""Faults of a host, seeded one at a time; driver, runtime and kernel log; and what is believed of nccom-test."""

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import Preempted, TransientError
from pipeline.core.machines import GIB, MACHINES
from pipeline.core.neuron_errors import device_error
from pipeline.core.stop import StopSignal
from pipeline.health import node
from pipeline.health.check import CheckResult, HealthVerdict, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.node import (
    DRIVER_FIT,
    TESTS,
    VERSIONS,
    HostChecks,
    Identity,
    check_driver,
    check_kernel_log,
    check_nccom_run,
    check_rank_count,
    find_versions,
    local_folders,
    neuron_checks,
    parse_table,
    read_identity,
)
from pipeline.io.storage import LocalStorage, ObjectStat
from pipeline.proc.tool import NOT_INSTALLED, ToolRun
from tests.health.fake_tools import environment, says
from tests.kit.ports import free_port

CONFIG = HealthConfig(min_free_gib=1e-6, expected_instance="trn1.32xlarge")
PASS, WARN, RETRY, FIX = HealthVerdict


@pytest.fixture
def well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostChecks:
    monkeypatch.setattr(node, "MIN_SHM_GIB", 1e-6)
    monkeypatch.setattr(node, "ROOT_COMM_PORT", free_port())
    workspace = LocalStorage(tmp_path, stop=StopSignal())
    return HostChecks(
        CONFIG,
        Identity("i-0abc", "trn1.32xlarge"),
        workspace,
        after_stop=LocalStorage(tmp_path, stop=StopSignal()),
        probes="cycles/c1/health/probe-0-",
        folders={"scratch": tmp_path, "compile cache": tmp_path / "cache"},
        env={"MASTER_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1"},
        node_rank=0,
        num_nodes=2,
        on_neuron=True,
    )


def run(checks: HostChecks, stop: StopSignal | None = None) -> list[CheckResult]:
    """All that is no pass."""
    report = run_checks(checks.checks(), checks.config, node_rank=0, host="h", stop=stop or StopSignal())
    names = {result.name for result in report.results}
    assert names >= {"instance", "clock", "address", "shared memory", "workspace"}
    return [result for result in report.results if result.verdict is not HealthVerdict.PASS]


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_a_host_that_is_well_passes_everything(well: HostChecks, tmp_path: Path) -> None:
    assert run(well) == [] and files(tmp_path) == []


def small_shm(checks: HostChecks, patch: pytest.MonkeyPatch) -> HostChecks:
    patch.setattr(node, "disk_bytes", lambda folder: (64 * 2**20, 64 * 2**20))
    patch.setattr(node, "MIN_SHM_GIB", 1.0)
    return replace(checks, folders={})


def full(checks: HostChecks, patch: pytest.MonkeyPatch) -> HostChecks:
    patch.setattr(node, "disk_bytes", lambda folder: (100 * GIB, 15 * GIB))
    return replace(checks, config=HealthConfig(min_free_gib=10))  # twice: cache and scratch are on one disk


def too_small(checks: HostChecks, patch: pytest.MonkeyPatch) -> HostChecks:
    patch.setattr(node, "disk_bytes", lambda folder: (15 * GIB, 15 * GIB))
    return replace(checks, config=HealthConfig(min_free_gib=10))


def dead_clock(checks: HostChecks, patch: pytest.MonkeyPatch) -> HostChecks:
    patch.setattr(node, "EARLIEST", datetime.max.replace(tzinfo=UTC))
    return checks


@pytest.mark.parametrize(
    ("spoil", "name", "verdict", "seen"),
    [
        (lambda one, patch: replace(one, identity=Identity("h", "trn1.2xlarge")), "instance", FIX, "trn1.2xlarge"),
        (lambda one, patch: replace(one, identity=Identity("h")), "instance", WARN, "unknown instance type"),
        (dead_clock, "clock", RETRY, "the clock is at "),
        (lambda one, patch: replace(one, env={"MASTER_ADDR": "no.such.host.invalid"}), "address", RETRY, "resolved"),
        (lambda one, patch: replace(one, env={"NEURON_RT_ROOT_COMM_ID": "1.2.3.4:x"}), "address", FIX, "'x'"),
        (small_shm, "shared memory", FIX, "64.0 MiB"),
        (lambda one, patch: replace(small_shm(one, patch), on_neuron=False), "shared memory", WARN, "64.0 MiB"),
        (full, "disk", RETRY, "scratch + compile cache: 15.0 GiB of 100.0 GiB free"),
        (too_small, "disk", FIX, "scratch + compile cache: 15.0 GiB"),
    ],
)
def test_each_fault_has_its_verdict(
    well: HostChecks,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[HostChecks, pytest.MonkeyPatch], HostChecks],
    name: str,
    verdict: HealthVerdict,
    seen: str,
) -> None:
    found = [one for one in run(spoil(well, monkeypatch)) if one.name == name]
    assert [(one.verdict, seen in one.seen) for one in found[:1]] == [(verdict, True)], found
    assert found[0].expected


@pytest.mark.parametrize(("rank", "verdict"), [(0, RETRY), (1, WARN)])
def test_a_port_in_use_is_told_on_the_main_node(well: HostChecks, rank: int, verdict: HealthVerdict) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        (result,) = run(replace(well, env={"MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}, node_rank=rank))
    assert (result.name, result.verdict) == ("address", verdict) and str(port) in result.seen


class Odd(LocalStorage):
    """A workspace that does something before it reads."""

    def __init__(self, folder: Path, act: Callable[[], object], stop: StopSignal) -> None:
        super().__init__(folder, stop=stop)
        self.act = act

    def read_bytes(self, key: str) -> bytes:
        value = self.act()
        return value if isinstance(value, bytes) else super().read_bytes(key)


def refuse() -> bytes:
    raise TransientError("gone")


@pytest.mark.parametrize(
    ("act", "verdict", "seen"),
    [
        (lambda: b"other", RETRY, "is different after reading it again"),
        (lambda: time.sleep(0.02), WARN, "bytes to file://"),
        (refuse, RETRY, "gone"),
    ],
)
def test_an_odd_workspace(
    well: HostChecks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], object],
    verdict: HealthVerdict,
    seen: str,
) -> None:
    monkeypatch.setattr(node, "SLOW_WORKSPACE_S", 0.01 if verdict is WARN else 60.0)
    (result,) = run(replace(well, workspace=Odd(tmp_path, act, StopSignal())))
    assert (result.name, result.verdict) == ("workspace", verdict) and seen in result.seen
    assert files(tmp_path) == []


class Ignorant(LocalStorage):
    """A store that ignores conditions of writes, as some do that are compatible with S3."""

    def __init__(self, folder: Path, condition: str) -> None:
        super().__init__(folder, stop=StopSignal())
        self.condition = condition

    def stat(self, key: str) -> ObjectStat | None:
        found = super().stat(key)
        return replace(found, etag="unknown") if found and self.condition == "etag" else found

    def write_if_absent(self, key: str, data: bytes) -> bool:
        return self._written(key, data) if self.condition == "If-None-Match" else super().write_if_absent(key, data)

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        return self._written(key, data) if self.condition == "If-Match" else super().write_if_match(key, data, etag)

    def _written(self, key: str, data: bytes) -> bool:
        self.write_bytes(key, data)
        return True


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match", "etag"])
def test_a_workspace_that_ignores_conditions_is_refused(well: HostChecks, tmp_path: Path, condition: str) -> None:
    (result,) = run(replace(well, workspace=Ignorant(tmp_path, condition)))
    assert (result.name, result.verdict) == ("workspace", HealthVerdict.FIX) and condition in result.seen
    assert files(tmp_path) == []


def test_a_stop_leaves_no_probe(well: HostChecks, tmp_path: Path) -> None:
    stop = StopSignal()
    with pytest.raises(Preempted):
        run(replace(well, workspace=Odd(tmp_path, lambda: stop.set("SIGTERM"), stop)), stop)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("files_", "expected"),
    [
        (("Amazon EC2", "i-0123456789abcdef0", "trn1.32xlarge"), ("i-0123456789abcdef0", "trn1.32xlarge")),
        (("Amazon EC2", "", "trn1.32xlarge"), (socket.gethostname(), "trn1.32xlarge")),
        (("QEMU", "i-0123456789abcdef0", "trn1.32xlarge"), (socket.gethostname(), "")),
        ((), (socket.gethostname(), "")),
    ],
)
def test_identity(tmp_path: Path, files_: tuple[str, ...], expected: tuple[str, str]) -> None:
    for name, text in zip(("sys_vendor", "board_asset_tag", "product_name"), files_, strict=False):
        (tmp_path / name).write_text(f"{text}\n")
    found = read_identity(tmp_path)
    assert (found.host, found.instance_type) == expected


def test_where_a_cycle_writes(tmp_path: Path) -> None:
    workspace = LocalStorage(tmp_path, stop=StopSignal())
    assert local_folders(Path("/s"), "/cache", workspace).keys() == {"scratch", "compile cache", "workspace"}
    assert local_folders(Path("/s"), "s3://b/c", workspace).keys() == {"scratch", "workspace"}


# Driver and runtime, the kernel's log, and nccom-test.

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
def test_driver_and_runtime(driver: str, runtime: str | None, verdict: HealthVerdict) -> None:
    versions = {"driver": driver} | ({"runtime": runtime} if runtime is not None else {})
    result = check_driver(versions)
    assert result is not None and result.verdict is verdict, result
    if verdict is not PASS:
        assert "2.33" in result.expected and result.next_command
    if verdict is FIX:
        assert "**When no such machine image is left**" in (ROOT / "docs" / "neuron.md").read_text()
        assert "docs/neuron.md, When no such machine image is left" in result.next_command
    assert check_driver({"runtime": "2.31.24.0"}) is None, "no driver: no Neuron machine"


@pytest.mark.unit
def test_versions_come_before_whatever_opens_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnrt.so.2.31.24.0").touch()
    (tmp_path / "libnrt.so.1").symlink_to("libnrt.so.2.31.24.0")
    (tmp_path / "version").write_text("2.30.2.0\n")
    found = find_versions(driver_file=tmp_path / "version", libraries=tmp_path)
    assert (found["driver"], found["runtime"]) == ("2.30.2.0", "2.31.24.0") and found["torch"]
    monkeypatch.setattr(node, "find_versions", lambda: found)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = HealthConfig()
    checks = neuron_checks(config, "trn1.32xlarge", {"code": "abc"}, num_nodes=1, processes=32, on_neuron=True)
    report = run_checks(checks, config, node_rank=0, host="h", stop=StopSignal())
    names = [(one.name, one.verdict) for one in report.results]
    assert names[:3] == [("processes", PASS), (VERSIONS, PASS), (DRIVER_FIT, FIX)]
    assert report.results[1].figures["code"] == "abc"
    spared = [one.name for one in report.results if one.seen.startswith("skipped")]
    operations = ("all_reduce", "all_gather", "reduce_scatter", "all_reduce bandwidth")
    assert spared == [f"nccom-test {operation}" for operation in operations]
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
def test_how_many_ranks_fit(instance: str, processes: int, num_nodes: int, verdict: HealthVerdict) -> None:
    assert check_rank_count(MACHINES[instance], processes, num_nodes=num_nodes).verdict is verdict


@pytest.mark.parametrize(
    ("text", "on_neuron", "verdict"),
    [
        ("[ 1.0] usb 1-1: new device\n", True, PASS),
        ("[ 9.1] NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR instance-id=i-05 nd-id=0\n", True, RETRY),
        (None, True, WARN),
        (None, False, PASS),
    ],
)
def test_the_kernel_log(tmp_path: Path, text: str | None, on_neuron: bool, verdict: HealthVerdict) -> None:
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
    assert [test.num_sizes for test in TESTS] == [3, 2, 2, 1]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("run", "verdict", "seen"),
    [
        (ran(OLD), PASS, "bus bandwidth 63.97"),
        (ran(NEW, stderr="0 errors found\n"), PASS, "bus bandwidth 63.97"),
        (ran(NEW, exit_code=1), WARN, "exit code 1 despite correct results"),
        (ran(FAILED), RETRY, "1048576    Failure running neuron-bench"),
        (ran(NEW + "2 errors found - test failed\n"), RETRY, "2 errors found - test failed"),
        (ran(NO_DRIVER), RETRY, "Neuron DKMS Driver is not running!"),
        (ran(""), RETRY, "results for 0 of 3 sizes"),
        (ran("".join(OLD.splitlines(True)[:3])), RETRY, "results for 2 of 3 sizes"),
        (ran(NEW.replace("63.97", "0.00")), RETRY, "the bandwidth is not a positive number"),
        (ran(NEW.replace("63.97", "nan")), RETRY, "the bandwidth is not a positive number"),
        (ran(NEW.replace("63.97", "47.0")), WARN, "bus bandwidth 47.00 GiB/s at 67108864 bytes"),
        (ran(NEW.replace("63.97", "41.0")), RETRY, "bus bandwidth 41.00 GiB/s at 67108864 bytes"),
        (ran(OLD, exit_code=None, failure="did not end within 300 s"), RETRY, "did not end within 300 s"),
        (ran(USAGE, exit_code=2), FIX, "unrecognized arguments"),
        (ran(FAILED + "NEFF version mismatch\n"), FIX, "version skew"),
        (ran("", exit_code=None, failure=NOT_INSTALLED), FIX, "not installed"),
    ],
)
def test_what_is_believed(run: ToolRun, verdict: HealthVerdict, seen: str) -> None:
    result = check_nccom_run(run, TEST, min_gib_s=45.0, usual_gib_s=110.0)
    if verdict is PASS:
        result = check_nccom_run(run, TEST, min_gib_s=45.0, usual_gib_s=60.0)
    assert result.verdict is verdict and seen in result.seen, result


@pytest.mark.unit
@given(st.text(max_size=200), st.integers(0, len(NEW)))
def test_whatever_a_tool_prints_gives_a_verdict(text: str, length: int) -> None:
    for output in (text, NEW[:length] + text):
        result = check_nccom_run(ran(output), TEST, min_gib_s=45.0)
        assert isinstance(result, CheckResult) and (result.verdict is PASS or result.seen)
        assert set(parse_table(NEW[:length])) <= {2**20, 2**23, 2**26}
        device_error(output)
