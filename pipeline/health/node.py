"""The checks of a node: type, clock, address and ports, shared memory, disks, the workspace, and Neuron's own tools.

Facts about Neuron: AWS Neuron documentation, user guides of nccom-test, runtime troubleshooting and release notes. The
exit code of nccom-test is not documented: a run is good only if every size asked for was measured and it reports no
failure.
"""

import importlib.metadata
import math
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
from pipeline.core.machines import GIB, MACHINES, Machine
from pipeline.core.neuron_errors import Evidence, classify, decisive
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckContext, CheckResult, HealthVerdict
from pipeline.health.config import NCCOM_LIMIT_S, HealthConfig
from pipeline.io.storage import Storage, os_errors
from pipeline.parallel.world import MAIN_ADDRESS, MASTER_PORT, own_address
from pipeline.proc.tool import NOT_INSTALLED, ToolRun, last_line, run_tool

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
            return CheckResult("instance", HealthVerdict.PASS, figures=figures)
        if not found:
            seen = "instance type not known: this is no EC2 machine, or its metadata cannot be read"
            return CheckResult("instance", HealthVerdict.WARN, seen, expected, figures=figures)
        do = "send the job to the queue of that type, or set --health.expected-instance"
        return CheckResult("instance", HealthVerdict.FIX, f"instance type {found}", expected, do, figures)

    def clock(self, ctx: CheckContext) -> CheckResult:
        """A clock that was never set makes every request to AWS fail, and cycles of another year."""
        now = datetime.now(UTC)
        if now > EARLIEST:
            return CheckResult("clock", HealthVerdict.PASS)
        do = "this job elsewhere; on this machine: chronyc tracking"
        return CheckResult("clock", HealthVerdict.RETRY, f"it is {now:%Y-%m-%d %H:%M}", f"after {EARLIEST:%Y}", do)

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
                    CheckResult("address", HealthVerdict.RETRY, seen, "the main node's address", f"getent hosts {main}")
                )
        for variable, port in ports.items():
            ctx.doing = f"listening on port {port}"
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
                try:
                    listener.bind(("", port))
                    listener.listen(1)
                except OSError as error:
                    verdict = HealthVerdict.RETRY if self.node_rank == 0 else HealthVerdict.WARN
                    do = f"ss -tlnp | grep {port} on that machine; end what an earlier job has left"
                    seen = f"port {port} ({variable}) is not free: {error.strerror}"
                    bad.append(CheckResult("address", verdict, seen, "a free port: one job on a machine", do))
        return bad or [CheckResult("address", HealthVerdict.PASS, figures=ports)]

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
            yield found if self.on_neuron or not found.verdict else replace(found, verdict=HealthVerdict.WARN)

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
            return CheckResult("workspace", HealthVerdict.RETRY, seen, "the same bytes", do, figures)
        slowest_s = max(map(float, figures.values()))
        if slowest_s > SLOW_WORKSPACE_S:
            seen = f"{format_duration(slowest_s)} for {PROBE_BYTES} bytes in {self.workspace.root}"
            do = "look at the network of that machine, and for throttling of the bucket"
            return CheckResult("workspace", HealthVerdict.WARN, seen, f"under {SLOW_WORKSPACE_S:g} s", do, figures)
        seen = f"{1000 * slowest_s:.1f} ms for the slowest of write, read and delete"
        return CheckResult("workspace", HealthVerdict.PASS, seen, figures=figures)


def room(name: str, folder: Path, what: str, needed: float, *, too_small: str, full: str) -> CheckResult:
    """Compare the free bytes of a file system with what is needed. FIX where even an empty one would not do."""
    total, free = disk_bytes(folder)
    seen, figures = f"{what}{format_bytes(free)} of {format_bytes(total)} free at {folder}", {"free_bytes": free}
    if free >= needed:
        return CheckResult(name, HealthVerdict.PASS, seen, figures=figures)
    verdict, do = (HealthVerdict.FIX, too_small) if total < needed else (HealthVerdict.RETRY, full)
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


# Versions, and whether driver and runtime fit.

