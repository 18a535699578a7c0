"""What the kernel wrote about broken Neuron hardware and the host's memory.

`NEURON_HW_ERR` lines: AWS Neuron documentation, runtime troubleshooting.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.core.stop import StopSignal
from pipeline.health.instances import NeuronInstance
from pipeline.health.neuron_errors import Evidence, Match, classify
from pipeline.health.verdict import CheckResult, Verdict
from pipeline.proc.tool import run_tool

NAME = "kernel-log"
HANG = "HANG_ON_COLLECTIVES"
_EVENT_GAP_S = 60.0
_WARNED = ("host out of memory",)


@dataclass(frozen=True)
class KernelError:
    """A line `NEURON_HW_ERR=<kind> ...`. `at_s`: since boot, None where the line has no time."""

    kind: str
    line: str
    at_s: float | None = None
    device: str = ""
    core: str = ""
    serial: str = ""
    instance_id: str = ""
    action: str = ""

    @property
    def where(self) -> str:
        place = f"device {self.device} core {self.core or '?'}" if self.device else "a device"
        return place + (f" (serial {self.serial})" if self.serial else "")


def parse_kernel_log(text: str) -> tuple[KernelError, ...]:
    """Every hardware error of the Neuron driver, of known kind or not."""
    found = []
    for match in _ERROR.finditer(text):
        line = match[0].strip()
        fields = dict(_FIELD.findall(line))
        time = _TIME.match(line)
        found.append(
            KernelError(
                match["kind"],
                line,
                float(time[1]) if time else None,
                fields.get("nd-id", ""),
                fields.get("nc-id", ""),
                fields.get("serial-num", ""),
                fields.get("instance-id", ""),
                fields.get("action", ""),
            )
        )
    return tuple(found)


def judge_kernel_log(text: str) -> CheckResult:
    """Broken hardware: RETRY. One hang on collectives, whose cause is usually a peer, or a full host: WARN.

    The log goes back to the boot of the machine, beyond this job: broken hardware stays broken, but memory that was
    full once may be free now, and only hangs that repeat speak against this host.
    """
    errors = parse_kernel_log(text)
    hangs = [error for error in errors if error.kind == HANG]
    broken = [error for error in errors if error.kind != HANG]
    matches = classify(text)
    figures = {"num_hardware_errors": len(broken), "num_hangs": _num_events(hangs)}
    proof = [match for match in matches if match.row.evidence is Evidence.PROOF]
    if broken:
        seen = f"{broken[-1].kind} on {broken[-1].where}"
        return _result(Verdict.RETRY, seen, "this job elsewhere; terminate this machine, or stop and start it", figures)
    if proof:
        return _result(Verdict.RETRY, proof[0].line, f"this job elsewhere; {proof[0].row.action}", figures)
    if figures["num_hangs"] > 1:
        seen = f"{figures['num_hangs']} times {HANG}, last on {hangs[-1].where}"
        return _result(Verdict.RETRY, seen, "this job elsewhere; replace this machine if its peers are well", figures)
    if hangs:
        return _result(Verdict.WARN, f"{HANG} on {hangs[-1].where}", "look at the peers of that run", figures)
    return _memory(matches, figures)


def check_kernel_log(
    instance: NeuronInstance | None,
    *,
    stop: StopSignal,
    timeout_s: float = 10.0,
    env: Mapping[str, str] | None = None,
) -> CheckResult:
    """Read it with `dmesg`. Containers may not, as a rule: then only the error counters speak, which is a WARN."""
    run = run_tool(["dmesg"], timeout_s=timeout_s, stop=stop, env=env)
    if run.exit_code == 0 or parse_kernel_log(run.stdout):
        return judge_kernel_log(run.stdout)
    seen = f"not readable ({run.told()})"
    if instance is None:
        return CheckResult(NAME, Verdict.PASS, seen, seconds=run.seconds)
    return CheckResult(
        NAME,
        Verdict.WARN,
        seen,
        expected="the kernel log: it names the device that broke",
        next_command="on the host: dmesg | grep NEURON_HW_ERR; a container needs the capability SYSLOG",
        seconds=run.seconds,
    )


_ERROR = re.compile(r"^[^\n]*\bNEURON_HW_ERR=(?P<kind>\w+)[^\n]*", re.MULTILINE)
_FIELD = re.compile(r"\b([a-z]+-?[a-z]+)=(\S+)")
_TIME = re.compile(r"(?:<\d+>)?\[\s*(\d{1,12}(?:\.\d{1,9})?)\]")


def _memory(matches: Iterable[Match], figures: dict[str, int]) -> CheckResult:
    for match in matches:
        if match.row.name in _WARNED:
            return _result(Verdict.WARN, match.line, match.row.action, figures)
    return CheckResult(NAME, Verdict.PASS, figures=figures)


def _result(verdict: Verdict, seen: str, next_command: str, figures: Mapping[str, int]) -> CheckResult:
    return CheckResult(NAME, verdict, seen, "no hardware error since boot", next_command, figures)


def _num_events(errors: Sequence[KernelError]) -> int:
    """Lines close together are one event, which every core reports; so are those without a time."""
    times = sorted(error.at_s for error in errors if error.at_s is not None)
    gaps = sum(later - earlier > _EVENT_GAP_S for earlier, later in pairwise(times))
    return gaps + 1 if errors else 0
