"""Whole runs on the CPU: from committed partitions to a candidate, through stops, lost files and missing data."""

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.backends import cpu
from pipeline.checkpoint.store import Checkpoint, PublishedWeights, open_checkpoint
from pipeline.context import StageContext
from pipeline.core.errors import ConfigError, DataError, NumericError, Preempted, TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.data.token_sets import open_rows, read_token_sets
from pipeline.data.training_groups import NONE
from pipeline.evaluate.score import HoldoutFigures
from pipeline.io.commit import commit_dir
from pipeline.io.storage import open_storage
from pipeline.mine.store import Negatives, NegativesInfo, commit_negatives
from pipeline.model.config import LossConfig, ModelConfig
from pipeline.model.hf import to_hf
from pipeline.model.relevance import build_model
from pipeline.parallel.world import World
from pipeline.registry.checkpoints import lineage
from pipeline.registry.promote import promote
from pipeline.registry.records import Author, Decision
from pipeline.settings import LogConfig, Settings
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventLog, EventName
from pipeline.train.build import Saver, open_run
from pipeline.train.config import CheckpointConfig, TrainConfig
from pipeline.train.inputs import gather_inputs
from pipeline.train.loop import Outcome, train
from tests.train.rows import MODEL, SPEC, TRAIN, mined_from, write_token_set

CONFIG = TRAIN.model_copy(update={"max_steps": 6, "evaluate_every": 2})


@dataclass
class Cycle:
    """A workspace with partitions, and runs in it."""

    folder: Path
    train: TrainConfig = CONFIG
    model: ModelConfig = MODEL
    every_steps: int = 3
    keep_last: int = 2
    name: str = "c"
    events: list[tuple[EventName, dict[str, Any]]] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    negatives: str | None = None
    on_event: Callable[[EventName, dict[str, Any]], None] = lambda name, fields: None

    def __post_init__(self) -> None:
        self.storage = open_storage(str(self.folder / "workspace"))
        self.stop = StopSignal()
        self.said = io.StringIO()

    def emit(self, event: EventName, /, **fields: object) -> None:
        self.events.append((event, dict(fields)))
        self.on_event(event, dict(fields))

    def flush(self, durable: bool = False) -> None:
        return

    def close(self) -> None:
        return

    def partition(self, day: int, splits: dict[str, Sequence[int]]) -> None:
        staging = self.folder / f"staging-{day}"
        staging.mkdir()
        info = write_token_set(
            staging, splits, partition=f"dt=2026-01-0{day}", fingerprint=f"print-{day}", first_id=10_000 * day + 1
        )
        prefix = f"tokens/d/{info.fingerprint}"
        commit_dir(self.storage, staging, prefix, kind="tokens", fields=info.model_dump(mode="json"))
        self.prefixes.append(prefix)

    def run(self, parent: Checkpoint | None = None) -> Outcome:
        self.stop = StopSignal()
        settings = Settings(
            backend="cpu",
            model=self.model,
            train=self.train,
            checkpoint=CheckpointConfig(every_steps=self.every_steps, keep_last=self.keep_last),
            log=LogConfig(every_steps=2),
        )
        ctx = StageContext(
            settings=settings,
            workspace=self.storage,
            workspace_after_stop=self.storage,
            cycle=self.name,
            scratch=self.folder / "scratch",
            events=cast(EventLog, self),
            console=Console(stream=self.said),
            stop=self.stop,
            world=World(),
            settings_hash="h",
            code_version="v",
        )
        inputs = gather_inputs(self.storage, self.prefixes, parent, self.train, self.model, self.negatives)
        settings = settings.model_copy(update={"backend": "cpu", "model": self.model, "train": self.train})
        with open_run(settings, ctx, inputs, b"tokenizer") as opened:
            return train(opened)

    def stop_at(self, event: EventName, step: int, parent: Checkpoint | None = None) -> None:
        """Run until an event of a step, which brings SIGTERM."""
        self.on_event = lambda name, fields: (
            self.stop.set("SIGTERM") if name == event and fields["step"] == step else None
        )
        with pytest.raises(Preempted):
            self.run(parent)
        self.on_event = lambda name, fields: None

    def mine(self, shift: int = 0) -> None:
        """Negatives of every query: rows of others, `shift` more apart."""
        sets = read_token_sets(self.storage, self.prefixes)
        rows = open_rows(self.storage, sets, "train", self.folder / "scratch")
        mined = mined_from(rows, slots=2)
        product = np.where(mined.product == NONE, NONE, (mined.product + shift) % sum(rows.sizes))
        info = NegativesInfo(
            dataset="d",
            token_sets=tuple(one.info.fingerprint for one in sets),
            rows=rows.sizes,
            source="bm25",
            settings={},
            figures={},
        )
        self.negatives = f"negatives/d/{shift}"
        staged = self.folder / "negatives"
        commit_negatives(self.storage, self.negatives, Negatives(mined.query_id, product), info, staged)

    def steps(self) -> list[int]:
        names = self.storage.list_dirs(f"checkpoints/{self.name}")
        return sorted(int(name.removeprefix("step-")) for name in names)

    def open(self, step: int) -> Checkpoint:
        return open_checkpoint(self.storage, f"checkpoints/{self.name}/step-{step}", self.folder / "cache")

    def losses(self) -> list[float]:
        return [loss for name, fields in self.events if name == EventName.TRAIN_STEPS for loss in fields["losses"]]