VERSIONS, DRIVER_FIT = "versions", "driver and runtime"
DISTRIBUTIONS = ("neuronx-cc", "torch", "torch-xla", "torch-neuronx", "libneuronxla")
DRIVER_FILE = Path("/sys/module/neuron/version")
NEURON_LIBRARIES = Path("/opt/aws/neuron/lib")
# "Neuron Driver 2.29 requires Neuron Runtime Library 2.33 or later", else nrt_init() fails: AWS Neuron release notes,
# runtime component, SDK 2.31.0.
NEW_DRIVER, LEAST_RUNTIME = (2, 29), (2, 33)


def find_versions(*, driver_file: Path = DRIVER_FILE, libraries: Path = NEURON_LIBRARIES) -> dict[str, str]:
    """Return the versions of the parts that are installed."""
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # Links of the package aws-neuronx-runtime-lib lead to a file named by its version.
    if runtimes := {path.resolve().name.removeprefix("libnrt.so.") for path in libraries.glob("libnrt.so.*")}:
        found["runtime"] = ", ".join(sorted(runtimes))
    if driver_file.is_file():
        found["driver"] = driver_file.read_text().strip()
    return found


def judge_driver(versions: Mapping[str, str]) -> CheckResult | None:
    """Judge whether the image's runtime works with the machine's driver; None without a driver.

    The driver is part of the machine image, so every machine of it would give the same verdict.
    """
    driver, runtime = versions.get("driver"), versions.get("runtime")
    if driver is None:
        return None
    # Of several runtimes side by side the loader's choice is not known: only all of them together are wrong.
    numbers = [number for text in (runtime or "").split(", ") if (number := _release(text))]
    new, seen = _release(driver), f"driver {driver}, runtime {runtime or 'not found'}"
    least, limit = (".".join(map(str, release)) for release in (LEAST_RUNTIME, NEW_DRIVER))
    expected = f"runtime {least} or later with driver {limit} or later"
    if new is None or (new >= NEW_DRIVER and not numbers):
        look = f"cat {DRIVER_FILE}; ls {NEURON_LIBRARIES}"
        return CheckResult(DRIVER_FIT, HealthVerdict.WARN, f"{seen}: cannot be compared", expected, look)
    if new >= NEW_DRIVER and max(numbers) < LEAST_RUNTIME:
        fix = (
            f"a machine image with a driver before {limit} (Terraform: ami_id), or a container image with runtime "
            f"{least}: docs/neuron.md, When no such machine image is left"
        )
        return CheckResult(DRIVER_FIT, HealthVerdict.FIX, f"{seen}: nrt_init fails", expected, fix)
    return CheckResult(DRIVER_FIT, HealthVerdict.PASS, seen)


