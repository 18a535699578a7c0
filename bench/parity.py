"""Do backends agree: `python -m bench.parity FILE`, with the PriceRunner pairs of a Parquet file.

Runs the real commands, as a user would: a short training from scratch, then the same 300 steps from its checkpoint on
each side.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.results import ROOT, Figure, Target, figure, finish
from pipeline.commands.parity import ParityReport
from pipeline.core.errors import EXIT_OK, GateRefused

NAME = "parity"
TITLE = "Largest difference of the holdout accuracy between XLA and CPU at any evaluation of 300 steps"
METHOD = """
`trnpipe prepare` and `train` with configs/quickstart.toml on the PriceRunner pairs for {first} steps from scratch, then
`trnpipe parity cpu:fp32 xla:fp32`: {steps} steps from that checkpoint on both, with an evaluation of all {rows:,}
validation rows every {every} steps. Differences are relative to the CPU. The same for XLA in bf16 against the CPU in
fp32, where training magnifies the rounding to 8 bits.
"""
CYCLE = "bench"


def run_parity(flags: Sequence[str], a: str, b: str, folder: Path) -> ParityReport:
    """Compare two sides; the report says whether they agree. Raises CalledProcessError when there is none."""
    done = subprocess.run([sys.executable, "-m", "pipeline", "parity", a, b, *flags], cwd=ROOT, check=False)
    if done.returncode not in (EXIT_OK, GateRefused.exit_code):
        raise subprocess.CalledProcessError(done.returncode, done.args)
    names = "-".join(side.replace(":", ".") for side in (a, b))
    report = folder / "cycles" / CYCLE / "parity" / names / "parity.json"
    return ParityReport.model_validate_json(report.read_bytes())


def figures_of(report: ParityReport, prefix: str, text: str) -> list[Figure]:
    """What a reader wants of one comparison."""
    worst = max(report.evaluations, key=lambda pair: pair.relative)
    found = [
        figure(f"{prefix}_metric", worst.relative, "share", f"largest difference of the accuracy, {text}"),
        figure(f"{prefix}_last_metric", report.evaluations[-1].relative, "share", f"after the last step, {text}"),
        figure(f"{prefix}_decisions", report.decisions, "rows", f"with another decision, {text}"),
    ]
    named = {"holdout_loss": "loss", "first_losses": "first_losses", "probability": "probability"}
    for name, short in named.items():
        check = next(check for check in report.checks if check.name == name)
        found.append(figure(f"{prefix}_{short}", check.value or 0.0, "", f"{check.text}, {text}"))
    for name in ("correlation", "cosine"):
        if (value := report.value(name)) is not None:
            found.append(figure(f"{prefix}_{name}_distance", 1 - value, "", f"1 - least {name}, {text}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--quick", action="store_true", help="few steps: proves that the script works")
    arguments = parser.parse_args()
    first, steps = (20, 12) if arguments.quick else (300, 300)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--config", str(ROOT / "configs" / "quickstart.toml"), "--workspace", name, "--cycle", CYCLE]
        flags += ["--data.path", str(arguments.data), "--data.name", "pricerunner", "--train.max-steps", str(first)]
        flags += ["--parity.steps", str(steps), "--train.metric", "accuracy"]
        for stage in ("prepare", "train"):
            command = [sys.executable, "-m", "pipeline", stage, *flags, "--backend", "cpu"]
            subprocess.run(command, cwd=ROOT, check=True)
        full, reduced = (run_parity(flags, "cpu:fp32", side, folder) for side in ("xla:fp32", "xla:bf16"))
    figures = [
        *figures_of(full, "fp32", "xla fp32 against cpu fp32"),
        *figures_of(reduced, "bf16", "xla bf16 against cpu fp32"),
    ]
    finish(
        NAME,
        TITLE,
        METHOD.format(first=first, steps=steps, every=steps // 6, rows=full.rows),
        figures,
        target=Target(figure="fp32_metric", comparison="<=", value=full.max_difference),
        quick=arguments.quick,
        settings={"config": "quickstart", "evaluations": len(full.evaluations)},
    )


if __name__ == "__main__":
    main()
