"""What an error of the Neuron runtime, driver, network or compiler means: one table, and the error to raise for a text.

Status codes: the Neuron runtime's nrt_status.h. Log patterns: for the most part AWS Neuron documentation, runtime
troubleshooting. RETRY: the same work may pass elsewhere or later; FIX: fails on every machine; NONE: work goes on.
Where the facts leave both open, RETRY: a few short attempts cost less than a night lost to one sick machine.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from pipeline.core.errors import ConfigError, NumericError, TransientError, TrnpipeError

NONE, RETRY, FIX = None, TransientError, ConfigError

# -9 is what Python calls a process ended by SIGKILL; F137 is neuronx-cc's own word when that hit one of its children.
COMPILER_KILLED = re.compile(
    r"neuronx-cc was forcibly killed|\[F137\]|neuronx-cc.*Signals\.SIGKILL"
    r"|(?:neuronx-cc|[Cc]ompil\w*)\b.*(?:failed|exited|returned|status|code|terminated)\D{0,20}(?<![\w.])-9(?!\.?\w)"
    r"|failed compilation:\D{0,80}(?<![\w.])-9(?!\.?\w)"
)
"""One line of a compile's log that says so."""


class Evidence(IntEnum):
    """How much a row says about the cause. In one log a single fault shows as many messages."""

    ECHO = 0
    """Often only follows another error, or comes from a peer."""
    LIKELY = 1
    PROOF = 2
    """Broken hardware, named: the cause whatever else is there."""


@dataclass(frozen=True)
class NeuronError:
    """A row. `error`: the class to raise, None where the work goes on; `many_nodes`: that of a job of several nodes.

    `sign`: NRT status, or a regular expression for one line.
    """

    name: str
    error: type[TrnpipeError] | None
    action: str
    sign: int | str
    evidence: Evidence = Evidence.LIKELY
    many_nodes: type[TrnpipeError] | None = None


_REPLACE = "replace the machine: terminate it, or stop and start it"
_SOFTWARE = "no machine helps: report it with the runtime's log (NEURON_RT_LOG_LEVEL=INFO)"
_RELOAD = "stop neuron-top and neuron-monitor, then sudo modprobe -r neuron; sudo modprobe neuron"
_PEERS = "look for the first error on the other nodes, then run the job again"
_EFA = "multi-node needs EFA: launch template (InterfaceType efa) and efa-installer in the image"
_VERSIONS = "compile again with the neuronx-cc of this SDK: compiler, runtime and driver must belong together"
_MEMORY = "fewer parallel compiles (compile.parallel) or loader workers, or a machine with more memory"
ECHO, LIKELY, PROOF = Evidence

