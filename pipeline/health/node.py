"""The health checks of a node, which verify the host, the workspace and the Neuron tools.

They are based on the AWS Neuron documentation, in particular the nccom-test user guide, the runtime troubleshooting
guide and the release notes. The exit code of nccom-test is not documented. Therefore, a run only passes if every
requested size was measured and no failure is reported.
"""

import importlib.metadata
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

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

SHM = Path("/dev/shm")  # noqa: S108 - only its size is read
MIN_SHM_GIB = 1.0  # loader workers use it to send batches. With the container default of 64 MiB, they die of SIGBUS
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)  # if the time is earlier, the clock has not been set
ROOT_COMM_PORT = 62182  # default port of the Neuron runtime if NEURON_RT_ROOT_COMM_ID is not set (docs/neuron.md)
SLOW_WORKSPACE_S = 5.0
PROBE_BYTES = 4096
_T = TypeVar("_T")

# Identify the machine by its instance id and type on EC2, or by its host name elsewhere.

DMI = Path("/sys/devices/virtual/dmi/id")
INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
INSTANCE_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")


@dataclass(frozen=True)
class Identity:
    """The identity of a machine."""

    host: str
    """The name of the machine in reports."""
    instance_type: str = ""
    """The EC2 instance type. Empty if it is unknown."""


def read_identity(dmi: Path = DMI) -> Identity:
    """Read the instance id and type from the firmware, or fall back to the host name.

    The firmware of all Nitro instances provides them, which includes all Trainium instances.
    """
    firmware = {"sys_vendor": "", "board_asset_tag": "", "product_name": ""}
    for name in firmware:
        with suppress(OSError):
            firmware[name] = (dmi / name).read_text(errors="replace").strip()
    on_ec2 = firmware["sys_vendor"] == "Amazon EC2"
    instance, kind = (firmware["board_asset_tag"], firmware["product_name"]) if on_ec2 else ("", "")
    return Identity(
        host=instance if INSTANCE_ID.fullmatch(instance) else socket.gethostname() or "unknown",
        instance_type=kind if INSTANCE_TYPE.fullmatch(kind) else "",
    )


