"""Quality on public data: `python -m bench.real_data FILE --task pricerunner` or `wdc-cameras`.

Runs the real commands, as a user would, and keeps the holdout figures beside the floor of the task. The data is no part
of the project: PriceRunner (UCI 837) with grades derived from its clusters, and the WDC product matching pairs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.results import Target, figure, finish


@dataclass(frozen=True)
class Task:
    """Flags of a task, the figure that counts, and what plain gradient boosting on lexical features reaches."""

    figure: str
    floor: float
    flags: tuple[str, ...]


TASKS = {
    "pricerunner": Task("test_accuracy", 0.785, ("--data.name", "pricerunner")),
    "wdc-cameras": Task(
        "test_positive_f1",
        0.802,
        (
            *("--data.name", "wdc-cameras", "--data.filter", "category=cameras,tier=large|test"),
            *("--train.metric", "positive_f1", "--train.epochs", "4"),
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--task", choices=sorted(TASKS), default="pricerunner")
    parser.add_argument("--backend", default="xla")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    config = Path(__file__).resolve().parents[1] / "configs" / "quickstart.toml"
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--config", str(config), "--workspace", folder, "--cycle", "bench", "--data.path", str(arguments.data)]
        flags += [*task.flags, "--backend", arguments.backend]
        started = time.monotonic()
        for stage in ("prepare", "train"):
            subprocess.run([sys.executable, "-m", "pipeline", stage, *flags], check=True)
        seconds = time.monotonic() - started
        figures = json.loads((Path(folder) / "cycles" / "bench" / "train" / "result.json").read_text())["figures"]
    kept = [
        figure(name, value, "", name.replace("_", " ")) for name, value in figures.items() if name.startswith("test_")
    ]
    finish(
        f"real_data_{arguments.task.replace('-', '_')}",
        f"{arguments.task}: {task.figure.replace('_', ' ')}",
        f"`trnpipe prepare` and `train` from scratch with configs/quickstart.toml, backend {arguments.backend}; "
        "floor: gradient boosting on lexical features",
        [*kept, figure("minutes", seconds / 60, "min", "prepare and train together")],
        target=Target(figure=task.figure, comparison=">=", value=task.floor),
        quick=False,
        settings={"flags": " ".join(task.flags)},
    )


if __name__ == "__main__":
    main()
