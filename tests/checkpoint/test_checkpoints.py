"""Saving, verifying, passing over and pruning checkpoints, on a real folder."""

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.checkpoint.save import CheckpointWriter, Snapshot, steps_to_delete
from pipeline.checkpoint.store import (
    OPTIMIZER,
    STATE,
    TOKENIZER,
    WEIGHTS,
    Best,
    CheckpointStore,
    Parent,
    TrainState,
    open_checkpoint,
    prefix_of,
)
from pipeline.core.errors import CheckpointError, DataError, TransientError, TrnpipeError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.io import atomic
from pipeline.io.commit import commit_dir
from pipeline.io.storage import open_storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import from_hf, to_hf
from pipeline.model.relevance import build_model
from pipeline.telemetry.events import EventName
from pipeline.train.config import CheckpointConfig
from tests.kit.states import train_state

CYCLE = "2026-01-01"
SPEC = InputSpec(vocab_size=20, pad_id=0, labels=("niedrig", "größer"), label_gains=(0.0, 1.0))
MODEL = ModelConfig(hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8, interaction_size=4, mlp_sizes=(8,))


def state_at(step: int, best: int | None = None, **changes: Any) -> TrainState:
    fields: dict[str, Any] = {
        "cycle": CYCLE,
        "model": MODEL,
        "inputs": SPEC,
        "watermark": CYCLE,
        "partitions": {"dt=2026-01-01": "abc"},
        "parent": Parent(uri="checkpoints/0/step-9", digest="d", cycle="0", step=9),
        "best": None if best is None else Best(step=best, metric="accuracy", value=0.1 + 0.2),
    }
    return train_state(step=step, **fields | changes)


def snapshot(step: int, best: int | None = None, **changes: Any) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    optimizer = {"guard": torch.randn(5, generator=generator), "exp_avg.decayed": torch.randn(100, generator=generator)}
    return Snapshot(
        state_at(step, best, **changes), to_hf(build_model(MODEL, SPEC, step).state_dict()), optimizer, "{}", b"tokens"
    )


@dataclass
class Place:
    """A workspace with a store and a writer; events on record."""

    folder: Path
    config: CheckpointConfig = CheckpointConfig()  # noqa: RUF009 - frozen
    events: list[tuple[EventName, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storage = open_storage(str(self.folder / "workspace"))
        self.store = CheckpointStore(self.storage, CYCLE, cache_dir=self.folder / "cache", emit=self._emit)
        self.writer = CheckpointWriter(self.store, self.config, self.folder / "staging")

    def _emit(self, name: EventName, **fields: object) -> None:
        self.events.append((name, dict(fields)))

    def save(self, step: int, best: int | None = None) -> None:
        self.writer.submit(snapshot(step, best))
        self.writer.wait()

    def path(self, step: int, name: str) -> Path:
        return self.folder / "workspace" / prefix_of(CYCLE, step) / name

    def names(self) -> list[EventName]:
        return [name for name, _ in self.events]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left
    )


def test_what_was_saved_comes_back_bit_by_bit(place: Place) -> None:
    place.save(7, best=5)
    checkpoint, rejected = place.store.newest_valid()
    assert checkpoint is not None and rejected == []
    saved = snapshot(7, best=5)
    assert checkpoint.state == saved.state  # umlauts and 0.1 + 0.2 included
    assert same(checkpoint.weights(), dict(saved.weights))
    assert same(checkpoint.optimizer(), dict(saved.optimizer))
    assert checkpoint.tokenizer() == b"tokens"
    model = build_model(MODEL, SPEC, 99).state_dict()
    assert same(from_hf(checkpoint.weights(), model, source="x"), build_model(MODEL, SPEC, 7).state_dict())
    ((name, fields),) = place.events
    assert name == EventName.CHECKPOINT_SAVED and fields["step"] == 7 and fields["size_bytes"] > 1000
    assert place.writer.last_saved == 7 and not any((place.folder / "staging").iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.fault
@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE, TOKENIZER, MANIFEST_NAME])
@pytest.mark.parametrize("damage", [flip, cut, remove])
def test_a_damaged_newest_is_reported_and_the_one_before_used(place: Place, name: str, damage: Any) -> None:
    place.save(1)
    place.save(2)
    place.events.clear()
    damage(place.path(2, name))
    checkpoint, rejected = place.store.newest_valid()
    assert checkpoint is not None and checkpoint.state.step == 1
    if name == MANIFEST_NAME and damage is remove:
        assert rejected == [] and place.store.steps() == [1]  # never committed, as far as anybody can tell
        return
    assert len(rejected) == 1 and "step-2" in rejected[0]
    ((event, fields),) = place.events
    assert event == EventName.CHECKPOINT_REJECTED
    assert fields == {"step": 2, "reason": rejected[0]}