@dataclass(frozen=True)
class HostChecks:
    """The checks of this host.

    Args:
        after_stop: the workspace as a storage that ignores the stop signal. It is used to clean up.
        probes: prefix of the objects that this node writes to test the workspace.
        folders: local folders that the run writes to, by name.
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
        """Compare the instance type with the expected one."""
        expected, actual = self.config.expected_instance, self.identity.instance_type
        figures: dict[str, float | int | str] = {"type": actual or "unknown", "cpus": os.cpu_count() or 1}
        if not expected or actual == expected:
            return CheckResult("instance", HealthVerdict.PASS, figures=figures)
        if not actual:
            seen = "unknown instance type, because this is not an EC2 instance or its metadata cannot be read"
            return CheckResult("instance", HealthVerdict.WARN, seen, expected, figures=figures)
        advice = "submit the job to a queue with instances of that type, or set --health.expected-instance"
        return CheckResult("instance", HealthVerdict.FIX, f"instance type {actual}", expected, advice, figures)

    def clock(self, ctx: CheckContext) -> CheckResult:
        """Check that the clock is set. Otherwise, AWS would reject all requests and cycles would get wrong dates."""
        now = datetime.now(UTC)
        if now > EARLIEST:
            return CheckResult("clock", HealthVerdict.PASS)
        seen, expected = f"the clock is at {now:%Y-%m-%d %H:%M}", f"{EARLIEST:%Y} or later"
        advice = "retry the job on a different machine, and run chronyc tracking on this one"
        return CheckResult("clock", HealthVerdict.RETRY, seen, expected, advice)

    def address(self, ctx: CheckContext) -> list[CheckResult]:
        """Check that the address of the main node can be resolved and that its ports are free.

        According to user reports, a second job that uses the same port of the Neuron runtime hangs at startup without
        an error message.
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
                    advice = f"run ss -tlnp | grep {port} on that machine, and kill the processes of an earlier job"
                    seen = f"port {port} ({variable}) is not free: {error.strerror}"
                    bad.append(CheckResult("address", verdict, seen, "a free port (one job per machine)", advice))
        return bad or [CheckResult("address", HealthVerdict.PASS, figures=ports)]

    def _ports(self) -> dict[str, int]:
        """Return the ports on which the main node listens. Raises ConfigError if they are invalid or not distinct."""
        texts = {}
        if self.num_nodes > 1:
            texts["MASTER_PORT"] = self.env.get("MASTER_PORT", str(MASTER_PORT))
        if self.on_neuron:
            root = self.env.get("NEURON_RT_ROOT_COMM_ID", "") or f":{ROOT_COMM_PORT}"
            texts["NEURON_RT_ROOT_COMM_ID"] = root.rpartition(":")[2]
        ports = {name: int(text) for name, text in texts.items() if text.isdecimal() and 0 < int(text) < 65_536}
        if len({*ports.values()}) < len(texts):
            raise ConfigError(
                f"invalid ports: {texts}", expected="a valid port for each", next_command=f"unset {' '.join(texts)}"
            )
        return ports

    def shared_memory(self, ctx: CheckContext) -> Iterator[CheckResult]:
        ctx.doing = f"reading the size of {SHM}"
        if SHM.is_dir():  # it does not exist on macOS
            too_small = "sharedMemorySize in the job definition (docker: --shm-size)"
            needed, full = MIN_SHM_GIB * GIB, "remove the files of processes that have exited"
            result = check_free_space("shared memory", SHM, "", needed, too_small=too_small, full=full)
            yield result if self.on_neuron or not result.verdict else replace(result, verdict=HealthVerdict.WARN)

    def disks(self, ctx: CheckContext) -> Iterator[CheckResult]:
        """Check that each file system has enough free space for the folders on it."""
        groups: dict[int, list[str]] = {}
        for name, folder in self.folders.items():
            ctx.doing = f"reading the free space of {folder}"
            groups.setdefault(nearest_existing(folder).stat().st_dev, []).append(name)
        for names in groups.values():
            folder = self.folders[names[0]]
            num_uses = len({name == "compile cache" for name in names})  # scratch and workspace both store checkpoints
            needed, full = num_uses * self.config.min_free_gib * GIB, f"du -xh --max-depth=2 {folder} on that machine"
            too_small = "a larger volume in the launch template, or lower --health.min-free-gib"
            yield check_free_space("disk", folder, f"{' + '.join(names)}: ", needed, too_small=too_small, full=full)

    def write_read_delete(self, ctx: CheckContext) -> CheckResult:
        """Write, read, replace and delete a small object in the workspace. Storage errors are propagated."""
        # The key depends only on the host, so that an object left over from a killed process is overwritten.
        key, data = self.probes + re.sub(r"[^A-Za-z0-9.-]", "-", self.identity.host), secrets.token_bytes(PROBE_BYTES)
        uri, figures, workspace = self.workspace.uri(key), dict[str, float | int | str](), self.workspace

        def timed(doing: str, work: Callable[..., _T], *arguments: object) -> _T:
            ctx.doing, started = f"{doing} {uri}", time.monotonic()
            result = work(*arguments)
            figures[f"{doing}_s"] = time.monotonic() - started
            return result

        try:
            timed("writing", workspace.write_bytes, key, data)
            back = timed("reading", workspace.read_bytes, key)
            ignored = timed("replacing", self._ignored_condition, key, data)
            timed("deleting", workspace.delete, [key])
        except BaseException:
            with suppress(TrnpipeError):  # raise the original error, which is more useful
                self.after_stop.delete([key])
            raise
        if back != data:
            seen, advice = (
                f"the content of {uri} is different after reading it again",
                "do not use this machine, because it corrupts data",
            )
            return CheckResult("workspace", HealthVerdict.RETRY, seen, "the written bytes", advice, figures)
        if ignored:
            seen, expected = (
                f"{workspace.root} ignores {ignored}",
                "conditional writes, so that no job overwrites another",
            )
            advice = "use a bucket of S3, or a store that supports them (aws s3api put-object --if-none-match '*')"
            return CheckResult("workspace", HealthVerdict.FIX, seen, expected, advice, figures)
        slowest_s = max(map(float, figures.values()))
        if slowest_s > SLOW_WORKSPACE_S:
            seen = f"a request of {PROBE_BYTES} bytes to {workspace.root} took {format_duration(slowest_s)}"
            advice = "check the network of that machine, and the bucket for throttling"
            return CheckResult("workspace", HealthVerdict.WARN, seen, f"under {SLOW_WORKSPACE_S:g} s", advice, figures)
        seen = f"the slowest of write, read, replace and delete took {1000 * slowest_s:.1f} ms"
        return CheckResult("workspace", HealthVerdict.PASS, seen, figures=figures)

    def _ignored_condition(self, key: str, data: bytes) -> str:
        """Return the condition that the workspace ignores when it replaces an object, or an empty string if none."""
        stat, other = self.workspace.stat(key), data[::-1]
        if self.workspace.write_if_absent(key, other):
            return "If-None-Match, which prevents a write if the key already exists"
        if stat and self.workspace.write_if_match(key, other, stat.etag):
            if not self.workspace.write_if_match(key, data, stat.etag):
                return ""
            return "If-Match, which prevents a write if the object has changed"
        return "the etag of an object that it returned itself"


