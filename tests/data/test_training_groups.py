"""What a run trains on: groups of all new rows with mined products, and a chosen share of old ones."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.arrays import Int64s
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.training_groups import (
    MAX_LINKED,
    NONE,
    GroupedRows,
    Links,
    MinedGroups,
    MinedProducts,
    TrainingPools,
)
from tests.train.rows import PAD, make_rows, mined_from

SLOTS = 4
LENGTHS = (16, 21, 60)


def group(rows: TokenRows, slots: int, mined: MinedProducts | None = None) -> GroupedRows:
    return GroupedRows.build(rows, slots=slots, lengths=LENGTHS, positive_gain=0.99, seed=1, mined=mined)


def build(new: TokenRows, old: TokenRows | None, replay_share: float, seed: int = 1) -> TrainingPools:
    return TrainingPools.build(new, old, replay_share, seed, slots=SLOTS, lengths=LENGTHS, positive_gain=0.99)


def ids_of(pools: TrainingPools | GroupedRows) -> list[list[list[int]]]:
    """Sample ids of the groups of every length, in pool order."""
    found = []
    for pool, size in enumerate(pools.sizes):
        arrays = pools.read(np.full(size, pool), np.arange(size), len(pools.sizes) - 1) if size else None
        groups = [] if arrays is None else np.split(arrays["sample_id"], size)
        real = [] if arrays is None else np.split(arrays["is_row"], size)
        found.append([ids[mask].tolist() for ids, mask in zip(groups, real, strict=True)])
    return found


def text_of(arrays: Arrays, row: int, number: int) -> list[int]:
    """Tokens of text `number` of a row, in the order of their positions."""
    here = arrays["segments"][row] == number
    assert arrays["positions"][row][here].tolist() == list(range(here.sum()))
    found: list[int] = arrays["tokens"][row][here].tolist()
    return found


def assert_equal_keys_for_equal_texts(arrays: Arrays, slots: int) -> None:
    has_text = arrays["is_row"] | arrays["is_mined"]
    texts = [tuple(text_of(arrays, slot // slots, 2 + slot % slots)) for slot in range(len(has_text))]
    met: dict[tuple[int, ...], int] = {}
    for text, key in zip(texts, arrays["product_key"].tolist(), strict=True):
        assert not text or met.setdefault(text, key) == key
    assert len(set(met.values())) == len(met)


def test_every_row_is_in_one_group_of_its_query(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(30, 10), (7, 14)])
    grouped = group(rows, 3)
    groups = [group for bucket in ids_of(grouped) for group in bucket]
    assert sorted(i for group in groups for i in group) == list(range(1, 62))
    assert all(1 <= len(group) <= 3 and len({i // 4 for i in group}) == 1 for group in groups)
    longer = [i for shard in ((31, 41), (48, 62)) for i in range(*shard)]  # texts of 6 tokens, the others have 4
    for number, found in enumerate(ids_of(grouped)):
        sizes = [sum(6 if i in longer else 4 for i in (group[0], *group)) for group in found]
        assert all(size <= LENGTHS[number] and (not number or size > LENGTHS[number - 1]) for size in sizes)
    assert grouped.groups.fill == pytest.approx(61 / (3 * len(groups)))


def test_a_group_has_one_query_and_the_arrays_of_its_rows(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(5, 5)])
    grouped = group(rows, SLOTS)
    pool = np.repeat(np.arange(3), grouped.sizes)[:2]
    arrays = grouped.read(pool, np.array([0, int(pool[1] == pool[0])]), 2)
    assert {arrays[name].shape for name in ("tokens", "positions", "segments")} == {(2, LENGTHS[2])}
    by_id: dict[int, dict[str, Any]] = {}
    for bucket, size in enumerate(rows.sizes):
        alone = rows.read(np.full(size, bucket), np.arange(size), 1)
        by_id |= {int(i): {name: values[n] for name, values in alone.items()} for n, i in enumerate(alone["sample_id"])}
    for slot, (sample, is_row) in enumerate(zip(arrays["sample_id"], arrays["is_row"], strict=True)):
        wanted, row = by_id[int(sample)], slot // SLOTS
        product = text_of(arrays, row, 2 + slot % SLOTS)
        assert product == (wanted["product"][wanted["product"] != 0].tolist() if is_row else [])
        for name in ("label", "gain", "numeric", "categorical"):
            np.testing.assert_array_equal(arrays[name][slot], wanted[name])
        first = by_id[int(arrays["sample_id"][row * SLOTS])]
        assert arrays["query_key"][row] == first["query_id"] == wanted["query_id"]
        assert text_of(arrays, row, 1) == first["query"][first["query"] != 0].tolist()
        assert is_row or sample == first["sample_id"]  # an empty slot repeats the first row
    assert_equal_keys_for_equal_texts(arrays, SLOTS)


def test_positives_are_repeated_until_each_group_of_their_query_can_have_one(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(90, 70)])
    grouped = GroupedRows.build(
        rows, slots=2, lengths=LENGTHS, positive_gain=0.99, seed=1, mined=mined_from(rows, 1), repeat_positives=True
    )
    labelled: list[int] = []
    groups: dict[int, list[list[float]]] = {}
    for bucket, size in enumerate(grouped.sizes):
        if not size:
            continue
        arrays = grouped.read(np.full(size, bucket), np.arange(size), bucket)
        shape = (size, 3)
        ids, gain, label, is_row = (arrays[name].reshape(shape) for name in ("sample_id", "gain", "label", "is_row"))
        labelled += ids[is_row & (label >= 0)].tolist()
        assert (gain[is_row & (label < 0)] == 1.0).all() and arrays["label"].dtype == np.int16
        for number, query in enumerate(arrays["query_key"].tolist()):
            groups.setdefault(query, []).append(gain[number][is_row[number]].tolist())
    assert sorted(labelled) == list(range(1, 161))  # every row is judged once
    plain, repeated = sum(group(rows, 2).sizes), sum(grouped.sizes)
    assert repeated > plain
    for members in groups.values():
        gains = [gain for member in members for gain in member]
        if 0 < sum(gains) <= len(members):
            assert all(sum(member) == 1 for member in members), members


def test_mined_products_stand_behind_the_judged_ones(tmp_path: Path) -> None:
    rows, extra = make_rows(tmp_path, [(30, 10), (7, 14)]), 2
    plain = group(rows, 3)
    mined = group(rows, 3, mined_from(rows, extra))
    assert mined.mined is not None and sum(mined.sizes) == sum(plain.sizes)
    met: dict[int, list[list[int]]] = {}
    judged = {tuple(group) for groups in ids_of(plain) for group in groups}
    for bucket, size in enumerate(mined.sizes):
        if not size:
            continue
        asked = np.full(size, bucket), np.arange(size), bucket
        for epoch in (0, 1):
            chosen = mined.mined.choose(asked[0], asked[1], epoch)
            arrays = mined.read(*asked, epoch)
            assert arrays["tokens"].shape == (size, LENGTHS[bucket])
            assert arrays["is_mined"].reshape(size, -1)[:, 3:].tolist() == (chosen != -1).tolist()
            assert not (arrays["is_mined"] & arrays["is_row"]).any()
            ids, real = (arrays[name].reshape(size, -1)[:, :3] for name in ("sample_id", "is_row"))
            assert {tuple(one[mask].tolist()) for one, mask in zip(ids, real, strict=True)} <= judged
            wanted = mined.mined.products.tokens(chosen[chosen != -1])
            (filled,) = np.nonzero(arrays["is_mined"])
            found = [text_of(arrays, slot // 5, 2 + slot % 5) for slot in filled.tolist()]
            assert found == [tokens[tokens != 0].tolist() for tokens in wanted]
            assert_equal_keys_for_equal_texts(arrays, 5)
            for query, row in zip(arrays["query_key"].tolist(), chosen.tolist(), strict=True):
                met.setdefault(query, []).append(row)
    for query, visits in met.items():
        available = query % 6  # tests.train.rows.mined_from
        seen = [product for row in visits for product in row if product != -1]
        assert len(seen) == len(visits) * min(extra, available)
        assert len(set(seen)) == min(available, len(visits) * min(extra, available))
    assert 0.5 < mined.mined.fill < 1.0


def test_groups_of_like_queries_are_neighbours(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(90, 70)])
    by_topic, as_dealt = (
        GroupedRows.build(rows, slots=2, lengths=(60,), positive_gain=0.99, seed=1, by_topic=ordered)
        for ordered in (True, False)
    )
    assert sorted(ids_of(by_topic)[0]) == sorted(ids_of(as_dealt)[0])
    arrays = by_topic.read(np.zeros(by_topic.sizes[0], dtype=np.int64), np.arange(by_topic.sizes[0]), 0)
    ids = arrays["query_key"].tolist()
    keys = [(ids[:place].count(query), text_of(arrays, place, 1)) for place, query in enumerate(ids)]
    assert keys == sorted(keys) and len({place for place, _ in keys}) > 1


def test_replayed_groups_of_like_queries_stay_together(tmp_path: Path) -> None:
    new, old = make_rows(tmp_path, [(20, 20)], first_id=4), make_rows(tmp_path, [(90, 90)], first_id=1004)
    pools = TrainingPools.build(new, old, 0.3, 1, slots=SLOTS, lengths=LENGTHS, positive_gain=0.99, topic=4)
    assert pools.old is not None
    before = ids_of(pools.old)
    for pool, groups in enumerate(ids_of(pools)):
        replayed = [before[pool].index(group) for group in groups[pools.new.sizes[pool] :]]
        steps = [(b - a) % len(before[pool]) for a, b in itertools.pairwise(replayed)]
        assert len(set(replayed)) == len(replayed) and steps.count(1) >= len(steps) * 3 // 4


def test_new_groups_first_then_a_share_of_the_old(tmp_path: Path) -> None:
    new, old = make_rows(tmp_path, [(28, 8), (8, 12)], first_id=4), make_rows(tmp_path, [(100, 200)], first_id=1004)
    pools = build(new, old, replay_share=0.25)
    assert sum(pools.num_replayed) / sum(pools.sizes) == pytest.approx(0.25, abs=0.05)
    for bucket, own in zip(ids_of(pools), pools.new.sizes, strict=True):
        assert all(i < 1000 for group in bucket[:own] for i in group)
        assert all(i > 1000 for group in bucket[own:] for i in group)
        assert len({i for group in bucket for i in group}) == sum(map(len, bucket))


@pytest.mark.parametrize(
    ("old_rows", "share", "replayed"), [((3, 2), 0.9, 5), ((3, 2), 0.0, 0), (None, 0.5, 0), ((0, 0), 0.5, 0)]
)
def test_all_old_groups_are_replayed_if_they_are_fewer_than_wanted_and_none_unless_asked_for(
    tmp_path: Path, old_rows: tuple[int, int] | None, share: float, replayed: int
) -> None:
    old = None if old_rows is None else make_rows(tmp_path, [old_rows], first_id=1001)
    pools = build(make_rows(tmp_path, [(4, 4)]), old, share)
    found = sorted(i for bucket in ids_of(pools) for group in bucket for i in group)
    assert found == [*range(1, 9), *range(1001, 1001 + replayed)]


def test_order_asked_for_is_kept_across_new_and_old(tmp_path: Path) -> None:
    new, old = make_rows(tmp_path, [(20, 20)], first_id=4), make_rows(tmp_path, [(36, 36)], first_id=1004)
    pools = build(new, old, replay_share=0.4)
    asked = [(pool, number) for pool, size in enumerate(pools.sizes) for number in range(size)][::-2]
    kinds, numbers = (np.array(values) for values in zip(*asked, strict=True))
    assert {number >= pools.new.sizes[pool] for pool, number in asked} == {True, False}
    together = pools.read(kinds, numbers, 2)
    for place, (pool, number) in enumerate(asked):
        alone = pools.read(np.array([pool]), np.array([number]), 2)
        for name, values in together.items():
            each = len(alone[name])
            np.testing.assert_array_equal(values[place * each : (place + 1) * each], alone[name])


@dataclass(frozen=True)
class Judged:
    """Rows of one bucket: (query, product, gain), each text a number; products have room for more tokens."""

    judged: Sequence[tuple[int, int, float]]
    pad_id: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return (len(self.judged),)

    def read(self, pools: Int64s, rows: Int64s, bucket: int, fields: Sequence[str] = ()) -> Arrays:
        query, product, gain = np.array(self.judged, dtype=np.float64).reshape(-1, 3)[rows].T
        first, last, padding = (np.full(len(rows), token) for token in (2, 3, self.pad_id))
        return {
            "query": np.stack([first, query, last], axis=1).astype(np.int32),
            "product": np.stack([first, product, last, padding, padding], axis=1).astype(np.int32),
            "gain": gain.astype(np.float32),
            "label": (gain > 0).astype(np.int32),
            "query_id": query.astype(np.int64),
            "sample_id": rows + 1,
            "numeric": np.zeros((len(rows), 0), dtype=np.float32),
            "categorical": np.zeros((len(rows), 0), dtype=np.int32),
        }


def means_the_same(links: Links, texts: int) -> list[list[int]]:
    """Texts that have a meaning in common, by the lowest of them."""
    rows = Judged([(text, text, 0.0) for text in range(10, 10 + texts)])
    pools = TrainingPools(
        GroupedRows.build(rows, slots=1, lengths=(16,), positive_gain=0.99, seed=1, links=links), None, (0,), 1
    )
    arrays = pools.read(np.zeros(texts, dtype=np.int64), np.arange(texts), 0)
    keys = arrays["query_key"].tolist()
    assert arrays["product_key"].tolist() == keys  # a text has the same key on both sides
    named = {int(arrays["sample_id"][place]) + 9: key for place, key in enumerate(keys)}
    return sorted(sorted(text for text in named if named[text] == key) for key in set(keys))


def test_links_go_from_partition_to_partition() -> None:
    new, old = Judged([(10, 11, 1.0), (12, 13, 1.0)]), Judged([(11, 13, 1.0), (13, 90, 1.0)])
    assert means_the_same(Links.build([new], 0.99), 4) == [[10], [11], [12], [13]]
    assert means_the_same(Links.build([new, old], 0.99), 4) == [[10, 11, 12, 13]]
    build = [
        TrainingPools.build(new, old, 0.5, 1, slots=2, lengths=(16,), positive_gain=0.99, link_queries=linked)  # type: ignore[arg-type]
        for linked in (True, False)
    ]
    for pools, different in zip(build, (1, 4), strict=True):
        arrays = pools.read(np.zeros(4, dtype=np.int64), np.arange(4), 0)
        assert len(set(arrays["query_key"].tolist())) == different


@pytest.mark.parametrize("seed", range(4))
def test_links_are_those_of_a_search_from_query_to_query(seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = 40
    judged = [(int(a), int(b), float(gain)) for a, b, gain in rng.integers([10, 10, 0], [50, 60, 2], (45, 3))]
    judged += [(text, 99, 0.0) for text in range(10, 10 + texts)]
    asked, near = range(10, 10 + texts), {text: {text} for text in range(10, 10 + texts)}
    for query, product, gain in judged:
        if gain == 1.0 and product in asked:
            near[query].add(product)
            near[product].add(query)
    expected = set()
    for text in asked:
        met, ahead = {text}, [text]
        while ahead:
            new = near[ahead.pop()] - met
            met |= new
            ahead += new
        expected.add(tuple(sorted(met)))
    links = Links.build([Judged(judged)], 0.99)
    assert means_the_same(links, texts) == sorted(list(one) for one in expected)
    assert links.linked == sum(len(one) for one in expected if len(one) > 1)


def test_queries_that_meet_at_a_product_of_many_kinds_are_left_as_they_are() -> None:
    judged = [(10 + n, 9, 1.0) for n in range(MAX_LINKED)]
    assert Links.build([Judged(judged)], 0.99).linked == 0  # nobody asks for it
    links = Links.build([Judged([*judged, (9, 9, 1.0), (200, 201, 1.0), (201, 200, 1.0)])], 0.99)
    assert (links.linked, links.unlinked, links.queries) == (2, MAX_LINKED + 1, MAX_LINKED + 3)
    assert [len(one) for one in means_the_same(links, MAX_LINKED)] == [1] * MAX_LINKED
    links = Links.build([Judged([*judged[1:], (9, 9, 1.0)])], 0.99)
    assert (links.linked, links.unlinked) == (MAX_LINKED, 0)


def test_a_mined_product_that_means_the_same_leaves_its_slot_empty() -> None:
    rows = Judged([(10, 11, 1.0), (11, 12, 1.0), (13, 14, 1.0)])
    mined = MinedProducts(rows, rows.pad_id, np.array([10, 13]), np.array([[0, 2], [0, 1]]), slots=2, seed=1)
    found = {}
    for links in (None, Links.build([rows], 0.99)):
        groups = GroupedRows.build(rows, slots=1, lengths=(16,), positive_gain=0.99, seed=1, mined=mined, links=links)
        arrays = groups.read(np.zeros(3, dtype=np.int64), np.arange(3), 0)
        texts = [[text_of(arrays, row, 3 + slot)[1:2] for slot in (0, 1)] for row in range(3)]
        assert arrays["is_mined"].reshape(3, 3)[:, 1:].tolist() == [[bool(text) for text in row] for row in texts]
        assert arrays["is_row"].reshape(3, 3).tolist() == [[True, False, False]] * 3
        found[links is None] = {
            int(row): sorted(itertools.chain(*text)) for row, text in zip(arrays["sample_id"][::3], texts, strict=True)
        }
    assert found[True] == {1: [11, 14], 2: [], 3: [11, 12]}
    assert found[False] == {1: [14], 2: [], 3: [11, 12]}  # 10 and 11 mean the same


def of_counts(counts: list[int], slots: int, tmp_path: Path, seed: int = 1) -> MinedProducts:
    """Query 10 i has counts[i] products, 100 i and on."""
    product = np.full((len(counts), max(counts, default=0)), NONE, dtype=np.int64)
    for place, count in enumerate(counts):
        product[place, :count] = 100 * place + np.arange(count)
    rows = make_rows(tmp_path, [(4, 4)])
    return MinedProducts(rows, PAD, 10 * np.arange(len(counts), dtype=np.int64), product, slots, seed)


@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=5), slots=st.integers(1, 5), seed=st.integers(0, 9))
def test_visits_take_each_product_equally_often(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], slots: int, seed: int
) -> None:
    mined = of_counts(counts, slots, tmp_path_factory.getbasetemp(), seed)
    for place, count in enumerate(counts):
        visits = np.arange(max(1, count), dtype=np.int64)
        chosen = mined.choose(np.full(len(visits), place), visits)
        assert chosen.shape == (len(visits), slots)
        for row in chosen.tolist():
            real = [product for product in row if product != NONE]
            assert row[: len(real)] == real and len(real) == len(set(real)) == min(slots, count)
        found, times = np.unique(chosen[chosen != NONE], return_counts=True)
        assert found.tolist() == [100 * place + number for number in range(count)]
        assert set(times.tolist()) <= {min(slots, count)}


def test_a_query_that_nothing_was_mined_for(tmp_path: Path) -> None:
    mined = of_counts([2, 0, 3], 2, tmp_path)
    places = mined.indices(np.array([20, 5, 10, 99, 0]))
    assert places.tolist() == [2, NONE, 1, NONE, 0]
    chosen = mined.choose(places, np.zeros(5, dtype=np.int64))
    assert (chosen[1:4] == NONE).all() and (chosen[[0, 4]] != NONE).all()
    empty = of_counts([0], 2, tmp_path)
    assert empty.choose(np.array([0, NONE]), np.array([3, 4])).tolist() == [[NONE, NONE]] * 2
    nobody = MinedProducts(mined.rows, PAD, np.zeros(0, np.int64), np.zeros((0, 3), np.int64), 2, 1)
    assert nobody.choose(nobody.indices(np.array([4])), np.array([0])).tolist() == [[NONE, NONE]]
    scored = MinedGroups.build(replace(nobody, score=np.zeros((0, 3), np.float32)), [np.array([4])])
    first = np.zeros(1, np.int64)
    chosen = scored.choose(first, first, 0)
    assert np.isnan(scored.scores(first, first, chosen)).all()


def test_there_is_room_for_whichever_are_chosen(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(5, 3)])  # 4 and 6 tokens
    product = np.array([[0, 6, 1], [7, 5, NONE], [2, NONE, NONE], [NONE, NONE, NONE]])
    mined = MinedProducts(rows, PAD, np.array([1, 2, 4, 6]), product, 2, 1)
    assert mined.max_tokens(np.array([2, 1, 4, 6, 3])).tolist() == [12, 10, 4, 0, 0]
    nobody = MinedProducts(rows, PAD, np.zeros(0, np.int64), np.zeros((0, 3), np.int64), 2, 1)
    assert nobody.max_tokens(np.array([4])).tolist() == [0]
