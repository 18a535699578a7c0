"""Find known errors of the Neuron runtime, driver, network and compiler in the output of a program.

The status codes are from nrt_status.h of the Neuron runtime, and the log patterns are from the runtime troubleshooting
page of the AWS Neuron documentation.

Errors marked RETRY may not occur again later or on a different machine, while errors marked FIX would occur everywhere.
If this is unclear, we choose RETRY, because a few short attempts are cheaper than a night lost to a faulty machine.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from pipeline.core.errors import ConfigError, NumericError, TransientError, TrnpipeError

# Python reports -9 as the return code of a process that was killed by SIGKILL. neuronx-cc prints F137 if one of its
# child processes was killed.
COMPILER_KILLED = re.compile(
    r"neuronx-cc was forcibly killed|\[F137\]|neuronx-cc.*Signals\.SIGKILL"
    r"|(?:neuronx-cc|[Cc]ompil\w*)\b.*(?:failed|exited|returned|status|code|terminated)\D{0,20}(?<![\w.])-9(?!\.?\w)"
    r"|failed compilation:\D{0,80}(?<![\w.])-9(?!\.?\w)"
)
"""Matches a line of a compilation log if it reports that the compiler was killed."""


class Evidence(IntEnum):
    """How likely an error is to be the root cause, given that a single fault often causes many other errors."""

    ECHO = 0
    """Often just the consequence of a different error, possibly on a different rank."""
    LIKELY = 1
    PROOF = 2
    """Reports faulty hardware, which is always the root cause."""


@dataclass(frozen=True)
class NeuronError:
    """A known error. `pattern` is either an NRT status code or a regular expression that matches within a line."""

    name: str
    error: type[TrnpipeError]
    action: str
    pattern: int | str
    evidence: Evidence = Evidence.LIKELY


_REPLACE = "replace the machine: terminate it, or stop and start it"
_RELOAD = "sudo modprobe -r neuron; sudo modprobe neuron; if it repeats, replace the machine"
_SOFTWARE = "this is not specific to this machine: report it with the runtime log (NEURON_RT_LOG_LEVEL=INFO)"
_HANG = "check dmesg on this node and the first error on the other nodes, then run the job again"
_CORES = f"stop the processes that use the cores (see neuron-ls) and wait 10 s; if that does not help, {_RELOAD}"
_VERSIONS = "compile again with neuronx-cc from this SDK, because compiler, runtime and driver versions must match"
_MEMORY = "use fewer loader workers, a smaller micro-batch, or a machine with more memory"
ECHO, LIKELY, PROOF = Evidence
RETRY, FIX = TransientError, ConfigError

ROWS = (
    NeuronError("NRT_FAILURE", RETRY, _CORES, 1, ECHO),
    NeuronError("NRT_INVALID", FIX, _SOFTWARE, 2),
    NeuronError("NRT_INVALID_HANDLE", FIX, _SOFTWARE, 3, ECHO),
    NeuronError("NRT_RESOURCE", FIX, "out of memory or queues: use a smaller micro-batch or load fewer graphs", 4),
    NeuronError("NRT_TIMEOUT", RETRY, f"{_HANG}; or raise NEURON_RT_EXEC_TIMEOUT", 5),
    NeuronError("NRT_HW_ERROR", RETRY, _REPLACE, 6, PROOF),
    NeuronError("NRT_QUEUE_FULL", RETRY, "run the job again", 7),
    NeuronError("NRT_LOAD_NOT_ENOUGH_NC", RETRY, _CORES, 9),
    NeuronError("NRT_UNSUPPORTED_NEFF_VERSION", FIX, _VERSIONS, 10),
    NeuronError("NRT_FAIL_HOST_MEM_ALLOC", FIX, _MEMORY, 11),
    NeuronError("NRT_UNINITIALIZED", FIX, _SOFTWARE, 13, ECHO),
    NeuronError("NRT_CLOSED", FIX, _SOFTWARE, 14, ECHO),
    NeuronError("NRT_QUEUE_EMPTY", FIX, _SOFTWARE, 15, ECHO),
    NeuronError("NRT_EXEC_UNIT_UNRECOVERABLE", RETRY, _RELOAD, 101),
    NeuronError("NRT_EXEC_BAD_INPUT", FIX, _SOFTWARE, 1002),
    NeuronError("NRT_EXEC_COMPLETED_WITH_NUM_ERR", NumericError, "check the model and the data for NaN", 1003),
    NeuronError(
        "NRT_EXEC_COMPLETED_WITH_ERR", RETRY, "check dmesg for memory errors; if it repeats, check the graph", 1004
    ),
    NeuronError("NRT_EXEC_NC_BUSY", RETRY, _CORES, 1005),
    NeuronError("NRT_EXEC_OOB", FIX, "check token ids and positions for an index out of bounds", 1006),
    NeuronError("NRT_COLL_PENDING", RETRY, "run the job again", 1100),
    NeuronError("NRT_EXEC_HW_ERR_COLLECTIVES", RETRY, _HANG, 1200),
    NeuronError("NRT_EXEC_HW_ERR_HBM_UE", RETRY, _REPLACE, 1201, PROOF),
    NeuronError("NRT_EXEC_HW_ERR_NC_UE", RETRY, _REPLACE, 1202, PROOF),
    NeuronError("NRT_EXEC_HW_ERR_DMA_ABORT", RETRY, _REPLACE, 1203, PROOF),
    NeuronError("NRT_EXEC_SW_NQ_OVERFLOW", FIX, "disable DGE notifications", 1204),
    NeuronError("NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", RETRY, _RELOAD, 1205, PROOF),
    NeuronError("NRT_NETWORK_PROXY_FAILURE", RETRY, "run the job again; if it repeats, check EFA (fi_info)", 1206),
    NeuronError(
        "hardware error",
        RETRY,
        f"{_REPLACE}; to repair a memory error, try {_RELOAD}",
        # Treat unknown types as hardware errors too, because that is how the kernel reports them.
        r"NEURON_HW_ERR=(?!HANG_ON_COLLECTIVES\b)\w|Uncorrectable (?:HBM )?memory error"
        r"|DMA [TR]X engine \d+ is in an abort state",
        PROOF,
    ),
    NeuronError(
        "hang",
        RETRY,
        f"{_HANG}; or raise NEURON_RT_EXEC_TIMEOUT once",
        r"NEURON_HW_ERR=HANG_ON_COLLECTIVES\b|missing collectives status|suspected hang in collectives"
        r"|execution timeout \(\d+ ?ms\)|waiting for execution completion notification|\binference timeout",
    ),
    NeuronError(
        "cores not available",
        RETRY,
        _CORES,
        r"NeuronCore\(s\) not available|engines are running\. Please restart device|Timestamp program stop timeout"
        r"|Failed to initialize devices, error:\s*5\b|Could not open the nd\d+",
    ),
    NeuronError("compiler cache lock", RETRY, "trnpipe cache repair", r"Another process must be compiling"),
    NeuronError(
        *("peer died", RETRY, _HANG),
        r"RX, connection closed by remote peer|Call to recv failed\s*: Broken pipe",
        ECHO,
    ),
    NeuronError(
        "no EFA for many nodes",
        FIX,
        "multi-node jobs need EFA: set InterfaceType efa in the launch template and run efa-installer in the image",
        r"Unable to run multi-instance workload",
    ),
    NeuronError("no libnccom", FIX, "install aws-neuronx-collectives in the image", r"Error opening libnccom\.so"),
    NeuronError("too many open files", FIX, "set the nofile ulimit to at least 65535", r"Too many open files"),
    NeuronError(
        *("version skew", FIX, _VERSIONS),
        r"NEFF version mismatch|incompatible model|Unsupported hardware operator code",
    ),
    NeuronError(
        "host out of memory",
        FIX,
        _MEMORY,
        r"Out of memory: Killed process|neuronx-cc was forcibly killed|\[F137\]"
        r"|neuronx-cc\b[^\n]{0,200}(?:(?<![\w.])-9(?!\.?\w)|SIGKILL|(?:status|code)\D{0,12}70\b)",
    ),
    NeuronError("killed with SIGTERM", RETRY, "check dmesg for OOM kills", r"Received 15 death signal", ECHO),
)

# Examples: `nrt_execute: status=1004`, `nrt_init failed with error code 1`, `Inference completed with err: 1004`.
_CODE = re.compile(
    r"\b(?:nrt\w*|inference completed)\b[^\n]{0,80}?\b(?:status|code|err|error)(?:[ _]code)?\s*[=:]?\s*\(?(\d{1,4})\b",
    re.IGNORECASE,
)
_NAME = re.compile(r"\b(NRT_[A-Z_]+)\b")


@dataclass(frozen=True)
class Match:
    """A known error and the first line of the output that matches it."""

    row: NeuronError
    line: str


def classify(text: str) -> tuple[Match, ...]:
    """Return all known errors that occur in `text`, in order of their first occurrence."""
    starts: dict[str, int] = {}
    for pattern in (_CODE, _NAME):
        for match in pattern.finditer(text):
            starts.setdefault(match[1], match.start())
    matches = []
    for row in ROWS:
        if isinstance(row.pattern, str):
            first = re.search(row.pattern, text)
            positions = [first.start()] if first else []
        else:
            positions = [starts[key] for key in (row.name, str(row.pattern)) if key in starts]
        if positions:
            start = min(positions)
            line = text[text.rfind("\n", 0, start) + 1 :].partition("\n")[0].strip()
            if len(line) > 300:
                line = text[start : start + 300].partition("\n")[0].strip()
            matches.append((start, Match(row, line)))
    return tuple(match for _, match in sorted(matches, key=lambda item: item[0]))


def decisive(matches: Iterable[Match]) -> Match | None:
    """Return the match that is most likely to be the root cause, or None if there are no matches.

    If several matches are equally likely, FIX takes precedence over RETRY, and earlier matches over later ones.
    """
    return max(matches, key=lambda match: (match.row.evidence, match.row.error is not RETRY), default=None)


def device_error(text: str) -> TrnpipeError | None:
    """Return the error to raise for the output of a Neuron program, or None if it contains no known error."""
    match = decisive(classify(text))
    if match is None:
        return None
    return match.row.error(f"{match.row.name}: {match.line}", expected="no device error", next_command=match.row.action)
