"""The readiness lint: what neuronx-cc is documented to refuse or to compute wrongly, found in a traced graph."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeline.compile.hlo import Module
from pipeline.compile.lint_rules import RULES, Rule, Scope, Severity, Target

__all__ = ["RULES", "Finding", "Rule", "Target", "errors", "lint", "lint_counters"]

_SCALAR_READ = "aten::_local_scalar_dense"


@dataclass(frozen=True)
class Finding:
    """One problem, however often it occurs at one place."""

    code: str
    severity: Severity
    message: str
    remedy: str
    instruction: str = ""
    """Name, operation and shape of the first one; empty for what is no instruction."""
    source: str = ""
    """file:line; empty when the trace was made without XLA_HLO_DEBUG=1 XLA_IR_DEBUG=1."""
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        where = f"\n  at: {self.source}" if self.source else ""
        what = f"\n  in: {self.instruction}" if self.instruction else ""
        return f"{self.severity} {self.code}: {self.message}{times}{what}{where}\n  remedy: {self.remedy}"


def lint(module: Module, target: Target | None = None, rules: Iterable[Rule] = RULES) -> tuple[Finding, ...]:
    """Every rule over every instruction. Errors first, each problem once for a place in our code."""
    target = target or Target()
    rules = tuple(rules)
    found: dict[tuple[str, str, str], Finding] = {}
    for computation in module.computations:
        scope = Scope(module, computation, target)
        for instruction in computation.instructions:
            for rule in rules:
                if message := rule.check(instruction, scope):
                    key = (rule.code, message, instruction.source)
                    before = found.get(key)
                    found[key] = (
                        replace(before, count=before.count + 1)
                        if before
                        else Finding(
                            rule.code,
                            rule.severity,
                            message,
                            rule.remedy,
                            f"{instruction.name} = {instruction.signature}",
                            instruction.source,
                        )
                    )
    if target.max_instructions is not None and module.size > target.max_instructions:
        found[("EVRF007", "", "")] = Finding(
            "EVRF007",
            "warning",
            f"{module.size} instructions, above the ceiling of {target.max_instructions} that was set",
            "train.step_boundary split, fewer batches in one execution, or a smaller bucket",
        )
    return _errors_first(found.values())


def lint_all(modules: Iterable[Module], target: Target | None = None) -> tuple[Finding, ...]:
    """The findings of many graphs, what several share told once with its count over all."""
    found: dict[tuple[str, str, str], Finding] = {}
    for module in modules:
        for finding in lint(module, target):
            key = (finding.code, finding.message, finding.source)
            before = found.get(key)
            found[key] = replace(before, count=before.count + finding.count) if before else finding
    return _errors_first(found.values())


def lint_counters(counters: Mapping[str, int]) -> tuple[Finding, ...]:
    """Operators that ran on the host, from the `aten::` counters of the traced program (torch_xla.debug.metrics)."""
    findings = [
        Finding(
            "HLO005",
            "error",
            f"{name} ran on the host: the graph is cut there, and its result goes back to the device",
            "another operator, or move this part into the data preparation",
            count=count,
        )
        for name, count in sorted(counters.items())
        if name.startswith("aten::") and name != _SCALAR_READ and count > 0
    ]
    if reads := counters.get(_SCALAR_READ, 0):
        findings.append(
            Finding(
                "HLO006",
                "warning",
                "a value was read on the host (.item(), float(), bool() of a tensor): the graph is cut there",
                "keep it on the device and read it every N steps",
                count=reads,
            )
        )
    return _errors_first(findings)


def errors(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that stop a graph from being compiled or from being right."""
    return tuple(finding for finding in findings if finding.severity == "error")


def _errors_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.severity != "error"))