ROWS: dict[str, Sequence[int]] = {"train": (40, 40), "valid": (10, 10), "test": (6, 6)}


@pytest.fixture
def cycle(tmp_path: Path) -> Cycle:
    made = Cycle(tmp_path)
    made.partition(1, ROWS)
    return made


def test_a_run_leaves_its_best_and_its_last(cycle: Cycle) -> None:
    outcome = cycle.run()
    assert outcome.steps_done == 6 and not outcome.late
    assert set(outcome.holdouts) == {"valid", "test"} and outcome.holdouts["valid"].rows == 20
    assert {outcome.step, 6} <= set(cycle.steps())
    last = cycle.open(6)
    assert last.state.best is not None and last.state.best.step == outcome.step
    assert outcome.prefix == f"checkpoints/c/step-{outcome.step}"
    evaluations = [fields for name, fields in cycle.events if name == EventName.HOLDOUT_EVALUATED]
    assert len(evaluations) >= 3 and sum(fields["seconds"] for fields in evaluations) > 0


def test_bf16_where_the_cpu_emulates_it_is_said_to_be_slow(cycle: Cycle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "supports_bf16", lambda: False)
    cycle.train = CONFIG.model_copy(update={"precision": "bf16"})
    cycle.run()
    assert "train.precision bf16 is many times slower than fp32 on this CPU" in cycle.said.getvalue()


def test_graded_weight_0_is_all_that_a_run_for_retrieval_alone_needs(cycle: Cycle) -> None:
    """Its checkpoint says that the head was not trained; the best one is named by retrieval, whatever the metric."""
    cycle.train = CONFIG.model_copy(update={"loss": LossConfig(graded_weight=0, matryoshka_sizes=(4, 8))})
    cycle.run()
    first = cycle.open(6)
    assert not first.state.trained_head and "the relevance head is not trained" in cycle.said.getvalue()
    assert first.state.best is not None and first.state.best.metric == "retrieval_ndcg"
    cycle.partition(2, ROWS)
    cycle.name, cycle.train = "next", CONFIG
    assert cycle.open(cycle.run(first).step).state.trained_head


