"""AWS's tools as checks of a node; of them nccom-test: do the cores of this machine add up right and fast.

Its exit code is not documented: a run is good only when every size asked for was measured and it reports no failure.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeline.core.errors import ConfigError
from pipeline.core.machines import GIB
from pipeline.core.neuron_errors import Evidence, classify
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckContext, CheckResult, Verdict
from pipeline.health.config import HealthConfig
from pipeline.health.neuron import (
    WAIT_S,
    NeuronInstance,
    check_counters,
    check_efa,
    check_kernel_log,
    check_neuron_ls,
    judge_rank_count,
    neuron_instance,
    without_answer,
)
from pipeline.proc.tool import ToolRun, last_line, run_tool

NAME = "nccom-test"
_SIZE_TOLERANCE = 0.01  # sizes may be rounded to whole elements of every rank,
_SMALL_BYTES, _SMALL_TOLERANCE = 1024, 2.0  # which says more of small ones (AWS shows 32 where 64 was asked for)
_USUAL_SHARE = 0.5


@dataclass(frozen=True)
class NccomTest:
    """One test: an operation over sizes, each `step_factor` times the one before.

    check: results are compared with those of the host, which makes them for each rank; that takes long for large sizes.
    """

    num_ranks: int
    operation: str = "all_reduce"
    min_bytes: int = 2**20
    max_bytes: int = 2**26
    step_factor: int = 8
    check: bool = True

    @property
    def sizes(self) -> tuple[int, ...]:
        found = [self.min_bytes]
        while self.step_factor > 1 and found[-1] * self.step_factor <= self.max_bytes:
            found.append(found[-1] * self.step_factor)
        return tuple(found)

    def command(self) -> list[str]:
        """The operation first, and a flag after --check, which would take the next word for its value."""
        words = [NAME, self.operation, "-r", str(self.num_ranks), "-b", str(self.min_bytes), "-e", str(self.max_bytes)]
        words += ["-f", str(self.step_factor), "-d", "fp32", "-n", "20", "-w", "5"]
        return [*words, *(["--check"] if self.check else []), "--non-interactive"]


def parse_table(text: str) -> dict[int, float]:
    """Bus bandwidth by size in bytes of the printed table, by the names of its columns; GB there is 2^30 bytes.

    A row of another length tells of a failure; one without an end of line may be cut in the middle of a number.
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
    run: ToolRun, test: NccomTest, *, min_busbw_gib_s: float | None = None, usual_busbw_gib_s: float | None = None
) -> CheckResult:
    """Right results and enough bandwidth.

    min_busbw_gib_s: bus bandwidth at the largest size, in 2^30 bytes a second, below which a machine is unfit; usual:
    what others reach, of which less than half is a warning.
    """
    rows = parse_table(run.stdout)
    largest, busbw_gib_s = max(rows.items(), default=(0, 0.0))
    figures = {"num_sizes": len(rows), "size_bytes": largest, "busbw_gib_s": busbw_gib_s}
    what = "right results" if test.check else "times"
    wanted = f"{what} for {len(test.sizes)} sizes of {test.operation} over {test.num_ranks} ranks"

    def bad(verdict: Verdict, seen: str, expected: str = wanted, do: str = _ELSEWHERE) -> CheckResult:
        return CheckResult(NAME, verdict, seen, expected, do, figures, run.seconds)

    if _USAGE.search(run.output) and not rows:
        return bad(Verdict.FIX, run.told(), do="nccom-test --help: are these options of your version of the tools?")
    failure = last_line(found[0]) if (found := _FAILED.search(run.output)) else ""
    causes = [match for match in classify(run.output) if match.error]
    if run.timed_out and rows and not (failure or causes or run.num_left):
        sizes = ", ".join(map(str, rows))
        return bad(Verdict.WARN, f"{run.failure}; no fault in the sizes it came to: {sizes} bytes", do=_SLOW)
    if run.failure or failure:
        proof = any(match.row.evidence is Evidence.PROOF for match in causes)
        fix = next((match for match in causes if match.error is ConfigError), None)
        if fix and not proof:
            return bad(Verdict.FIX, f"{fix.row.name}: {fix.line}", do=fix.row.action)
        return bad(Verdict.RETRY, failure or run.told())
    missing = []
    for size in test.sizes:  # a run prints the sizes it took, which may not be those it was asked for
        least, most = size - _SIZE_TOLERANCE * size, size + _SIZE_TOLERANCE * size
        if size < _SMALL_BYTES:
            least, most = size / _SMALL_TOLERANCE, size * _SMALL_TOLERANCE
        if not any(least <= row <= most for row in rows):
            missing.append(size)
    if missing:
        return bad(Verdict.RETRY, f"no result for {len(missing)} sizes, first {missing[0]} bytes ({run.told()})")
    # That of small sizes is printed as 0.00.
    if not busbw_gib_s > 0 or not all(0 <= row < math.inf for row in rows.values()):
        return bad(Verdict.RETRY, "a bandwidth that is no positive number")
    seen = f"bus bandwidth {busbw_gib_s:.2f} GiB/s at {largest} bytes"
    if min_busbw_gib_s is not None and busbw_gib_s < min_busbw_gib_s:
        return bad(Verdict.RETRY, seen, f"at least {min_busbw_gib_s:g} GiB/s")
    if usual_busbw_gib_s is not None and busbw_gib_s < _USUAL_SHARE * usual_busbw_gib_s:
        return bad(Verdict.WARN, seen, f"about {usual_busbw_gib_s:g} GiB/s, as AWS measured", "compare other machines")
    if run.exit_code != 0:
        return bad(Verdict.WARN, f"all sizes are right, but exit code {run.exit_code}", "exit code 0", "see its output")
    return CheckResult(NAME, Verdict.PASS, seen, figures=figures, seconds=run.seconds)


