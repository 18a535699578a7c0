"""examples/tune_optuna.py searches by real training runs, and the same command continues a search."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests/old_workspace/settings.toml"


def search(workspace: Path, trials: int) -> str:
    words = ["--config", str(CONFIG), "--workspace", str(workspace), "--trials", str(trials), "--steps", "8"]
    command = [sys.executable, "examples/tune_optuna.py", *words, "--min-steps", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRNPIPE_BACKEND": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout


def open_study(workspace: Path) -> optuna.Study:
    return optuna.load_study(
        study_name="search", storage=JournalStorage(JournalFileBackend(str(workspace / "optuna.log")))
    )


@pytest.mark.stage
def test_a_search_goes_on_with_the_trial_that_a_kill_left_open(tmp_path: Path) -> None:
    search(tmp_path, 1)
    first = open_study(tmp_path)
    left = first.ask()  # as a kill leaves it: under way, its cycle named
    values = {
        "train.optimizer.learning_rate": left.suggest_float("train.optimizer.learning_rate", 1e-4, 1e-2, log=True),
        "train.loss.temperature": left.suggest_categorical("train.loss.temperature", [0.02, 0.05, 0.1]),
        "model.cross_layers": left.suggest_int("model.cross_layers", 1, 3),
    }
    left.set_user_attr("cycle", "left-open")

    printed = search(tmp_path, 3)
    study = open_study(tmp_path)
    assert [trial.state for trial in study.trials].count(TrialState.FAIL) == 1
    over = [trial for trial in study.trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert len(over) == 3 and any(trial.state is TrialState.COMPLETE for trial in over)
    (again,) = [trial for trial in over if trial.user_attrs["cycle"] == "left-open"]
    assert again.params == values
    for trial in over:
        events = (tmp_path / "cycles" / trial.user_attrs["cycle"] / "events.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in events]
        steps = {row["step"]: row["accuracy"] for row in rows if row["event"] == "holdout_evaluated" and "best" in row}
        assert trial.intermediate_values == {step: steps[step] for step in trial.intermediate_values}
    best = tomllib.loads((tmp_path / "best.toml").read_text())
    assert best["model"]["cross_layers"] == study.best_params["model.cross_layers"]
    assert f"{study.best_value:.4f}" in printed
