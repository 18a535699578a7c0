"""Batches of ranks: together the same global batch whatever the world, and the same tail after a restart."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from pipeline.core.batch_order import BatchPlan, RankSlice
from pipeline.data.loader import MicroBatch, sample_digest, target_tensors, to_tensors, training_batches
from pipeline.data.shards import TokenRows
from pipeline.data.training_groups import TrainingPools
from pipeline.model.relevance import MISSING
from pipeline.train.stream import add_digests
from tests.train.rows import BUCKETS, PAD, make_rows, mined_from, write_shard

BATCH = 12
LENGTHS = (20, 26, 60)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> TrainingPools:
    folder = tmp_path_factory.mktemp("loader")
    new, old = make_rows(folder, [(20, 9), (11, 16)]), make_rows(folder, [(40, 40)], first_id=1001)
    mined = mined_from(new, 3)
    return TrainingPools.build(
        new, old, replay_share=0.3, seed=1, slots=2, lengths=LENGTHS, positive_gain=0.99, mined=mined
    )


def plan_of(pools: TrainingPools) -> BatchPlan:
    return BatchPlan(pools.sizes, BATCH // pools.slots, seed=5)


def global_batches(pools: TrainingPools, world_size: int, accumulation: int, start: int, stop: int) -> list[MicroBatch]:
    """What all ranks saw, put together per position in rank and micro-step order."""
    streams = [
        list(training_batches(pools, plan_of(pools), RankSlice(rank, world_size, accumulation), start, stop))
        for rank in range(world_size)
    ]
    joined = []
    for step in range(stop - start):
        parts = [part for stream in streams for part in stream[step * accumulation : (step + 1) * accumulation]]
        assert {part.position for part in parts} == {start + step}
        assert len({part.length for part in parts}) == 1  # Neuron runs one graph sequence on all ranks
        joined.append(
            MicroBatch(
                start + step,
                parts[0].length,
                {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors},
                np.concatenate([part.sample_ids for part in parts]),
            )
        )
    return joined


def assert_same(left: list[MicroBatch], right: list[MicroBatch]) -> None:
    assert len(left) == len(right) > 0
    for one, two in zip(left, right, strict=True):
        assert (one.position, one.length) == (two.position, two.length)
        assert one.sample_ids.tolist() == two.sample_ids.tolist()
        assert one.tensors.keys() == two.tensors.keys()
        assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)])
def test_every_world_sees_the_same_global_batches(pools: TrainingPools, world_size: int, accumulation: int) -> None:
    stop = plan_of(pools).batches_per_epoch + 2  # over the end of an epoch
    assert_same(global_batches(pools, world_size, accumulation, 0, stop), global_batches(pools, 1, 1, 0, stop))


@pytest.mark.parametrize("start", [0, 1, 4, 9])
def test_a_restart_at_a_position_gives_the_tail_even_in_another_world(pools: TrainingPools, start: int) -> None:
    whole = global_batches(pools, 1, 1, 0, 10)
    assert_same(global_batches(pools, 3, 2, start, 10), whole[start:])


def test_an_epoch_gives_each_sample_at_most_once(pools: TrainingPools) -> None:
    seen = [i for b in global_batches(pools, 1, 1, 0, plan_of(pools).batches_per_epoch) for i in b.sample_ids.tolist()]
    assert len(set(seen)) == len(seen) > sum(pools.sizes) - BATCH


def test_tensors_are_32_bit_and_empty_slots_have_no_target(pools: TrainingPools) -> None:
    mined = 0
    for batch in global_batches(pools, 1, 1, 0, plan_of(pools).batches_per_epoch):
        tensors = batch.tensors
        assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.int32", "torch.float32"}
        assert {len(tensors[name]) for name in ("tokens", "segments", "query_key", "place")} == {BATCH // 2}
        every = BATCH // 2 * (2 + 3)  # judged, and mined
        assert {len(tensors[name]) for name in ("label", "gain", "product_key", "numeric")} == {every}
        assert tensors["place"].tolist() == list(range(BATCH // 2))
        gain, label = (tensors[name].view(BATCH // 2, 5) for name in ("gain", "label"))
        assert torch.equal(gain[:, :2] < 0, label[:, :2] < 0)
        assert set(gain[:, 2:].reshape(-1).tolist()) <= {-1.0, 0.0} and (label[:, 2:] == -1).all()
        assert int((label >= 0).sum()) == len(batch.sample_ids)
        mined += int((gain[:, 2:] == 0).sum())
    assert mined > BATCH


def test_nan_never_reaches_a_device(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "gaps", (20, 9), first_id=1)
    tensors = load_file(shard.path)
    for bucket in (0, 1):
        tensors[f"b{bucket}.numeric"][::3] = np.nan
    save_file(tensors, shard.path)
    rows = TokenRows([shard], BUCKETS, PAD)
    scored = to_tensors(rows.read(np.zeros(20, np.int64), np.arange(20), 0))["numeric"]
    assert scored.dtype == torch.float32
    assert (scored[:, 0] == torch.tensor(MISSING)).tolist() == [row % 3 == 0 for row in range(20)]
    gaps = TrainingPools.build(rows, None, 0.0, 1, slots=2, lengths=LENGTHS, positive_gain=0.99)
    trained = torch.cat([batch.tensors["numeric"] for batch in global_batches(gaps, 1, 1, 0, 2)])
    assert torch.isfinite(trained).all() and (trained == torch.tensor(MISSING)).any()
    assert torch.isfinite(torch.tensor(MISSING).bfloat16())


def test_keys_use_all_bits_of_the_id() -> None:
    ids = np.array([5, 5 + 2**32, 5, 2**62 + 1], dtype=np.int64)
    flags = {"is_row": np.ones(4, np.bool_), "is_mined": np.zeros(4, np.bool_)}
    values = {name: np.zeros(4, np.float32) for name in ("label", "gain")}
    tensors = target_tensors({**flags, **values, "query_key": ids, "product_key": ids[::-1].copy()})
    keys = tensors["query_key"].tolist()
    assert keys[0] == keys[2] and len(set(keys)) == 3
    assert tensors["product_key"].tolist() == keys[::-1]


def test_digests_add_up_and_notice_a_swap() -> None:
    ids = np.arange(1, 41, dtype=np.int64)
    parts = [sample_digest(part) for part in np.split(np.random.default_rng(1).permutation(ids), 4)]
    assert add_digests(parts) == sample_digest(ids)
    changed = ids.copy()
    changed[0] = 999
    assert sample_digest(changed) != sample_digest(ids)
    assert sample_digest(np.repeat(ids, 2)) != sample_digest(ids)
