"""Is this host fit: instance, memory, limits, ports, disks, the way to the workspace."""

import errno
import math
import os
import re
import resource
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from pipeline.core.errors import ConfigError, TrnpipeError
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.machines import GIB, MACHINES
from pipeline.health.check import Check, CheckContext, CheckResult, Verdict
from pipeline.health.config import HealthConfig
from pipeline.io.storage import Storage, os_errors
from pipeline.parallel.world import MASTER_PORT
from pipeline.proc.tool import host_memory_bytes

SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written


@dataclass(frozen=True)
class Memory:
    """`total_bytes` of the machine; `usable_bytes` for this container; `available_bytes` of the machine now."""

    total_bytes: int
    usable_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Disk:
    """A file system; `device` is equal for two folders on the same one."""

    device: int
    total_bytes: int
    free_bytes: int


class Host:
    """What a machine is asked about itself. Tests have one with other answers."""

    def clock(self) -> float:
        return time.monotonic()

    def num_cpus(self) -> int:
        """Logical CPUs of the machine, whatever this container may use."""
        return os.cpu_count() or 1

    def memory(self) -> Memory:
        now = psutil.virtual_memory()
        return Memory(now.total, host_memory_bytes(), now.available)

    def disk(self, folder: Path) -> Disk:
        """The file system a folder is on, or will be on. Raises ConfigError or TransientError when it cannot tell."""
        with os_errors("asking for the free space of", f"file://{folder}"):
            while not folder.exists():
                folder = folder.parent
            found, device = os.statvfs(folder), folder.stat().st_dev
        return Disk(device, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def shared_memory(self) -> Disk | None:
        """None where there is no such thing (macOS)."""
        return self.disk(SHM) if SHM.is_dir() else None

    def soft_limit(self, which: int) -> float:
        """What a process gets that does not ask for more, of resource.RLIMIT_...; infinite when there is none."""
        soft, _ = resource.getrlimit(which)
        return math.inf if soft == resource.RLIM_INFINITY else soft

    def port_holder(self, number: int) -> str | None:
        """Who keeps us from listening on a port: `name (pid 7)`, or `another process`; None when it is free."""
        with socket.socket() as listener:
            # As torch does: a dead connection does not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", number))
                listener.listen(1)
                return None
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        with suppress(psutil.Error):  # only root sees all
            for one in psutil.net_connections("tcp"):
                if one.laddr and one.laddr.port == number and one.pid:
                    return f"{psutil.Process(one.pid).name()} (pid {one.pid})"
        return "another process"


# Who this machine is: instance id and type on EC2, else its host name.

DMI = Path("/sys/devices/virtual/dmi/id")
INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
INSTANCE_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")


@dataclass(frozen=True)
class Identity:
    """`host` names the machine in reports; `instance_type` is empty where nobody knows it."""

    host: str
    instance_type: str = ""


def read_identity(dmi: Path = DMI) -> Identity:
    """Instance id and type from the firmware of a Nitro machine (all with Trainium are), else the host name.

    No network is needed, and containers see it.
    """
    found = {"sys_vendor": "", "board_asset_tag": "", "product_name": ""}
    for name in found:
        with suppress(OSError):
            found[name] = (dmi / name).read_text(errors="replace").strip()
    on_ec2 = found["sys_vendor"] == "Amazon EC2"
    instance, kind = (found["board_asset_tag"], found["product_name"]) if on_ec2 else ("", "")
    return Identity(
        host=instance if INSTANCE_ID.fullmatch(instance) else socket.gethostname() or "unknown",
        instance_type=kind if INSTANCE_TYPE.fullmatch(kind) else "",
    )


ROOT_COMM_PORT = 62182  # where ranks of the Neuron runtime meet unless NEURON_RT_ROOT_COMM_ID says so (docs/neuron.md)
MEMORY_SHARE = 0.9  # of the nominal memory: firmware and kernel keep some; 124 of 128 GiB were seen on trn2.3xlarge
MIN_AVAILABLE_SHARE = 0.2  # on a machine that has just been given to us somebody else's process holds the rest
SLOW_WORKSPACE_S = 5.0
PROBE_BYTES = 4096
PROBE_LIFE_S = 600.0  # far more than the limit of a check: an older one was left by a process that was killed

Purpose = Literal["cache", "checkpoints"]
Figures = dict[str, float | int | str]


@dataclass(frozen=True)
class Place:
    """A local folder that needs room; it may not exist yet."""

    name: str
    folder: Path
    purpose: Purpose


@dataclass(frozen=True)
class Port:
    """A TCP port of the run. `needed`: this node will listen on it."""

    number: int
    purpose: str
    needed: bool


@dataclass(frozen=True)
class HostChecks:
    """What is asked of this host. `on_neuron`: a Trainium machine; what only that one needs is a warning elsewhere.

    `after_stop`: the workspace as a storage that does not heed the stop signal, to clean up with. `probes`: how keys
    begin of what this node writes to test the workspace.
    """

    config: HealthConfig
    identity: Identity
    workspace: Storage
    after_stop: Storage
    probes: str
    places: Sequence[Place]
    ports: Sequence[Port]
    on_neuron: bool
    host: Host = field(default_factory=Host)

    def checks(self) -> tuple[Check, ...]:
        """All of them, for both profiles; each takes milliseconds but the last."""
        return (
            Check("instance", self.instance, "host", cost_s=0.0),
            Check("memory", self.memory, "host", cost_s=0.0),
            Check("open files", self.open_files, "host", cost_s=0.0),
            Check("locked memory", self.locked_memory, "host", cost_s=0.0),
            Check("shared memory", self.shared_memory, "host", cost_s=0.0),
            Check("ports", self.free_ports, "host", cost_s=0.1),
            Check("disk", self.disks, "host", cost_s=0.1),
            Check("workspace", self.write_read_delete, "host", cost_s=0.5),
        )

    def instance(self, ctx: CheckContext) -> CheckResult:
        """The type that was asked for, with all its cores and memory."""
        name, expected, found = "instance", self.config.expected_instance, self.identity.instance_type
        cpus, memory = self.host.num_cpus(), self.host.memory()
        figures: Figures = {"type": found or "unknown", "cpus": cpus, "memory_gib": round(memory.total_bytes / GIB, 1)}
        if expected and not found:
            hint = "this is no EC2 machine, or its metadata cannot be read"
            return CheckResult(name, Verdict.WARN, f"instance type not known: {hint}", expected, figures=figures)
        if expected and found != expected:
            return CheckResult(
                name,
                Verdict.FIX,
                f"instance type {found}",
                expected,
                "send the job to the queue of that type, or set --health.expected-instance",
                figures,
            )
        machine = MACHINES.get(found)
        min_cpus, gib = (machine.vcpus or 0, machine.memory_gib) if machine else (0, 0)
        if cpus < min_cpus or memory.total_bytes < MEMORY_SHARE * gib * GIB:
            return CheckResult(
                name,
                Verdict.RETRY,
                f"a {found} with {cpus} CPUs and {format_bytes(memory.total_bytes)} of memory",
                f"{min_cpus or 'any number of'} CPUs and {gib} GiB, less what the kernel keeps",
                "terminate that instance: a part of it has failed",
                figures,
            )
        return CheckResult(name, Verdict.PASS, figures=figures)

    def memory(self, ctx: CheckContext) -> CheckResult:
        """Nobody else is using it up."""
        found = self.host.memory()
        figures = {"usable_bytes": found.usable_bytes, "available_bytes": found.available_bytes}
        if found.available_bytes >= MIN_AVAILABLE_SHARE * found.total_bytes:
            seen = f"{format_bytes(found.available_bytes)} available, {format_bytes(found.usable_bytes)} usable"
            return CheckResult("memory", Verdict.PASS, seen, figures=figures)
        return CheckResult(
            "memory",
            Verdict.RETRY if self.on_neuron else Verdict.WARN,
            f"{format_bytes(found.available_bytes)} of {format_bytes(found.total_bytes)} available",
            f"{MIN_AVAILABLE_SHARE:.0%} before any work has begun",
            "end what an earlier job has left there (ps aux --sort=-rss)",
            figures,
        )

    def open_files(self, ctx: CheckContext) -> CheckResult:
        limit, least = self.host.soft_limit(resource.RLIMIT_NOFILE), self.config.min_open_files
        figures: Figures = {"limit_files": "unlimited" if math.isinf(limit) else limit}
        if limit >= least:
            return CheckResult("open files", Verdict.PASS, figures=figures)
        return CheckResult(
            "open files",
            Verdict.FIX if self.on_neuron else Verdict.WARN,
            f"ulimit -n is {limit:.0f}",
            f"at least {least}",
            "ulimit nofile in the job definition, or ulimit -n before the command",
            figures,
        )

    def locked_memory(self, ctx: CheckContext) -> Iterator[CheckResult]:
        """Neuron and EFA pin the memory they send from; nothing else of ours does."""
        limit = self.host.soft_limit(resource.RLIMIT_MEMLOCK)
        if self.on_neuron and math.isinf(limit):
            yield CheckResult("locked memory", Verdict.PASS, figures={"limit_bytes": "unlimited"})
        elif self.on_neuron:
            yield CheckResult(
                "locked memory",
                Verdict.FIX,
                f"ulimit -l is {format_bytes(limit)}",
                "unlimited",
                "ulimit memlock -1 in the job definition (docker: --ulimit memlock=-1)",
                {"limit_bytes": limit},
            )

    def shared_memory(self, ctx: CheckContext) -> Iterator[CheckResult]:
        ctx.doing = f"asking for the size of {SHM}"
        found, least = self.host.shared_memory(), self.config.min_shm_gib * GIB
        if found is None:
            return
        figures = {"total_bytes": found.total_bytes, "free_bytes": found.free_bytes}
        if found.total_bytes < least:
            yield CheckResult(
                "shared memory",
                Verdict.FIX if self.on_neuron else Verdict.WARN,
                f"{SHM} has {format_bytes(found.total_bytes)}",
                f"at least {format_bytes(least)}",
                "sharedMemorySize in the job definition (docker: --shm-size)",
                figures,
            )
        elif found.free_bytes < least:
            yield CheckResult(
                "shared memory",
                Verdict.RETRY if self.on_neuron else Verdict.WARN,
                f"{format_bytes(found.free_bytes)} of {format_bytes(found.total_bytes)} free in {SHM}",
                f"at least {format_bytes(least)}",
                "remove what dead processes have left there",
                figures,
            )
        else:
            seen = f"{format_bytes(found.free_bytes)} of {format_bytes(found.total_bytes)} free"
            yield CheckResult("shared memory", Verdict.PASS, seen, figures=figures)

    def free_ports(self, ctx: CheckContext) -> Iterator[CheckResult]:
        """A second job on the same default port hangs at its start without an error (reported by users)."""
        numbers = [port.number for port in self.ports if port.needed]
        if len(set(numbers)) < len(numbers):
            raise ConfigError(
                f"port {numbers[0]} is to serve two purposes",
                expected=f"a port for the Neuron runtime other than {MASTER_PORT}",
                next_command="unset NEURON_RT_ROOT_COMM_ID",
            )
        for port in self.ports:
            ctx.doing = f"listening on port {port.number}"
            holder = self.host.port_holder(port.number)
            name, figures = f"port {port.number}", {"port": port.number}
            if holder is None:
                yield CheckResult(name, Verdict.PASS, f"free for {port.purpose}", figures=figures)
            else:
                yield CheckResult(
                    name,
                    Verdict.RETRY if port.needed else Verdict.WARN,
                    f"port {port.number} ({port.purpose}) is held by {holder}",
                    "a free port: one job on a machine",
                    f"ss -tlnp | grep {port.number} on that machine; end what an earlier job has left",
                    figures,
                )

    def disks(self, ctx: CheckContext) -> Iterator[CheckResult]:
        """Each file system has room for all that goes there: the needs of two purposes on one add up."""
        minimum_gib = {"cache": self.config.min_free_cache_gib, "checkpoints": self.config.min_free_checkpoint_gib}
        groups: dict[int, tuple[Disk, list[Place]]] = {}
        for place in self.places:
            ctx.doing = f"asking for the free space of {place.folder}"
            disk = self.host.disk(place.folder)
            groups.setdefault(disk.device, (disk, []))[1].append(place)
        for disk, places in groups.values():
            needed = sum(minimum_gib[purpose] for purpose in {place.purpose for place in places}) * GIB
            names = " + ".join(place.name for place in places)
            figures = {"free_bytes": disk.free_bytes, "total_bytes": disk.total_bytes}
            seen = f"{names}: {format_bytes(disk.free_bytes)} of {format_bytes(disk.total_bytes)} free"
            if disk.free_bytes >= needed:
                yield CheckResult("disk", Verdict.PASS, seen, figures=figures)
                continue
            folders = ", ".join(str(place.folder) for place in places)
            if disk.total_bytes < needed:  # an empty one of this size would not do either
                verdict = Verdict.FIX
                advice = (
                    "a larger volume in the launch template, or lower --health.min-free-cache-gib and"
                    " --health.min-free-checkpoint-gib"
                )
            else:
                verdict, advice = Verdict.RETRY, f"du -xh --max-depth=2 {places[0].folder} on that machine"
            expected = f"at least {format_bytes(needed)}"
            yield CheckResult("disk", verdict, f"{seen} at {folders}", expected, advice, figures)

    def write_read_delete(self, ctx: CheckContext) -> CheckResult:
        """A small object goes to the workspace and comes back. What denies it says so as an error."""
        key, data = f"{self.probes}{time.time():.0f}-{secrets.token_hex(8)}", secrets.token_bytes(PROBE_BYTES)
        uri = self.workspace.uri(key)
        start = self.host.clock()
        try:
            ctx.doing = f"writing {uri}"
            self.workspace.write_bytes(key, data)
            written = self.host.clock()
            ctx.doing = f"reading {uri}"
            back = self.workspace.read_bytes(key)
            read = self.host.clock()
            ctx.doing = f"deleting {uri}"
            self.workspace.delete([key])
            deleted = self.host.clock()
            ctx.doing = f"looking for probes of killed processes in {self.workspace.root}"
            found = [stat.key for stat in self.workspace.list(self.probes.rpartition("/")[0])]
            # Keys hold the time they were written at.
            times = {
                one: one.removeprefix(self.probes).partition("-")[0] for one in found if one.startswith(self.probes)
            }
            oldest = time.time() - PROBE_LIFE_S
            self.workspace.delete(one for one, text in times.items() if text.isdecimal() and int(text) < oldest)
        except BaseException:
            with suppress(TrnpipeError):  # the first error says more
                self.after_stop.delete([key])
            raise
        figures = {"write_s": written - start, "read_s": read - written, "delete_s": deleted - read}
        slowest = max(figures.values())
        if back != data:
            return CheckResult(
                "workspace",
                Verdict.RETRY,
                f"{uri} came back with other bytes than were written",
                "the same bytes",
                "do not use that machine: its memory, network or disk changes data",
                figures,
            )
        if slowest > SLOW_WORKSPACE_S:
            return CheckResult(
                "workspace",
                Verdict.WARN,
                f"{format_duration(slowest)} for {PROBE_BYTES} bytes in {self.workspace.root}",
                f"under {format_duration(SLOW_WORKSPACE_S)} for each request",
                "look at the network of that machine, and for throttling of the bucket",
                figures,
            )
        seen = f"{1000 * slowest:.1f} ms for the slowest of write, read and delete"
        return CheckResult("workspace", Verdict.PASS, seen, figures=figures)


def usual_places(scratch: Path, cache_root: str, workspace: Storage) -> tuple[Place, ...]:
    """Where a cycle writes on this machine. Checkpoints are staged in scratch before they go to a remote workspace."""
    places = [Place("scratch", scratch, "checkpoints")]
    if "://" not in cache_root:
        places.append(Place("compile cache", Path(cache_root), "cache"))
    if (root := workspace.local_path("")) is not None:
        places.append(Place("workspace", root, "checkpoints"))
    return tuple(places)


def usual_ports(env: Mapping[str, str], *, node_rank: int, num_nodes: int, on_neuron: bool) -> tuple[Port, ...]:
    """Ports of a run: only the main node listens on them; on others one in use is a sign of an earlier job.

    Raises ConfigError when MASTER_PORT or NEURON_RT_ROOT_COMM_ID holds no port. torchrun chooses its own port on a
    machine alone.
    """
    wanted = []  # (variable, port, purpose, what the variable is to be, how to mend it)
    if num_nodes > 1:
        port = env.get("MASTER_PORT", str(MASTER_PORT))
        wanted.append(("MASTER_PORT", port, "torchrun", "a port", "unset it, or correct it"))
    if on_neuron:
        given = env.get("NEURON_RT_ROOT_COMM_ID", "")
        port = given.rpartition(":")[2] if given else str(ROOT_COMM_PORT)
        form, advice = "<address of the main node>:<port>", "unset it: it is derived from MASTER_ADDR"
        wanted.append(("NEURON_RT_ROOT_COMM_ID", port, "Neuron runtime", form, advice))
    for name, port, _, form, advice in wanted:
        if not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ConfigError(f"{name} is {env[name]!r}", expected=form, next_command=advice)
    return tuple(Port(int(port), purpose, node_rank == 0) for _, port, purpose, _, _ in wanted)
