"""What health checks say: verdicts and reports, the error that follows from them, and both for machines and people.

For machines JSON in the workspace, for people plain lines.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, ClassVar, Literal, TextIO

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from pipeline.core.errors import ConfigError, DataError, TransientError, TrnpipeError
from pipeline.core.format import format_duration
from pipeline.io.storage import Storage


class Verdict(IntEnum):
    """From harmless to grave; the gravest of a node is the node's."""

    PASS = 0
    WARN = 1
    RETRY = 2
    """This machine is unfit: the same work may pass on another one."""
    FIX = 3
    """No machine would do: settings, image or permissions must change first."""

    @property
    def text(self) -> str:
        return self.name.lower()


def _verdict(value: object) -> object:
    """From its name in JSON."""
    return next((one for one in Verdict if one.text == value), "no verdict") if isinstance(value, str) else value


Named = Annotated[Verdict, BeforeValidator(_verdict), PlainSerializer(lambda verdict: verdict.text)]
# Not a number is a figure, too: it is written as NaN, which Python's readers take.
_STORED = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True)
class CheckResult:
    """One check on one rank or node."""

    __pydantic_config__: ClassVar[ConfigDict] = _STORED

    name: str
    verdict: Named
    seen: str = ""
    """What was found, one line; empty for a plain pass."""
    expected: str = ""
    next_command: str = ""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    """The unit is in the name."""
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeReport:
    """All checks of one node. `host`: instance id, or host name where there is none."""

    node_rank: int
    host: str
    results: tuple[CheckResult, ...]

    @property
    def verdict(self) -> Verdict:
        return max((result.verdict for result in self.results), default=Verdict.PASS)


def gang_error(reports: Iterable[NodeReport]) -> TrnpipeError | None:
    """What every node of the gang raises; None when all may work.

    A configuration problem stops the job whatever else is wrong: no other machine would help. Else one unfit node
    sends all back, as a gang is started as a whole. The message names host, check and reason, the gravest first.
    """
    bad = [(report, result) for report in reports for result in report.results if result.verdict >= Verdict.RETRY]
    if not bad:
        return None
    report, first = min(bad, key=lambda one: (-one[1].verdict, one[0].node_rank))
    more = f" (and {len(bad) - 1} more failed checks)" if len(bad) > 1 else ""
    kind = ConfigError if first.verdict is Verdict.FIX else TransientError
    return kind(
        f"node {report.node_rank} ({report.host}), check {first.name}: {first.seen}{more}",
        expected=first.expected,
        next_command=first.next_command or "trnpipe health on that machine; the job itself may be retried elsewhere",
    )


class _StoredReport(BaseModel):
    model_config = _STORED

    schema_version: Literal[1] = 1
    node_rank: int = Field(ge=0)
    host: str
    verdict: Named
    results: tuple[CheckResult, ...]


def to_json(report: NodeReport) -> str:
    """The report as indented JSON, verdicts by name."""
    stored = _StoredReport(node_rank=report.node_rank, host=report.host, verdict=report.verdict, results=report.results)
    return stored.model_dump_json(indent=2)


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
    return NodeReport(stored.node_rank, stored.host, stored.results)


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
    """`node 0 (i-0abc): retry`, then a line for each check, and what to do about those that are no plain pass."""
    stream.writelines(f"{line}\n" for line in report_lines(report))
    stream.flush()


def report_lines(report: NodeReport) -> Iterator[str]:
    yield f"node {report.node_rank} ({report.host}): {report.verdict.text}"
    width = max((len(result.name) for result in report.results), default=0)
    for result in report.results:
        parts = (f"  {result.verdict.text:<5}  {result.name:<{width}}", result.seen or _figures(result))
        yield f"{'  '.join(part for part in parts if part)} ({format_duration(result.seconds)})"
        if result.verdict is not Verdict.PASS and result.expected:
            yield f"         expected: {result.expected}"
        if result.verdict is not Verdict.PASS and result.next_command:
            yield f"         next: {result.next_command}"


def _figures(result: CheckResult) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result.figures.items()
    )
