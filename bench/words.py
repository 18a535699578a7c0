"""Results in words: figures, targets, verdicts, where they were measured."""

from collections.abc import Sequence

from bench.__main__ import BENCHES
from bench.results import ROOT, Figure, Result, Target

_COMPARISONS = {"<=": "at most", "<": "under", ">=": "at least", ">": "above"}


def value_text(figure: Figure) -> str:
    """Value and unit; shares in percent."""
    return f"{figure.value:.2%}" if figure.unit == "share" else f"{_number(figure.value)} {figure.unit}".rstrip()


def spread_text(figure: Figure) -> str:
    """From the smallest to the largest of the repeats; empty for one."""
    if figure.repeats == 1:
        return ""
    if figure.unit == "share":
        return f"{figure.low:.2%} to {figure.high:.2%}"
    return f"{_number(figure.low)} to {_number(figure.high)}"


def _number(value: float) -> str:
    """Four significant digits; large ones with commas and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def target_text(result: Result, target: Target) -> str:
    """The bound on the judged figure, in its unit."""
    bound, unit = target.value, result.figure(target.figure).unit
    shown = f"{100 * bound:g}%" if unit == "share" else f"{bound:,g} {unit}".rstrip()
    return f"{_COMPARISONS[target.comparison]} {shown}"


def claim_rows(result: Result, section: str, targets: Sequence[Target]) -> list[str]:
    """Rows of a Markdown table, one a target: claim, measured, target, verdict. `section`: link to the figures."""
    rows = []
    for target in targets:
        judged = result.figure(target.figure)
        title = result.title if target is result.target else f"{result.bench}: {judged.text}"
        verdict = "pass" if result.holds(target) else "**fail**"
        rows.append(f"| [{title}]({section}) | {value_text(judged)} | {target_text(result, target)} | {verdict} |")
    return rows


def where_text(result: Result) -> str:
    """Machine, versions and date of one result."""
    packages = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{result.machine.text}; {packages}; {result.date[:10]}"


def machines_text(results: Sequence[Result]) -> str:
    """The machines of several results, each once."""
    return "; ".join(dict.fromkeys(result.machine.text for result in results))


def script_of(bench: str) -> str:
    """The command that measures it again, or the script that does, with arguments of its own."""
    if bench in BENCHES:
        return f"python -m bench --only {bench}"
    folder = ROOT / "bench"
    names = sorted(
        [path.stem for path in folder.glob("*.py")] + [path.parent.name for path in folder.glob("*/__main__.py")]
    )
    scripts = [name for name in names if bench.startswith(name)]
    return f"python -m bench.{scripts[-1] if scripts else bench} --help"