def check_free_space(name: str, folder: Path, title: str, needed: float, *, too_small: str, full: str) -> CheckResult:
    """Check that a file system has `needed` bytes of free space.

    The verdict is FIX if the file system would be too small even if it were empty, and RETRY otherwise.
    """
    total, free = disk_bytes(folder)
    seen, figures = f"{title}{format_bytes(free)} of {format_bytes(total)} free at {folder}", {"free_bytes": free}
    if free >= needed:
        return CheckResult(name, HealthVerdict.PASS, seen, figures=figures)
    verdict, advice = (HealthVerdict.FIX, too_small) if total < needed else (HealthVerdict.RETRY, full)
    return CheckResult(name, verdict, seen, f"at least {format_bytes(needed)}", advice, figures)


def nearest_existing(folder: Path) -> Path:
    """Return the folder itself if it exists, or else its closest existing parent."""
    with os_errors("reading the free space of", f"file://{folder}"):
        while not folder.exists():
            folder = folder.parent
    return folder


def disk_bytes(folder: Path) -> tuple[int, int]:
    """Return the total and free bytes of the file system that contains a folder, which may not exist yet."""
    with os_errors("reading the free space of", f"file://{folder}"):
        stat = os.statvfs(nearest_existing(folder))
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def local_folders(scratch: Path, cache_root: str, workspace: Storage) -> dict[str, Path]:
    """Return the local folders that a cycle writes to. Checkpoints are staged in scratch before they are uploaded."""
    folders = {"scratch": scratch}
    if "://" not in cache_root:
        folders["compile cache"] = Path(cache_root)
    if (root := workspace.local_path("")) is not None:
        folders["workspace"] = root
    return folders


# Find the installed versions, and check that the driver and the runtime are compatible.

VERSIONS, DRIVER_FIT = "versions", "driver and runtime"
DISTRIBUTIONS = ("neuronx-cc", "torch", "torch-xla", "torch-neuronx", "libneuronxla")
DRIVER_FILE = Path("/sys/module/neuron/version")
NEURON_LIBRARIES = Path("/opt/aws/neuron/lib")
# "Neuron Driver 2.29 requires Neuron Runtime Library 2.33 or later", and nrt_init() fails otherwise. See the runtime
# component in the AWS Neuron release notes for SDK 2.31.0.
NEW_DRIVER, LEAST_RUNTIME = (2, 29), (2, 33)


