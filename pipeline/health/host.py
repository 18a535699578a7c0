"""Is this host fit: its type, clock, address and ports, shared memory, disks, and the way to the workspace."""

import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pipeline.core.errors import ConfigError, TrnpipeError
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.machines import GIB
from pipeline.health.check import Check, CheckContext, CheckResult, Verdict
from pipeline.health.config import HealthConfig
from pipeline.io.storage import Storage, os_errors
from pipeline.parallel.world import MAIN_ADDRESS, MASTER_PORT, own_address

SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written
MIN_SHM_GIB = 1.0  # loader workers hand over batches through it; 64 MiB, the default of a container, end in SIGBUS
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)  # a clock before it was never set
ROOT_COMM_PORT = 62182  # where ranks of the Neuron runtime meet unless NEURON_RT_ROOT_COMM_ID says so (docs/neuron.md)
SLOW_WORKSPACE_S = 5.0
PROBE_BYTES = 4096

# Instance id and type on EC2, else the host name.

DMI = Path("/sys/devices/virtual/dmi/id")
INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
INSTANCE_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")


@dataclass(frozen=True)
class Identity:
    """`host` names the machine in reports; `instance_type` is empty if unknown."""

    host: str
    instance_type: str = ""


def read_identity(dmi: Path = DMI) -> Identity:
    """Read instance id and type from the firmware of a Nitro machine (all with Trainium are), else the host name.

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


@dataclass(frozen=True)
class HostChecks:
    """The checks of this host. `folders`: where the run writes on its disks.

    `after_stop`: the workspace as a storage that does not heed the stop signal, to clean up with. `probes`: how keys
    begin that this node writes to test the workspace.
    """

    config: HealthConfig
    identity: Identity
    workspace: Storage
    after_stop: Storage
    probes: str
    folders: Mapping[str, Path]
    env: Mapping[str, str]
    node_rank: int
    num_nodes: int
    on_neuron: bool

    def checks(self) -> tuple[Check, ...]:
        return (
            Check("instance", self.instance, "host", cost_s=0.0),
            Check("clock", self.clock, "host", cost_s=0.0),
            Check("address", self.address, "host", cost_s=0.1),
            Check("shared memory", self.shared_memory, "host", cost_s=0.0),
            Check("disk", self.disks, "host", cost_s=0.1),
            Check("workspace", self.write_read_delete, "host", cost_s=0.5),
        )

    def instance(self, ctx: CheckContext) -> CheckResult:
        """Compare the type with the one that was asked for."""
        expected, found = self.config.expected_instance, self.identity.instance_type
        figures: dict[str, float | int | str] = {"type": found or "unknown", "cpus": os.cpu_count() or 1}
        if not expected or found == expected:
            return CheckResult("instance", Verdict.PASS, figures=figures)
        if not found:
            seen = "instance type not known: this is no EC2 machine, or its metadata cannot be read"
            return CheckResult("instance", Verdict.WARN, seen, expected, figures=figures)
        do = "send the job to the queue of that type, or set --health.expected-instance"
        return CheckResult("instance", Verdict.FIX, f"instance type {found}", expected, do, figures)

    def clock(self, ctx: CheckContext) -> CheckResult:
        """A clock that was never set makes every request to AWS fail, and cycles of another year."""
        now = datetime.now(UTC)
        if now > EARLIEST:
            return CheckResult("clock", Verdict.PASS)
        do = "this job elsewhere; on this machine: chronyc tracking"
        return CheckResult("clock", Verdict.RETRY, f"it is {now:%Y-%m-%d %H:%M}", f"after {EARLIEST:%Y}", do)

    def address(self, ctx: CheckContext) -> list[CheckResult]:
        """Nodes find each other, and the ports of the main node are free.

        A second job on the same port of the Neuron runtime hangs at its start without an error (reported by users).
        """
        ports, bad = self._ports(), list[CheckResult]()
        if self.num_nodes > 1:
            main = self.env.get("MASTER_ADDR") or self.env.get(MAIN_ADDRESS) or own_address()
            ctx.doing = f"resolving {main}"
            try:
                socket.getaddrinfo(main, None)
            except OSError as error:
                seen = f"{main} cannot be resolved: {error.strerror or error}"
                bad.append(
                    CheckResult("address", Verdict.RETRY, seen, "the main node's address", f"getent hosts {main}")
                )
        for variable, port in ports.items():
            ctx.doing = f"listening on port {port}"
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
                try:
                    listener.bind(("", port))
                    listener.listen(1)
                except OSError as error:
                    verdict = Verdict.RETRY if self.node_rank == 0 else Verdict.WARN
                    do = f"ss -tlnp | grep {port} on that machine; end what an earlier job has left"
                    seen = f"port {port} ({variable}) is not free: {error.strerror}"
                    bad.append(CheckResult("address", verdict, seen, "a free port: one job on a machine", do))
        return bad or [CheckResult("address", Verdict.PASS, figures=ports)]

    def _ports(self) -> dict[str, int]:
        """Return the ports on which the main node listens. Raises ConfigError for one that is none, or used twice."""
        texts = {}
        if self.num_nodes > 1:
            texts["MASTER_PORT"] = self.env.get("MASTER_PORT", str(MASTER_PORT))
        if self.on_neuron:
            root = self.env.get("NEURON_RT_ROOT_COMM_ID", "") or f":{ROOT_COMM_PORT}"
            texts["NEURON_RT_ROOT_COMM_ID"] = root.rpartition(":")[2]
        ports = {name: int(text) for name, text in texts.items() if text.isdecimal() and 0 < int(text) < 65_536}
        if len({*ports.values()}) < len(texts):
            raise ConfigError(
                f"the ports are {texts}", expected="a port for each", next_command=f"unset {' '.join(texts)}"
            )
        return ports

    def shared_memory(self, ctx: CheckContext) -> Iterator[CheckResult]:
        ctx.doing = f"asking for the size of {SHM}"
        if SHM.is_dir():  # not on macOS
            too_small = "sharedMemorySize in the job definition (docker: --shm-size)"
            needed, full = MIN_SHM_GIB * GIB, "remove what dead processes left"
            found = room("shared memory", SHM, "", needed, too_small=too_small, full=full)
            yield found if self.on_neuron or not found.verdict else replace(found, verdict=Verdict.WARN)

    def disks(self, ctx: CheckContext) -> Iterator[CheckResult]:
        """Each file system has room for all that goes there."""
        groups: dict[int, list[str]] = {}
        for name, folder in self.folders.items():
            ctx.doing = f"asking for the free space of {folder}"
            groups.setdefault(existing(folder).stat().st_dev, []).append(name)
        for names in groups.values():
            folder = self.folders[names[0]]
            num_uses = len({name == "compile cache" for name in names})  # scratch and workspace both take checkpoints
            needed, full = num_uses * self.config.min_free_gib * GIB, f"du -xh --max-depth=2 {folder} on that machine"
            too_small = "a larger volume in the launch template, or lower --health.min-free-gib"
            yield room("disk", folder, f"{' + '.join(names)}: ", needed, too_small=too_small, full=full)

    def write_read_delete(self, ctx: CheckContext) -> CheckResult:
        """Send a small object to the workspace and back. Raises the storage's own error for what denies it."""
        # One key for each host: what a killed process leaves is overwritten by the next one.
        key, data = self.probes + re.sub(r"[^A-Za-z0-9.-]", "-", self.identity.host), secrets.token_bytes(PROBE_BYTES)
        uri, back, figures = self.workspace.uri(key), b"", dict[str, float | int | str]()
        try:
            for doing in ("writing", "reading", "deleting"):
                ctx.doing, started = f"{doing} {uri}", time.monotonic()
                if doing == "writing":
                    self.workspace.write_bytes(key, data)
                elif doing == "reading":
                    back = self.workspace.read_bytes(key)
                else:
                    self.workspace.delete([key])
                figures[f"{doing}_s"] = time.monotonic() - started
        except BaseException:
            with suppress(TrnpipeError):  # the first error says more
                self.after_stop.delete([key])
            raise
        if back != data:
            seen, do = f"{uri} came back with other bytes than were written", "do not use that machine: it changes data"
            return CheckResult("workspace", Verdict.RETRY, seen, "the same bytes", do, figures)
        slowest_s = max(map(float, figures.values()))
        if slowest_s > SLOW_WORKSPACE_S:
            seen = f"{format_duration(slowest_s)} for {PROBE_BYTES} bytes in {self.workspace.root}"
            do = "look at the network of that machine, and for throttling of the bucket"
            return CheckResult("workspace", Verdict.WARN, seen, f"under {SLOW_WORKSPACE_S:g} s", do, figures)
        seen = f"{1000 * slowest_s:.1f} ms for the slowest of write, read and delete"
        return CheckResult("workspace", Verdict.PASS, seen, figures=figures)


