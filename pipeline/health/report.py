"""Reports for machines (JSON in the workspace) and for people (a table on a terminal, else plain lines)."""

import re
from collections.abc import Iterable, Iterator
from typing import Literal, TextIO

import rich.box
import rich.console
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.table import Table
from rich.text import Text

from pipeline.core.errors import DataError
from pipeline.core.format import format_duration
from pipeline.health.verdict import CheckResult, NodeReport, Verdict
from pipeline.io.storage import Storage

VerdictName = Literal["pass", "warn", "retry", "fix"]
NAMES: dict[Verdict, VerdictName] = {
    Verdict.PASS: "pass",
    Verdict.WARN: "warn",
    Verdict.RETRY: "retry",
    Verdict.FIX: "fix",
}
VERDICTS = {name: verdict for verdict, name in NAMES.items()}
STYLES = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.RETRY: "bold red", Verdict.FIX: "bold magenta"}


class _StoredResult(BaseModel):
    # Not a number is a figure, too: it is written as NaN, which Python's readers take.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    name: str
    verdict: VerdictName
    seen: str
    expected: str
    next_command: str
    figures: dict[str, float | int | str]
    seconds: float


class _StoredReport(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    schema_version: Literal[1] = 1
    node_rank: int = Field(ge=0)
    host: str
    verdict: VerdictName
    results: tuple[_StoredResult, ...]


def to_json(report: NodeReport) -> str:
    """The report as indented JSON, verdicts by name."""
    return _StoredReport(
        node_rank=report.node_rank,
        host=report.host,
        verdict=NAMES[report.verdict],
        results=tuple(
            _StoredResult(
                name=one.name,
                verdict=NAMES[one.verdict],
                seen=one.seen,
                expected=one.expected,
                next_command=one.next_command,
                figures=dict(one.figures),
                seconds=one.seconds,
            )
            for one in report.results
        ),
    ).model_dump_json(indent=2)


def from_json(text: str | bytes, where: str = "a health report") -> NodeReport:
    """What `to_json` wrote. Raises DataError naming `where`."""
    try:
        stored = _StoredReport.model_validate_json(text)
    except ValidationError as error:
        raise DataError(
            f"{where} cannot be read: {error.errors(include_url=False)[0]['msg']}",
            expected="a report written by trnpipe health",
            next_command="run the same version of trnpipe on all nodes",
        ) from error
    results = (
        CheckResult(
            one.name, VERDICTS[one.verdict], one.seen, one.expected, one.next_command, dict(one.figures), one.seconds
        )
        for one in stored.results
    )
    return NodeReport(stored.node_rank, stored.host, tuple(results))


def report_key(cycle: str, report: NodeReport) -> str:
    """With rank and host: what another machine of an earlier attempt said is kept."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", report.host) or "unknown"
    return f"cycles/{cycle}/health/{report.node_rank}-{host}.json"


def store_report(workspace: Storage, cycle: str, report: NodeReport) -> str:
    """Write the report below the cycle (atomic); returns its key."""
    key = report_key(cycle, report)
    workspace.write_bytes(key, to_json(report).encode() + b"\n")
    return key


def show(report: NodeReport, stream: TextIO) -> None:
    """A table where `stream` is a terminal, else plain lines."""
    if not stream.isatty():
        stream.writelines(f"{line}\n" for line in report_lines(report))
        stream.flush()
        return
    console = rich.console.Console(file=stream)
    table = Table(title=_title(report), title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("seen", ratio=1)
    table.add_column("time", justify="right", no_wrap=True)
    for result in report.results:
        verdict = Text(NAMES[result.verdict], style=STYLES[result.verdict])
        seen = Text("\n".join([result.seen or _figures(result), *_help(result)]))
        table.add_row(Text(result.name), verdict, seen, format_duration(result.seconds))
    console.print(table)


def report_lines(report: NodeReport) -> Iterator[str]:
    """`node 0 (i-0abc): retry`, then a line for each check, and what to do about those that are no plain pass."""
    yield _title(report)
    width = max((len(result.name) for result in report.results), default=0)
    for result in report.results:
        parts = (f"  {NAMES[result.verdict]:<5}  {result.name:<{width}}", result.seen or _figures(result))
        yield f"{'  '.join(part for part in parts if part)} ({format_duration(result.seconds)})"
        yield from (f"         {line}" for line in _help(result))


def _title(report: NodeReport) -> str:
    return f"node {report.node_rank} ({report.host}): {NAMES[report.verdict]}"


def _help(result: CheckResult) -> Iterable[str]:
    if result.verdict is not Verdict.PASS:
        if result.expected:
            yield f"expected: {result.expected}"
        if result.next_command:
            yield f"next: {result.next_command}"


def _figures(result: CheckResult) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result.figures.items()
    )