def find_versions(*, driver_file: Path = DRIVER_FILE, libraries: Path = NEURON_LIBRARIES) -> dict[str, str]:
    """Return the versions of the installed components."""
    versions = {}
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    # The package aws-neuronx-runtime-lib installs symlinks to a file that has the version in its name.
    if runtimes := {path.resolve().name.removeprefix("libnrt.so.") for path in libraries.glob("libnrt.so.*")}:
        versions["runtime"] = ", ".join(sorted(runtimes))
    if driver_file.is_file():
        versions["driver"] = driver_file.read_text().strip()
    return versions


def check_driver(versions: Mapping[str, str]) -> CheckResult | None:
    """Check that the runtime in the container image supports the driver of the machine.

    The driver is part of the machine image, which means that the job would fail on every machine that uses this image.
    Returns None if there is no driver.
    """
    driver, runtime = versions.get("driver"), versions.get("runtime")
    if driver is None:
        return None
    # If several runtimes are installed, it is unknown which of them is loaded. Only fail if all of them are too old.
    numbers = [number for text in (runtime or "").split(", ") if (number := _release(text))]
    new, seen = _release(driver), f"driver {driver} and runtime {runtime or '(not found)'}"
    least, limit = (".".join(map(str, release)) for release in (LEAST_RUNTIME, NEW_DRIVER))
    expected = f"runtime {least} or later with driver {limit} or later"
    if new is None or (new >= NEW_DRIVER and not numbers):
        advice = f"cat {DRIVER_FILE}; ls {NEURON_LIBRARIES}"
        return CheckResult(DRIVER_FIT, HealthVerdict.WARN, f"{seen}, which cannot be compared", expected, advice)
    if new >= NEW_DRIVER and max(numbers) < LEAST_RUNTIME:
        advice = (
            f"use a machine image with a driver older than {limit} (Terraform: ami_id), or a container image with"
            f" runtime {least} (see docs/neuron.md, When no such machine image is left)"
        )
        seen = f"{seen} are incompatible, which causes nrt_init to fail"
        return CheckResult(DRIVER_FIT, HealthVerdict.FIX, seen, expected, advice)
    return CheckResult(DRIVER_FIT, HealthVerdict.PASS, seen)