STATUS_ROWS = (
    NeuronError("NRT_SUCCESS", NONE, "nothing", 0, ECHO),
    NeuronError("NRT_FAILURE", RETRY, "end other processes on the cores; is the driver loaded?", 1, ECHO),
    NeuronError("NRT_INVALID", FIX, f"a bad graph or inputs; {_SOFTWARE}", 2),
    NeuronError("NRT_INVALID_HANDLE", FIX, _SOFTWARE, 3, ECHO),
    NeuronError("NRT_RESOURCE", FIX, "out of memory or queues: a smaller micro-batch, fewer loaded graphs", 4),
    NeuronError("NRT_TIMEOUT", RETRY, f"a hang; dmesg here, then {_PEERS}; or raise NEURON_RT_EXEC_TIMEOUT", 5),
    NeuronError("NRT_HW_ERROR", RETRY, _REPLACE, 6, PROOF),
    NeuronError("NRT_QUEUE_FULL", RETRY, "run the job again", 7),
    NeuronError("NRT_LOAD_NOT_ENOUGH_NC", RETRY, "neuron-ls: busy cores? Else fewer ranks than cores", 9),
    NeuronError("NRT_UNSUPPORTED_NEFF_VERSION", FIX, _VERSIONS, 10),
    NeuronError("NRT_FAIL_HOST_MEM_ALLOC", FIX, _MEMORY, 11),
    NeuronError("NRT_UNINITIALIZED", FIX, _SOFTWARE, 13, ECHO),
    NeuronError("NRT_CLOSED", FIX, _SOFTWARE, 14, ECHO),
    NeuronError("NRT_QUEUE_EMPTY", FIX, _SOFTWARE, 15, ECHO),
    NeuronError("NRT_EXEC_UNIT_UNRECOVERABLE", RETRY, f"{_RELOAD}; if it repeats, {_REPLACE}", 101),
    NeuronError("NRT_EXEC_BAD_INPUT", FIX, _SOFTWARE, 1002),
    NeuronError(
        "NRT_EXEC_COMPLETED_WITH_NUM_ERR", NumericError, f"NaN: model or data; if every model gives it, {_RELOAD}", 1003
    ),
    NeuronError(
        "NRT_EXEC_COMPLETED_WITH_ERR", RETRY, "dmesg: a memory error? If it repeats elsewhere, the graph", 1004
    ),
    NeuronError("NRT_EXEC_NC_BUSY", RETRY, "end the other process on the core", 1005),
    NeuronError("NRT_EXEC_OOB", FIX, "an index beyond a table: token ids against the vocabulary, positions", 1006),
    NeuronError("NRT_COLL_PENDING", RETRY, "run the job again", 1100),
    NeuronError("NRT_EXEC_HW_ERR_COLLECTIVES", RETRY, _PEERS, 1200),
    NeuronError("NRT_EXEC_HW_ERR_HBM_UE", RETRY, _REPLACE, 1201, PROOF),
    NeuronError("NRT_EXEC_HW_ERR_NC_UE", RETRY, _REPLACE, 1202, PROOF),
    NeuronError("NRT_EXEC_HW_ERR_DMA_ABORT", RETRY, _REPLACE, 1203, PROOF),
    NeuronError("NRT_EXEC_SW_NQ_OVERFLOW", FIX, "disable DGE notifications", 1204),
    NeuronError("NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", RETRY, f"{_RELOAD}; or reboot", 1205, PROOF),
    NeuronError(
        "NRT_NETWORK_PROXY_FAILURE", RETRY, "run the job again; if it repeats, check EFA (fi_info -p efa)", 1206
    ),
)
_UNCORRECTABLE = r"Uncorrectable (?:HBM )?memory error"
_RELOADABLE = r"reload the neuron driver|reboot your EC2 instance"
LOG_ROWS = (
    # Any type that is not known: an error the kernel calls one of hardware is believed.
    NeuronError("hardware error", RETRY, _REPLACE, r"NEURON_HW_ERR=(?!HANG_ON_COLLECTIVES\b)\w", PROOF),
    NeuronError("hang on collectives", RETRY, _PEERS, r"NEURON_HW_ERR=HANG_ON_COLLECTIVES\b"),
    NeuronError(
        "uncorrectable memory error", RETRY, _REPLACE, rf"{_UNCORRECTABLE}(?![^\n]{{0,300}}(?:{_RELOADABLE}))", PROOF
    ),
    NeuronError(
        "repairable memory error",
        RETRY,
        f"{_RELOAD}; or reboot",
        rf"{_UNCORRECTABLE}[^\n]{{0,300}}(?:{_RELOADABLE})",
        PROOF,
    ),
    NeuronError("DMA abort", RETRY, _REPLACE, r"DMA [TR]X engine \d+ is in an abort state", PROOF),
    NeuronError(
        "suspected hang in collectives", RETRY, _PEERS, r"missing collectives status|suspected hang in collectives"
    ),
    NeuronError(
        "hang on compute",
        RETRY,
        f"raise NEURON_RT_EXEC_TIMEOUT once; if it repeats, {_REPLACE}",
        r"execution timeout \(\d+ ?ms\)|waiting for execution completion notification|\binference timeout",
    ),
    NeuronError(
        "cores not available",
        RETRY,
        f"end the processes that hold them and wait 10 s; else {_RELOAD}",
        r"NeuronCore\(s\) not available",
    ),
    NeuronError(
        "engines still running",
        RETRY,
        _RELOAD,
        r"engines are running\. Please restart device|Timestamp program stop timeout"
        r"|Failed to initialize devices, error:\s*5\b",
    ),
    NeuronError(
        "device missing",
        RETRY,
        "neuron-ls: are all devices there? Are they mapped into the container? Else replace the machine",
        r"Could not open the nd\d+",
    ),
    NeuronError(
        "waits for a peer",
        NONE,
        "look at the other nodes: one compiles, or is dead",
        r"Timeout waiting for (?:RX|incoming connection)|Connect to \S+ failed - retrying",
        ECHO,
    ),
    NeuronError(
        "peer died", RETRY, _PEERS, r"RX, connection closed by remote peer|Call to recv failed\s*: Broken pipe", ECHO
    ),
    NeuronError("no EFA", NONE, _EFA, r"OFI plugin initNet\(\) failed", many_nodes=FIX),
    NeuronError("no EFA for many nodes", FIX, _EFA, r"Unable to run multi-instance workload"),
    NeuronError("no libnccom", FIX, "install aws-neuronx-collectives in the image", r"Error opening libnccom\.so"),
    NeuronError("too many open files", FIX, "nofile ulimit of at least 65535", r"Too many open files"),
    NeuronError(
        "version skew", FIX, _VERSIONS, r"NEFF version mismatch|incompatible model|Unsupported hardware operator code"
    ),
    NeuronError("EFA deregistration", NONE, "nothing", r"\befa\b[^\n]{0,80}DEREG_MR[^\n]{0,60}err -22\b"),
    NeuronError(
        "host out of memory",
        FIX,
        _MEMORY,
        r"Out of memory: Killed process|neuronx-cc was forcibly killed|\[F137\]"
        r"|neuronx-cc\b[^\n]{0,200}(?:(?<![\w.])-9(?!\.?\w)|SIGKILL|(?:status|code)\D{0,12}70\b)",
    ),
    NeuronError("killed with SIGTERM", RETRY, "dmesg: was it the host's memory?", r"Received 15 death signal", ECHO),
)
ROWS = (*STATUS_ROWS, *LOG_ROWS)


