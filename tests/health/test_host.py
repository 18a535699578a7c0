"""Faults of a host, seeded one at a time in the answers of a machine that is well."""

import errno
import math
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.machines import GIB
from pipeline.core.stop import StopSignal
from pipeline.health.check import CheckResult, NodeReport, Verdict, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.host import (
    Disk,
    Host,
    HostChecks,
    Identity,
    Memory,
    Place,
    Port,
    read_identity,
    usual_places,
    usual_ports,
)
from pipeline.io import atomic
from pipeline.io.local import LocalStorage
from tests.ports import free_port

CONFIG = HealthConfig(min_free_cache_gib=100, min_free_checkpoint_gib=50, expected_instance="trn1.32xlarge")


class Answers(Host):
    """A host with given answers."""

    def __init__(self, **answers: object) -> None:
        vars(self).update(answers)


def other(host: Host, **answers: object) -> Host:
    return Answers(**{**vars(host), **answers})


def limits(open_files: float = 65_535, locked_memory: float = math.inf) -> Callable[[int], float]:
    return lambda which: open_files if which == resource.RLIMIT_NOFILE else locked_memory


WELL = Answers(
    num_cpus=lambda: 128,
    memory=lambda: Memory(500 * GIB, 480 * GIB, 470 * GIB),
    disk=lambda folder: Disk(len(folder.parts), 1000 * GIB, 400 * GIB),  # each depth a file system of its own
    shared_memory=lambda: Disk(9, 8 * GIB, 8 * GIB),
    soft_limit=limits(),
    port_holder=lambda number: None,
    clock=lambda: 0.0,
)
PLACES = (
    Place("scratch", Path("/scratch"), "checkpoints"),
    Place("compile cache", Path("/var/cache"), "cache"),
)
PORTS = (Port(41000, "torchrun", True), Port(62182, "Neuron runtime", True))


def checks(folder: Path, stop: StopSignal | None = None) -> HostChecks:
    return HostChecks(
        CONFIG,
        Identity("i-0abc", "trn1.32xlarge"),
        LocalStorage(folder, stop=stop or StopSignal()),
        LocalStorage(folder, stop=StopSignal()),
        "cycles/c1/health/probe-0-",
        PLACES,
        PORTS,
        on_neuron=True,
        host=WELL,
    )


def run(what: HostChecks, stop: StopSignal | None = None) -> NodeReport:
    return run_checks(what.checks(), what.config, node_rank=0, host=what.identity.host, stop=stop or StopSignal())


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def bad(what: HostChecks) -> list[CheckResult]:
    return [result for result in run(what).results if result.verdict is not Verdict.PASS]


def the_fault(what: HostChecks) -> CheckResult:
    (result,) = bad(what)
    assert result.seen and result.expected and (result.next_command or result.verdict is Verdict.WARN)
    return result


def test_a_host_that_is_well_passes_everything(tmp_path: Path) -> None:
    report = run(checks(tmp_path))
    assert report.verdict is Verdict.PASS
    assert [result.name for result in report.results] == [
        "instance",
        "memory",
        "open files",
        "locked memory",
        "shared memory",
        "port 41000",
        "port 62182",
        "disk",
        "disk",
        "workspace",
    ]
    assert files(tmp_path) == []


FAULTS = {
    "few CPUs": (other(WELL, num_cpus=lambda: 127), "instance", Verdict.RETRY, "127 CPUs"),
    "a lost memory module": (
        other(WELL, memory=lambda: Memory(448 * GIB, 448 * GIB, 440 * GIB)),
        "instance",
        Verdict.RETRY,
        "448.0 GiB",
    ),
    "memory in use": (
        other(WELL, memory=lambda: Memory(500 * GIB, 480 * GIB, 99 * GIB)),
        "memory",
        Verdict.RETRY,
        "99.0 GiB of 500.0 GiB",
    ),
    "few files": (other(WELL, soft_limit=limits(open_files=1024)), "open files", Verdict.FIX, "ulimit -n is 1024"),
    "little memlock": (other(WELL, soft_limit=limits(locked_memory=65_536)), "locked memory", Verdict.FIX, "64.0 KiB"),
    "docker's /dev/shm": (
        other(WELL, shared_memory=lambda: Disk(9, 64 * 2**20, 64 * 2**20)),
        "shared memory",
        Verdict.FIX,
        "/dev/shm has 64.0 MiB",
    ),
    "a full /dev/shm": (
        other(WELL, shared_memory=lambda: Disk(9, 8 * GIB, GIB - 1)),
        "shared memory",
        Verdict.RETRY,
        "of 8.0 GiB free",
    ),
    "a busy port": (
        other(WELL, port_holder=lambda number: "python (pid 7)" if number == 62182 else None),
        "port 62182",
        Verdict.RETRY,
        "(Neuron runtime) is held by python (pid 7)",
    ),
    "a full disk": (
        other(WELL, disk=lambda folder: Disk(len(folder.parts), 1000 * GIB, 99 * GIB)),
        "disk",
        Verdict.RETRY,
        "compile cache: 99.0 GiB of 1000.0 GiB free at /var/cache",
    ),
    "a disk too small": (
        other(WELL, disk=lambda folder: Disk(len(folder.parts), 80 * GIB, 79 * GIB)),
        "disk",
        Verdict.FIX,
        "compile cache: 79.0 GiB of 80.0 GiB free",
    ),
    "one disk for both": (
        other(WELL, disk=lambda folder: Disk(1, 1000 * GIB, 149 * GIB)),
        "disk",
        Verdict.RETRY,
        "scratch + compile cache: 149.0 GiB of 1000.0 GiB free",
    ),
}