def same_weights(one: Checkpoint, two: Checkpoint) -> bool:
    left, right = {**one.weights(), **one.optimizer()}, {**two.weights(), **two.optimizer()}
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("event", "step"),
    [
        (EventName.TRAIN_STEPS, 2),  # before an evaluation is due
        (EventName.TRAIN_STEPS, 4),
        (EventName.TRAIN_STEPS, 6),  # before the last evaluation
        (EventName.HOLDOUT_EVALUATED, 2),
        (EventName.HOLDOUT_EVALUATED, 4),
        (EventName.HOLDOUT_EVALUATED, 6),
        (EventName.CHECKPOINT_SAVED, 3),
    ],
)
def test_a_stop_anywhere_resumes_to_the_same_end(tmp_path: Path, event: EventName, step: int) -> None:
    whole, stopped = Cycle(tmp_path / "whole"), Cycle(tmp_path / "stopped")
    for made in (whole, stopped):
        made.folder.mkdir()
        made.partition(1, ROWS | {"valid": (100, 100)})
        made.model = MODEL.model_copy(update={"dropout": 0.3})
    expected = whole.run()
    stopped.stop_at(event, step)
    assert max(stopped.steps()) >= step  # what was trained before the signal is saved
    torch.manual_seed(12345)  # whatever state another process starts with
    seen = stopped.run()
    assert seen == expected
    assert stopped.losses() == whole.losses()  # no step is lost or done twice
    assert same_weights(stopped.open(6), whole.open(6))
    assert expected.holdouts["valid"].temperature != 1.0
    for step in {expected.step, 6}:  # also if it was saved before it was evaluated
        assert stopped.open(step).state.temperature == whole.open(step).state.temperature
    assert stopped.open(seen.step).state.temperature == expected.holdouts["valid"].temperature


def mining(folder: Path) -> Cycle:
    made = Cycle(folder, CONFIG.model_copy(update={"mined_per_query": 2}))
    folder.mkdir(exist_ok=True)
    made.partition(1, ROWS)
    return made


def test_mined_negatives_are_trained_on_and_a_stop_resumes_to_the_same_end(tmp_path: Path) -> None:
    plain, whole, other, stopped = (mining(tmp_path / name) for name in ("plain", "whole", "other", "stopped"))
    plain.train = CONFIG
    for made, shift in ((whole, 0), (other, 1), (stopped, 0)):
        made.mine(shift)
    for made in (plain, whole, other):
        made.run()
    assert "groups of up to 2 samples and 2 mined negatives | " in whole.said.getvalue()
    assert not same_weights(whole.open(6), plain.open(6)) and not same_weights(whole.open(6), other.open(6))

    stopped.stop_at(EventName.CHECKPOINT_SAVED, 3)
    stopped.run()
    assert stopped.losses() == whole.losses() and same_weights(stopped.open(6), whole.open(6))
    stopped.mine(1)
    with pytest.raises(ConfigError, match=r"step-6 was trained with different negatives"):
        stopped.run()


def test_mined_slots_without_negatives_of_this_data_are_refused(tmp_path: Path) -> None:
    cycle = mining(tmp_path / "c")
    cycle.mine()
    cycle.partition(2, ROWS)
    with pytest.raises(DataError, match="was mined from different data: 1 of its 1 prepared partitions") as refused:
        cycle.run()
    assert refused.value.next_command.startswith("trnpipe mine")
    cycle.train = CONFIG
    cycle.run()  # does not look at them


@pytest.mark.fault
def test_a_damaged_newest_checkpoint_costs_only_its_steps(cycle: Cycle) -> None:
    first = cycle.run()
    expected = {name: tensor.clone() for name, tensor in cycle.open(6).weights().items()}  # mapped from the file
    path = cycle.storage.local_path("checkpoints/c/step-6/model.safetensors")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-3])
    cycle.events.clear()
    again = cycle.run()
    assert [fields["step"] for name, fields in cycle.events if name == EventName.CHECKPOINT_REJECTED] == [6]
    assert again == first
    assert all(torch.equal(expected[name], tensor) for name, tensor in cycle.open(6).weights().items())


@pytest.mark.fault
def test_when_the_best_cannot_be_read_the_last_is_the_candidate(cycle: Cycle) -> None:
    cycle.run()
    best = cycle.open(6).state.best
    assert best is not None
    if best.step == 6:
        pytest.skip("the last step is the best with these seeds")
    cycle.storage.delete_prefix(f"checkpoints/c/step-{best.step}/")
    outcome = cycle.run()
    assert outcome.step == 6
    assert "the best checkpoint cannot be used" in cycle.said.getvalue()


