"""An operation that is less exact than expected: a defect of one core, or all that such cores can do.

A sick core is wrong in its own way. Where all ranks, given equal inputs, come to the same error, no core is sick: the
expectation is wrong, or what compiles for them. Without torch: the process that compares ranks needs none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pipeline.health.verdict import CheckResult, NodeReport, Verdict

OPERATIONS = "operations"
BEYOND = "beyond_tolerance"
"""The figure of a result that names the operations whose error is beyond their tolerance."""
GROSS_ERROR = 0.1
"""More than rounding can make of any of these operations: bf16 has 8 bits of mantissa, so errors of 2^-9."""

_ELSEWHERE = "this job elsewhere; take the machine out of service if it fails again"
_SEPARATOR = ", "


def error_figure(operation: str) -> str:
    """Under which name the error of an operation is in the figures."""
    return f"{operation.replace(' ', '_')}_error"


def beyond_tolerance(errors: Mapping[str, float], tolerances: Mapping[str, float]) -> CheckResult:
    """What a rank says of the operations in `tolerances`, each with an error beyond it. `errors`: of all operations."""
    wrong = {name: errors[name] for name in tolerances}
    figures = error_figures(errors) | {BEYOND: _SEPARATOR.join(wrong)}
    at_most = _SEPARATOR.join(f"{tolerance:g} ({name})" for name, tolerance in tolerances.items())
    hint = "" if max(wrong.values()) > GROSS_ERROR else f"; if all machines say so: {_flag(wrong)}"
    expected = f"at most {at_most} against float64"
    return CheckResult(OPERATIONS, Verdict.RETRY, _errors_text(wrong), expected, f"{_ELSEWHERE}{hint}", figures)


def error_figures(errors: Mapping[str, float]) -> dict[str, float | int | str]:
    """Three digits: equal ones on equal cores."""
    return {error_figure(name): float(f"{value:.3g}") for name, value in errors.items()}


def with_shared_errors(reports: Sequence[NodeReport], num_ranks: int) -> tuple[NodeReport, ...]:
    """The same reports; where all `num_ranks` have the same errors beyond tolerances, with one softer result a node.

    One rank alone cannot tell: its verdict stays.
    """
    found = [_errors(result) for report in reports for result in report.results if _is_beyond(result)]
    if num_ranks < 2 or len(found) != num_ranks or any(one != found[0] for one in found):
        return tuple(reports)
    return tuple(replace(report, results=tuple(_shared(report.results, num_ranks))) for report in reports)


def _shared(results: Iterable[CheckResult], num_ranks: int) -> Iterable[CheckResult]:
    is_first = True
    for result in results:
        if not _is_beyond(result):
            yield result
        elif is_first:
            yield _softened(result, num_ranks)
            is_first = False


def _softened(result: CheckResult, num_ranks: int) -> CheckResult:
    wrong = _errors(result)
    same = f"{_errors_text(wrong)}; the same on all {num_ranks} ranks"
    if max(wrong.values()) > GROSS_ERROR:
        fix = "compiler and its flags as in docs/neuron.md; then trnpipe parity against the CPU"
        return replace(result, verdict=Verdict.FIX, seen=f"{same}: no core but what runs on them", next_command=fix)
    seen = f"{same}: a tolerance, not a defect"
    return replace(result, verdict=Verdict.WARN, seen=seen, next_command=f"{_flag(wrong)}, once trnpipe parity passes")


def _is_beyond(result: CheckResult) -> bool:
    return result.name == OPERATIONS and BEYOND in result.figures


def _errors(result: CheckResult) -> dict[str, float]:
    names = str(result.figures[BEYOND]).split(_SEPARATOR)
    return {name: float(result.figures[error_figure(name)]) for name in names}


def _errors_text(errors: Mapping[str, float]) -> str:
    return "; ".join(f"{name}: relative error {error:.2g}" for name, error in errors.items())


def _flag(errors: Mapping[str, float]) -> str:
    """The setting that lets them pass, with room for other inputs."""
    return f"--health.tolerances '{','.join(f'{name}={2 * error:.1g}' for name, error in errors.items())}'"
