"""`python -m bench.scaling`: which plan suits which model and fleet (table of docs/parallel.md), and how it scales."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from bench.scaling.fabrics import FABRICS
from bench.scaling.model import Candidate, Transformer, candidates, scaled
from pipeline.core.format import aligned, format_bytes, format_count, format_percent

MODELS = (
    Transformer("small, 23 M", 23_000_000, 6, 384),
    Transformer("base, 110 M", 110_000_000, 12, 768),
    Transformer("large, 335 M", 335_000_000, 24, 1024),
    Transformer("1.3 B", 1_300_000_000, 24, 2048),
    Transformer("7 B", 6_700_000_000, 32, 4096),
    Transformer("70 B", 69_000_000_000, 80, 8192),
)
FLEETS = (
    (1, "trn1.32xlarge"),
    (16, "trn1.32xlarge"),
    (16, "trn2.48xlarge"),
    (1, "p4d.24xlarge"),
    (16, "p4d.24xlarge"),
    (16, "p5.48xlarge"),
    (128, "p5.48xlarge"),
)
MFU = 0.4


def best_plan(model: Transformer, fabric: str, nodes: int) -> Candidate:
    """Return the fastest plan that fits, otherwise the one that takes the least memory."""
    return candidates(model.work(FABRICS[fabric], MFU), model.beside_bytes(), FABRICS[fabric], nodes)[0]


def decision_table() -> Iterator[str]:
    """Yield a Markdown table: the best plan for each model and fleet, from sizes alone."""
    yield f"| nodes | {' | '.join(model.name for model in MODELS)} |"
    yield "|---" * (1 + len(MODELS)) + "|"
    for nodes, name in FLEETS:
        yield f"| {nodes} x {name} | {' | '.join(_plan_text(best_plan(model, name, nodes)) for model in MODELS)} |"


def _plan_text(plan: Candidate) -> str:
    """Return a candidate as the keys of a plan, with its memory."""
    layout = plan.spread.layout
    keys = [f"shard_degree {layout.shard_size}"]
    keys += ["shard state"] if plan.spread.shard == "state" and layout.shard_size > 1 else []
    keys += [f"tensor_degree {layout.tensor_size}"] if layout.tensor_size > 1 else []
    keys += ["recompute units"] if plan.spread.recompute else []
    return f"{', '.join(keys)} ({format_bytes(plan.memory_bytes)})" if plan.fits else "does not fit"


def scaling_table(model: Transformer, fabric: str) -> Iterator[str]:
    """Yield the step and its efficiency on 1 to 128 nodes, under the plan that suits one node."""
    best, machine = best_plan(model, fabric, 1), FABRICS[fabric]
    rows = [["nodes", "step", "exposed", "weak", "tokens/s", "strong"]]
    degree = best.spread.layout.shard_size
    for row in scaled(model.work(machine, MFU), best.spread, machine, shard_degree=degree):
        rate = model.tokens * row.nodes * machine.ranks / best.spread.layout.tensor_size / row.step.step_s
        times = [f"{1e3 * seconds:.1f} ms" for seconds in (row.step.step_s, row.step.exposed_s)]
        efficiency = format_percent(row.weak_efficiency)
        rows.append([str(row.nodes), *times, efficiency, format_count(rate), f"{row.strong_speedup:.2f}x"])
    yield f"{model.name} on {fabric}, {_plan_text(best)}; modelled, an upper bound"
    yield from aligned(rows)


def main(words: Sequence[str] | None = None) -> int:
    """Print the table of plans, or with --model the steps of that model over nodes."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    names = {model.name.partition(",")[0]: model for model in MODELS}
    parser.add_argument("--model", choices=names, help="print its step on 1 to 128 nodes instead")
    parser.add_argument("--fabric", choices=FABRICS, default="trn1.32xlarge", help="with --model: of which machine")
    given = parser.parse_args(words)
    for line in scaling_table(names[given.model], given.fabric) if given.model else decision_table():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