def test_steps_are_numbers_not_words(place: Place) -> None:
    for step in (9, 100, 20):
        place.save(step)
    foreign = place.path(100, "x").parent.parent / "step-007x"
    foreign.mkdir()
    (foreign / MANIFEST_NAME).write_bytes(b"{}")
    place.path(100, "x").parent.parent.joinpath("step-5").mkdir()  # empty: no marker
    assert place.store.steps() == [9, 20, 100]
    checkpoint, _ = place.store.newest_valid()
    assert checkpoint is not None and checkpoint.state.step == 100


def test_retention(tmp_path: Path) -> None:
    place = Place(tmp_path, CheckpointConfig(keep_last=1, keep_every_steps=3))
    asked: list[list[int]] = []

    def in_use() -> frozenset[str]:
        asked.append(place.store.steps())
        return frozenset({prefix_of(CYCLE, 1), prefix_of("another", 2)})

    place.writer = CheckpointWriter(place.store, place.config, tmp_path / "staging", in_use=in_use)
    for step in range(1, 7):
        place.save(step, best=2)
    assert place.store.steps() == [1, 2, 3, 6], "in use, the best, a multiple, the newest"
    deleted = [fields["step"] for name, fields in place.events if name == EventName.CHECKPOINT_DELETED]
    assert deleted == [4, 5]
    assert asked[-1] == [1, 2, 3, 5, 6], "before anything goes"


@pytest.mark.fault
@pytest.mark.parametrize("error", [CheckpointError, DataError, TransientError])
def test_nothing_goes_while_it_is_not_known_what_is_in_use(tmp_path: Path, error: type[TrnpipeError]) -> None:
    place = Place(tmp_path, CheckpointConfig(keep_last=1))

    def in_use() -> frozenset[str]:
        raise error("the pointer is damaged")

    place.writer = CheckpointWriter(place.store, place.config, tmp_path / "staging", in_use=in_use)
    for step in (1, 2):
        place.save(step)
    assert place.store.steps() == [1, 2] and place.writer.last_saved == 2 and place.writer.failure == ""
    name, fields = place.events[-1]
    assert name == EventName.CHECKPOINT_FAILED and "the pointer is damaged" in fields["reason"]


@pytest.mark.fault
def test_two_cycles_that_save_the_same_step_at_once_have_each_their_own(tmp_path: Path) -> None:
    """They share the scratch folder of the machine."""
    storage, config = open_storage(str(tmp_path / "workspace")), CheckpointConfig()
    made = {cycle: replace(snapshot(5), state=state_at(5, cycle=cycle)) for cycle in ("a", "b")}

    def writer(cycle: str, before_commit: Callable[[], None]) -> CheckpointWriter:
        store = CheckpointStore(storage, cycle, cache_dir=tmp_path / "cache", emit=lambda name, **fields: None)
        return CheckpointWriter(store, config, tmp_path / "staging", before_commit)

    def save(writer: CheckpointWriter, cycle: str) -> None:
        writer.submit(made[cycle])
        writer.wait()
        assert writer.last_saved == 5 and writer.failure == ""

    other = writer("b", lambda: None)
    save(writer("a", lambda: save(other, "b")), "a")
    for cycle in ("a", "b"):
        assert open_checkpoint(storage, prefix_of(cycle, 5), tmp_path / "opened").state.cycle == cycle


@pytest.mark.fault
def test_a_damaged_later_step_does_not_push_out_good_ones(tmp_path: Path) -> None:
    """The run went back to step 1 because step 3 is damaged; keeping the newest must not mean keeping only that."""
    place = Place(tmp_path, CheckpointConfig(keep_last=1))
    place.save(3)
    flip(place.path(3, WEIGHTS))
    place.save(2)
    checkpoint, _ = place.store.newest_valid()
    assert checkpoint is not None and checkpoint.state.step == 2


def test_saving_a_step_again_changes_nothing(place: Place) -> None:
    place.save(4)
    before = {path.name: path.stat().st_mtime_ns for path in place.path(4, "x").parent.iterdir()}
    place.save(4)
    assert {path.name: path.stat().st_mtime_ns for path in place.path(4, "x").parent.iterdir()} == before
    assert place.writer.last_saved == 4 and place.writer.failure == ""


@pytest.mark.parametrize("in_use", [False, True])
def test_a_step_that_was_saved_before_it_was_evaluated_gets_its_temperature(place: Place, in_use: bool) -> None:
    """Unless it was promoted in the meantime, because its digest must not change then."""
    place.save(4)
    place.writer.in_use = lambda: {prefix_of(CYCLE, 4)} if in_use else set()
    place.writer.submit(snapshot(4, temperature=2.0))
    place.writer.wait()
    assert place.store.open(4).state.temperature == (1.0 if in_use else 2.0) and place.writer.last_saved == 4


