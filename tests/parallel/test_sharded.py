"""State in slices (ZeRO-1) against one process: the same training, the same files, less state on a rank."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.backends import Backend, RankGroup, open_host
from pipeline.backends.cpu import CpuBackend
from pipeline.compile.manifest import GraphWatch
from pipeline.core.batch_order import RankSlice
from pipeline.data.loader import training_batches
from pipeline.model.config import LossConfig
from pipeline.model.relevance import build_model
from pipeline.parallel.mesh import REPLICATE, SHARD, open_mesh
from pipeline.parallel.process_group import ProcessGroup, open_ranks
from pipeline.parallel.strategies import FlatVector
from pipeline.parallel.strategies.flat import ALIGNED, CHUNK_MIB, FlatLayout
from pipeline.parallel.strategies.zero1 import (
    LARGEST_BYTES,
    LARGEST_UNDER_AUTOCAST_BYTES,
    Zero1Strategy,
    buckets_of,
)
from pipeline.parallel.world import World, world_from_env
from pipeline.train.config import OptimizerConfig, TrainPlan, rank_slice, run_layout
from pipeline.train.optimizer import AdamW, control_values
from pipeline.train.step import TrainProgram, open_program, prepare_model
from tests.backends.xla_process import FAST_COMPILE, needs_xla
from tests.kit.ranks import run_ranks
from tests.train.rows import BUCKETS, MODEL, SPEC, TRAIN, grouped, make_rows, plan_of

CASES = "tests.parallel.test_sharded"
STEPS, HALF = 4, 2
RATE = 1e-3
CALM = LossConfig(temperature=0.5)
"""Rounding grows less, with the inverse of the temperature: plain data parallel is 1e-6 off one process at 0.05."""
BASE = TRAIN.model_copy(update={"global_batch_size": 16, "micro_batch_size": 16, "loss": CALM})
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "graded": {"loss": LossConfig(contrastive_weight=0.0)},
    "bf16": {"precision": "bf16"},
    # Small chunks, a rate by chunk, more than one micro-step.
    "rich": {"micro_batch_size": 2, "optimizer": OptimizerConfig(head_rate=2.0)},
}
BUCKET_BYTES = 3000
"""So small that a chunk is cut."""

Figures = list[dict[str, float]]
Files = tuple[dict[str, Tensor], dict[str, Tensor]]


def program_of(
    variant: str, degree: int, process_group: ProcessGroup, backend: Backend, seed: int
) -> tuple[TrainProgram, RankSlice]:
    """`degree` 1: plain data parallel. Variant "plain" is as a run opens it, with no bucket smaller than a chunk."""
    plan = TrainPlan(shard="state", shard_degree=degree)
    config = BASE.model_copy(update={**VARIANTS[variant], "seed": seed, "parallel": plan})
    world = process_group.world
    process_group.layout = run_layout(config, world.world_size, world.rank)
    share, model = rank_slice(config, world.world_size, world.rank), build_model(MODEL, SPEC, seed)
    if degree == 1 or variant == "plain":
        program = open_program(
            model, backend, config, share, process_group, metric_rows=STEPS, buckets=BUCKETS, watch=GraphWatch()
        )
        return program, share
    mesh = open_mesh(plan.as_plan(), backend, timeout_s=60.0)
    prepare_model(model, backend, config)
    strategy = Zero1Strategy(
        model,
        backend,
        precision=config.precision,
        chunk_mib=chunk_mib(variant),
        shards=mesh.ranks(SHARD),
        replicas=mesh.ranks(REPLICATE),
        host_gather=process_group.gather_rows,
        largest_bytes=BUCKET_BYTES,
    )
    assert len(strategy.buckets) > len(strategy.layout.chunks)
    return TrainProgram(strategy, backend, config, share, metric_rows=STEPS, buckets=BUCKETS), share


def chunk_mib(variant: str) -> float:
    return 0.004 if variant == "rich" else CHUNK_MIB


def train(program: TrainProgram, share: RankSlice, start: int, stop: int) -> Figures:
    with TemporaryDirectory() as folder:
        rows = make_rows(Path(folder), [(40, 40)])
        groups = grouped(rows, BASE)
        stream = training_batches(groups, plan_of(groups, BASE), share, start, stop)
        micros = [{**one.tensors, "control": control_values(one.position + 1, RATE, BASE.optimizer)} for one in stream]
    micros = [{name: tensor.to(program.backend.device) for name, tensor in one.items()} for one in micros]
    for step in range(stop - start):
        program.step(micros[step * share.accumulation : (step + 1) * share.accumulation])
    return program.read_metrics(stop - start)


def runs(folder: str, device: str, *modes: str) -> list[dict[str, Any]]:
    """Of each mode, `variant/degree`: its figures, and those of a run that goes on from the snapshot half way.

    Rank 0 leaves files: at the end, and at the end of the run that went on.
    """
    torch.set_num_threads(1)
    found = []
    with open_ranks(device, world_from_env(), timeout_s=60.0) as (process_group, backend):
        for mode in modes:
            variant, degree = mode.split("/")
            program, share = program_of(variant, int(degree), process_group, backend, seed=1)
            figures = train(program, share, 0, HALF)
            half = program.snapshot()
            figures += train(program, share, HALF, STEPS)
            end = program.snapshot()
            assert process_group.world.is_main or degree == "1" or half == end == ({}, {})
            result: dict[str, Any] = {"figures": figures, "state_bytes": state_bytes(program)}
            source = process_group.gather(half)[0]
            program, share = program_of(variant, int(degree), process_group, backend, seed=5)
            program.restore(*source)
            restored = program.snapshot()
            for kept, saved in zip(restored, source, strict=True) if process_group.world.is_main else ():
                assert list(kept) == list(saved) and all(torch.equal(kept[name], saved[name]) for name in saved)
            result["resumed"] = train(program, share, HALF, STEPS)
            again = program.snapshot()
            if process_group.world.is_main:
                torch.save([end, again], Path(folder) / f"{variant}-{degree}.pt")
            found.append(result)
    return found


def state_bytes(program: TrainProgram) -> int:
    """Masters and moments."""
    vectors = [*program.strategy.masters, *program.optimizer.exp_avg, *program.optimizer.exp_avg_sq]
    return sum(tensor.numel() * tensor.element_size() for tensor in vectors)


def alone(variant: str) -> tuple[Figures, Files]:
    """Figures, and the snapshot at the end, of one process."""
    program, share = program_of(variant, 1, ProcessGroup(World(), timeout_s=1.0), open_host(), seed=1)
    return train(program, share, 0, STEPS), program.snapshot()


def furthest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of all elements; relative to the largest of a tensor where that is above 1, as the guard's variance is."""
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1.0)) for name in one)


