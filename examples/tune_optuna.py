"""Search training settings with Optuna: every trial is a `trnpipe train`, pruned by Hyperband on the valid split.

    python examples/tune_optuna.py --config configs/quickstart.toml --workspace workspace/search --trials 20

Needs `pip install optuna`. Edit `suggest` to search other settings. A trial is a cycle of the workspace: its metric is
read from cycles/<trial>/events.jsonl while it trains, and a trial that falls behind is stopped with SIGTERM. Run the
same command again to continue a search that was stopped or killed: finished trials are kept, and a running one resumes
at its last checkpoint. The best settings are written to <workspace>/best.toml, to be the last --config of
`trnpipe train`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState

import trnpipe

CONFIG_ERROR, NUMERIC_ERROR, PREEMPTED = 78, 70, 143  # exit codes, see docs/runbook.md


def suggest(trial: optuna.Trial) -> dict[str, float | int | str]:
    """Return the settings of one trial by their dotted names."""
    return {
        "train.optimizer.learning_rate": trial.suggest_float("train.optimizer.learning_rate", 1e-4, 1e-2, log=True),
        "train.loss.temperature": trial.suggest_categorical("train.loss.temperature", [0.02, 0.05, 0.1]),
        "model.cross_layers": trial.suggest_int("model.cross_layers", 1, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="TOML file with the fixed settings")
    parser.add_argument("--workspace", type=Path, required=True, help="local folder, used only by this search")
    parser.add_argument("--trials", type=int, default=20, help="total number of trials")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of a full trial")
    parser.add_argument("--min-steps", type=int, default=50, help="steps between validations, and first rung")
    arguments = parser.parse_args()
    settings = trnpipe.resolve([arguments.config], os.environ).settings
    arguments.workspace.mkdir(parents=True, exist_ok=True)

    study = optuna.create_study(
        study_name="search",
        storage=JournalStorage(JournalFileBackend(str(arguments.workspace / "optuna.log"))),
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.HyperbandPruner(arguments.min_steps, arguments.steps, reduction_factor=3),
        direction="maximize",
        load_if_exists=True,
    )
    for killed in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(killed.number, state=TrialState.FAIL)
        study.enqueue_trial(killed.params, user_attrs=killed.user_attrs)  # keeps its cycle, and so its checkpoint
    ended = study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    study.optimize(
        lambda trial: run_trial(trial, arguments, settings.train.best_metric),
        n_trials=max(0, arguments.trials - len(ended)),
    )
    best = arguments.workspace / "best.toml"
    best.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in study.best_params.items()))
    print(f"best {settings.train.best_metric} {study.best_value:.4f} (trial {study.best_trial.number}): {best}")


def run_trial(trial: optuna.Trial, arguments: argparse.Namespace, metric: str) -> float:
    """Train with the suggested settings and return the metric on the valid split after the last step.

    Raises TrialPruned if the trial falls behind, diverges, or has an invalid combination of settings.
    """
    values = suggest(trial)
    cycle = trial.user_attrs.get("cycle", f"trial-{trial.number}")
    trial.set_user_attr("cycle", cycle)
    options = [f"--config={arguments.config}", f"--workspace={arguments.workspace}", f"--cycle={cycle}"]
    options += [
        "--train.start=scratch",
        f"--train.max-steps={arguments.steps}",
        f"--train.evaluate-every={arguments.min_steps}",
    ]
    options += [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    trnpipe_command = [sys.executable, "-m", "pipeline"]
    subprocess.run([*trnpipe_command, "prepare", *options], check=True)  # later trials reuse the result of the first

    value, is_pruned = float("nan"), False
    with subprocess.Popen([*trnpipe_command, "train", *options]) as process:
        for step, value in figures(arguments.workspace / "cycles" / cycle / "events.jsonl", metric, process):
            trial.report(value, step)
            if step < arguments.steps and trial.should_prune():
                is_pruned = True
                process.terminate()
    if is_pruned or process.returncode in (CONFIG_ERROR, NUMERIC_ERROR):
        raise optuna.TrialPruned
    if process.returncode:
        sys.exit(process.returncode)  # the trial stays open, and the next run continues it
    return value


def figures(events: Path, metric: str, process: subprocess.Popen[bytes]) -> Iterator[tuple[int, float]]:
    """Yield (step, metric on the valid split) while a training run continues, each step once."""
    last_step, has_ended = 0, False
    while not has_ended:
        has_ended = process.poll() is not None  # before the last read, so that no line is missed
        for line in events.read_text().splitlines() if events.exists() else ():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # incomplete line
            if event["event"] == "holdout_evaluated" and "best" in event and event["step"] > last_step:
                last_step = event["step"]
                yield last_step, event[metric]
        if not has_ended:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