def check_nccom(
    instance: NeuronInstance | None,
    test: NccomTest,
    *,
    env: Mapping[str, str],
    stop: StopSignal,
    timeout_s: float,
    min_busbw_gib_s: float | None = None,
    usual_busbw_gib_s: float | None = None,
    free_s: float = WAIT_S,
) -> CheckResult:
    """Run it and judge. On return no process of it holds a core, or the verdict is RETRY."""
    run = run_tool(test.command(), timeout_s=timeout_s, stop=stop, env=env)
    if run.missing or (instance is None and not run.stdout):
        return without_answer(NAME, run, instance)
    result = judge_nccom(run, test, min_busbw_gib_s=min_busbw_gib_s, usual_busbw_gib_s=usual_busbw_gib_s)
    if not run.timed_out or result.verdict is Verdict.RETRY:
        return result
    stop.wait(free_s)  # a killed process keeps its cores for a while; whoever opens one meanwhile fails
    held = [one for one in check_neuron_ls(instance, stop=stop, wait_s=free_s, env=env) if one.verdict >= Verdict.RETRY]
    return replace(result, verdict=Verdict.RETRY, seen=f"{result.seen}; then {held[0].seen}") if held else result


_ELSEWHERE = "this job elsewhere; on this machine: nccom-test with --debug, dmesg | grep -i neuron"
_SLOW = "run the same size by hand; it compiles each one first, and with --check its ranks share the host's CPUs"
_USAGE = re.compile(r"^usage:|unrecognized arguments|invalid choice", re.MULTILINE)
_FAILED = re.compile(
    r"^[^\n]*(?:\bFailure\b|\b[1-9]\d* errors? found|test failed|Driver is not running)[^\n]*", re.MULTILINE
)


# All tools as checks of a node, and how long the health stage may take with them.

NCCOM_LIMIT_S = 300.0  # each size is compiled first
NCCOM_LEAVE_S = 60.0  # for one that is killed to leave its cores
START_LIMIT_S = 60.0  # for the ranks to import what they need, on a busy host
CHANGED_LNC = "NEURON_LOGICAL_NC_CONFIG"  # then the numbers of cores are others than the usual ones


