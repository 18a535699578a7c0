"""`trnpipe parity`: sides recorded and compared, what it refuses, what a stop leaves, and what an error does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.commands import ToolCall
from pipeline.commands import parity as command
from pipeline.commands.parity import (
    RECORD,
    ParityReport,
    RecordedSide,
    compare_sides,
    load_side,
    make_task,
    record,
)
from pipeline.context import StageResult, open_context, store_result
from pipeline.core.errors import EXIT_OK, CheckpointError, ConfigError, DataError, GateRefused
from pipeline.core.stop import StopSignal
from pipeline.evaluate import score
from pipeline.evaluate.config import ParityConfig
from pipeline.io.commit import commit_dir
from pipeline.io.storage import open_storage
from pipeline.model import encoder, ops
from pipeline.model.hf import from_hf
from pipeline.settings import LogConfig, Settings
from pipeline.telemetry.events import EventLog, EventName
from pipeline.train import build, optimizer, stream
from pipeline.train.build import open_run
from pipeline.train.inputs import gather_inputs
from pipeline.train.loop import train
from tests.backends.xla_process import FAST_COMPILE, needs_xla
from tests.train.rows import MODEL, TRAIN, write_token_set

pytestmark = pytest.mark.stage

CYCLE = "c1"
ROWS = {"train": (60, 60), "valid": (40, 40), "test": (6, 6)}
PARITY = ParityConfig(steps=12, max_difference=0.5)


@dataclass(frozen=True)
class Case:
    """A workspace with prepared rows and a trained candidate, and the settings its sides are recorded with."""

    folder: Path
    settings: Settings

    def side(self, side: str = "cpu:fp32", place: str = "", **changes: Any) -> RecordedSide:
        """Record a side in this process, and read it."""
        settings = self.settings.model_copy(update=changes)
        with open_context(settings, StopSignal(), {}) as ctx:
            task = make_task(settings, ctx, side, place and f"{self.folder}/{place}")
        record(torch.get_num_threads(), task)
        return load_side(open_storage(task.uri), self.folder / "cache")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("parity")
    workspace, staging = folder / "workspace", folder / "staging"
    settings = Settings(
        workspace=str(workspace), cycle=CYCLE, model=MODEL, train=TRAIN, parity=PARITY, log=LogConfig(every_steps=2)
    )
    storage = open_storage(str(workspace))
    staging.mkdir()
    info = write_token_set(staging, ROWS, partition="flat", fingerprint="print")
    commit_dir(storage, staging, "tokens/d/print", kind="tokens", fields=info.model_dump(mode="json"))
    storage.write_bytes("tokens/d/tokenizers/tok/tokenizer.json", b"{}")
    now = datetime.now(UTC)

    def store(stage: str, outputs: dict[str, str]) -> None:
        times = {"started": now, "finished": now}
        result = {"stage": stage, "cycle": CYCLE, "status": "done", "inputs": {}, "outputs": outputs}
        store_result(storage, StageResult(**result, **times, settings_hash="h", code_version="v"))  # type: ignore[arg-type]

    store("prepare", {"token_set_0000": "tokens/d/print", "tokenizer": "tokens/d/tokenizers/tok"})
    on_cpu = settings.model_copy(update={"backend": "cpu"})
    inputs = gather_inputs(storage, ["tokens/d/print"], None, TRAIN, MODEL)
    with open_context(on_cpu, StopSignal(), {}) as ctx, open_run(on_cpu, ctx, inputs, b"{}") as opened:
        store("train", {"checkpoint": train(opened).prefix})
    return Case(folder, settings)


@pytest.fixture(scope="module")
def good(case: Case) -> RecordedSide:
    return case.side()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(case: Case, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, with sides in this process."""

    def here(function: Callable[..., object], context: int, tasks: Iterator[Any], **more: object) -> list[object]:
        return [function(context, task) for task in tasks]

    def run(*words: str, to: str = "", **parity: object) -> int:
        settings = case.settings.model_copy(update={"parity": PARITY.model_copy(update=parity)})
        call = ToolCall(arguments=words, options={"--to": to} if to else {})
        return command.run(settings, StopSignal(), said.append, call)

    monkeypatch.setattr(command, "run_tasks", here)
    return run


def test_a_record_is_whole(good: RecordedSide) -> None:
    made, arrays = good.record, good.arrays
    assert [one.step for one in made.evaluations] == [0, 2, 4, 6, 8, 10, 12]
    assert len(made.curve.losses) == len(made.curve.samples) == PARITY.steps
    assert (made.name, made.device, made.metric) == ("cpu.fp32", "cpu", "accuracy")
    assert len(arrays["sample_id"]) == sum(ROWS["valid"]) == len(arrays["query"])
    np.testing.assert_allclose(np.linalg.norm(arrays["product"], axis=1), 1, rtol=1e-5)
    assert made.evaluations[0].metric == pytest.approx((arrays["logits"].argmax(1) == arrays["label"]).mean())
    assert list(open_storage(good.uri).list("work/checkpoints")) == [], "they were only to continue from"


