"""Quality beside the simplest tools that do the same job: `python -m bench.quality PART --task TASK --data FOLDER`.

Every trained side starts from the same MiniLM weights (`--model FOLDER`), sees the same number of pairs in the same
precision, and is scored by the same search and metric code. A part keeps its result in build/quality; `table` makes the
committed results of what is there. Choices are made with `--split valid`; each run with `--split test` is counted.
"""

import argparse
import tempfile
import time
from pathlib import Path

from bench.quality import ours, peers
from bench.quality.part import PartResult
from bench.quality.score import nearest, of_cosines, retrieval
from bench.quality.table import write
from bench.quality.tasks import TASKS, read_catalogue, read_pairs
from bench.results import ROOT
from pipeline.core.metrics import MetricsConfig, best_threshold, metric_report
from pipeline.evaluation.bm25 import Bm25

KEPT = ROOT / "build" / "quality"
PARTS = ("ours", "bm25", *peers.LOSSES)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "table"])
    parser.add_argument("--task", choices=sorted(TASKS), default="pricerunner")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--model", type=Path, help="folder of the MiniLM weights and tokenizer")
    parser.add_argument("--split", choices=("valid", "test"), default="valid")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate of a peer; ours has that of its recipe")
    parser.add_argument("--precision", choices=("fp32", "autocast"), default="autocast")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("more", nargs="*", help="after --: further settings of ours")
    arguments = parser.parse_args()
    if arguments.part == "table":
        write(KEPT)
        return
    result = run(arguments)
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{result.name}.json").write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    shown = "  ".join(f"{name} {value:.4f}" for name, value in result.figures.items())
    print(f"{result.name}: {shown}  ({result.train_seconds:.0f} s)", flush=True)


def run(arguments: argparse.Namespace) -> PartResult:
    """One part. Raises what the tools raise."""
    task, data, part = TASKS[arguments.task], arguments.data, arguments.part
    catalogue = read_catalogue(data, task, arguments.split) if task.catalogue else None
    figures: dict[str, float] = {}
    by_query: list[float] = []
    started = time.monotonic()
    seconds = 0.0
    if part == "ours":
        with tempfile.TemporaryDirectory() as folder:
            workspace = Path(folder) / "workspace"
            flags = ours.flags_of(
                task,
                data.resolve(),
                arguments.model.resolve(),
                workspace,
                split=arguments.split,
                seed=arguments.seed,
                steps=arguments.steps,
                batch=arguments.batch,
                precision=arguments.precision,
            )
            ours.run(flags, arguments.more)
            report = ours.report_of(workspace)
            figures = ours.figures_of(report)
            if catalogue is not None:
                by_query = ours.ndcg_by_query(workspace, Path(folder) / "scratch")
        seconds = time.monotonic() - started
    elif part == "bm25":
        if catalogue is None:
            raise SystemExit(f"{task.name} has no catalogue to search")
        ranked = Bm25(catalogue.titles).search(catalogue.queries, 100)[1]
        per_query, figures = retrieval(ranked, catalogue)
        by_query = per_query.values["retrieval_ndcg@10"].tolist()
    else:
        model = peers.train(
            part,
            arguments.model,
            read_pairs(data, task, "train"),
            steps=arguments.steps,
            batch=arguments.batch,
            rate=arguments.rate,
            seed=arguments.seed,
            bf16=arguments.precision != "fp32",
        )
        seconds = time.monotonic() - started
        encode = peers.encoder(model, arguments.precision)
        if catalogue is not None:
            per_query, figures = retrieval(nearest(encode, catalogue), catalogue)
            by_query = per_query.values["retrieval_ndcg@10"].tolist()
        similar = {}
        for split in {"valid", arguments.split}:
            pairs = read_pairs(data, task, split)
            similar[split] = of_cosines((encode(pairs.query) * encode(pairs.title)).sum(1), pairs.positive)
        chosen = best_threshold(similar["valid"])
        figures["f1"] = metric_report(similar[arguments.split], MetricsConfig(), chosen).values["f1"]
    return PartResult(
        task=arguments.task,
        part=part,
        split=arguments.split,
        seed=arguments.seed,
        steps=0 if part == "bm25" else arguments.steps,
        batch=arguments.batch,
        precision=arguments.precision,
        rate=0.0 if part in ("ours", "bm25") else arguments.rate,
        figures=figures,
        ndcg_by_query=by_query,
        train_seconds=seconds,
    )


if __name__ == "__main__":
    main()
