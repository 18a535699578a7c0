"""Whole searches on the CPU: real training runs, stopped, killed, shared; only the valid split is looked at."""

import io
import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import pipeline.train.build as train_build
import pipeline.tune.study as tune_trial
from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.data.token_sets import open_rows
from pipeline.io import atomic
from pipeline.settings import LaunchConfig, Settings, resolve
from pipeline.stages import train as train_stage
from pipeline.telemetry.events import EventLog, EventName
from pipeline.train.step import TrainProgram
from pipeline.tune.journal import Journal, open_space
from pipeline.tune.study import StudyTable, lines_of, run_study
from tests.killing import FORK
from tests.tune.case import SPACE, TUNE, context, search, settings_of, without_seconds

pytestmark = pytest.mark.stage


@pytest.fixture(scope="session")
def whole(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyTable, Path, str]:
    """A search that nobody interrupts, its folder, and what it said."""
    folder, said = tmp_path_factory.mktemp("whole"), io.StringIO()
    table = search(settings_of(workspace, folder), said=said)
    return table, folder / TUNE.name, said.getvalue()


def test_a_search_leaves_its_table_and_the_best_settings(whole: tuple[StudyTable, Path, str]) -> None:
    table, folder, said = whole
    assert StudyTable.model_validate_json((folder / "table.json").read_bytes()) == table
    assert table.rungs == (2, 4, 8) and len(table.trials) == TUNE.trials
    assert {row.state for row in table.trials} == {"complete", "pruned"}
    complete = [row for row in table.trials if row.state == "complete"]
    assert list(table.trials[: len(complete)]) == complete
    metrics = [row.metric for row in complete]
    assert metrics == sorted(metrics, reverse=True, key=lambda one: one or 0.0) and table.best == table.trials[0]
    for row in table.trials:
        steps = list(row.metric_by_step)
        assert steps == list(table.rungs)[: len(steps)] and (row.state == "complete") == (len(steps) == 3)
        assert row.metric == row.metric_by_step.get(8) and row.seconds > 0 and row.settings.keys() == SPACE.keys()
    assert "tune: 7 of 7 trials | best ndcg" in said and " a trial | eta" in said
    lines = lines_of(table)
    assert lines[0] == "search default: ndcg on valid, best first"
    assert lines[1].split()[:5] == ["trial", "state", "step", "2", "step"] and len(lines) == 2 + TUNE.trials
    assert lines[2].startswith(f"{table.trials[0].trial} ") and f"{table.trials[0].metric:.4f}" in lines[2]


def test_the_best_settings_are_a_file_for_config(whole: tuple[StudyTable, Path, str]) -> None:
    table, folder, _ = whole
    assert table.best is not None
    settings = resolve([folder / "best.toml"], {}, []).settings
    assert settings.train.optimizer.learning_rate == table.best.settings["train.optimizer.learning_rate"]
    assert settings.train.loss.temperature == table.best.settings["train.loss.temperature"]
    assert settings.model.cross_layers == table.best.settings["model.cross_layers"]
    assert settings.train.max_steps == 0, "how long to train is not what was searched"


def test_of_a_finished_trial_only_events_stay(whole: tuple[StudyTable, Path, str]) -> None:
    _, folder, _ = whole
    for number in range(TUNE.trials):
        assert sorted(path.name for path in (folder / f"trial-{number}").iterdir()) == ["events.jsonl", "lock"]
    assert not list((folder.parent / "scratch" / "tune" / TUNE.name).iterdir())


@pytest.mark.fault
def test_what_a_kill_left_of_a_finished_trial_is_removed(workspace: Path, tmp_path: Path) -> None:
    settings, folder = settings_of(workspace, tmp_path, trials=1), tmp_path / TUNE.name / "trial-0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_trial.TrialFolder, "clear", lambda self: os.kill(os.getpid(), signal.SIGKILL))
        killed = FORK.Process(target=search, args=(settings,))
        killed.start()
        killed.join()
    assert killed.exitcode == -signal.SIGKILL and list(folder.glob("checkpoints/*/*"))
    assert [row.state for row in search(settings).trials] == ["complete"]
    assert not list(folder.glob("checkpoints/*/*"))