@pytest.mark.parametrize(("host", "name", "verdict", "seen"), FAULTS.values(), ids=FAULTS)
def test_a_fault_has_its_verdict(tmp_path: Path, host: Host, name: str, verdict: Verdict, seen: str) -> None:
    fault = the_fault(replace(checks(tmp_path), host=host))
    assert (fault.name, fault.verdict) == (name, verdict)
    assert seen in fault.seen


def test_what_only_neuron_needs_is_a_warning_elsewhere(tmp_path: Path) -> None:
    laptop = other(
        WELL,
        soft_limit=limits(open_files=1024, locked_memory=65_536),
        shared_memory=lambda: Disk(9, 64 * 2**20, 2**20),
        memory=lambda: Memory(16 * GIB, 16 * GIB, GIB),
    )
    config = CONFIG.model_copy(update={"expected_instance": ""})
    what = replace(checks(tmp_path), host=laptop, on_neuron=False, config=config, identity=Identity("box"))
    assert {result.name for result in bad(what)} == {"open files", "shared memory", "memory"}
    assert run(what).verdict is Verdict.WARN
    assert "shared memory" not in {r.name for r in bad(replace(what, host=other(WELL, shared_memory=lambda: None)))}


def test_room_for_one_purpose_is_asked_for_once(tmp_path: Path) -> None:
    """A local workspace holds its scratch; a checkpoint moves from one to the other by a rename."""
    places = (*PLACES, Place("workspace", Path("/work"), "checkpoints"))
    what = replace(checks(tmp_path), places=places, host=other(WELL, disk=lambda folder: Disk(1, 200 * GIB, 150 * GIB)))
    assert bad(what) == []


def test_a_disk_that_cannot_be_asked(tmp_path: Path) -> None:
    """The other file systems are reported all the same."""

    def disk(folder: Path) -> Disk:
        if folder == Path("/var/cache"):
            raise TransientError("EIO")
        return WELL.disk(folder)

    fault = next(one for one in bad(replace(checks(tmp_path), host=other(WELL, disk=disk))))
    assert (fault.name, fault.verdict, fault.seen) == ("disk", Verdict.RETRY, "EIO")


@pytest.mark.parametrize(
    ("kind", "verdict"), [("trn1.2xlarge", Verdict.FIX), ("c7i.large", Verdict.FIX), ("", Verdict.WARN)]
)
def test_another_instance_than_expected(tmp_path: Path, kind: str, verdict: Verdict) -> None:
    fault = the_fault(replace(checks(tmp_path), identity=Identity("i-0abc", kind)))
    assert (fault.name, fault.verdict, fault.expected) == ("instance", verdict, "trn1.32xlarge")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_workspace_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def write(path: Path, data: bytes) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(atomic, "write_bytes_atomic", write)
    fault = the_fault(checks(tmp_path))
    assert (fault.name, fault.verdict) == ("workspace", Verdict.FIX)
    assert errno.errorcode[code] in fault.seen and str(tmp_path) in fault.seen


def test_a_workspace_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "no")

    monkeypatch.setattr(atomic, "write_bytes_atomic", write)
    assert the_fault(checks(tmp_path)).verdict is Verdict.RETRY


class Faulty(LocalStorage):
    """Changes what is read, or is stopped while it reads."""

    def read_bytes(self, key: str) -> bytes:
        self.stop.raise_if_set("reading")
        *rest, last = super().read_bytes(key)
        return bytes([*rest, last ^ 1])


def test_bytes_that_change_on_the_way(tmp_path: Path) -> None:
    fault = the_fault(replace(checks(tmp_path), workspace=Faulty(tmp_path, stop=StopSignal())))
    assert (fault.name, fault.verdict) == ("workspace", Verdict.RETRY)
    assert files(tmp_path) == []


def test_what_a_killed_process_has_left_is_swept_and_what_others_write_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "cycles" / "c1" / "health"
    folder.mkdir(parents=True)
    now = int(time.time())
    kept = {f"probe-0-{now - 60}-ab", f"probe-1-{now - 9999}-ab", "probe-0-x-ab", "0-i-0abc.json"}
    for name in (*kept, f"probe-0-{now - 9999}-ab"):
        (folder / name).touch()
    assert run(checks(tmp_path)).verdict is Verdict.PASS
    assert set(files(tmp_path)) == kept


def test_a_slow_workspace_is_a_warning_with_its_times(tmp_path: Path) -> None:
    now = iter([0.0, 6.0, 6.5, 6.75])
    fault = the_fault(replace(checks(tmp_path), host=other(WELL, clock=lambda: next(now))))
    assert (fault.name, fault.verdict) == ("workspace", Verdict.WARN)
    assert fault.figures == {"write_s": 6.0, "read_s": 0.5, "delete_s": 0.25}