def test_two_sides_are_compared_and_those_too_far_apart_refused(
    case: Case, run: Callable[..., int], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("cpu", "cpu:bf16") == EXIT_OK
    folder = open_storage(case.settings.workspace)
    key = f"cycles/{CYCLE}/parity/cpu.fp32-cpu.bf16/parity.json"
    report = ParityReport.model_validate_json(folder.read_bytes(key))
    assert not report.failed and said[-1] == f"report {folder.uri(key)}"
    value = report.value("probability")
    assert value is not None and 0 < value < 0.3
    monkeypatch.setitem(command.BARS, "probability", (0.0, 0.0))
    with pytest.raises(GateRefused, match="maximum difference in a probability"):
        run("cpu", "cpu:bf16")


def test_a_side_recorded_elsewhere_is_compared_and_not_computed_again(
    good: RecordedSide, run: Callable[..., int], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`good` is the side of the workspace that it is compared with."""
    there = str(tmp_path / "there")
    assert run("cpu", to=there) == EXIT_OK
    assert said[-1] == f"to compare it with a different side: trnpipe parity file://{there} SIDE"
    monkeypatch.setattr(command, "open_run", lambda *args: pytest.fail("computed again"))
    assert run("cpu", to=there) == EXIT_OK
    assert run(there, "cpu") == EXIT_OK
    with pytest.raises(ConfigError, match=r"already contains cpu\.fp32 of run"):
        run("cpu", to=there, steps=6)


@pytest.mark.parametrize(
    ("words", "to"),
    [
        (("cpu", "cpu"), ""),
        (("cpu", "cpu:fp32"), ""),
        (("gpu",), ""),
        (("cpu", "xla"), "there"),
        (("cpu:fp64", "xla"), ""),
    ],
)
def test_what_cannot_be_meant_is_refused(run: Callable[..., int], words: tuple[str, ...], to: str) -> None:
    with pytest.raises(ConfigError):
        run(*words, to=to)


def test_what_is_missing_is_found_before_anything_is_computed(
    case: Case, run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_tasks", lambda *args, **more: pytest.fail("computed"))
    with pytest.raises(DataError, match="does not contain a complete recorded side"):
        run("cpu", str(tmp_path / "gpu"))
    for checkpoint, error in (("incumbent", ConfigError), ("scratch", ConfigError), (str(tmp_path), CheckpointError)):
        with pytest.raises(error):
            run("cpu", checkpoint=checkpoint)


@pytest.mark.parametrize("damage", ["record", "digest", "arrays"])
def test_a_damaged_record_is_refused(case: Case, tmp_path: Path, damage: str) -> None:
    place = open_storage(case.side(place=damage).uri)
    data = place.read_bytes(RECORD)
    key = next(stat.key for stat in place.list("arrays") if stat.key.endswith(".safetensors"))
    if damage == "arrays":
        place.write_bytes(key, place.read_bytes(key)[:-1] + b"x")
    else:
        place.write_bytes(RECORD, b"{}" if damage == "record" else data.replace(b'"scores": "', b'"scores": "0'))
    with pytest.raises(DataError):
        load_side(place, tmp_path / "cache")


@pytest.mark.parametrize(("event", "step"), [(EventName.TRAIN_STARTED, 0), (EventName.HOLDOUT_EVALUATED, 6)])
def test_a_side_that_is_killed_goes_on_and_ends_the_same(
    case: Case, good: RecordedSide, monkeypatch: pytest.MonkeyPatch, event: EventName, step: int
) -> None:
    emit = EventLog.emit

    def fail(self: EventLog, name: EventName, /, **fields: object) -> None:
        emit(self, name, **fields)
        if (name, fields.get("step")) == (event, step):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "emit", fail)
        with pytest.raises(KeyboardInterrupt):
            case.side(place=f"killed-{step}")
    ended = case.side(place=f"killed-{step}").record
    assert (ended.evaluations, ended.curve) == (good.record.evaluations, good.record.curve)


def test_what_differs_between_devices_by_chance_is_off(case: Case, good: RecordedSide) -> None:
    model = case.settings.model.model_copy(update={"dropout": 0.5})
    assert case.side(place="dropout", model=model).record.curve == good.record.curve
    combined = case.settings.train.model_copy(update={"metric": "combined", "patience": 1})
    assert case.side(place="combined", train=combined).record.metric == "macro_f1"
    with pytest.raises(ConfigError, match="scores of pairs"):
        case.side(train=case.settings.train.model_copy(update={"metric": "retrieval_ndcg"}))


def wrong_epsilon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(encoder, "LayerNorm", lambda width, eps: ops.LayerNorm(width, eps=1e-3))


def dropped_weight(patch: pytest.MonkeyPatch) -> None:
    def without_one(weights: Any, template: Any, *, source: str) -> dict[str, torch.Tensor]:
        name, found = "encoder.layers.0.output.weight", real(weights, template, source=source)
        return {**found, name: torch.zeros_like(found[name])}

    real = from_hf
    for module in (score, build):
        patch.setattr(module, "from_hf", without_one)


def wrong_rate(patch: pytest.MonkeyPatch) -> None:
    rate = optimizer.learning_rate_at
    patch.setattr(stream, "learning_rate_at", lambda *args: 1.3 * rate(*args))


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (wrong_epsilon, {"mean_probability", "first_losses"}),
        (dropped_weight, {"mean_probability", "first_losses", "first_gradients"}),
        (wrong_rate, {"first_losses", "first_gradients"}),
    ],
)
def test_a_seeded_error_is_found(
    case: Case,
    good: RecordedSide,
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[pytest.MonkeyPatch], None],
    found: set[str],
) -> None:
    with monkeypatch.context() as patch:
        error(patch)
        bad = case.side(place=error.__name__)
    assert {check.name for check in compare_sides(good, bad, PARITY).failed} >= found


@needs_xla
def test_xla_in_a_process_of_its_own_agrees_with_the_cpu(
    case: Case, good: RecordedSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PJRT_DEVICE": "CPU", "XLA_FLAGS": FAST_COMPILE}.items():
        monkeypatch.setenv(name, value)
    call = ToolCall(arguments=(good.uri, "xla"), options={})
    said = list[str]()
    settings = case.settings.model_copy(update={"parity": ParityConfig(steps=12)})
    assert command.run(settings, StopSignal(), said.append, call) == EXIT_OK
    assert "parity of A cpu.fp32 and B xla.fp32" in said[0]