def assert_alike(figures: Figures, expected: Figures, name: str, bound: float = 1e-6) -> None:
    for ours, theirs in zip(figures, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=bound), name
        norm_bound = bound if bound < 1e-3 else 0.05  # bf16
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norm_bound), name
        assert ours["skipped"] == theirs["skipped"] and ours["step"] == theirs["step"]


def check_modes(folder: Path, ranks: int, *modes: str, device: str = "cpu") -> None:
    """Against one process on the CPU; in bf16 closely against plain data parallel, which is mode `variant/1`, alone."""
    expected = {variant: alone(variant) for variant in {mode.split("/")[0] for mode in modes}}
    env = {"LOCAL_WORLD_SIZE": "2", "PJRT_DEVICE": "CPU", "XLA_FLAGS": FAST_COMPILE}
    by_rank = run_ranks(f"{CASES}:runs", ranks, folder, str(folder), device, *modes, env=env)
    found = dict(zip(modes, zip(*by_rank, strict=True), strict=True))
    for mode, results in found.items():
        variant, degree = mode.split("/")
        result, (figures, end) = results[0], expected[variant]
        bound, of_weights = (2e-2, 5e-2) if "bf16" in variant else (1e-6, 1e-5)
        assert all(other["figures"] == result["figures"] for other in results), "the same on every rank"
        assert_alike(result["figures"], figures, mode, bound)
        if f"{variant}/1" in found:
            assert_alike(result["figures"], found[f"{variant}/1"][0]["figures"], f"{mode} and plain")
        ours, again = torch.load(folder / f"{variant}-{degree}.pt")
        assert max(furthest(one, other) for one, other in zip(ours, end, strict=True)) <= of_weights, mode
        assert result["resumed"] == result["figures"][HALF:], f"{mode}: bit for bit"
        for same, other in zip(ours, again, strict=True):
            assert all(torch.equal(same[name], other[name]) for name in same), f"{mode}: bit for bit"
        assert [one["state_bytes"] for one in results] == [12 * slices(variant, int(degree))] * ranks


def slices(variant: str, shards: int) -> int:
    """Elements of one rank: whole runs of ALIGNED elements of each bucket, a share of the vector and its padding."""
    config = BASE.model_copy(update=VARIANTS[variant])
    model = build_model(MODEL, SPEC, 1)
    prepare_model(model, CpuBackend(), config)
    one_rate = variant == "plain" and config.optimizer.has_one_rate
    layout = FlatLayout.of(model, chunk_mib(variant), has_one_rate=one_rate)
    if shards == 1:
        return layout.size
    buckets = buckets_of(layout, shards, LARGEST_BYTES if variant == "plain" else BUCKET_BYTES)
    padding = sum(bucket.padding for bucket in buckets)
    assert padding < ALIGNED * shards * len(buckets)
    count, rest = divmod(layout.size + padding, shards)
    assert rest == 0
    return count


