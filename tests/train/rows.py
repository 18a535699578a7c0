"""Token shards on disk and tiny settings for the tests of data, training and evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.core.batch_order import BatchPlan, Bucket, RankSlice
from pipeline.data.config import CategoricalFeature
from pipeline.data.loader import GroupSource, RowSource
from pipeline.data.shards import ShardFile, TokenRows
from pipeline.data.taught import TaughtPartition, TaughtRows
from pipeline.data.token_sets import ShardInfo, TokenSetInfo
from pipeline.data.training_groups import NONE, GroupedRows, MinedProducts
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.relevance import build_model
from pipeline.parallel.strategies.flat import CHUNK_MIB
from pipeline.train.config import TrainConfig, batch_lengths, groups_per_batch
from pipeline.train.step import TrainProgram, flat_strategy
from tests.kit.states import train_state

VOCAB, PAD, CLS, SEP = 40, 0, 1, 2
BUCKETS = (Bucket(4, 6), Bucket(6, 8))
SPEC = InputSpec(
    vocab_size=VOCAB,
    pad_id=PAD,
    labels=("bad", "good"),
    label_gains=(0.0, 1.0),
    numeric=("price",),
    categorical_ids=(5,),
)
MODEL = ModelConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    intermediate_size=32,
    max_positions=16,
    interaction_size=8,
    cross_layers=1,
    feature_sizes=(8,),
    mlp_sizes=(16,),
)
TRAIN = TrainConfig(
    start="scratch",
    global_batch_size=8,
    micro_batch_size=8,
    max_steps=6,
    candidates_per_query=2,
)


def write_shard(path: Path, rows: Sequence[int], first_id: int, buckets: Sequence[Bucket] = BUCKETS) -> ShardFile:
    """`rows[b]` rows of bucket b with sample ids from `first_id` on. A good pair shares its tokens.

    Texts of bucket b have 4 + 2 b tokens, so that groups of either bucket take rows of another length.
    """
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for index, (count, bucket) in enumerate(zip(rows, buckets, strict=True)):
        if not count:
            continue
        ids = np.arange(first_id, first_id + count, dtype=np.int64)
        first_id += count
        rng = np.random.default_rng(ids[0])
        label = rng.integers(0, 2, count)
        topic = rng.integers(3, VOCAB, (count, 2))
        other = np.where(label[:, None] == 1, topic, rng.integers(3, VOCAB, (count, 2)))
        topic, other = (np.concatenate([ids, ids[:, : 2 * index]], axis=1) for ids in (topic, other))
        tensors |= {
            f"b{index}.query": _framed(topic, bucket.query_tokens),
            f"b{index}.product": _framed(other, bucket.product_tokens),
            f"b{index}.label": label.astype(np.int16),
            f"b{index}.gain": label.astype(np.float32),
            f"b{index}.numeric": rng.normal(size=(count, 1)).astype(np.float32),
            f"b{index}.categorical": rng.integers(0, 5, (count, 1)).astype(np.int32),
            f"b{index}.sample_id": ids,
            f"b{index}.query_id": ids // 4,
        }
    save_file(tensors, path)
    return ShardFile(path, tuple(rows))


def write_token_set(
    folder: Path, splits: Mapping[str, Sequence[int]], *, partition: str, fingerprint: str, first_id: int = 1
) -> TokenSetInfo:
    """A partition as `prepare` stages it: a shard a split of `splits[split][b]` rows of bucket b."""
    shards = {}
    for number, (split, rows) in enumerate(splits.items()):
        name = f"{split}.safetensors"
        write_shard(folder / name, rows, first_id + 1000 * number)
        shards[split] = (ShardInfo(file=name, rows=tuple(rows)),)
    return token_set_info(partition, fingerprint, shards)


def token_set_info(
    partition: str, fingerprint: str = "print", shards: Mapping[str, tuple[ShardInfo, ...]] | None = None
) -> TokenSetInfo:
    """What `prepare` says of a partition of rows like these."""
    return TokenSetInfo(
        dataset="d",
        partition=partition,
        watermark=partition.removeprefix("dt=") if partition.startswith("dt=") else "",
        fingerprint=fingerprint,
        tokenizer_fingerprint="tok",
        vocab_size=SPEC.vocab_size,
        pad_id=SPEC.pad_id,
        buckets=tuple(bucket.name for bucket in BUCKETS),
        labels=SPEC.labels,
        label_gains=SPEC.label_gains,
        numeric=SPEC.numeric,
        categorical=(CategoricalFeature(column="c", num_ids=5),),
        splits=dict(shards or {}),  # type: ignore[arg-type]
        rows_read=1,
        rows_bad=0,
        reasons={},
        truncated_rows=0,
        tokens=1,
    )


def _framed(topic: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    framed = np.full((len(topic), length), PAD, dtype=np.uint16)
    framed[:, 0], framed[:, 1 : 1 + topic.shape[1]], framed[:, 1 + topic.shape[1]] = CLS, topic, SEP
    return framed


def make_rows(folder: Path, shards: Sequence[Sequence[int]], first_id: int = 1) -> TokenRows:
    """Rows over several shards; sample ids count up from `first_id` in shard, bucket and row order."""
    files = []
    for number, rows in enumerate(shards):
        files.append(write_shard(folder / f"train-{first_id}-{number:05d}.safetensors", rows, first_id))
        first_id += sum(rows)
    return TokenRows(files, BUCKETS, PAD)


def every_row(rows: TokenRows) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays of all rows, as long as the largest bucket, in the order of their numbers."""
    last = len(rows.sizes) - 1
    parts = [rows.read(np.full(size, bucket), np.arange(size), last) for bucket, size in enumerate(rows.sizes)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def taught_at_random(rows: TokenRows, width: int = 5) -> TaughtRows:
    """Scores and vectors of a teacher, some scores missing."""
    rng, count = np.random.default_rng(7), sum(rows.sizes)
    score = np.where(rng.random(count) < 0.2, np.nan, rng.normal(size=count)).astype(np.float32)
    vectors = rng.normal(size=(2 * count, width))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    index = np.arange(count, dtype=np.int32)
    return TaughtRows([TaughtPartition(rows.sizes, score, index, index + count, vectors)], width)


def grouped(
    source: RowSource,
    config: TrainConfig = TRAIN,
    mined: MinedProducts | None = None,
    taught: TaughtRows | None = None,
) -> GroupedRows:
    """Rows in groups of one query, as a run of this config has them."""
    return GroupedRows.build(
        source,
        slots=config.candidates_per_query,
        lengths=batch_lengths(config, BUCKETS),
        positive_gain=config.loss.positive_gain,
        seed=config.seed,
        mined=mined,
        taught=taught,
    )


def mined_from(rows: TokenRows, slots: int, *, most: int = 5, seed: int = 1) -> MinedProducts:
    """For every query of the rows 0 to `most` rows of other queries, by its number."""
    every = [rows.read(np.full(size, bucket), np.arange(size), bucket) for bucket, size in enumerate(rows.sizes)]
    query = np.concatenate([arrays["query_id"] for arrays in every])
    query_id = np.unique(query)
    product = np.full((len(query_id), most), NONE, dtype=np.int64)
    for place, number in enumerate(query_id.tolist()):
        others = np.flatnonzero(query != number)
        chosen = np.random.default_rng(number).choice(others, min(number % (most + 1), len(others)), replace=False)
        product[place, : len(chosen)] = chosen
    score = np.where(product == NONE, np.nan, product / 10).astype(np.float32)
    return MinedProducts(rows, rows.pad_id, query_id, product, slots, seed, taught_at_random(rows), score)


def plan_of(groups: GroupSource, config: TrainConfig = TRAIN) -> BatchPlan:
    """The order of the global batches of `config` over groups."""
    return BatchPlan(groups.sizes, groups_per_batch(config), 1)


def make_program(
    backend: Backend,
    config: TrainConfig = TRAIN,
    model: ModelConfig = MODEL,
    accumulation: int = 1,
    chunk_mib: float = CHUNK_MIB,
) -> TrainProgram:
    strategy = flat_strategy(build_model(model, SPEC, config.seed), backend, config, chunk_mib=chunk_mib)
    return TrainProgram(strategy, backend, config, RankSlice(0, 1, accumulation), metric_rows=8, buckets=BUCKETS)


def checkpoint_of(**state: Any) -> Checkpoint:
    """Its digest and some of its state; no file is there."""
    made = train_state(**{"step": 7, "model": MODEL, "inputs": SPEC, **state})
    return Checkpoint("checkpoints/c0/step-7", "file:///w/checkpoints/c0/step-7", Path("/nowhere"), "digest", made)