def test_a_promoted_checkpoint_outlives_retention(cycle: Cycle) -> None:
    """A person may put a checkpoint into production while its run goes on."""
    cycle.every_steps, cycle.keep_last = 1, 1

    def put_into_production(name: EventName, fields: dict[str, Any]) -> None:
        if name == EventName.CHECKPOINT_SAVED and fields["step"] == 1:
            forced, me = Decision(passed=False, forced="try it"), Author(by="me")
            promote(cycle.storage, "relevance", fields["prefix"], expected=None, decision=forced, author=me)

    cycle.on_event = put_into_production
    cycle.run()
    assert 1 in cycle.steps() and not {3, 5} & set(cycle.steps())


def test_data_that_fills_no_batch_is_counted_as_the_settings_count(cycle: Cycle) -> None:
    cycle.train = CONFIG.model_copy(update={"global_batch_size": 4096})
    slots = CONFIG.candidates_per_query
    with pytest.raises(DataError) as caught:
        cycle.run()
    pattern = (
        r"the training data has only (\d+) groups of up to (\d+) products, but a batch of 4096 samples requires (\d+)"
    )
    found = re.fullmatch(pattern, caught.value.seen)
    assert found and (int(found[2]), int(found[3])) == (slots, 4096 // slots)
    assert caught.value.next_command.startswith(f"--train.global-batch-size {int(found[1]) * slots},")


def test_an_incremental_run_takes_new_partitions_and_replays_old_ones(cycle: Cycle) -> None:
    cycle.run()
    parent = cycle.open(6)
    cycle.partition(2, ROWS)
    cycle.name, cycle.train = "next", CONFIG.model_copy(update={"start": "incumbent", "replay_share": 0.2})
    cycle.events.clear()
    outcome = cycle.run(parent)
    (started,) = [fields for name, fields in cycle.events if name == EventName.TRAIN_STARTED]
    assert started["parent"] == "checkpoints/c/step-6"
    assert started["new_partitions"] == ["dt=2026-01-02"] and started["old_partitions"] == ["dt=2026-01-01"]
    new, replayed = re.findall(r"(\d+) new and (\d+) replayed groups of up to 2 samples", cycle.said.getvalue())[-1]
    assert int(replayed) == pytest.approx(0.25 * int(new), abs=1), "a fifth of all"
    state = cycle.open(outcome.step).state
    assert state.watermark == "2026-01-02" and set(state.partitions) == {"dt=2026-01-01", "dt=2026-01-02"}
    assert state.parent is not None and state.parent.digest == parent.digest


def test_a_run_goes_on_with_the_moments_of_its_parent(tmp_path: Path) -> None:
    """As if its steps were those of one run; also after a stop. Else, moments start at zero."""
    ends, changes = {}, {}
    for name in ("whole", "stopped", "small", "none"):
        (tmp_path / name).mkdir()
        cycle = Cycle(tmp_path / name)
        cycle.partition(1, ROWS)
        cycle.run()
        parent = cycle.open(6)
        assert parent.state.earlier_steps == 0
        file = parent.folder / "optimizer.safetensors"
        if name == "small":  # such large squares that only weights without a gradient so far can move
            moments = load_file(file)
            save_file({key: one * (1e12 if "sq" in key else 1) for key, one in moments.items()}, file)
        elif name == "none":
            save_file({"guard": load_file(file)["guard"]}, file)
        cycle.partition(2, ROWS)
        cycle.name, cycle.train = "next", CONFIG.model_copy(update={"start": "incumbent"})
        if name == "stopped":
            cycle.stop_at(EventName.CHECKPOINT_SAVED, 3, parent)
        cycle.run(parent)
        ends[name] = cycle.open(6)
        before, after = parent.weights(), ends[name].weights()
        changes[name] = sum(float((after[key] - before[key]).abs().sum()) for key in before)
        assert ends[name].state.earlier_steps == (0 if name == "none" else 6)
        steps = [fields["step"] for event, fields in cycle.events if event == EventName.TRAIN_STEPS]
        assert steps[-1] == 6, "steps are those of the run"
        cycle.partition(3, ROWS)
        cycle.name = "third"
        cycle.run(ends[name])
        assert cycle.open(6).state.earlier_steps == (6 if name == "none" else 12)
    assert changes["small"] < 0.1 * changes["whole"]
    assert same_weights(ends["stopped"], ends["whole"]) and not same_weights(ends["none"], ends["whole"])


@pytest.mark.parametrize(("width", "is_kept"), [(5, True), (6, False), (0, False)])
def test_a_run_goes_on_with_the_projection_of_its_parent_if_it_has_the_same_size(width: int, is_kept: bool) -> None:
    """Its moments are those of this projection. A parent that had no teacher (0) has none."""
    parent, child = (build_model(MODEL, SPEC, seed) for seed in (1, 2))
    child.add_projection(5, 2)
    if width:
        parent.add_projection(width, 1)
    loaded = dict[str, torch.Tensor]()
    program = SimpleNamespace(
        strategy=SimpleNamespace(template=child.state_dict()),
        start_from=lambda weights, optimizer: loaded.update(weights) or True,
    )
    state, weights = SimpleNamespace(earlier_steps=0, step=6), to_hf(parent.state_dict())
    checkpoint = SimpleNamespace(weights=lambda: weights, optimizer=dict, prefix="p", state=state)
    new = {"teacher.weight": child.state_dict()["teacher.weight"]}
    saver = Saver(*cast(Any, (program, None, None, None, None, b"", print, new)))
    assert saver.start_from(cast(Any, checkpoint)) == 6
    expected = weights["teacher.weight"] if is_kept else new["teacher.weight"]
    assert torch.equal(loaded["teacher.weight"], expected)


def test_published_weights_are_named_wherever_a_run_starts(cycle: Cycle, tmp_path: Path) -> None:
    """Also after a stop, by the cycles that go on with the model, and in its lineage; not by a run from scratch."""
    cycle.run()
    assert cycle.open(6).state.published is None and " | from scratch | " in cycle.said.getvalue()
    assert lineage(cycle.storage, "checkpoints/c/step-6")[-1].published == ""
    published = tmp_path / "published"
    published.mkdir()
    encoder = {name: one for name, one in cycle.open(6).weights().items() if name.startswith("bert.")}
    save_file(encoder, published / "model.safetensors")
    sha256 = hashlib.sha256((published / "model.safetensors").read_bytes()).hexdigest()
    expected = PublishedWeights(uri=(published / "model.safetensors").as_uri(), sha256=sha256)
    cycle.name, cycle.model = "first", MODEL.model_copy(update={"init_from": str(published)})
    cycle.stop_at(EventName.CHECKPOINT_SAVED, 3)
    save_file({name: one + 1 for name, one in encoder.items()}, published / "model.safetensors")  # another one by now
    cycle.run()
    assert cycle.said.getvalue().count(f" | from {expected.text} | ") == 2
    parent = cycle.open(6)
    assert parent.state.published == expected
    cycle.partition(2, ROWS)
    cycle.name, cycle.model = "next", MODEL
    assert cycle.open(cycle.run(parent).step).state.published == expected
    assert f" | from checkpoints/first/step-6 (originally {expected.text}) | " in cycle.said.getvalue()
    names = [one.published for one in lineage(cycle.storage, "checkpoints/next/step-6")]
    assert names == ["", expected.text]


def test_a_new_partition_without_holdout_rows_is_judged_on_the_older_ones(cycle: Cycle) -> None:
    cycle.run()
    parent = cycle.open(6)
    cycle.partition(2, {"train": (20, 20)})
    cycle.name = "next"
    outcome = cycle.run(parent)
    assert outcome.holdouts["valid"].rows == 20


def test_no_holdout_at_all_fails_before_training(tmp_path: Path) -> None:
    cycle = Cycle(tmp_path)
    cycle.partition(1, {"train": (20, 20)})
    with pytest.raises(DataError, match="no prepared partition has a row in the validation split"):
        cycle.run()
    assert not cycle.losses()


@pytest.mark.parametrize("metric", ["ndcg", "retrieval_ndcg", "combined"])
def test_a_holdout_without_gains_fails_before_training_where_the_metric_is_of_gains(
    tmp_path: Path, metric: str
) -> None:
    cycle = Cycle(tmp_path, CONFIG.model_copy(update={"metric": metric}))
    cycle.partition(1, {"train": (20, 20), "valid": (6, 6)})
    plain = TokenRows.read

    def graded_zero(rows: TokenRows, *asked: Any) -> Any:
        found = plain(rows, *asked)
        is_valid = sum(rows.sizes) == 12
        return {**found, "gain": found["gain"] * 0} if is_valid and "gain" in found else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenRows, "read", graded_zero)
        with pytest.raises(DataError, match=f"{metric} is undefined on the validation split") as caught:
            cycle.run()
        assert not cycle.losses()
        assert "--train.metric accuracy" in caught.value.next_command
        assert "a different --cycle NAME" in caught.value.next_command
        cycle.train = CONFIG
        cycle.run()


