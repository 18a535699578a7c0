"""What is mined for: queries that have a positive, distinct products, and what of them is judged."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.checkpoint.store import Checkpoint
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows, text_hashes
from pipeline.data.token_sets import TokenSet
from pipeline.embed.config import EmbedConfig
from pipeline.mine.config import MineConfig
from pipeline.mine.run import NONE, MiningTask, make_task, plan_mining
from pipeline.settings import Settings
from tests.kit.fields import check_named, without_effect
from tests.train.rows import BUCKETS, PAD, checkpoint_of, every_row, token_set_info, write_shard


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    """Partition 0 with 70 rows, partition 1 with 50 of other queries; four rows a query, in two shapes."""
    folder = tmp_path_factory.mktemp("task")
    shards = []
    for partition, counts in enumerate(([40, 30], [20, 30])):
        shard = write_shard(folder / f"{partition}.safetensors", counts, 1000 * partition)
        _make_pairs_alike(shard.path)
        shards.append(type(shard)(shard.path, shard.rows, partition))
    return TokenRows(shards, BUCKETS, PAD, ("partition",))


def _make_pairs_alike(path: Path) -> None:
    """Write two pairs of a query twice, the better gain first and last, and two queries with the same one product."""
    tensors = load_file(path)
    for first, gains in ((0, (1.0, 0.0)), (2, (0.0, 1.0))):
        assert tensors["b0.query_id"][first] == tensors["b0.query_id"][first + 1]
        tensors["b0.product"][first + 1] = tensors["b0.product"][first]
        tensors["b0.gain"][first : first + 2] = gains
    tensors["b0.product"][8:16] = tensors["b0.product"][8]
    tensors["b0.gain"][8:16] = [1.0, 0.0, 0.0, 0.0] * 2
    save_file(tensors, path)


def table_of(rows: TokenRows) -> dict[str, npt.NDArray[np.int64]]:
    """All rows in the order of their numbers; products as hashes."""
    table = every_row(rows)
    return table | {"product": text_hashes(table["product"], PAD), "query": text_hashes(table["query"], PAD)}


def task_of(rows: TokenRows, partitions: list[int], max_items: int = 10_000) -> MiningTask:
    return make_task(rows, partitions, positive_gain=0.99, max_items=max_items, stop=StopSignal())


@pytest.mark.parametrize("partitions", [[0, 1], [1], []])
def test_the_task_is_what_the_rows_say(rows: TokenRows, partitions: list[int]) -> None:
    task, table = task_of(rows, partitions), table_of(rows)
    positive = table["gain"] >= 0.99
    of_asked = np.isin(table["partition"], partitions)
    with_positive = set(table["query_id"][positive].tolist())
    assert task.query_id.tolist() == sorted(set(table["query_id"][of_asked].tolist()) & with_positive)
    assert len(task.products) == len(np.unique(table["product"]))
    texts = text_hashes_of(task, 0, len(task.products))
    assert table["product"][task.rows_of(np.arange(len(task.products)))].tolist() == texts
    for place, query in enumerate(task.query_id.tolist()):
        mine = slice(task.judged.offsets[place], task.judged.offsets[place + 1])
        of_query = table["query_id"] == query
        items = task.judged.items[mine].tolist()
        assert items == sorted(set(items))
        assert {texts[item] for item in items} == set(table["product"][of_query].tolist())
        relevant = {texts[item] for item, good in zip(items, task.judged.positive[mine], strict=True) if good}
        assert relevant == set(table["product"][of_query & positive].tolist())
        assert table["query_id"][task.query_row[place]] == query


NO_PART_OF_NEGATIVES = {
    "enabled": "whether a cycle mines",
    "source": "the digest of what ranks counts",
    "queries_per_part": "how the work is cut",
    "workers": "who does it",
}


def test_every_setting_of_mining_names_other_negatives_or_is_named_as_no_part_of_them() -> None:
    sets = [TokenSet(f"tokens/d/{name}", token_set_info("flat", name)) for name in ("one", "two")]
    settings = Settings()

    def prefix(mine: MineConfig, **more: object) -> str:
        return plan_mining(settings.model_copy(update={"mine": mine, **more}), sets, None, None).prefix

    found = without_effect(MineConfig(), prefix, partitions="all")
    check_named(found, NO_PART_OF_NEGATIVES)
    loss = settings.train.loss.model_copy(update={"positive_gain": 0.5})
    assert prefix(MineConfig(), train=settings.train.model_copy(update={"loss": loss})) != prefix(MineConfig())
    assert plan_mining(settings, sets[::-1], None, None).prefix != prefix(MineConfig())


def test_what_makes_the_vectors_of_a_model_names_other_negatives() -> None:
    sets = [TokenSet("tokens/d/one", token_set_info("flat", "one"))]
    given = checkpoint_of(max_tokens=14)

    def prefix(embed: EmbedConfig, model: Checkpoint | None = given) -> str:
        return plan_mining(Settings().model_copy(update={"embed": embed}), sets, model, None).prefix

    config = EmbedConfig(chunks=2, buckets=(8,))
    outside = set(EmbedConfig.model_fields) - {"buckets", "chunks", "precision"}
    check_named(without_effect(config, prefix, buckets=(10,), precision="bf16"), outside)
    assert len({prefix(config), prefix(config, None), prefix(config, replace(given, digest="other"))}) == 3
    assert len({prefix(EmbedConfig(chunks=chunks)) for chunks in (1, 2, 3)}) == 3
    with pytest.raises(ConfigError):
        prefix(config, checkpoint_of(tokenizer_fingerprint="other"))


def test_queries_of_new_partitions_are_asked_or_of_all() -> None:
    days = ("2026-01-01", "2026-01-02", "2026-01-03")
    sets = [TokenSet(f"tokens/d/{day}", token_set_info(f"dt={day}", day)) for day in days]
    parent = checkpoint_of(watermark=days[1], partitions={f"dt={day}": day for day in days[:2]})
    everything = Settings(mine=MineConfig(partitions="all"))
    plans = [plan_mining(Settings(), sets, None, parent), plan_mining(everything, sets, parent, parent)]
    assert [plan.new for plan in plans] == [(2,), (0, 1, 2)]
    assert [plan.source for plan in plans] == ["bm25", "digest"]
    assert plan_mining(Settings(), sets, None, None).new == (0, 1, 2), "without a parent all are new"
    changed = [replace(one, info=one.info.model_copy(update={"fingerprint": "late"})) for one in sets[:1]]
    assert plan_mining(Settings(), changed, None, parent).new == ()
    flat = [TokenSet("tokens/d/flat", token_set_info("flat", "print"))]
    for mark, new in (("print", ()), ("other", (0,))):
        assert plan_mining(Settings(), flat, None, checkpoint_of(partitions={"flat": mark})).new == new


def text_hashes_of(task: MiningTask, start: int, stop: int) -> list[int]:
    tokens = task.products.tokens(start, stop)
    padded = np.full((stop - start, 8), PAD, dtype=np.int32)
    for row in range(stop - start):
        ids = tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]]
        padded[row, : len(ids)] = ids
    hashes: list[int] = text_hashes(padded, PAD).tolist()
    return hashes


def test_a_limit_of_items_keeps_the_positives(rows: TokenRows) -> None:
    table = table_of(rows)
    positives = set(table["product"][table["gain"] >= 0.99].tolist())
    task = task_of(rows, [0, 1], max_items=len(positives) + 2)
    texts = text_hashes_of(task, 0, len(task.products))
    assert len(texts) == len(positives) + 2 and positives <= set(texts)
    assert task.judged.items.min() >= 0 and task.judged.positive.any()
    assert task.rows_of(np.array([[NONE, 0]]))[0, 0] == NONE
