"""Graphs compiled ahead of time: after `compile`, training meets nothing new, and refuses what was not compiled."""

import json
import re
from collections.abc import Callable

import pytest

from pipeline.compile.manifest import GraphManifest, load_manifests
from tests.backends.xla_process import needs_xla
from tests.fault.harness import ON_XLA, UNJUDGED, Place

pytestmark = [needs_xla, pytest.mark.stage]
TWO_SHAPES = (*ON_XLA, "--data.buckets=12x20,16x32", "--train.max-steps=24", "--train.evaluate-every=10")
ONE_SHAPE = (*ON_XLA, "--train.max-steps=12", "--train.evaluate-every=5")

# Step boundary, accumulation, processes, slots for mined negatives, and how many graphs the
# steps of rows of three lengths are. Two passes have more: the embeddings of each length, all of them where they go
# through the host, the contrastive loss. Mined negatives have none.
MODES = [
    pytest.param("fused", 1, 1, 0, 3, id="fused", marks=pytest.mark.thorough),
    pytest.param("fused", 1, 1, 2, 3, id="fused-mined"),
    pytest.param("split", 4, 1, 3, 11, id="split-accumulating-mined", marks=pytest.mark.thorough),
    pytest.param("fused", 4, 2, 0, 12, id="fused-accumulating-two-processes", marks=pytest.mark.thorough),
    pytest.param("split", 1, 2, 0, 9, id="split-two-processes", marks=pytest.mark.thorough),
]


def manifest_of(place: Place) -> GraphManifest:
    (manifest,) = load_manifests(place.storage)
    return manifest


@pytest.mark.parametrize(("boundary", "accumulation", "processes", "mined", "num_steps"), MODES)
def test_training_meets_only_compiled_graphs(
    place: Callable[..., Place],
    boundary: str,
    accumulation: int,
    processes: int,
    mined: int,
    num_steps: int,
) -> None:
    flags = (
        *TWO_SHAPES,
        "--train.candidates-per-query=2",
        f"--train.mined-per-query={mined}",
        f"--train.step-boundary={boundary}",
        f"--train.micro-batch-size={24 // accumulation // processes}",
        f"--launch.processes={processes}",
    )
    here = place("xla", flags)
    compiled = here.run("compile")
    assert "more than one graph" not in compiled.out + compiled.err
    graphs = manifest_of(here).graphs
    assert len([graph for graph in graphs if graph.phase not in ("start", "evaluate", "embed")]) == num_steps
    said = re.findall(r"^compile: graph (\d+)(?: of about (\d+))?, .* so far$", compiled.out, re.MULTILINE)
    assert [int(number) for number, _ in said] == list(range(1, len(graphs) + 1))
    assert abs(int(said[0][1]) - len(graphs)) <= 2, "a forecast"
    assert {graph.bucket for graph in graphs if graph.phase == "evaluate"} == {"12x20", "16x32"}
    assert {graph.bucket for graph in graphs if graph.phase == "embed"} == {"128", "512"}
    if mined:
        here.run("mine")
    trained = here.run("train")
    assert "compiled ahead of time, manifest" in trained.out + trained.err
    assert here.events("graph_compiled")[-1]["total"] <= len(graphs)
    assert "none is compiled: XLA:CPU cannot keep programs" in compiled.out and not any(
        graph.compiles for graph in graphs
    )
    if boundary == "fused" and accumulation == 1:  # its graphs are the same in every mode
        evaluated = here.run("evaluate", UNJUDGED)
        assert "compiled ahead of time, manifest" in evaluated.out and "generation 1" in evaluated.out
    elif processes > 1:  # what fewer ranks evaluate was compiled by all of them
        evaluated = here.run("evaluate", UNJUDGED, "--launch.processes=1")
        assert "compiled ahead of time, manifest" in evaluated.out and "generation 1" in evaluated.out
    again = here.run("compile")
    assert "already done" in again.out + again.err


def test_a_teacher_of_another_size_and_training_with_it_meet_only_compiled_graphs(place: Callable[..., Place]) -> None:
    here = place("xla", (*ONE_SHAPE, "--train.max-steps=4", "--train.evaluate-every=0"))
    here.run("train", "--model.hidden-size=48")
    flags = (f"--train.teacher={here.result()['outputs']['checkpoint']}", "--train.candidates-per-query=2")
    here.run("prepare", *flags, cycle="c2")
    assert "2 graphs of the teacher" in here.run("compile", *flags, cycle="c2").out  # those of embed
    taught = here.run("teach", *flags, cycle="c2")
    assert "graphs: 2 compiled ahead of time" in taught.out and "warning" not in taught.err
    assert "compiled ahead of time, manifest" in here.run("train", *flags, cycle="c2").out
    assert "already done" in here.run("compile", *flags, cycle="c2").out