NAN = float("nan")


@pytest.mark.parametrize(
    ("loss", "ndcg", "error"), [(1.0, NAN, DataError), (NAN, NAN, NumericError), (NAN, 0.7, NumericError)]
)
def test_a_metric_that_is_no_number_at_the_end_costs_no_step(
    cycle: Cycle, monkeypatch: pytest.MonkeyPatch, loss: float, ndcg: float, error: type[TrnpipeError]
) -> None:
    """The holdout cannot give it, or the scores are not finite, which a metric need not show."""
    cycle.train = CONFIG.model_copy(update={"metric": "ndcg", "evaluate_every": 0})
    figures = HoldoutFigures(rows=1, loss=loss, accuracy=1.0, macro_f1=1.0, positive_f1=1.0, ndcg=ndcg)
    monkeypatch.setattr("pipeline.train.loop.evaluate_holdout", lambda *given, **more: figures)
    with pytest.raises(error):
        cycle.run()
    assert 6 in cycle.steps()


@pytest.mark.parametrize("metric", ["retrieval_ndcg", "combined"])
def test_the_best_checkpoint_may_be_named_by_retrieval(cycle: Cycle, metric: str) -> None:
    cycle.train = CONFIG.model_copy(update={"metric": metric})
    outcome = cycle.run()
    best = cycle.open(6).state.best
    assert best is not None and (best.metric, best.step) == (metric, outcome.step)
    assert 0 < best.value <= 1


