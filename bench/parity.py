"""Do backends agree: `python -m bench.parity FILE`, with the PriceRunner pairs that `bench.real_data` trains on.

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
from pipeline.core.errors import EXIT_OK, GateRefused
from pipeline.parity.compare import CurveFigures, ParityReport

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
    pairs, scores, vectors = report.compared.evaluations, report.compared.scores, report.compared.vectors
    curve: CurveFigures = report.compared.curve
    worst = max(pairs, key=lambda pair: pair.relative)
    found = [
        figure(f"{prefix}_metric", worst.relative, "share", f"largest difference of the accuracy, {text}"),
        figure(f"{prefix}_last_metric", pairs[-1].relative, "share", f"difference after the last step, {text}"),
        figure(
            f"{prefix}_loss",
            max(pair.loss_relative for pair in pairs),
            "share",
            f"largest difference of the holdout loss, {text}",
        ),
        figure(f"{prefix}_first_losses", curve.first_loss, "share", f"of the loss in the first steps, {text}"),
        figure(f"{prefix}_step_losses", curve.max_loss, "share", f"of the loss in any step, {text}"),
        figure(f"{prefix}_probability", scores.max_probability, "", f"largest difference of a probability, {text}"),
        figure(f"{prefix}_decisions", scores.decisions, "rows", f"with another decision, {text}"),
    ]
    if scores.spearman is not None:
        found.append(figure(f"{prefix}_rank_distance", 1 - scores.spearman, "", f"1 - rank correlation, {text}"))
    if vectors is not None:
        found.append(figure(f"{prefix}_cosine_distance", 1 - vectors.min_cosine, "", f"1 - least cosine, {text}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--quick", action="store_true", help="few steps: proves that the script works")
    arguments = parser.parse_args()
    first, steps, every = (20, 10, 5) if arguments.quick else (300, 300, 50)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--config", str(ROOT / "configs" / "quickstart.toml"), "--workspace", name, "--cycle", CYCLE]
        flags += ["--data.path", str(arguments.data), "--data.name", "pricerunner", "--train.max-steps", str(first)]
        flags += ["--parity.steps", str(steps), "--parity.evaluate-every", str(every), "--train.metric", "accuracy"]
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
        METHOD.format(first=first, steps=steps, every=every, rows=full.compared.scores.rows),
        figures,
        target=Target(figure="fp32_metric", comparison="<=", value=full.max_difference),
        also=["fp32_loss", "bf16_metric"],
        quick=arguments.quick,
        settings={"config": "quickstart", "evaluations": len(full.compared.evaluations)},
    )


if __name__ == "__main__":
    main()