def test_stopped_while_the_probe_lies_there(tmp_path: Path) -> None:
    """Preempted, and nothing is left in the workspace."""
    stop = StopSignal()

    class Stopped(Faulty):
        def read_bytes(self, key: str) -> bytes:
            assert files(tmp_path) == [key.rpartition("/")[2]]
            stop.set("SIGTERM")
            return super().read_bytes(key)

    with pytest.raises(Preempted, match="SIGTERM while in health check workspace: reading file://"):
        run(replace(checks(tmp_path), workspace=Stopped(tmp_path, stop=stop)), stop)
    assert files(tmp_path) == []


def test_ports_of_a_run() -> None:
    def ports(rank: int, nodes: int, *, neuron: bool = True, root: str = "") -> list[tuple[int, bool]]:
        env = {"NEURON_RT_ROOT_COMM_ID": root} if root else {}
        return [(p.number, p.needed) for p in usual_ports(env, node_rank=rank, num_nodes=nodes, on_neuron=neuron)]

    assert ports(0, 1, neuron=False) == []
    assert ports(0, 1) == [(62182, True)]
    assert ports(0, 2) == [(41000, True), (62182, True)]
    assert ports(1, 2) == [(41000, False), (62182, False)]
    (moved,) = usual_ports({"MASTER_PORT": "700"}, node_rank=0, num_nodes=2, on_neuron=False)
    assert moved.number == 700
    assert ports(0, 1, root="[fe80::1]:700") == [(700, True)]
    for wrong in ("localhost", "a:b", "a:0", "a:65536"):
        with pytest.raises(ConfigError, match="NEURON_RT_ROOT_COMM_ID"):
            ports(0, 1, root=wrong)


def test_one_port_for_two_purposes(tmp_path: Path) -> None:
    ports = usual_ports({"NEURON_RT_ROOT_COMM_ID": "main:41000"}, node_rank=0, num_nodes=2, on_neuron=True)
    fault = the_fault(replace(checks(tmp_path), ports=ports))
    assert (fault.name, fault.verdict) == ("ports", Verdict.FIX)


def test_a_port_in_use_where_nobody_listens_is_a_warning(tmp_path: Path) -> None:
    held = other(WELL, port_holder=lambda number: "another process")
    what = replace(checks(tmp_path), ports=(Port(41000, "torchrun", False),), host=held)
    assert the_fault(what).verdict is Verdict.WARN


def test_usual_places(tmp_path: Path) -> None:
    workspace = LocalStorage(tmp_path, stop=StopSignal())
    places = usual_places(tmp_path / "s", str(tmp_path / "c"), workspace)
    assert [(one.name, one.folder, one.purpose) for one in places] == [
        ("scratch", tmp_path / "s", "checkpoints"),
        ("compile cache", tmp_path / "c", "cache"),
        ("workspace", tmp_path, "checkpoints"),
    ]
    assert [one.name for one in usual_places(tmp_path, "s3://bucket/cache", workspace)] == ["scratch", "workspace"]


def test_who_holds_a_port() -> None:
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen(1)
        assert Host().port_holder(port) is not None
    assert Host().port_holder(port) is None


def test_this_machine_answers(tmp_path: Path) -> None:
    host = Host()
    memory, disk = host.memory(), host.disk(tmp_path / "not" / "yet" / "there")
    assert 0 < memory.available_bytes <= memory.total_bytes and 0 < memory.usable_bytes <= memory.total_bytes
    assert disk == replace(host.disk(tmp_path), free_bytes=disk.free_bytes) and disk.total_bytes > 0
    assert min(host.num_cpus(), host.soft_limit(resource.RLIMIT_NOFILE), host.soft_limit(resource.RLIMIT_MEMLOCK)) > 0


NITRO = {"sys_vendor": "Amazon EC2", "board_asset_tag": "i-0123456789abcdef0", "product_name": "trn1.32xlarge"}


def found(folder: Path, dmi: dict[str, str]) -> Identity:
    folder.mkdir(exist_ok=True)
    for name, line in dmi.items():
        (folder / name).write_text(f"{line}\n")
    return read_identity(folder)


def test_the_firmware_of_nitro_machines_knows(tmp_path: Path) -> None:
    assert found(tmp_path, NITRO) == Identity("i-0123456789abcdef0", "trn1.32xlarge")


def test_elsewhere_it_is_the_host_name(tmp_path: Path) -> None:
    laptop = {"sys_vendor": "LENOVO", "board_asset_tag": "Not Available", "product_name": "20XW.x"}
    here = Identity(socket.gethostname())
    for name, dmi in (("laptop", laptop), ("none", {}), ("vendor alone", {"sys_vendor": "Amazon EC2"})):
        assert found(tmp_path / name, dmi) == here


def test_an_answer_that_is_no_instance_id_is_not_believed(tmp_path: Path) -> None:
    odd = {**NITRO, "board_asset_tag": "none", "product_name": "a b"}
    assert found(tmp_path, odd) == Identity(socket.gethostname())
