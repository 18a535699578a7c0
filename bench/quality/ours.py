"""Ours by the real commands, as a user would run them: prepare, mine, train, evaluate."""

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.quality.tasks import SEARCH_FLAGS, Task, write_items
from bench.results import ROOT
from pipeline.core.fingerprint import fingerprint
from pipeline.data.trained_items import TRAINED_ON
from pipeline.evaluate.metrics.measure import RELEVANT_PRODUCTS
from pipeline.evaluate.report import EvaluationReport, load_report
from pipeline.evaluate.score import load_arrays
from pipeline.io.storage import open_storage

CONFIG = ROOT / "configs" / "small.toml"
MINED = "--train.mined-per-query"
OPEN_GATE = ("--gate.first-baselines", "warn")
"""A model worse than a baseline is a result here, not a refusal."""


def recipe() -> str:
    """Names the content of the preset."""
    return fingerprint(tomllib.loads(CONFIG.read_text(encoding="utf-8")))


def flags_of(
    task: Task,
    data: Path,
    model: Path,
    workspace: Path,
    *,
    cycle: str,
    split: str,
    seed: int,
    steps: int,
    batch: int,
    precision: str,
    device: str,
) -> list[str]:
    """Everything that is not the recipe of configs/small.toml. Where `split` is valid, no row of test is read."""
    flags = ["--config", str(CONFIG), "--workspace", str(workspace), "--cycle", cycle, "--backend", device]
    pairs = data / task.pairs
    if task.by_item:
        workspace.mkdir(parents=True, exist_ok=True)
        write_items(data, task, pairs := workspace / "pairs.parquet")
    flags += ["--data.path", str(pairs), *task.data_flags(split)]
    flags += ["--data.tokenizer.path", str(model / "tokenizer.json"), "--model.init-from", str(model)]
    flags += ["--train.max-steps", str(steps), "--train.seed", str(seed), "--train.precision", precision]
    flags += ["--train.global-batch-size", str(batch), "--train.micro-batch-size", str(batch)]
    flags += ["--train.evaluate-every", "0"]
    flags += ["--embed.precision", "fp32" if precision == "fp32" else "bf16"]
    flags += ["--evaluate.split", split, "--evaluate.promote", "false", *OPEN_GATE]
    if task.splits_pairs:
        flags += ["--evaluate.leak", "warn"]
    if task.catalogue:
        flags += ["--evaluate.retrieval.catalogue", str(data / task.catalogue), *SEARCH_FLAGS]
        flags += ["--evaluate.retrieval.queries", f"split={split}"]
        if split != "valid":  # where the weight of hybrid search is chosen
            flags += ["--evaluate.retrieval.valid-queries", "split=valid"]
    return flags


def run(flags: Sequence[str], more: Sequence[str]) -> None:
    """All stages, `mine` and `teach` where `more` asks for mined negatives or a teacher. Raises CalledProcessError; a
    refusal of the gate (80) is none."""
    optional = [name for name, flag in (("mine", MINED), ("teach", "--train.teacher")) if flag in more]
    for stage in ("prepare", *optional, "train", "evaluate"):
        command = [sys.executable, "-m", "pipeline", stage, *flags, *more]
        code = subprocess.run(command, check=False, cwd=ROOT).returncode
        if code and not (stage == "evaluate" and code == 80):
            raise subprocess.CalledProcessError(code, command)


def report_of(workspace: Path, cycle: str) -> EvaluationReport:
    """What evaluate found. Raises SystemExit without it."""
    report = load_report(open_storage(str(workspace)), cycle)
    if report is None:
        raise SystemExit(f"{workspace} holds no evaluation")
    return report


def figures_of(report: EvaluationReport) -> dict[str, float]:
    """Retrieval under the names that peers have; scores of pairs and the other tools under theirs."""
    found = report.figures()
    pairs = {name: value for name, value in found.items() if not name.startswith("retrieval_") and "@" not in name}
    searched = {name: value for name, value in found.items() if "retrieval_" in name}
    return pairs | {name.replace("retrieval_", ""): value for name, value in searched.items()} | _of_parts(report)


def _of_parts(report: EvaluationReport) -> dict[str, float]:
    """Figures by which side was trained on, calibration, and lower bounds of the lead over baselines."""
    models = {"": report.candidate.slices} | {f"{tool.name}_": tool.slices for tool in report.baselines}
    found = {
        f"{prefix}{name}:{part.value}": part.report.values[name]
        for prefix, slices in models.items()
        for part in slices
        if part.column in (TRAINED_ON, RELEVANT_PRODUCTS)
        for name in ("f1", "accuracy", "retrieval_ndcg@10")
        if name in part.report.values
    }
    for check in report.verdict.checks:
        if check.kind == "baseline" and check.low is not None:
            found[f"{check.metric}_ahead_of_{check.baseline.lower()}_low"] = check.low
    if report.candidate.ece_before is not None:
        found["ece_before"] = report.candidate.ece_before
    return found


def ndcg_by_query(workspace: Path, scratch: Path, cycle: str) -> tuple[float, ...]:
    """nDCG@10 of each query of the catalogue, ascending by id."""
    storage = open_storage(str(workspace))
    prefix = f"cycles/{cycle}/evaluate/retrieval"
    (name,) = storage.list_dirs(prefix)
    found, _ = load_arrays(storage, f"{prefix}/{name}", "retrieval", scratch)
    return tuple(np.asarray(found["retrieval_ndcg@10"], dtype=np.float64).tolist())