def test_the_best_trial_is_a_training_run_with_its_settings(
    whole: tuple[StudyTable, Path, str], workspace: Path, tmp_path: Path
) -> None:
    """Trained with best.toml by the train stage, the valid split reads what the table says."""
    table, folder, _ = whole
    assert table.best is not None
    base = settings_of(workspace, tmp_path)
    best = resolve([folder / "best.toml"], {}, []).settings
    optimizer = base.train.optimizer.model_copy(update={"learning_rate": best.train.optimizer.learning_rate})
    loss = base.train.loss.model_copy(update={"temperature": best.train.loss.temperature})
    settings = base.model_copy(
        update={
            "cycle": "trained",
            "model": base.model.model_copy(update={"cross_layers": best.model.cross_layers}),
            "train": base.train.model_copy(
                update={"max_steps": 8, "metric": "ndcg", "evaluate_every": 0, "optimizer": optimizer, "loss": loss}
            ),
        }
    )
    prepared = (workspace / "cycles/c1/prepare/result.json").read_text()
    (workspace / "cycles/trained/prepare").mkdir(parents=True)
    (workspace / "cycles/trained/prepare/result.json").write_text(prepared)
    with context(settings) as ctx:
        result = train_stage.run(settings, ctx)
    assert result.figures["valid_ndcg"] == table.best.metric


def test_run_again_it_is_done(whole: tuple[StudyTable, Path, str], workspace: Path) -> None:
    table, folder, _ = whole
    before = (folder / "journal.log").read_bytes()
    said = io.StringIO()
    assert search(settings_of(workspace, folder.parent), said=said) == table
    assert (folder / "journal.log").read_bytes() == before and "step" not in said.getvalue()


def test_more_trials_go_on_where_fewer_ended(
    whole: tuple[StudyTable, Path, str], workspace: Path, tmp_path: Path
) -> None:
    search(settings_of(workspace, tmp_path, trials=3))
    assert without_seconds(search(settings_of(workspace, tmp_path))) == without_seconds(whole[0])


