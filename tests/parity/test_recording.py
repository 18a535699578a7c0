"""A side recorded in this process: whole, the same twice, going on after a stop; and what a seeded error does to it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.core.errors import CheckpointError, ConfigError, DataError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.evaluate.score import ScoreProgram
from pipeline.io.storage import open_storage
from pipeline.model import encoder, ops
from pipeline.model.hf import from_hf
from pipeline.model.relevance import RelevanceOutputs
from pipeline.parity import record as scoring
from pipeline.parity.compare import RecordedSide, Side, SideRecord, compare_sides
from pipeline.parity.record import curve_of, evaluations_of, load_side
from pipeline.settings import Settings
from pipeline.telemetry.events import EventLog, EventName
from pipeline.train import build, optimizer, stream
from pipeline.train.step import TrainProgram
from tests.parity.case import CPU, PARITY, ROWS, Case

pytestmark = pytest.mark.stage


@pytest.fixture(scope="module")
def good(case: Case) -> RecordedSide:
    return case.side(case.task())


def test_a_record_is_whole(case: Case, good: RecordedSide) -> None:
    record, scores = good.record, good.scores
    assert [one.step for one in record.evaluations] == [0, 2, 4, 6]
    assert len(record.curve.losses) == len(record.curve.samples) == PARITY.steps
    assert (record.side, record.device, record.metric) == (CPU, "cpu", "accuracy")
    assert "train.precision" not in record.identity
    assert scores.info.rows == len(scores.sample_id) == sum(ROWS["valid"])
    assert scores.vectors is not None
    assert len(scores.vectors.query) == PARITY.vector_rows
    np.testing.assert_allclose(np.linalg.norm(scores.vectors.product, axis=1), 1, rtol=1e-5)
    right = scores.logits.argmax(1) == scores.label
    assert record.evaluations[0].metric == pytest.approx(right.mean())
    place = open_storage(good.uri)
    assert sorted(place.list_dirs("")) == ["scores", "work"]
    assert list(place.list("work/checkpoints")) == [], "what was only to continue from is gone"


def test_a_metric_that_is_half_a_search_is_followed_by_its_other_half(case: Case) -> None:
    """As all presets have it."""
    combined = replace(case, settings=with_metric(case, "combined", patience=1))
    record = combined.record(combined.task(place="combined"))
    assert record.metric == "macro_f1"
    assert [one.step for one in record.evaluations] == [0, 2, 4, 6]
    with pytest.raises(ConfigError, match="scores of pairs"):
        replace(case, settings=with_metric(case, "retrieval_ndcg")).task()


def with_metric(case: Case, metric: str, **train: object) -> Settings:
    changed = case.settings.train.model_copy(update={"metric": metric, **train})
    return case.settings.model_copy(update={"train": changed})


def test_the_same_twice_agrees_to_the_bit_and_is_not_computed_again(case: Case, good: RecordedSide) -> None:
    again = case.side(case.task(place="again"))
    report = compare_sides(good, again, PARITY)
    assert report.passed
    assert {pair.relative for pair in report.compared.evaluations} == {0.0}
    assert (report.compared.curve.max_loss, report.compared.scores.max_probability) == (0.0, 0.0)
    before = again.record.finished
    assert case.record(case.task(place="again")).finished == before


def test_another_precision_is_another_side_of_the_same_run(case: Case, good: RecordedSide) -> None:
    task = case.task(Side("cpu", "bf16"))
    other = case.side(task)
    assert other.record.run == good.record.run
    report = compare_sides(good, other, PARITY)
    assert 0 < report.compared.scores.max_probability < 0.3
    assert report.bars.min_cosine == PARITY.reduced.min_cosine
    assert report.compared.vectors is not None
    assert 0.99 < report.compared.vectors.min_cosine < 1


def zeroed(real: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    def without_one(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
        found = real(weights, template, source=source)
        return found | {name: torch.zeros_like(found[name]) for name in ("encoder.layers.0.output.weight",)}

    return without_one


def wrong_epsilon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(encoder, "LayerNorm", lambda width, eps: ops.LayerNorm(width, eps=1e-3))


def dropped_weight(patch: pytest.MonkeyPatch) -> None:
    for module in (scoring, build):
        patch.setattr(module, "from_hf", zeroed(from_hf))


def wrong_rate(patch: pytest.MonkeyPatch) -> None:
    rate = optimizer.schedule_of
    patch.setattr(stream, "schedule_of", lambda *args: 1.3 * rate(*args))


def half_a_gradient(patch: pytest.MonkeyPatch) -> None:
    """A bias that gets no gradient: only the backward pass is wrong."""
    real = TrainProgram._reduce_and_step

    def step(self: TrainProgram, control: Tensor) -> None:
        assert self._sums is not None
        self._sums[1] = self._sums[1] * (torch.arange(len(self._sums[1])) % 2)
        real(self, control)

    patch.setattr(TrainProgram, "_reduce_and_step", step)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (wrong_epsilon, {"mean_probability", "first_losses"}),
        (dropped_weight, {"mean_probability", "first_losses", "first_gradients"}),
        (half_a_gradient, {"first_losses", "first_gradients"}),
        (wrong_rate, {"first_losses", "first_gradients"}),
    ],
)
def test_a_seeded_error_fails(
    case: Case,
    good: RecordedSide,
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[pytest.MonkeyPatch], None],
    found: set[str],
) -> None:
    error(monkeypatch)
    bad = case.side(case.task(place=error.__name__))
    report = compare_sides(good, bad, PARITY)
    failed = {check.name for check in report.checks if check.outcome == "fail"}
    assert found <= failed
    if error in (half_a_gradient, wrong_rate):
        assert report.compared.scores.max_probability == 0.0, "the checkpoint itself scores the same"


def stop_at(patch: pytest.MonkeyPatch, stop: StopSignal, event: EventName, step: int) -> None:
    emit = EventLog.emit

    def emit_and_stop(self: EventLog, name: EventName, /, **fields: object) -> None:
        emit(self, name, **fields)
        if (name, fields.get("step")) == (event, step):
            stop.set("test")

    patch.setattr(EventLog, "emit", emit_and_stop)


@pytest.mark.parametrize(
    ("event", "step"),
    [(EventName.TRAIN_STARTED, 0), (EventName.TRAIN_STEPS, 2), (EventName.HOLDOUT_EVALUATED, 4)],
)
def test_a_stopped_recording_goes_on_and_ends_the_same(
    case: Case, good: RecordedSide, monkeypatch: pytest.MonkeyPatch, event: EventName, step: int
) -> None:
    task, stop = case.task(place=f"stopped-{event}"), StopSignal()
    with monkeypatch.context() as patch:
        stop_at(patch, stop, event, step)
        with pytest.raises(Preempted):
            case.record(task, stop)
    with pytest.raises(DataError, match="holds no recorded side"):
        load_side(open_storage(task.place), case.folder / "cache")
    ended = case.side(task).record
    assert (ended.evaluations, ended.curve) == (good.record.evaluations, good.record.curve)
    log = open_storage(task.place).read_bytes("work/events.jsonl")
    assert b"train_resumed" in log, "what was done is not done again"


def test_a_stop_while_scoring_goes_on(case: Case, good: RecordedSide, monkeypatch: pytest.MonkeyPatch) -> None:
    task, stop = case.task(place="stopped-scoring"), StopSignal()
    with monkeypatch.context() as patch:
        outputs = ScoreProgram.outputs

        def score(self: ScoreProgram, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
            stop.set("test")
            return outputs(self, batch)

        patch.setattr(ScoreProgram, "outputs", score)
        with pytest.raises(Preempted):
            case.record(task, stop)
    np.testing.assert_array_equal(case.side(task).scores.logits, good.scores.logits)


def test_dropout_is_off_as_devices_draw_other_numbers(case: Case, good: RecordedSide) -> None:
    model = case.settings.model.model_copy(update={"dropout": 0.5})
    other = Case(case.folder, case.settings.model_copy(update={"model": model}))
    record = other.side(other.task(place="dropout")).record
    assert record.curve == good.record.curve


def test_a_place_with_another_record_is_refused(case: Case, good: RecordedSide) -> None:
    task = case.task(steps=5).model_copy(update={"place": good.uri})
    with pytest.raises(ConfigError, match=rf"holds cpu\.fp32 of run {good.record.run}"):
        case.record(task)


def test_what_another_task_has_begun_is_not_taken_over(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stop = case.task(place="begun"), StopSignal()
    with monkeypatch.context() as patch:
        stop_at(patch, stop, EventName.TRAIN_STARTED, 0)
        with pytest.raises(Preempted):
            case.record(begun, stop)
    for other in (case.task(place="begun", steps=5), case.task(Side("cpu", "bf16"), place="begun")):
        with pytest.raises(ConfigError, match=rf"holds cpu\.fp32 of run {begun.run}"):
            case.record(other)
    assert case.record(begun).run == begun.run


def test_a_damaged_checkpoint_is_refused(case: Case, tmp_path: Path) -> None:
    task = case.task(place="damaged")
    root, prefix = task.checkpoint
    source = open_storage(root)
    for name in ("MANIFEST.json", "state.json", "model.safetensors", "config.json", "tokenizer.json"):
        open_storage(str(tmp_path)).write_bytes(f"cp/{name}", source.read_bytes(f"{prefix}/{name}"))
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        case.record(task.model_copy(update={"checkpoint": (f"file://{tmp_path}", "cp")}))


def event(name: EventName, step: int, **fields: Any) -> dict[str, Any]:
    return {"event": str(name), "step": step, **fields}


def steps(last: int, losses: list[float | str]) -> dict[str, Any]:
    names = [f"s{number}" for number in range(last - len(losses) + 1, last + 1)]
    return event(EventName.TRAIN_STEPS, last, losses=losses, grad_norms=losses, samples=names)


def test_steps_made_again_after_a_kill_count_once() -> None:
    curve = curve_of([steps(2, [1.0, 2.0]), steps(4, [3.0, 4.0]), steps(4, [3.5, "nan"]), steps(5, [5.0])])
    assert curve.losses[:3] == (1.0, 2.0, 3.5)
    assert np.isnan(curve.losses[3])
    assert curve.samples == ("s1", "s2", "s3", "s4", "s5")
    with pytest.raises(RuntimeError, match=r"lack steps \[3\]"):
        curve_of([steps(2, [1.0, 2.0]), steps(4, [4.0])])
    evaluated = [
        event(EventName.HOLDOUT_EVALUATED, 4, best=True, accuracy=0.5, loss=1.0),
        event(EventName.HOLDOUT_EVALUATED, 2, best=True, accuracy=0.4, loss=2.0),
        event(EventName.HOLDOUT_EVALUATED, 4, best=False, accuracy=0.6, loss="inf"),
        event(EventName.HOLDOUT_EVALUATED, 4, split="test", accuracy=0.9, loss=0.1),
    ]
    first, last = evaluations_of(evaluated, "accuracy")
    assert (first.step, first.metric) == (2, 0.4)
    assert (last.step, last.metric, last.loss) == (4, 0.6, float("inf"))


def test_what_is_not_finite_survives_the_file(case: Case, good: RecordedSide) -> None:
    bad = good.record.model_copy(
        update={"curve": good.record.curve.model_copy(update={"losses": (float("nan"), float("inf"))})}
    )
    read = SideRecord.model_validate_json(bad.model_dump_json())
    assert np.isnan(read.curve.losses[0])
    assert read.curve.losses[1] == float("inf")