@pytest.mark.stage
@pytest.mark.parametrize(
    ("ranks", "modes"),
    [
        (2, ("plain/1", "plain/2", "rich/2", "bf16/1", "bf16/2")),
        (4, ("plain/4", "rich/2")),
        pytest.param(4, ("plain/2", "bf16/1", "bf16/4"), marks=pytest.mark.thorough),
    ],
)
def test_ranks_train_as_one_process_and_resume(tmp_path: Path, ranks: int, modes: tuple[str, ...]) -> None:
    """Of four ranks two shards and two copies of them as well."""
    check_modes(tmp_path, ranks, *modes)


@pytest.mark.stage
@pytest.mark.thorough
@needs_xla
def test_two_ranks_that_compile(tmp_path: Path) -> None:
    check_modes(tmp_path, 2, "plain/2", device="xla")


def ends(_: str) -> None:
    """Rank 1 goes before the third step; the other one has nothing to gather but gradients."""
    with open_ranks("cpu", world_from_env(), timeout_s=200.0) as (process_group, backend):
        program, share = program_of("graded", 2, process_group, backend, seed=1)
        train(program, share, 0, 2)
        if process_group.world.rank == 1:
            os._exit(75)
        train(program, share, 2, STEPS)


@pytest.mark.stage
def test_a_peer_that_goes_is_an_error_to_try_again(tmp_path: Path) -> None:
    errors = run_ranks(f"{CASES}:ends", 2, tmp_path, "", code=75)
    assert "another rank failed while reducing gradients" in errors[0] and "Traceback" not in errors[0]


@given(size=st.integers(1, 5000), shards=st.sampled_from([1, 2, 3, 8]), largest_bytes=st.integers(64, 20_000))
def test_buckets_cover_a_chunk_in_equal_slices_below_the_limit(size: int, shards: int, largest_bytes: int) -> None:
    chunk = FlatVector(True, True, ("x",), (torch.Size([size]),), (size,))
    buckets = buckets_of(FlatLayout((chunk, chunk)), shards, largest_bytes)
    assert [bucket.chunk for bucket in buckets] == sorted(bucket.chunk for bucket in buckets)
    flat, unit = torch.arange(size, dtype=torch.float32), ALIGNED * shards
    for index in (0, 1):
        mine = [bucket for bucket in buckets if bucket.chunk == index]
        joined = []
        for bucket in mine:
            padded = bucket.size + bucket.padding
            assert padded % unit == 0 and (4 * padded <= largest_bytes or padded == unit)
            of_ranks = [
                bucket.local_slice(flat[bucket.start : bucket.stop], RankGroup(rank, (tuple(range(shards)),)))
                for rank in range(shards)
            ]
            assert {part.numel() for part in of_ranks} == {padded // shards}
            joined.append(torch.cat(of_ranks)[: bucket.size])
        assert torch.equal(torch.cat(joined), flat)
        fewest = -(-size // max(unit, largest_bytes // 4 // unit * unit))
        assert len(mine) <= fewest


def test_the_fused_update_has_the_same_bits_in_slices() -> None:
    config, size, shards = OptimizerConfig(), 40 * ALIGNED, 4
    generator = torch.Generator().manual_seed(1)
    weights, grads = (torch.randn(size, generator=generator) for _ in range(2))
    chunk = FlatVector(True, True, ("x",), (torch.Size([size]),), (size,))
    (bucket,) = buckets_of(FlatLayout((chunk,)), shards, LARGEST_BYTES)
    ranks = [RankGroup(rank, ((0, 1, 2, 3),)) for rank in range(shards)]
    found = []
    for masters, parts in (
        ([weights.clone()], [grads]),
        ([bucket.local_slice(weights, one) for one in ranks], [bucket.local_slice(grads, one) for one in ranks]),
    ):
        optimizer = AdamW(masters, [True] * len(masters), config, traced=False)
        for step in (1, 2):
            optimizer.step(parts, control_values(step, RATE, config), torch.tensor(0.7), torch.tensor(True))
        found.append(torch.cat([*masters, *optimizer.exp_avg, *optimizer.exp_avg_sq]))
    whole, sliced = found
    assert torch.equal(whole, sliced)


@pytest.mark.parametrize(("largest_bytes", "count"), [(LARGEST_BYTES, 3), (LARGEST_UNDER_AUTOCAST_BYTES, 6)])
def test_a_table_of_words_is_exchanged_in_parts(largest_bytes: int, count: int) -> None:
    """XLM-R's for 384 columns, one parameter of 384 MB."""
    shape = torch.Size([250_002, 384])
    chunk = FlatVector(True, True, ("x",), (shape,), (shape.numel(),))
    assert len(buckets_of(FlatLayout((chunk,)), 32, largest_bytes)) == count