def _release(version: str) -> tuple[int, int] | None:
    """Return major and minor number; None if it does not start with them."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})(?!\d)", version)
    return (int(match[1]), int(match[2])) if match else None


# nccom-test: do the cores of this machine add up right and fast.

NAME = "nccom-test"
_ELSEWHERE = "this job elsewhere; on this machine: nccom-test with --debug, dmesg | grep -i neuron"
_USAGE = re.compile(r"^usage:|unrecognized arguments|invalid choice", re.MULTILINE)
_FAILED = re.compile(
    r"^[^\n]*(?:\bFailure\b|\b[1-9]\d* errors? found|test failed|Driver is not running)[^\n]*", re.MULTILINE
)


@dataclass(frozen=True)
class NccomTest:
    """One test: an operation over sizes, each 1,024 times the one before.

    check: results are compared with those of the host, which takes long for large sizes.
    """

    operation: str = "all_reduce"
    min_bytes: int = 2**13
    max_bytes: int = 2**23
    check: bool = True

    @property
    def name(self) -> str:
        return f"{NAME} {self.operation}{'' if self.check else ' bandwidth'}"

    @property
    def num_sizes(self) -> int:
        return 1 + (self.max_bytes // self.min_bytes).bit_length() // 10

    def command(self, num_ranks: int) -> list[str]:
        """Return the command: the operation first, and a flag after --check, which takes a word for its value."""
        words = [NAME, self.operation, "-r", str(num_ranks), "-b", str(self.min_bytes), "-e", str(self.max_bytes)]
        words += ["-f", str(2**10), "-d", "fp32", "-n", "20", "-w", "5"]
        return [*words, *(["--check"] if self.check else []), "--non-interactive"]


# Results are checked at 8 KiB and 8 MiB, those of all-reduce from 8 bytes on, which is one number for every rank; the
# bandwidth is that of 128 MiB, more than a gradient bucket.
TESTS = (
    NccomTest(min_bytes=2**3),
    NccomTest("all_gather"),
    NccomTest("reduce_scatter"),
    NccomTest(min_bytes=2**27, max_bytes=2**27, check=False),
)


def parse_table(text: str) -> dict[int, float]:
    """Return the bus bandwidth by size in bytes of the printed table; GB there is 2^30 bytes.

    A row of another length reports a failure; one without an end of line may be cut in the middle of a number.
    """
    header: list[str] = []
    found: dict[int, float] = {}
    for cells in (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")):
        if "size(B)" in cells and "busbw(GB/s)" in cells:
            header = cells
        elif header and len(cells) == len(header):
            with suppress(ValueError):  # the row of a failure may have as many words as there are columns
                found[int(cells[header.index("size(B)")])] = float(cells[header.index("busbw(GB/s)")])
    return found


def judge_nccom(
    run: ToolRun, test: NccomTest, *, min_gib_s: float = 0.0, usual_gib_s: float | None = None
) -> CheckResult:
    """Judge results and bandwidth at the largest size, in 2^30 bytes a second.

    A machine below `min_gib_s` is unfit; less than half of the usual bandwidth is a warning.
    """
    rows = parse_table(run.stdout)
    largest, busbw_gib_s = max(rows.items(), default=(0, 0.0))
    figures = {"num_sizes": len(rows), "size_bytes": largest, "busbw_gib_s": busbw_gib_s}
    what = "right results" if test.check else "times"
    wanted = f"{what} for {test.num_sizes} sizes of {test.operation}"

    def bad(verdict: HealthVerdict, seen: str, expected: str = wanted, do: str = _ELSEWHERE) -> CheckResult:
        return CheckResult(test.name, verdict, seen, expected, do, figures, run.seconds)

    if run.failure == NOT_INSTALLED:  # the image brings the tools, so every machine that runs it lacks them
        return bad(HealthVerdict.FIX, f"{NAME} is not installed", do="aws-neuronx-tools in the image")
    if _USAGE.search(run.output) and not rows:
        return bad(
            HealthVerdict.FIX, run.summary(), do="nccom-test --help: are these options of your version of the tools?"
        )
    failure = last_line(found[0]) if (found := _FAILED.search(run.output)) else ""
    if run.failure or failure:
        cause = decisive(classify(run.output))
        if cause and cause.row.error is ConfigError and cause.row.evidence is not Evidence.PROOF:
            return bad(HealthVerdict.FIX, f"{cause.row.name}: {cause.line}", do=cause.row.action)
        return bad(HealthVerdict.RETRY, failure or run.summary())
    if len(rows) < test.num_sizes:  # sizes may be rounded to whole elements of every rank
        return bad(HealthVerdict.RETRY, f"results for {len(rows)} of {test.num_sizes} sizes ({run.summary()})")
    # The bandwidth of small sizes is printed as 0.00.
    if not busbw_gib_s > 0 or not all(0 <= row < math.inf for row in rows.values()):
        return bad(HealthVerdict.RETRY, "a bandwidth that is no positive number")
    seen = f"bus bandwidth {busbw_gib_s:.2f} GiB/s at {largest} bytes"
    if busbw_gib_s < min_gib_s:
        return bad(HealthVerdict.RETRY, seen, f"at least {min_gib_s:g} GiB/s")
    if usual_gib_s is not None and busbw_gib_s < usual_gib_s / 2:
        return bad(HealthVerdict.WARN, seen, f"about {usual_gib_s:g} GiB/s, as AWS measured", "compare other machines")
    if run.exit_code != 0:
        return bad(
            HealthVerdict.WARN, f"all sizes are right, but exit code {run.exit_code}", "exit code 0", "see its output"
        )
    return CheckResult(test.name, HealthVerdict.PASS, seen, figures=figures, seconds=run.seconds)


# All of them as checks of a node.

CHANGED_LNC = "NEURON_LOGICAL_NC_CONFIG"  # then the numbers of cores are others than the usual ones


def check_kernel_log(
    *, on_neuron: bool, stop: StopSignal, env: Mapping[str, str] | None = None, timeout_s: float = 10.0
) -> CheckResult:
    """Look for hardware errors since boot, with `dmesg`. Containers may not read it, as a rule: a warning."""
    run = run_tool(["dmesg"], timeout_s=timeout_s, stop=stop, env=env)
    for match in classify(run.stdout):
        if match.row.evidence is Evidence.PROOF:
            do, expected = f"this job elsewhere; {match.row.action}", "no hardware error since boot"
            return CheckResult("kernel-log", HealthVerdict.RETRY, match.line, expected, do, seconds=run.seconds)
    if run.exit_code == 0:
        return CheckResult("kernel-log", HealthVerdict.PASS)
    verdict, do = HealthVerdict.WARN if on_neuron else HealthVerdict.PASS, "a container needs the capability SYSLOG"
    return CheckResult(
        "kernel-log", verdict, f"not readable ({run.summary()})", "the kernel log", do, seconds=run.seconds
    )


def judge_rank_count(machine: Machine, processes: int, *, num_nodes: int) -> CheckResult:
    """The runtime joins cores only in some numbers; with another one it hangs or fails when it starts."""
    fits = machine.rank_counts[-1:] if num_nodes > 1 else machine.rank_counts
    if not fits or processes in fits:
        return CheckResult("processes", HealthVerdict.PASS, figures={"processes": processes})
    seen = f"{processes} processes on {machine.name}, {num_nodes} nodes"
    return CheckResult(
        "processes", HealthVerdict.FIX, seen, " or ".join(map(str, fits)), f"--launch.processes {fits[-1]}"
    )


def neuron_checks(
    config: HealthConfig, instance: str, more: Mapping[str, str], *, num_nodes: int, processes: int, on_neuron: bool
) -> tuple[Check, ...]:
    """Return the checks of a node with its instance type. `more`: further versions to report.

    Versions come before anything that opens a device: if driver and runtime do not fit, that fails in less clear words.
    """

    def versions(ctx: CheckContext) -> Iterator[CheckResult]:
        found = find_versions()
        yield CheckResult(VERSIONS, HealthVerdict.PASS, figures={**found, **more})
        if (fit := judge_driver(found)) is not None:
            yield fit

    def kernel_log(ctx: CheckContext) -> CheckResult:
        ctx.doing = "reading the kernel log"
        return check_kernel_log(on_neuron=on_neuron, stop=ctx.stop)

    checks = [Check(VERSIONS, versions, cost_s=0.1), Check("kernel log", kernel_log, "tools", cost_s=0.5)]
    if not on_neuron:
        return tuple(checks)
    machine = MACHINES.get(instance)
    if machine is not None and CHANGED_LNC not in os.environ:
        count = judge_rank_count(machine, processes, num_nodes=num_nodes)
        checks.append(Check("processes", lambda ctx: count, "tools", cost_s=0.0))
    usual = machine.bus_gib_s if machine and (processes,) == machine.rank_counts[-1:] else None

    def nccom(test: NccomTest) -> Check:
        def run(ctx: CheckContext) -> CheckResult:
            ctx.doing = f"running {test.name}"
            ended = run_tool(test.command(processes), timeout_s=NCCOM_LIMIT_S, stop=ctx.stop)
            if test.check:
                return judge_nccom(ended, test)
            return judge_nccom(ended, test, min_gib_s=config.min_bus_gb_s * 1e9 / GIB, usual_gib_s=usual)

        return Check(test.name, run, "tools", time_limit_s=NCCOM_LIMIT_S + 60.0, cost_s=20.0)

    return (*checks, *(nccom(test) for test in TESTS if processes > 1))
