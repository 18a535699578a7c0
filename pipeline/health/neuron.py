"""A Neuron machine: versions of driver and runtime, the kernel's log, how many ranks fit, and nccom-test.

Facts: AWS Neuron documentation, user guides of nccom-test, runtime troubleshooting and release notes. The exit code of
nccom-test is not documented: a run is good only if every size asked for was measured and it reports no failure.
"""

import importlib.metadata
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import ConfigError
from pipeline.core.machines import GIB, MACHINES, Machine
from pipeline.core.neuron_errors import Evidence, classify, decisive
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckContext, CheckResult, Verdict
from pipeline.health.config import NCCOM_LIMIT_S, HealthConfig
from pipeline.proc.tool import NOT_INSTALLED, ToolRun, last_line, run_tool

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
        return CheckResult(DRIVER_FIT, Verdict.WARN, f"{seen}: cannot be compared", expected, look)
    if new >= NEW_DRIVER and max(numbers) < LEAST_RUNTIME:
        fix = (
            f"a machine image with a driver before {limit} (Terraform: ami_id), or a container image with runtime "
            f"{least}: docs/neuron.md, When no such machine image is left"
        )
        return CheckResult(DRIVER_FIT, Verdict.FIX, f"{seen}: nrt_init fails", expected, fix)
    return CheckResult(DRIVER_FIT, Verdict.PASS, seen)


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

    def bad(verdict: Verdict, seen: str, expected: str = wanted, do: str = _ELSEWHERE) -> CheckResult:
        return CheckResult(test.name, verdict, seen, expected, do, figures, run.seconds)

    if run.failure == NOT_INSTALLED:  # the image brings the tools, so every machine that runs it lacks them
        return bad(Verdict.FIX, f"{NAME} is not installed", do="aws-neuronx-tools in the image")
    if _USAGE.search(run.output) and not rows:
        return bad(Verdict.FIX, run.told(), do="nccom-test --help: are these options of your version of the tools?")
    failure = last_line(found[0]) if (found := _FAILED.search(run.output)) else ""
    if run.failure or failure:
        cause = decisive(classify(run.output))
        if cause and cause.row.error is ConfigError and cause.row.evidence is not Evidence.PROOF:
            return bad(Verdict.FIX, f"{cause.row.name}: {cause.line}", do=cause.row.action)
        return bad(Verdict.RETRY, failure or run.told())
    if len(rows) < test.num_sizes:  # sizes may be rounded to whole elements of every rank
        return bad(Verdict.RETRY, f"results for {len(rows)} of {test.num_sizes} sizes ({run.told()})")
    # The bandwidth of small sizes is printed as 0.00.
    if not busbw_gib_s > 0 or not all(0 <= row < math.inf for row in rows.values()):
        return bad(Verdict.RETRY, "a bandwidth that is no positive number")
    seen = f"bus bandwidth {busbw_gib_s:.2f} GiB/s at {largest} bytes"
    if busbw_gib_s < min_gib_s:
        return bad(Verdict.RETRY, seen, f"at least {min_gib_s:g} GiB/s")
    if usual_gib_s is not None and busbw_gib_s < usual_gib_s / 2:
        return bad(Verdict.WARN, seen, f"about {usual_gib_s:g} GiB/s, as AWS measured", "compare other machines")
    if run.exit_code != 0:
        return bad(Verdict.WARN, f"all sizes are right, but exit code {run.exit_code}", "exit code 0", "see its output")
    return CheckResult(test.name, Verdict.PASS, seen, figures=figures, seconds=run.seconds)


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
            return CheckResult("kernel-log", Verdict.RETRY, match.line, expected, do, seconds=run.seconds)
    if run.exit_code == 0:
        return CheckResult("kernel-log", Verdict.PASS)
    verdict, do = Verdict.WARN if on_neuron else Verdict.PASS, "a container needs the capability SYSLOG"
    return CheckResult("kernel-log", verdict, f"not readable ({run.told()})", "the kernel log", do, seconds=run.seconds)


def judge_rank_count(machine: Machine, processes: int, *, num_nodes: int) -> CheckResult:
    """The runtime joins cores only in some numbers; with another one it hangs or fails when it starts."""
    fits = machine.rank_counts[-1:] if num_nodes > 1 else machine.rank_counts
    if not fits or processes in fits:
        return CheckResult("processes", Verdict.PASS, figures={"processes": processes})
    seen = f"{processes} processes on {machine.name}, {num_nodes} nodes"
    return CheckResult("processes", Verdict.FIX, seen, " or ".join(map(str, fits)), f"--launch.processes {fits[-1]}")


def neuron_checks(
    config: HealthConfig, instance: str, more: Mapping[str, str], *, num_nodes: int, processes: int, on_neuron: bool
) -> tuple[Check, ...]:
    """Return the checks of a node with its instance type. `more`: further versions to report.

    Versions come before anything that opens a device: if driver and runtime do not fit, that fails in less clear words.
    """

    def versions(ctx: CheckContext) -> Iterator[CheckResult]:
        found = find_versions()
        yield CheckResult(VERSIONS, Verdict.PASS, figures={**found, **more})
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
