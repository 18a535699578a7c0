"""The guard and the recorder, with made-up graphs."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.compile.manifest import GraphManifest, GraphPosition, Guard, PlanValue, Recorder, plan_differences
from pipeline.core.errors import ConfigError

PLAN: dict[str, PlanValue] = {
    "device": "xla:CPU",
    "flags": "",
    "versions": {},
    "world_size": 1,
    "train.micro_batch_size": 4,
}
STEP = GraphPosition("step", "16x16", 4)


def traced(text: str) -> Any:
    return [text]


def hlo(rows: int = 4, op: str = "add") -> str:
    return f"""HloModule Sync.{rows}, entry_computation_layout={{(f32[{rows},2]{{1,0}})->f32[{rows},2]{{1,0}}}}

ENTRY %Sync.{rows} (p0.1: f32[{rows},2]) -> f32[{rows},2] {{
  %p0.1 = f32[{rows},2]{{1,0}} parameter(0)
  ROOT %{op}.2 = f32[{rows},2]{{1,0}} {op}(f32[{rows},2]{{1,0}} %p0.1, f32[{rows},2]{{1,0}} %p0.1)
}}
"""


class Backend:
    """A device whose "tensors" are the text of their graph."""

    compiles_steps = False

    def __init__(self) -> None:
        self.count, self.seconds, self.looks = 0, 0.0, 0

    def graph_hash(self, tensors: Sequence[Any]) -> str:
        self.looks += 1
        return hashlib.sha256(tensors[0].encode()).hexdigest()

    def hlo_text(self, tensors: Sequence[Any]) -> str:
        return str(tensors[0])

    def compile_count(self) -> int:
        return self.count

    def compile_seconds(self) -> float:
        return self.seconds


def recorded(*texts: str) -> GraphManifest:
    counters = Backend()
    met = list[int]()
    recorder = Recorder(counters, PLAN, on_graph=lambda number, position: met.append(number))
    for text in texts:
        recorder.before(STEP, traced(text))
        counters.count, counters.seconds = counters.count + 1, counters.seconds + 2.0
        recorder.after(STEP)
    assert not recorder.extra_compiles
    assert met == list(range(1, len(set(texts)) + 1)), "once for every graph, before it is compiled"
    return GraphManifest(plan=PLAN, graphs=tuple(recorder.graphs.values()))


def test_every_different_graph_is_noted_once_with_its_seconds() -> None:
    manifest = recorded(hlo(), hlo(8), hlo())
    assert [(graph.compiles, graph.compile_s) for graph in manifest.graphs] == [(2, 4.0), (1, 2.0)]
    assert GraphManifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_more_compiled_than_was_looked_at_is_noted() -> None:
    counters = Backend()
    recorder = Recorder(counters, PLAN)
    recorder.before(STEP, traced(hlo()))
    counters.count += 2
    recorder.after(STEP)
    assert recorder.extra_compiles == ["step of 4 x 16x16 tokens"]
    counters.count += 1  # between two cuts: a value was read, which ends a graph of its own
    recorder.before(STEP, traced(hlo()))
    assert recorder.extra_compiles[1:] == ["step of 4 x 16x16 tokens, before its graph"]


def test_a_known_graph_passes_and_is_read_a_few_times_only() -> None:
    backend = Backend()
    guard = Guard(backend, recorded(hlo()), "error", pytest.fail)
    for _ in range(30):
        guard.before(STEP, traced(hlo()))
        guard.after(STEP)
    assert backend.looks == 3


def test_an_unknown_graph_is_refused_with_the_difference_or_warned_of() -> None:
    with pytest.raises(ConfigError) as refused:
        Guard(Backend(), recorded(hlo()), "error", pytest.fail).before(STEP, traced(hlo(op="multiply")))
    assert "step of 4 x 16x16 tokens was not compiled" in refused.value.seen
    assert "+1 multiply f32[4,2]" in refused.value.expected and "-1 add f32[4,2]" in refused.value.expected
    told: list[str] = []
    guard = Guard(Backend(), recorded(hlo()), "warn", told.append)
    guard.before(STEP, traced(hlo(op="multiply")))
    assert guard.unknown == 1 and "was not compiled ahead of time" in told[0]


def test_a_graph_that_changes_later_is_looked_at_once_the_counter_moved() -> None:
    counters = Backend()
    guard = Guard(counters, recorded(hlo()), "error", pytest.fail)
    for _ in range(5):
        guard.before(STEP, traced(hlo()))
        guard.after(STEP)
    looks = counters.looks
    guard.before(STEP, traced(hlo()))
    assert counters.looks == looks, "looked at for no reason"
    counters.count += 1
    guard.after(STEP)
    with pytest.raises(ConfigError, match="was not compiled ahead of time"):
        guard.before(STEP, traced(hlo(op="multiply")))


def test_the_nearest_plan_is_told_by_its_differences() -> None:
    near, far = GraphManifest(plan=PLAN, graphs=()), GraphManifest(plan={"device": "cuda"}, graphs=())
    wanted = {**PLAN, "train.micro_batch_size": 8}
    assert plan_differences(wanted, [far, near]) == ["train.micro_batch_size: compiled 4, now 8"]


# Devices that compile as they go.


class StepBackend(Backend):
    compiles_steps = True


def passed(counters: Backend, watch: Recorder | Guard, compiles: dict[str, int]) -> None:
    """Through places, in order, at which so many programs are compiled."""
    for bucket, count in compiles.items():
        counters.count += count
        watch.after(GraphPosition("step", bucket, 8))


@pytest.mark.parametrize("again", ["16x16", "16x32"])
def test_a_program_may_be_compiled_where_a_place_is_passed_first_and_nowhere_after(again: str) -> None:
    counters = StepBackend()
    recorder = Recorder(counters, {})
    passed(counters, recorder, {"16x16": 3, "16x32": 2})
    assert [graph.compiles for graph in recorder.graphs.values()] == [3, 2]
    manifest = GraphManifest(plan={}, graphs=tuple(recorder.graphs.values()))
    guard = Guard(counters, manifest, "error", print)
    passed(counters, guard, {"16x32": 3, "16x16": 2})  # in another order, after a resume
    with pytest.raises(ConfigError, match=f"after 3 steps, 1 graphs were compiled at step of 8 x {again}"):
        passed(counters, guard, {again: 1})


def test_a_place_that_was_not_met_must_not_compile() -> None:
    counters, said = StepBackend(), list[str]()
    guard = Guard(counters, GraphManifest(plan={}, graphs=()), "warn", said.append)
    passed(counters, guard, {"64x64": 1})
    assert guard.unknown == 1 and "is not in the manifest" in said[0]