@pytest.mark.parametrize(("patience", "steps"), [(1, 2), (None, 7)])  # the default: half of the run
def test_training_ends_when_it_no_longer_gets_better_and_a_resume_agrees(
    cycle: Cycle, patience: int | None, steps: int
) -> None:
    cycle.train = CONFIG.model_copy(update={"patience": patience, "evaluate_every": 1, "max_steps": 12})
    cycle.train = cycle.train.model_copy(
        update={"optimizer": cycle.train.optimizer.model_copy(update={"learning_rate": 1e-12})}
    )
    outcome = cycle.run()  # nothing is learnt, so nothing gets better than the first evaluation
    assert (outcome.step, outcome.steps_done) == (1, steps)
    assert cycle.said.getvalue().count(f"valid at step {steps}:") == 1
    events = len(cycle.losses())
    again = cycle.run()
    assert (again.step, again.steps_done) == (1, steps)
    assert len(cycle.losses()) == events  # no step more


@pytest.mark.parametrize("every_steps", [2, 3])  # a checkpoint is due at the last step, or not
def test_a_deadline_already_past_finishes_with_what_there_is(cycle: Cycle, every_steps: int) -> None:
    cycle.every_steps = every_steps
    past = {"deadline": datetime(2020, 1, 1, tzinfo=UTC), "on_deadline": "finish", "evaluate_every": 0}
    cycle.train = CONFIG.model_copy(update=past)
    outcome = cycle.run()
    assert outcome.late and outcome.steps_done == 2
    best = cycle.open(outcome.step).state.best
    assert best is not None and best.step == outcome.step == 2