@pytest.mark.thorough
def test_shapes_can_come_from_the_settings_alone(bare_place: Callable[..., Place]) -> None:
    here = bare_place("xla", ONE_SHAPE)
    compiled = here.run("compile")
    assert "assuming a vocabulary of 400 tokens, 4 labels, and texts of up to 24 tokens" in compiled.out + compiled.err
    here.run("prepare")
    assert "compiled ahead of time, manifest" in here.run("train").out
    other = here.run("prepare", "--data.tokenizer.vocab-size=300", cycle="c2")
    assert other.process.returncode == 0
    refused = here.run("train", "--data.tokenizer.vocab-size=300", cycle="c2", code=78)
    assert "data.vocab_size: compiled 400, now 300" in refused.err


@pytest.mark.thorough
def test_another_batch_size_is_refused_before_the_first_step(place: Callable[..., Place]) -> None:
    here = place("xla", ONE_SHAPE)
    here.run("compile")
    refused = here.run("train", "--train.micro-batch-size=16", "--train.global-batch-size=16", code=78)
    assert "train.micro_batch_size: compiled 24, now 16" in refused.err
    assert "trnpipe compile" in refused.err
    assert not here.events("train_steps")
    warned = here.run(
        "train", "--train.micro-batch-size=16", "--train.global-batch-size=16", "--compile.on-unknown-graph=warn"
    )
    assert "compiling on demand" in warned.out + warned.err


def test_a_graph_that_is_not_in_the_manifest_is_refused_and_explained(place: Callable[..., Place]) -> None:
    here = place("xla", ONE_SHAPE)
    here.run("compile")
    manifest = manifest_of(here)
    key = f"compile-cache/graphs/{manifest.plan_id}.json"
    known = json.loads(here.storage.read_bytes(key))
    for graph in known["graphs"]:
        if graph["phase"] == "step":
            graph["key"] = "0" * 32
            name = next(name for name in graph["op_counts"] if name.startswith("dot "))
            del graph["op_counts"][name]
    here.storage.write_bytes(key, json.dumps(known).encode())
    refused = here.run("train", code=78)
    assert re.search(r"the graph of step of 24 x \d+ tokens was not compiled ahead of time", refused.err)
    assert f" {name}" in refused.err
    assert not here.events("train_steps")
    known["schema_version"] = 1
    here.storage.write_bytes(key, json.dumps(known).encode())
    here.run("train")
    assert "already done" not in here.run("compile").out, "keys of an earlier revision name no graph: traced again"
    assert [graph.key for graph in manifest_of(here).graphs] == [graph.key for graph in manifest.graphs]
    here.storage.write_bytes(key, json.dumps({**known, "schema_version": 2, "code": "before an upgrade"}).encode())
    here.run("compile")
    assert manifest_of(here).code == manifest.code, "other code may have other graphs"


def test_an_incumbent_of_another_architecture_is_scored(place: Callable[..., Place]) -> None:
    here = place("xla", ONE_SHAPE)
    for stage in ("compile", "train", "evaluate"):
        here.run(stage, UNJUDGED)
    larger = ("--model.num-layers=2", "--train.micro-batch-size=12", "--train.start=scratch", "--train.max-steps=6")
    for stage in ("prepare", "compile", "train"):
        here.run(stage, *larger, cycle="c2")
    scored = here.run("evaluate", *larger, cycle="c2", code=80)  # there are too few queries to judge
    assert "train.micro_batch_size: compiled 24, now 12; compiling on demand" in scored.out + scored.err


@pytest.mark.thorough
def test_keys_are_the_same_in_another_place_and_in_another_run(place: Callable[..., Place]) -> None:
    one, other = place("xla", ONE_SHAPE), place("xla", (*ONE_SHAPE, "--data.num-workers=2"))
    for here in (one, other):
        here.run("compile")
    assert one.workspace != other.workspace
    first, second = manifest_of(one), manifest_of(other)
    assert first.plan_id == second.plan_id
    assert [graph.key for graph in first.graphs] == [graph.key for graph in second.graphs]


@pytest.mark.slow
@pytest.mark.thorough
def test_keys_change_with_what_decides_a_graph(place: Callable[..., Place]) -> None:
    here = place("xla", (*ONE_SHAPE, "--train.candidates-per-query=2"))
    seen = set[str]()
    for change in ((), ("--train.micro-batch-size=12",), ("--train.precision=bf16",), ("--launch.processes=2",)):
        known = {manifest.plan_id for manifest in load_manifests(here.storage)}
        here.run("compile", *change)
        (manifest,) = [one for one in load_manifests(here.storage) if one.plan_id not in known]
        steps = {graph.key for graph in manifest.graphs if graph.phase not in ("start", "evaluate", "embed")}
        assert steps
        assert not steps & seen
        seen |= steps