def _release(version: str) -> tuple[int, int] | None:
    """Parse a version into (major, minor). Returns None if it does not begin with two numbers."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})(?!\d)", version)
    return (int(match[1]), int(match[2])) if match else None


# Run nccom-test to check the correctness and bandwidth of collectives across the cores of this machine.

NAME = "nccom-test"
_ADVICE = "retry the job on a different machine, and run nccom-test --debug and dmesg | grep -i neuron on this one"
_USAGE = re.compile(r"^usage:|unrecognized arguments|invalid choice", re.MULTILINE)
_FAILED = re.compile(
    r"^[^\n]*(?:\bFailure\b|\b[1-9]\d* errors? found|test failed|Driver is not running)[^\n]*", re.MULTILINE
)


@dataclass(frozen=True)
class NccomTest:
    """A run of nccom-test for one operation. The sizes increase by a factor of 1,024."""

    operation: str = "all_reduce"
    min_bytes: int = 2**13
    max_bytes: int = 2**23
    check: bool = True
    """Whether to compare the results with the host."""

    @property
    def name(self) -> str:
        return f"{NAME} {self.operation}{'' if self.check else ' bandwidth'}"

    @property
    def num_sizes(self) -> int:
        return 1 + (self.max_bytes // self.min_bytes).bit_length() // 10

    def command(self, num_ranks: int) -> list[str]:
        """Return the command line. --check must be followed by a flag, because it accepts an optional value."""
        command = [NAME, self.operation, "-r", str(num_ranks), "-b", str(self.min_bytes), "-e", str(self.max_bytes)]
        command += ["-f", str(2**10), "-d", "fp32", "-n", "20", "-w", "5"]
        return [*command, *(["--check"] if self.check else []), "--non-interactive"]


# The results are checked for sizes of 8 KiB and 8 MiB and, in the case of all-reduce, 8 bytes, which is a single number
# per rank. The bandwidth is measured with 128 MiB, which is larger than a gradient bucket.
TESTS = (
    NccomTest(min_bytes=2**3),
    NccomTest("all_gather"),
    NccomTest("reduce_scatter"),
    NccomTest(min_bytes=2**27, max_bytes=2**27, check=False),
)


def parse_table(text: str) -> dict[int, float]:
    """Parse the table that nccom-test prints. Returns the bus bandwidth in GiB/s by size in bytes.

    Note that nccom-test prints "GB" for 2^30 bytes. Rows with a different number of columns are skipped, because they
    report a failure. The last row is skipped if it has no newline, because it may be truncated.
    """
    header: list[str] = []
    bandwidths: dict[int, float] = {}
    for cells in (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")):
        if "size(B)" in cells and "busbw(GB/s)" in cells:
            header = cells
        elif header and len(cells) == len(header):
            with suppress(ValueError):  # a row that reports a failure may have as many columns as the header
                bandwidths[int(cells[header.index("size(B)")])] = float(cells[header.index("busbw(GB/s)")])
    return bandwidths


def check_nccom_run(
    run: ToolRun, test: NccomTest, *, min_gib_s: float = 0.0, usual_gib_s: float | None = None
) -> CheckResult:
    """Check the results of a run and the bandwidth of the largest size.

    A machine is unfit if the bandwidth is below `min_gib_s`. If it is less than half of `usual_gib_s`, the verdict is a
    warning.
    """
    rows = parse_table(run.stdout)
    largest, busbw_gib_s = max(rows.items(), default=(0, 0.0))
    figures = {"num_sizes": len(rows), "size_bytes": largest, "busbw_gib_s": busbw_gib_s}
    outcome = "correct results" if test.check else "times"
    complete = f"{outcome} for {test.num_sizes} sizes of {test.operation}"

    def bad(verdict: HealthVerdict, seen: str, expected: str = complete, advice: str = _ADVICE) -> CheckResult:
        return CheckResult(test.name, verdict, seen, expected, advice, figures, run.seconds)

    if run.failure == NOT_INSTALLED:  # the tools are part of the image, so the job would fail on every machine
        return bad(HealthVerdict.FIX, f"{NAME} is not installed", advice="install aws-neuronx-tools in the image")
    if _USAGE.search(run.output) and not rows:
        advice = "run nccom-test --help to see which options your version of the tools supports"
        return bad(HealthVerdict.FIX, run.summary(), advice=advice)
    failure = last_line(match[0]) if (match := _FAILED.search(run.output)) else ""
    if run.failure or failure:
        cause = decisive(classify(run.output))
        if cause and cause.row.error is ConfigError and cause.row.evidence is not Evidence.PROOF:
            return bad(HealthVerdict.FIX, f"{cause.row.name}: {cause.line}", advice=cause.row.action)
        return bad(HealthVerdict.RETRY, failure or run.summary())
    # Only the number of sizes is compared, because they may be rounded to a multiple of the number of ranks.
    if len(rows) < test.num_sizes:
        return bad(HealthVerdict.RETRY, f"results for {len(rows)} of {test.num_sizes} sizes ({run.summary()})")
    # For small sizes, a bandwidth of 0.00 is printed.
    if not busbw_gib_s > 0 or not all(0 <= row < math.inf for row in rows.values()):
        return bad(HealthVerdict.RETRY, "the bandwidth is not a positive number")
    seen = f"bus bandwidth {busbw_gib_s:.2f} GiB/s at {largest} bytes"
    if busbw_gib_s < min_gib_s:
        return bad(HealthVerdict.RETRY, seen, f"at least {min_gib_s:g} GiB/s")
    if usual_gib_s is not None and busbw_gib_s < usual_gib_s / 2:
        expected = f"about {usual_gib_s:g} GiB/s, as measured by AWS"
        return bad(HealthVerdict.WARN, seen, expected, "compare with other machines")
    if run.exit_code != 0:
        return bad(
            HealthVerdict.WARN, f"exit code {run.exit_code} despite correct results", "exit code 0", "see its output"
        )
    return CheckResult(test.name, HealthVerdict.PASS, seen, figures=figures, seconds=run.seconds)


# The Neuron checks of a node.

CHANGED_LNC = "NEURON_LOGICAL_NC_CONFIG"  # this variable changes the number of logical cores


def check_kernel_log(
    *, on_neuron: bool, stop: StopSignal, env: Mapping[str, str] | None = None, timeout_s: float = 10.0
) -> CheckResult:
    """Search the kernel log for hardware errors since boot.

    On Neuron, the verdict is a warning if the log cannot be read, which is the case in most containers.
    """
    run = run_tool(["dmesg"], timeout_s=timeout_s, stop=stop, env=env)
    for match in classify(run.stdout):
        if match.row.evidence is Evidence.PROOF:
            advice, expected = f"retry the job on another machine; {match.row.action}", "no hardware error since boot"
            return CheckResult("kernel-log", HealthVerdict.RETRY, match.line, expected, advice, seconds=run.seconds)
    if run.exit_code == 0:
        return CheckResult("kernel-log", HealthVerdict.PASS)
    verdict = HealthVerdict.WARN if on_neuron else HealthVerdict.PASS
    seen, advice = f"not readable ({run.summary()})", "add the capability SYSLOG to the container"
    return CheckResult("kernel-log", verdict, seen, "a readable kernel log", advice, seconds=run.seconds)


def check_rank_count(machine: Machine, processes: int, *, num_nodes: int) -> CheckResult:
    """Check that the runtime supports this number of cores. If it does not, it hangs or fails at startup."""
    supported = machine.rank_counts[-1:] if num_nodes > 1 else machine.rank_counts
    if not supported or processes in supported:
        return CheckResult("processes", HealthVerdict.PASS, figures={"processes": processes})
    seen = f"{processes} processes on {machine.name}, {num_nodes} nodes"
    expected, advice = " or ".join(map(str, supported)), f"--launch.processes {supported[-1]}"
    return CheckResult("processes", HealthVerdict.FIX, seen, expected, advice)


def neuron_checks(
    config: HealthConfig, instance: str, more: Mapping[str, str], *, num_nodes: int, processes: int, on_neuron: bool
) -> tuple[Check, ...]:
    """Return the Neuron checks of a node with instance type `instance`.

    The versions are checked before a device is opened, because the error message of an incompatible driver is hard to
    understand. `more` has additional versions to report.
    """

    def versions(ctx: CheckContext) -> Iterator[CheckResult]:
        installed = find_versions()
        yield CheckResult(VERSIONS, HealthVerdict.PASS, figures={**installed, **more})
        if (result := check_driver(installed)) is not None:
            yield result

    def kernel_log(ctx: CheckContext) -> CheckResult:
        ctx.doing = "reading the kernel log"
        return check_kernel_log(on_neuron=on_neuron, stop=ctx.stop)

    checks = [Check(VERSIONS, versions, cost_s=0.1), Check("kernel log", kernel_log, "tools", cost_s=0.5)]
    if not on_neuron:
        return tuple(checks)
    machine = MACHINES.get(instance)
    if machine is not None and CHANGED_LNC not in os.environ:
        rank_count = check_rank_count(machine, processes, num_nodes=num_nodes)
        checks.append(Check("processes", lambda ctx: rank_count, "tools", cost_s=0.0))
    usual = machine.bus_gib_s if machine and (processes,) == machine.rank_counts[-1:] else None

    def nccom(test: NccomTest) -> Check:
        def run(ctx: CheckContext) -> CheckResult:
            ctx.doing = f"running {test.name}"
            tool_run = run_tool(test.command(processes), timeout_s=NCCOM_LIMIT_S, stop=ctx.stop)
            if test.check:
                return check_nccom_run(tool_run, test)
            return check_nccom_run(tool_run, test, min_gib_s=config.min_bus_gb_s * 1e9 / GIB, usual_gib_s=usual)

        return Check(test.name, run, "tools", time_limit_s=NCCOM_LIMIT_S + 60.0, cost_s=20.0)

    return (*checks, *(nccom(test) for test in TESTS if processes > 1))
