"""Faults of a host, seeded one at a time."""

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.core.errors import Preempted, TransientError
from pipeline.core.machines import GIB
from pipeline.core.stop import StopSignal
from pipeline.health import node as host
from pipeline.health.check import CheckResult, Verdict, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.node import HostChecks, Identity, read_identity, usual_folders
from pipeline.io.storage import LocalStorage
from tests.kit.ports import free_port

CONFIG = HealthConfig(min_free_gib=1e-6, expected_instance="trn1.32xlarge")
RETRY, FIX, WARN = Verdict.RETRY, Verdict.FIX, Verdict.WARN


@pytest.fixture
def well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostChecks:
    monkeypatch.setattr(host, "MIN_SHM_GIB", 1e-6)
    monkeypatch.setattr(host, "ROOT_COMM_PORT", free_port())
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
    return [result for result in report.results if result.verdict is not Verdict.PASS]


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_a_host_that_is_well_passes_everything(well: HostChecks, tmp_path: Path) -> None:
    assert run(well) == [] and files(tmp_path) == []


def small_shm(checks: HostChecks, patch: pytest.MonkeyPatch) -> HostChecks:
    patch.setattr(host, "disk_bytes", lambda folder: (64 * 2**20, 64 * 2**20))
    patch.setattr(host, "MIN_SHM_GIB", 1.0)
    return replace(checks, folders={})


def full(checks: HostChecks, patch: pytest.MonkeyPatch) -> HostChecks:
    patch.setattr(host, "disk_bytes", lambda folder: (100 * GIB, 15 * GIB))
    return replace(checks, config=HealthConfig(min_free_gib=10))  # twice: cache and scratch are on one disk


def too_small(checks: HostChecks, patch: pytest.MonkeyPatch) -> HostChecks:
    patch.setattr(host, "disk_bytes", lambda folder: (15 * GIB, 15 * GIB))
    return replace(checks, config=HealthConfig(min_free_gib=10))


def dead_clock(checks: HostChecks, patch: pytest.MonkeyPatch) -> HostChecks:
    patch.setattr(host, "EARLIEST", datetime.max.replace(tzinfo=UTC))
    return checks


@pytest.mark.parametrize(
    ("spoil", "name", "verdict", "seen"),
    [
        (lambda one, patch: replace(one, identity=Identity("h", "trn1.2xlarge")), "instance", FIX, "trn1.2xlarge"),
        (lambda one, patch: replace(one, identity=Identity("h")), "instance", WARN, "not known"),
        (dead_clock, "clock", RETRY, "it is "),
        (lambda one, patch: replace(one, env={"MASTER_ADDR": "no.such.host.invalid"}), "address", RETRY, "resolved"),
        (lambda one, patch: replace(one, env={"NEURON_RT_ROOT_COMM_ID": "1.2.3.4:x"}), "address", FIX, "'x'"),
        (
            lambda one, patch: replace(one, env={"MASTER_PORT": "7", "NEURON_RT_ROOT_COMM_ID": "a:7"}),
            "address",
            FIX,
            "7",
        ),
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
    verdict: Verdict,
    seen: str,
) -> None:
    found = [one for one in run(spoil(well, monkeypatch)) if one.name == name]
    assert [(one.verdict, seen in one.seen) for one in found[:1]] == [(verdict, True)], found
    assert found[0].expected


@pytest.mark.parametrize(("rank", "verdict"), [(0, RETRY), (1, WARN)])
def test_a_port_in_use_is_told_on_the_main_node(well: HostChecks, rank: int, verdict: Verdict) -> None:
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
        (lambda: b"other", RETRY, "other bytes"),
        (lambda: time.sleep(0.02), WARN, "bytes in file://"),
        (refuse, RETRY, "gone"),
    ],
)
def test_an_odd_workspace(
    well: HostChecks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], object],
    verdict: Verdict,
    seen: str,
) -> None:
    monkeypatch.setattr(host, "SLOW_WORKSPACE_S", 0.01 if verdict is WARN else 60.0)
    (result,) = run(replace(well, workspace=Odd(tmp_path, act, StopSignal())))
    assert (result.name, result.verdict) == ("workspace", verdict) and seen in result.seen
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
    assert usual_folders(Path("/s"), "/cache", workspace).keys() == {"scratch", "compile cache", "workspace"}
    assert usual_folders(Path("/s"), "s3://b/c", workspace).keys() == {"scratch", "workspace"}