def test_the_test_split_is_not_looked_at(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    original = open_rows

    def noted(storage: Any, sets: Any, split: str, cache: Path) -> Any:
        opened.append(split)
        return original(storage, sets, split, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(train_build, "open_rows", noted)
    settings = settings_of(workspace, tmp_path, trials=3)
    search(settings)
    assert set(opened) == {"train", "valid"}
    lines = [json.loads(line) for path in tmp_path.rglob("trial-*/events.jsonl") for line in path.open()]
    assert {line["split"] for line in lines if line["event"] == EventName.HOLDOUT_EVALUATED} == {"valid"}
    trained = settings.model_copy(update={"cycle": "c1", "train": settings.train.model_copy(update={"max_steps": 2})})
    with context(trained) as ctx:
        train_stage.run(trained, ctx)
    assert "test" in opened, "a run that is no trial does"


@pytest.mark.parametrize(
    "event",
    [
        EventName.TRAIN_STEPS,
        EventName.HOLDOUT_EVALUATED,
        pytest.param(EventName.CHECKPOINT_SAVED, marks=pytest.mark.thorough),
    ],
)
def test_told_to_stop_anywhere_it_ends_with_the_same_table(
    whole: tuple[StudyTable, Path, str],
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    event: EventName,
) -> None:
    """Told at every second of these events, so within trials and between them."""
    settings, seen, stops = settings_of(workspace, tmp_path), 0, 0
    stop = StopSignal()
    original = EventLog.emit

    def told(self: EventLog, name: EventName, /, **fields: object) -> None:
        nonlocal seen
        original(self, name, **fields)
        if name == event:
            seen += 1
            if seen % 2 == 0:
                stop.set("SIGTERM")

    monkeypatch.setattr(EventLog, "emit", told)
    said = io.StringIO()
    while True:
        stop = StopSignal()
        try:
            table = search(settings, stop, said)
            break
        except Preempted:
            stops += 1
            assert stops < 100
    assert stops > 3
    assert without_seconds(table) == without_seconds(whole[0])
    place = f"train: continuing from file://{tmp_path}/{TUNE.name}/trial-0/checkpoints/trial/step-"
    assert event != EventName.TRAIN_STEPS or place in said.getvalue()


@pytest.mark.fault
def test_killed_again_and_again_it_ends_with_the_same_table(
    whole: tuple[StudyTable, Path, str], workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill -9 at the 2nd to 6th step of each process: trials go on from their checkpoints."""
    monkeypatch.setattr(tune_trial, "MOST_STARTS", 1000)
    settings = settings_of(workspace, tmp_path)
    kills = 0
    while _killed_at_step(2 + kills % 5, lambda: search(settings)):
        kills += 1
        assert kills < 100
    assert kills > 5
    table = search(settings)
    assert without_seconds(table) == without_seconds(whole[0])
    lines = [json.loads(line) for path in tmp_path.rglob("trial-*/events.jsonl") for line in path.open()]
    assert any(line["event"] == EventName.TRAIN_RESUMED for line in lines), "no trial was continued"


def _killed_at_step(number: int, work: Callable[[], object]) -> bool:
    """Kill -9 in a child before its n-th training step; False when the work came to its end."""

    def child() -> None:
        original, seen = TrainProgram.step, 0

        def step(self: TrainProgram, *args: Any, **kwargs: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, *args, **kwargs)

        TrainProgram.step = step  # type: ignore[method-assign]
        work()

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.fault
def test_a_trial_that_always_ends_the_process_is_given_up(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of(workspace, tmp_path, trials=2)
    for _ in range(tune_trial.MOST_STARTS):
        assert _killed_at_step(1, lambda: search(settings))
    table = search(settings)
    assert [(row.trial, row.state) for row in table.trials] == [(1, "complete"), (0, "failed")]
    assert table.trials[-1].reason == "3 attempts ended the process; the last ones began at step 0"
    assert lines_of(table)[-1].startswith("trial 0 failed: 3 attempts")


def test_workers_share_a_search_and_none_does_a_trial_twice(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of(workspace, tmp_path, trials=6)
    workers = [FORK.Process(target=search, args=(settings,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    table = search(settings)
    assert sorted(row.trial for row in table.trials) == list(range(6)) and table.num_running == 0
    for number in range(6):
        lines = [json.loads(line) for line in (tmp_path / TUNE.name / f"trial-{number}" / "events.jsonl").open()]
        assert sum(line["event"] == EventName.TRAIN_STARTED for line in lines) == 1


def test_a_trial_at_work_elsewhere_is_left_alone(workspace: Path, tmp_path: Path) -> None:
    """As by a worker on another machine: its trial is running, and its lock held."""
    settings = settings_of(workspace, tmp_path, trials=2)
    original = tune_trial._train
    with pytest.MonkeyPatch.context() as patch:

        def other(*args: Any) -> None:
            patch.setattr(tune_trial, "_train", original)
            table = search(settings)  # opens the lock's file anew, as another process does
            assert [(row.trial, row.state) for row in table.trials] == [(1, "complete"), (0, "running")]
            raise TransientError("the other machine goes away")

        patch.setattr(tune_trial, "_train", other)
        with pytest.raises(TransientError, match="goes away"):
            search(settings)
    assert {row.state for row in search(settings).trials} == {"complete"}


def test_a_trial_that_ends_while_its_lock_is_waited_for_is_left_alone(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker ends it, and gives its lock back, after this one has read that it runs."""
    settings, ended = settings_of(workspace, tmp_path, trials=2), list[int]()

    def stopped(*args: Any) -> None:
        raise TransientError("the other machine goes away")

    with monkeypatch.context() as patch, pytest.raises(TransientError, match="goes away"):
        patch.setattr(tune_trial, "_train", stopped)
        search(settings)
    space, tune, original = open_space(settings), settings.tune, atomic.if_free

    def late(path: Path) -> AbstractContextManager[bool]:
        if path.parent.name == "trial-0" and not ended:
            file = tmp_path / TUNE.name / tune_trial.JOURNAL
            other = Journal(file, tune.name, space.ranges, space.start(), tune.hyperband, tune.seed)
            other.resume(0).fail("ended elsewhere")
            ended.append(0)
        return original(path)

    monkeypatch.setattr(atomic, "if_free", late)
    assert [(row.trial, row.state) for row in search(settings).trials] == [(1, "complete"), (0, "failed")]
    assert ended == [0]


def test_values_that_do_not_go_together_are_a_failed_trial(workspace: Path, tmp_path: Path) -> None:
    space = {"train.candidates_per_query": "one of 2 3"}  # a batch of 8 is no whole number of threes
    table = search(settings_of(workspace, tmp_path, space=space, trials=6))
    states = {(row.settings["train.candidates_per_query"], row.state == "failed") for row in table.trials}
    assert states == {(2, False), (3, True)}
    assert "a global batch of 8" in table.trials[-1].reason


def test_values_that_the_settings_do_not_allow_together_are_a_failed_trial(workspace: Path, tmp_path: Path) -> None:
    space = {"train.loss.graded_weight": "one of 0.0 1.0", "train.loss.contrastive_weight": "one of 0.0 0.5"}
    settings = settings_of(workspace, tmp_path, space=space, metric="retrieval_ndcg", trials=8)
    train = settings.train.model_copy(update={"metric": "retrieval_ndcg"})
    table = search(settings.model_copy(update={"train": train}))
    assert {(sum(map(float, map(str, row.settings.values()))) == 0, row.state == "failed") for row in table.trials} == {
        (True, True),
        (False, False),
    }
    assert table.num_running == 0 and "no term of the loss has a weight" in table.trials[-1].reason


def test_a_metric_of_what_is_not_trained_ranks_no_trial(workspace: Path, tmp_path: Path) -> None:
    space = {"train.loss.graded_weight": "one of 0.0 1.0"}
    settings = settings_of(workspace, tmp_path, space=space, metric="ndcg", trials=8)
    train = settings.train.model_copy(update={"metric": "retrieval_ndcg"})
    table = search(settings.model_copy(update={"train": train}))
    assert {(row.settings["train.loss.graded_weight"], row.state) for row in table.trials} == {
        (0.0, "failed"),
        (1.0, "complete"),
    }
    loss = settings.train.loss.model_copy(update={"graded_weight": 0.0})
    bare = train.model_copy(update={"loss": loss})
    with pytest.raises(ConfigError, match=r"tune\.metric ndcg: metric ndcg with loss\.graded_weight 0"):
        search(settings.model_copy(update={"train": bare}))


def test_training_that_diverges_is_a_failed_trial(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of(workspace, tmp_path, space={"train.optimizer.learning_rate": "one of 5e-4 1e-3"}, trials=2)
    guard = settings.train.guard.model_copy(update={"patience": 1})
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"guard": guard})})
    original = TrainProgram.read_figures
    with pytest.MonkeyPatch.context() as patch:

        def diverged(self: TrainProgram, count: int) -> list[dict[str, float]]:
            return [{**row, "skipped": 1.0, "skipped_in_a_row": 1.0} for row in original(self, count)]

        patch.setattr(TrainProgram, "read_figures", diverged)
        with pytest.raises(ConfigError, match="none of the 2 trials has come to its end: 1 steps in a row had a loss"):
            search(settings)