def room(name: str, folder: Path, what: str, needed: float, *, too_small: str, full: str) -> CheckResult:
    """Compare the free bytes of a file system with what is needed. FIX where even an empty one would not do."""
    total, free = disk_bytes(folder)
    seen, figures = f"{what}{format_bytes(free)} of {format_bytes(total)} free at {folder}", {"free_bytes": free}
    if free >= needed:
        return CheckResult(name, Verdict.PASS, seen, figures=figures)
    verdict, do = (Verdict.FIX, too_small) if total < needed else (Verdict.RETRY, full)
    return CheckResult(name, verdict, seen, f"at least {format_bytes(needed)}", do, figures)


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    with os_errors("asking for the free space of", f"file://{folder}"):
        while not folder.exists():
            folder = folder.parent
    return folder


def disk_bytes(folder: Path) -> tuple[int, int]:
    """Return total and free bytes of the file system a folder is on, or will be on."""
    with os_errors("asking for the free space of", f"file://{folder}"):
        found = os.statvfs(existing(folder))
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def usual_folders(scratch: Path, cache_root: str, workspace: Storage) -> dict[str, Path]:
    """Return where a cycle writes on this machine. Checkpoints are staged in scratch before they are uploaded."""
    folders = {"scratch": scratch}
    if "://" not in cache_root:
        folders["compile cache"] = Path(cache_root)
    if (root := workspace.local_path("")) is not None:
        folders["workspace"] = root
    return folders