def tool_checks(
    instance: NeuronInstance | None, config: HealthConfig, *, num_nodes: int, processes: int, on_neuron: bool = False
) -> tuple[Check, ...]:
    """For a machine that is, or should be, `instance`; None: no Neuron machine, where nothing is expected of them.

    on_neuron: ranks are to run on its cores, so that whoever holds one is looked for whatever groups are chosen: a
    second runtime on a core fails, and may take the first one with it.
    """

    def devices(ctx: CheckContext) -> tuple[CheckResult, ...]:
        ctx.doing = "running neuron-ls"
        return check_neuron_ls(instance, stop=ctx.stop)

    def kernel(ctx: CheckContext) -> tuple[CheckResult, ...]:
        ctx.doing = "reading the kernel log"
        return check_kernel_log(instance, stop=ctx.stop), check_counters()

    opens_cores = on_neuron and config.wants("cores", "collectives")
    checks = (
        Check("kernel log", kernel, "tools", cost_s=0.5),
        Check("neuron devices", devices, None if opens_cores else "tools", cost_s=1.0),
    )
    if instance is None:
        return checks

    def count(ctx: CheckContext) -> CheckResult:
        known = instance if CHANGED_LNC not in os.environ else replace(instance, rank_counts=())
        return judge_rank_count(known, processes, num_nodes=num_nodes)

    return (
        *checks,
        Check("processes", count, "tools", cost_s=0.0),
        Check("EFA", lambda ctx: check_efa(instance, num_nodes=num_nodes), "tools", cost_s=0.1),
        *(nccom_checks(instance, config, processes) if processes > 1 else ()),
    )


def nccom_checks(instance: NeuronInstance, config: HealthConfig, num_ranks: int) -> tuple[Check, ...]:
    """All-reduce and all-gather; all-reduce again for its bandwidth; in the full profile the other operations, too.

    Results are checked at 8 KiB and 8 MiB, those of all-reduce from 8 bytes on, which is one number for every rank; the
    bandwidth is that of 128 MiB, more than a gradient bucket.
    """
    least = config.min_bus_gb_s * 1e9 / GIB or None
    usual = instance.bus_gib_s if (num_ranks,) == instance.rank_counts[-1:] else None

    def check(test: NccomTest) -> Check:
        name = f"{NAME} {test.operation}" if test.check else f"{NAME} {test.operation} bandwidth"

        def run(ctx: CheckContext) -> CheckResult:
            ctx.doing = f"running {name}"
            found = check_nccom(
                instance,
                test,
                env=os.environ,
                stop=ctx.stop,
                timeout_s=NCCOM_LIMIT_S,
                min_busbw_gib_s=None if test.check else least,
                usual_busbw_gib_s=None if test.check else usual,
            )
            return replace(found, name=name)

        return Check(name, run, "tools", time_limit_s=NCCOM_LIMIT_S + NCCOM_LEAVE_S, cost_s=20.0)

    def right(operation: str, min_bytes: int = 2**13) -> NccomTest:
        return NccomTest(num_ranks, operation, min_bytes=min_bytes, max_bytes=2**23, step_factor=2**10)

    tests = [right("all_reduce", 8), right("all_gather")]
    tests.append(NccomTest(num_ranks, "all_reduce", min_bytes=2**27, max_bytes=2**27, check=False))
    if config.profile == "full":
        tests += [right("reduce_scatter"), right("alltoall")]
    return tuple(map(check, tests))


def tools_limit_s(checks: Iterable[Check], config: HealthConfig) -> float:
    """Seconds that those of these checks may take together which have a limit of their own, as nccom-test has."""
    return sum(one.time_limit_s or 0.0 for one in checks if config.wants(one.group))


def ranks_limit_s(config: HealthConfig, *, on_neuron: bool) -> float:
    """For all checks of the ranks of a node; the stage ends them then. 0 where no check of theirs is chosen."""
    if not config.wants("cores", "collectives"):
        return 0.0
    patience = config.patience(on_neuron=on_neuron)
    return START_LIMIT_S + patience * (5 * config.check_limit_s + 3 * config.collective_limit_s)


def stage_limit_s(config: HealthConfig, *, instance: str, on_neuron: bool, num_nodes: int, processes: int) -> float:
    """For the stage on a machine of that type, empty for any other: the tools with a limit of their own, the ranks,
    and the wait for the other nodes. The short checks of the host are not in it."""
    machine = neuron_instance(instance) if on_neuron else None
    tools = tool_checks(machine, config, num_nodes=num_nodes, processes=processes)
    nodes_s = config.nodes_wait_s if num_nodes > 1 else 0.0
    return tools_limit_s(tools, config) + ranks_limit_s(config, on_neuron=on_neuron) + nodes_s