@pytest.fixture
def full_disk() -> Iterator[Any]:
    """No file may grow beyond 500 bytes, as far as the kernel is concerned."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault
def test_a_full_disk_does_not_cost_the_checkpoint_that_gets_a_temperature(place: Place, full_disk: Any) -> None:
    place.save(4)
    full_disk()
    place.writer.submit(snapshot(4, temperature=2.0))
    place.writer.wait()
    assert place.writer.failure and place.store.open(4).state.temperature == 1.0


@pytest.mark.fault
def test_a_full_disk_is_an_event_and_the_last_good_one_stays(place: Place, full_disk: Any) -> None:
    place.save(1)
    full_disk()
    place.save(2)  # raises nothing: the run goes on
    assert place.names() == [EventName.CHECKPOINT_SAVED, EventName.CHECKPOINT_FAILED]
    assert place.writer.failure and place.writer.last_saved == 1
    assert place.store.steps() == [1]
    assert not any((place.folder / "staging").iterdir())


@pytest.mark.fault
def test_an_unwritable_place_is_an_event_and_saving_works_again_afterwards(place: Place) -> None:
    place.save(1)
    blocker = place.path(2, "x").parent
    blocker.write_text("a file where the folder should go")
    place.save(2)
    assert place.names()[-1] == EventName.CHECKPOINT_FAILED and "step-2" in place.writer.failure
    checkpoint, _ = place.store.newest_valid()
    assert checkpoint is not None and checkpoint.state.step == 1
    blocker.unlink()
    place.save(3)
    assert place.writer.failure == "" and place.store.steps() == [1, 3]


def test_a_bug_in_saving_is_raised_by_wait(place: Place) -> None:
    broken = snapshot(1)
    object.__setattr__(broken, "optimizer", {"x": "not a tensor"})
    place.writer.submit(broken)
    with pytest.raises((ValueError, AttributeError, TypeError)):
        place.writer.wait()
    place.writer.wait()  # told once
    place.save(2)
    assert place.store.steps() == [2]


def test_a_later_schema_is_refused(place: Place) -> None:
    later = snapshot(1)
    object.__setattr__(later, "state", state_at(1, schema_version=2))
    place.writer.submit(later)
    place.writer.wait()
    with pytest.raises(CheckpointError, match="schema 2"):
        place.store.open(1)


def test_a_folder_of_another_kind_is_no_checkpoint(place: Place) -> None:
    (place.folder / "tokens").mkdir()
    commit_dir(place.storage, place.folder / "tokens", prefix_of(CYCLE, 3), kind="tokens", fields={})
    with pytest.raises(CheckpointError, match="is not a committed checkpoint"):
        place.store.open(3)
    assert place.store.newest_valid()[0] is None


@pytest.mark.fault
def test_a_half_deleted_checkpoint_is_not_taken_for_whole(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.save(1)
    place.save(2)

    def killed(prefix: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place.storage, "delete_prefix", killed)
    with pytest.raises(KeyboardInterrupt):
        place.store.delete(2)
    assert place.path(2, WEIGHTS).exists() and place.store.steps() == [1]


def test_leftovers_of_a_killed_attempt_do_no_harm(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "SWEEP_MIN_AGE_S", -1.0)
    leftovers = atomic.temp_path_for(place.folder / "staging" / "step")
    leftovers.mkdir(parents=True)
    (leftovers / "half").write_bytes(b"x")
    half_committed = place.path(3, WEIGHTS)
    half_committed.parent.mkdir(parents=True)
    half_committed.write_bytes(b"half")
    place.save(3)
    assert place.store.steps() == [3]
    assert not (half_committed.parent / "half").exists()
    assert not leftovers.exists()


def test_last_best_and_multiples_stay() -> None:
    gone = steps_to_delete(range(10, 101, 10), keep_last=2, keep_every_steps=40, best_step=30)
    assert gone == (10, 20, 50, 60, 70)
    assert steps_to_delete([], keep_last=1, keep_every_steps=0, best_step=None) == ()
    assert steps_to_delete([5], keep_last=3, keep_every_steps=0, best_step=99) == ()


@given(st.sets(st.integers(0, 500)), st.integers(1, 5), st.integers(0, 50), st.none() | st.integers(0, 500))
def test_the_newest_and_the_best_are_never_deleted(steps: set[int], last: int, every: int, best: int | None) -> None:
    gone = set(steps_to_delete(steps, keep_last=last, keep_every_steps=every, best_step=best))
    assert gone <= steps
    assert not gone & set(sorted(steps)[-last:])
    assert best not in gone
    # Applying it again deletes nothing more.
    assert not steps_to_delete(steps - gone, keep_last=last, keep_every_steps=every, best_step=best)
