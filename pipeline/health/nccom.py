"""Do the cores of this machine, or of a gang, add up right and fast: nccom-test (AWS: its user guide).

Its exit code is not documented: a run is good only when every size asked for was measured and no failure was told.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel, Field

from pipeline.core.stop import StopSignal
from pipeline.health.instances import NeuronInstance, without_answer
from pipeline.health.neuron_errors import Evidence, classify
from pipeline.health.neuron_ls import WAIT_S, check_neuron_ls
from pipeline.health.verdict import CheckResult, Verdict
from pipeline.proc.tool import ToolRun, json_in, last_line, run_tool

NAME = "nccom-test"
ROOT_PORT, COLLECTOR_PORT = 45654, 60006  # where ranks meet (any free one), and where their times are gathered
_SIZE_TOLERANCE = 0.01  # sizes may be rounded to whole elements of every rank,
_SMALL_BYTES, _SMALL_TOLERANCE = 1024, 2.0  # which says more of small ones (AWS shows 32 where 64 was asked for)
_USUAL_SHARE = 0.5


@dataclass(frozen=True)
class NccomTest:
    """One test: an operation over sizes, each `step_factor` times the one before. `hosts`: more than one in a gang.

    check: results are compared with those of the host, which makes them for each rank; that takes long for large sizes.
    """

    num_ranks: int
    operation: str = "all_reduce"
    min_bytes: int = 2**20
    max_bytes: int = 2**26
    step_factor: int = 8
    datatype: str = "fp32"
    iters: int = 20
    warmup_iters: int = 5
    check: bool = True
    hosts: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        found = [self.min_bytes]
        while self.step_factor > 1 and found[-1] * self.step_factor <= self.max_bytes:
            found.append(found[-1] * self.step_factor)
        return tuple(found)


class Measurement(BaseModel):
    """One size. GB here is 2^30 bytes; times of other statistics than the average are passed over."""

    size_bytes: float = Field(alias="size(B)")
    algbw_gib_s: float = Field(alias="algbw(GB/s)")
    busbw_gib_s: float = Field(alias="busbw(GB/s)")
    time_us: float | None = Field(None, alias="time:avg(us)")


class _Report(BaseModel):
    results: list[Measurement]


def command(test: NccomTest, *, report: Path | None = None) -> list[str]:
    """The operation first and a flag after --check and --hosts, which would take it for their value."""
    words = ["nccom-test", test.operation, "-r", str(test.num_ranks)]
    if len(test.hosts) > 1:
        words += ["-N", str(len(test.hosts)), "--hosts", *test.hosts]
    words += ["-b", str(test.min_bytes), "-e", str(test.max_bytes), "-f", str(test.step_factor)]
    words += ["-d", test.datatype, "-n", str(test.iters), "-w", str(test.warmup_iters)]
    words += ["--check"] if test.check else []
    words += ["--report-to-json-file", str(report)] if report else []
    return [*words, "--non-interactive"]


def environment(test: NccomTest, env: Mapping[str, str]) -> dict[str, str]:
    """What a test over many hosts needs to meet."""
    return {**env, "NEURON_RT_ROOT_COMM_ID": f"{test.hosts[0]}:{ROOT_PORT}"} if len(test.hosts) > 1 else dict(env)


def parse_table(text: str) -> tuple[Measurement, ...]:
    """The rows of the printed table, by the names of its columns.

    A row of another length tells of a failure; one without an end of line may be cut in the middle of a number.
    """
    header: list[str] = []
    found: list[Measurement] = []
    for cells in (line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")):
        if "size(B)" in cells:
            header = ["time:avg(us)" if cell == "time(us)" else cell for cell in cells]
        elif header and len(cells) == len(header):
            found += _measurement(dict(zip(header, cells, strict=True)))
    return tuple(found)


def parse_report(text: str) -> tuple[Measurement, ...] | None:
    """The JSON report; None where it is cut off or something else."""
    try:
        return tuple(_Report.model_validate(json_in(text)).results)
    except ValueError:
        return None


def judge_nccom(
    run: ToolRun,
    report: str | None,
    test: NccomTest,
    *,
    min_busbw_gib_s: float | None = None,
    usual_busbw_gib_s: float | None = None,
) -> CheckResult:
    """Right results and enough bandwidth. `report`: text of the JSON file, None where none was written.

    min_busbw_gib_s: bus bandwidth at the largest size, in 2^30 bytes a second, below which a machine is unfit; usual:
    what others reach, of which less than half is a warning.
    """
    reported = parse_report(report) if report is not None else None
    rows = reported if reported is not None else parse_table(run.stdout)
    largest = max(rows, key=lambda row: row.size_bytes, default=None)
    figures = {"num_sizes": len(rows)} | (_figures(largest) if largest else {})
    what = "right results" if test.check else "times"
    wanted = f"{what} for {len(test.sizes)} sizes of {test.operation} over {test.num_ranks} ranks"

    def bad(verdict: Verdict, seen: str, expected: str = wanted, do: str = _ELSEWHERE) -> CheckResult:
        return CheckResult(NAME, verdict, seen, expected, do, figures, run.seconds)

    if (barred := _NO_WAY.search(run.output)) and not rows:
        return bad(Verdict.FIX, last_line(barred[0]), do=_SSH)
    if _USAGE.search(run.output) and not rows:
        return bad(Verdict.FIX, run.told(), do="nccom-test --help: are these options of your version of the tools?")
    told = _failure(run.output)
    cause = [match for match in classify(run.output, num_nodes=max(1, len(test.hosts))) if match.error]
    # What mpirun has started on other hosts does not end with it: there nobody knows whether cores are free again.
    if run.timed_out and rows and len(test.hosts) < 2 and not (told or cause or run.num_left):
        sizes = ", ".join(f"{row.size_bytes:.0f}" for row in rows)
        return bad(Verdict.WARN, f"{run.failure}; no fault in the sizes it came to: {sizes} bytes", do=_SLOW)
    if run.failure or told:
        proof = any(match.row.evidence is Evidence.PROOF for match in cause)
        fix = None if proof else next((match for match in cause if match.verdict is Verdict.FIX), None)
        if fix:
            return bad(Verdict.FIX, f"{fix.row.name}: {fix.line}", do=fix.row.action)
        return bad(Verdict.RETRY, told or run.told())
    missing = [size for size in test.sizes if not any(_same_size(size, row.size_bytes) for row in rows)]
    if missing:
        return bad(Verdict.RETRY, f"no result for {len(missing)} sizes, first {missing[0]} bytes ({run.told()})")
    if report is not None and reported is None:
        return bad(Verdict.RETRY, "its JSON report is broken off", "a whole report")
    # That of small sizes is printed as 0.00.
    fine = largest is not None and all(0 <= row.busbw_gib_s < math.inf for row in rows) and largest.busbw_gib_s > 0
    if largest is None or not fine:
        return bad(Verdict.RETRY, "a bandwidth that is no positive number")
    if min_busbw_gib_s is not None and largest.busbw_gib_s < min_busbw_gib_s:
        seen = f"bus bandwidth {largest.busbw_gib_s:.2f} GiB/s at {largest.size_bytes:.0f} bytes"
        return bad(Verdict.RETRY, seen, f"at least {min_busbw_gib_s:g} GiB/s")
    if usual_busbw_gib_s is not None and largest.busbw_gib_s < _USUAL_SHARE * usual_busbw_gib_s:
        seen = f"bus bandwidth {largest.busbw_gib_s:.2f} GiB/s at {largest.size_bytes:.0f} bytes"
        return bad(Verdict.WARN, seen, f"about {usual_busbw_gib_s:g} GiB/s, as AWS measured", "compare other machines")
    if run.exit_code != 0:
        return bad(Verdict.WARN, f"all sizes are right, but exit code {run.exit_code}", "exit code 0", "see its output")
    return CheckResult(
        NAME, Verdict.PASS, f"bus bandwidth {largest.busbw_gib_s:.2f} GiB/s", figures=figures, seconds=run.seconds
    )


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
    """Run it and judge; again without the report where this version of the tool has none.

    On return no process of it holds a core, or the verdict is RETRY.
    """
    variables = environment(test, env)
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "report.json"
            run = run_tool(command(test, report=path), timeout_s=timeout_s, stop=stop, env=variables)
            report = path.read_text(errors="replace") if path.exists() else None
    except OSError as error:  # no space for the report
        return without_answer(NAME, ToolRun((NAME,), failure=f"no place for its report: {error}"), instance)
    if _NO_REPORT.search(run.output):
        run = run_tool(command(test), timeout_s=timeout_s, stop=stop, env=variables)
    if run.missing or (instance is None and not run.stdout):
        return without_answer(NAME, run, instance)
    result = judge_nccom(run, report, test, min_busbw_gib_s=min_busbw_gib_s, usual_busbw_gib_s=usual_busbw_gib_s)
    if not run.timed_out or result.verdict is Verdict.RETRY:
        return result
    stop.wait(free_s)  # a killed process keeps its cores for a while; whoever opens one meanwhile fails
    held = [one for one in check_neuron_ls(instance, stop=stop, wait_s=free_s, env=env) if one.verdict >= Verdict.RETRY]
    return replace(result, verdict=Verdict.RETRY, seen=f"{result.seen}; then {held[0].seen}") if held else result


_ELSEWHERE = "this job elsewhere; on this machine: nccom-test with --debug, dmesg | grep -i neuron"
_SLOW = "run the same size by hand; it compiles each one first, and with --check its ranks share the host's CPUs"
_SSH = "ssh without a password between all nodes, or --no-health.nccom-across-nodes"
_NO_WAY = re.compile(r"^[^\n]*(?:Permission denied \(|Host key verification failed)[^\n]*", re.MULTILINE)
_USAGE = re.compile(r"^usage:|unrecognized arguments|invalid choice", re.MULTILINE)
_NO_REPORT = re.compile(r"unrecognized arguments[^\n]*--report-to-json-file")
_FAILED = re.compile(
    r"^[^\n]*(?:\bFailure\b|\b[1-9]\d* errors? found|test failed|Driver is not running)[^\n]*", re.MULTILINE
)


def _failure(text: str) -> str:
    match = _FAILED.search(text)
    return last_line(match[0]) if match else ""


def _measurement(cells: Mapping[str, str]) -> Iterable[Measurement]:
    try:
        return (Measurement.model_validate(cells),)
    except ValueError:  # the row of a failure may have as many words as there are columns
        return ()


def _figures(row: Measurement) -> dict[str, float]:
    figures = {"size_bytes": row.size_bytes, "algbw_gib_s": row.algbw_gib_s, "busbw_gib_s": row.busbw_gib_s}
    return figures if row.time_us is None else figures | {"time_us": row.time_us}


def _same_size(wanted: int, found: float) -> bool:
    if wanted < _SMALL_BYTES:
        return wanted / _SMALL_TOLERANCE <= found <= wanted * _SMALL_TOLERANCE
    return abs(found - wanted) <= _SIZE_TOLERANCE * wanted