def test_another_error_is_told_and_the_next_run_tries_other_values(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of(workspace, tmp_path, trials=2)

    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_trial, "_train", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            search(settings)
    table = search(settings)
    assert [(row.trial, row.state, row.reason) for row in table.trials] == [
        (1, "complete", ""),
        (0, "failed", "RuntimeError: out of memory"),
    ]


def test_a_search_is_continued_with_its_own_settings_alone(workspace: Path, tmp_path: Path) -> None:
    search(settings_of(workspace, tmp_path, trials=1))
    for changes, names in (
        ({"seed": 2}, "tune.seed"),
        ({"steps": 10}, "train.max_steps"),
        ({"metric": "accuracy"}, "train.metric"),
        ({"reduction": 3, "space": {"train.seed": "int 1 9"}}, "tune.reduction, tune.space"),
    ):
        with pytest.raises(ConfigError, match=f"was started with other {names}\n"):
            search(settings_of(workspace, tmp_path, trials=1, **changes))


def refused(settings: Settings) -> str:
    with pytest.raises(ConfigError) as caught, context(settings) as ctx:
        run_study(settings, ctx)
    return str(caught.value)


def test_what_cannot_be_is_refused_before_anything_is_trained(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of(workspace, tmp_path)
    ranks = settings.model_copy(update={"launch": LaunchConfig(processes=2)})
    assert "one process, on one device" in refused(ranks)
    on_s3 = settings.model_copy(update={"tune": settings.tune.model_copy(update={"folder": "s3://bucket/tune"})})
    assert "expected: one of accuracy, macro_f1" in refused(settings_of(workspace, tmp_path, metric="f1"))
    assert "tune.folder is a URI" in refused(on_s3)
    slots = settings.train.model_copy(update={"candidates_per_query": 3})
    assert "equal micro-batches" in refused(settings.model_copy(update={"train": slots}))
    assert not list(tmp_path.rglob("trial-*"))