@dataclass(frozen=True)
class Match:
    """A row, the error where the job has as many nodes as given, and the first line that shows it."""

    row: NeuronError
    error: type[TrnpipeError] | None
    line: str


def classify(text: str, *, num_nodes: int = 1) -> tuple[Match, ...]:
    """Every row that `text` shows, each once, in order of appearance."""
    codes = _first_places(_CODE, text)
    names = _first_places(_NAME, text)
    found = []
    for row in ROWS:
        if isinstance(row.sign, str):
            places = [shown.start()] if (shown := re.search(row.sign, text)) else []
        else:
            places = [where[key] for where, key in ((names, row.name), (codes, str(row.sign))) if key in where]
        if places:
            place = min(places)
            error = row.error if num_nodes == 1 or row.many_nodes is None else row.many_nodes
            end = text.find("\n", place)
            line = text[text.rfind("\n", 0, place) + 1 : len(text) if end < 0 else end].strip()
            if len(line) > 300:
                line = text[place : place + 300].partition("\n")[0].strip()
            found.append((place, Match(row, error, line)))
    return tuple(match for _, match in sorted(found, key=lambda item: item[0]))


def decisive(matches: Iterable[Match]) -> Match | None:
    """What to act on: proof of broken hardware before anything else, echoes last, then the gravest, then the first."""
    gravity: dict[type[TrnpipeError] | None, int] = {None: 0, TransientError: 1}
    return max(matches, key=lambda match: (match.row.evidence, gravity.get(match.error, 2)), default=None)


def device_error(text: str, *, num_nodes: int = 1) -> TrnpipeError | None:
    """The error to raise for what a program on Neuron devices printed; None where the table knows none in it."""
    match = decisive(match for match in classify(text, num_nodes=num_nodes) if match.error)
    if match is None or match.error is None:
        return None
    return match.error(f"{match.row.name}: {match.line}", expected="no device error", next_command=match.row.action)


# `nrt_execute: status=1004`, `nrt_init failed with error code 1`, `Inference completed with err: 1004`.
_CODE = re.compile(
    r"\b(?:nrt\w*|inference completed)\b[^\n]{0,80}?\b(?:status|code|err|error)(?:[ _]code)?\s*[=:]?\s*\(?(\d{1,4})\b",
    re.IGNORECASE,
)
_NAME = re.compile(r"\b(NRT_[A-Z_]+)\b")


def _first_places(pattern: re.Pattern[str], text: str) -> dict[str, int]:
    places: dict[str, int] = {}
    for match in pattern.finditer(text):
        places.setdefault(match[1], match.start())
    return places
