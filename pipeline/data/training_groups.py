"""The groups of a run: rows of one query, all of the new partitions and a share of the old ones.

After its judged rows a group has slots for mined negatives of its query, if configured. All texts of a group are in one
row of tokens, one after the other, so that hardly anything of a batch is padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int32s, Int64s
from pipeline.core.batch_order import EMPTY, Groups, deal_groups, first_rows, locate, rank_among_equals
from pipeline.core.shuffle import mix64, permute_runs, stream_key
from pipeline.data.loader import RowSource
from pipeline.data.shards import Arrays, TokenRows

NONE = -1
MOST_LINKED = 64
"""Queries that may be linked: more lead to one product of many kinds. WDC has at most some 20 offers of a product."""
_NOTHING: Int64s = np.zeros(0, dtype=np.int64)
_BLOCK_ROWS = 65_536
"""Rows whose texts are read at a time."""
_REPLAY, _FIRST = 3, 5  # purposes of streams of random numbers, apart from those of core/batch_order and train/loop
_PER_SLOT = ("product", "label", "gain", "numeric", "categorical", "sample_id")

# Mined negatives as training reads them: of each query some products, by the row of the token shards that has them.


@dataclass(frozen=True)
class MinedProducts:
    """Products for `slots` slots of every group.

    Args:
        rows: what `product` counts in.
        pad_id: of its tokens.
        query_id: [Q], ascending.
        product: [Q, K] row numbers over all buckets of `rows`, smallest bucket first; NONE behind the last.
    """

    rows: RowSource
    pad_id: int
    query_id: Int64s
    product: Int64s
    slots: int
    seed: int

    def places(self, query_id: Int64s) -> Int64s:
        """Return the indices of queries [N] in `query_id`, NONE for those without mined products."""
        return _find(self.query_id, query_id)

    def choose(self, places: Int64s, visits: Int64s) -> Int64s:
        """Return products [N, slots] of the queries at `places` [N], NONE beyond the products of a query.

        Visit v [N] of a query uses the next `slots` products after visit v - 1, wrapping around; the start is random
        for each query. So its groups and epochs use each of its products equally often.
        """
        nothing = np.full((len(places), self.slots), NONE, dtype=np.int64)
        if not self.product.size:
            return nothing
        products = np.where(places[:, None] == NONE, NONE, self.product[places])
        count = (products != NONE).sum(axis=1)
        around = np.maximum(count, 1)
        key = np.uint64(stream_key(self.seed, _FIRST))
        first = (mix64(self.query_id[places].astype(np.uint64) ^ key) % around.astype(np.uint64)).astype(np.int64)
        slot = np.arange(self.slots)
        chosen = (first[:, None] + visits[:, None] * self.slots + slot) % around[:, None]
        return np.where(slot < count[:, None], np.take_along_axis(products, chosen, axis=1), nothing)

    def tokens(self, products: Int64s) -> Int32s:
        """Return the tokens of products [N] in the length of the largest bucket."""
        largest = len(self.rows.sizes) - 1
        tokens: Int32s = self.rows.read(*locate(self.rows.sizes, products), largest, ("product",))["product"]
        return tokens

    def room(self, query_id: Int64s) -> Int64s:
        """Return the most tokens [N] that the mined products of a group of each query can take."""
        kinds, place = np.unique(self.product[self.product != NONE], return_inverse=True)
        sizes = np.zeros(self.product.shape, dtype=np.int64)
        sizes[self.product != NONE] = text_lengths(self.rows, self.pad_id, "product", kinds)[place]
        most = -np.sort(-sizes, axis=1)[:, : self.slots].sum(axis=1)
        places = self.places(query_id)
        return np.where(places == NONE, 0, most[places]) if len(most) else np.zeros_like(query_id)


# Queries that are products of each other, as in data that matches items to items.


@dataclass(frozen=True)
class Links:
    """Texts that mean the same: a query that is a positive product of another one, and so on from query to query.

    The positives of one are then no negatives of another, though nobody has judged them so. In pairs of offers of the
    same product, queries that begin alike have many of each other's positives unjudged among them. A product
    that many queries lead to says nothing of them: more than MOST_LINKED that are linked are left as they are.

    `key` [N], ascending: keys of the texts that have the key of another one as `meaning` [N]. `queries`: how many there
    are, by their texts; `linked` of them mean the same as another, `loose` ones are linked to too many.
    """

    key: Int64s
    meaning: Int64s
    queries: int
    linked: int
    loose: int

    @staticmethod
    def of(sources: Sequence[RowSource], positive_gain: float) -> "Links":
        """Reads the texts and gains of every row once. Memory: some 70 bytes a row while linking."""
        query, product, positive = [_NOTHING], [_NOTHING], [np.zeros(0, dtype=np.bool_)]
        for source in sources:
            for arrays in _blocks(source, _all_rows(source), ("query", "product", "gain")):
                query.append(_text_key(arrays["query"], source.pad_id))
                product.append(_text_key(arrays["product"], source.pad_id))
                positive.append(arrays["gain"] >= np.float32(positive_gain))
        is_positive = np.concatenate(positive)
        key, asked = np.unique(np.concatenate(query), return_inverse=True)
        first, second = asked[is_positive], _find(key, np.concatenate(product)[is_positive])
        lowest = _connected(len(key), first[second != NONE], second[second != NONE])
        size = np.bincount(lowest, minlength=len(key))[lowest]
        is_few = size <= MOST_LINKED
        other = is_few & (lowest != np.arange(len(key)))
        return Links(key[other], key[lowest[other]], len(key), int((is_few & (size > 1)).sum()), int((~is_few).sum()))

    def meanings(self, keys: Int64s) -> Int64s:
        """What texts with these keys mean [N]; one that is not linked means itself."""
        place = _find(self.key, keys)
        return np.where(place == NONE, keys, self.meaning[place]) if len(self.key) else keys


def _find(ascending: Int64s, keys: Int64s) -> Int64s:
    """Return the indices of keys [N] in `ascending`, NONE for missing ones."""
    if not len(ascending):
        return np.full(len(keys), NONE, dtype=np.int64)
    places = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    return np.where(ascending[places] == keys, places, NONE)


def _connected(size: int, first: Int64s, second: Int64s) -> Int64s:
    """Return for each of `size` nodes the lowest node that edges from `first` to `second` connect it with, [size]."""
    lowest = np.arange(size, dtype=np.int64)
    while True:
        before, lowest = lowest, lowest.copy()
        low = np.minimum(before[first], before[second])
        for nodes in (first, second, before[first], before[second]):
            np.minimum.at(lowest, nodes, low)
        lowest = lowest[lowest]
        if np.array_equal(lowest, before):
            return lowest


def _text_key(tokens: Int32s, pad_id: int) -> Int64s:
    """Return a 64-bit hash of each row of tokens [N], whatever its padding."""
    shown = np.where(tokens == pad_id, 0, tokens).astype(np.uint64)
    places = mix64(np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    with np.errstate(over="ignore"):
        return mix64((shown * places).sum(axis=1, dtype=np.uint64)).view(np.int64)


# Groups, with slots for such products.


@dataclass(frozen=True)
class MinedGroups:
    """Mined products of groups [G], those with the shortest rows first.

    `starts`: the first group of each length. `place`: of a group's query in `products`. `first`: which of the groups of
    its query a group is, of `every` one.
    """

    products: MinedProducts
    starts: Int64s
    place: Int64s
    first: Int64s
    every: Int64s

    @staticmethod
    def of(products: MinedProducts, query_id: Sequence[Int64s]) -> "MinedGroups":
        """Look up the queries of groups: `query_id` has an array for each length."""
        together = np.concatenate(list(query_id))
        starts = first_rows([len(ids) for ids in query_id])
        return MinedGroups(products, starts, products.places(together), *rank_among_equals(together))

    def choose(self, pools: Int64s, numbers: Int64s, epoch: int) -> Int64s:
        """Return products [N, slots] of groups `numbers[i]` of pool `pools[i]` in an epoch."""
        here = self.starts[pools] + numbers
        return self.products.choose(self.place[here], self.first[here] + epoch * self.every[here])

    @property
    def fill(self) -> float:
        """Share of the slots for mined products that are filled."""
        products = self.products
        if not len(self.place) or not products.product.size:
            return 0.0
        found = np.where(self.place == NONE, 0, (products.product != NONE).sum(axis=1)[self.place])
        return float(np.minimum(found, products.slots).mean()) / products.slots


@dataclass(frozen=True)
class GroupedRows:
    """Rows of a source by (pool, number of a group in it). A group is one query with `slots` judged products of it.

    A pool is a length of rows of tokens, `lengths` are all of them.
    """

    source: RowSource
    groups: Groups
    slots: int
    lengths: tuple[int, ...]
    mined: MinedGroups | None = None
    links: Links | None = None

    @staticmethod
    def of(
        source: RowSource,
        *,
        slots: int,
        lengths: Sequence[int],
        positive_gain: float,
        seed: int,
        mined: MinedProducts | None = None,
        by_topic: bool = False,
        links: Links | None = None,
    ) -> "GroupedRows":
        """Deal the rows of a source, see core/batch_order. Reads the judgement and the texts of every row once.

        `lengths`: ascending, the last holds the longest texts there can be. `by_topic`: in the order of their queries'
        first tokens, so that neighbours are alike; all queries stand there once before any comes again.
        """
        every = _all_rows(source)
        judged = list(_blocks(source, every, ("query_id", "gain")))
        query_id = np.concatenate([_NOTHING, *(block["query_id"] for block in judged)])
        positive = (block["gain"] >= np.float32(positive_gain) for block in judged)
        is_positive = np.concatenate([np.zeros(0, dtype=np.bool_), *positive])
        members = deal_groups(query_id, is_positive, slots=slots, seed=seed)
        if by_topic:
            members = members[_topic_order(source, query_id, members[:, 0])]
        query, product = (text_lengths(source, source.pad_id, field, every) for field in ("query", "product"))
        first = members[:, 0]
        tokens = query[first] + np.where(members == EMPTY, 0, product[members]).sum(axis=1)
        if mined is not None:
            tokens += mined.room(query_id[first])
        groups = Groups.from_members(members, tokens, lengths)
        asking = None
        if mined is not None:
            asking = MinedGroups.of(mined, [query_id[members[:, 0]] for members in groups.members])
        return GroupedRows(source, groups, slots, tuple(lengths), asking, links)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Groups of each length."""
        return self.groups.sizes

    def numeric_sample(self, most: int) -> npt.NDArray[np.float32]:
        """Return numeric features [N, F] of at most `most` rows, spread evenly over the source."""
        total = sum(self.source.sizes)
        chosen = np.arange(0, total, max(1, -(-total // most)), dtype=np.int64)
        largest = len(self.source.sizes) - 1
        return self.source.read(*locate(self.source.sizes, chosen), largest, ("numeric",))["numeric"]

    def read(self, pools: Int64s, numbers: Int64s, length: int, epoch: int = 0) -> Arrays:
        """Groups `numbers[i]` of pool `pools[i]` in rows of length number `length`, in the order asked for.

        `tokens`, `positions`, `segments` (see model/relevance.GroupInputs) and `query_key` have a row a group, all else
        one a slot: those of judged rows, then those of mined products, which change with the epoch. `is_row` and
        `is_mined` say which slot holds one; the others have no tokens. The rest of such a slot, and of one with a mined
        product, is that of its group's first row: nothing may be learnt from it. `query_key` is equal for equal
        queries, `product_key` for products of equal tokens; with links for all that mean the same.
        """
        slots = self.slots + (self.mined.products.slots if self.mined else 0)
        members = np.full((len(numbers), slots), EMPTY, dtype=np.int64)
        for pool in np.unique(pools):
            here = pools == pool
            members[here, : self.slots] = self.groups.members[pool][numbers[here]]
        is_row = members != EMPTY
        rows = np.where(is_row, members, members[:, :1]).reshape(-1)
        largest = len(self.source.sizes) - 1
        arrays = self.source.read(*locate(self.source.sizes, rows), largest, _PER_SLOT)
        asking = self.source.read(*locate(self.source.sizes, members[:, 0]), largest, ("query", "query_id"))
        is_mined = np.zeros_like(is_row)
        if self.mined is not None:
            chosen = self.mined.choose(pools, numbers, epoch)
            is_mined[:, self.slots :] = chosen != NONE
            if is_mined.any():
                arrays["product"][is_mined.reshape(-1)] = self.mined.products.tokens(chosen[chosen != NONE])
        product = arrays.pop("product")
        query_key, product_key = asking["query_id"], _text_key(product, self.source.pad_id)
        if self.links is not None:
            query_key = self.links.meanings(_text_key(asking["query"], self.source.pad_id))
            product_key = self.links.meanings(product_key)
            is_mined &= product_key.reshape(is_mined.shape) != query_key[:, None]  # no negative: an empty slot
        flags = {"is_row": is_row.reshape(-1), "is_mined": is_mined.reshape(-1)}
        texts = _lined_up(asking["query"], product, is_row | is_mined, self.lengths[length], self.source.pad_id)
        return {**arrays, **texts, **flags, "query_key": query_key, "product_key": product_key}


@dataclass(frozen=True)
class TrainingPools:
    """New groups first, then replayed ones, per length. Which old groups are replayed is a function of the seed alone.

    `kept` is the number of old groups replayed of each length, `topic` that of groups in order that stay together.
    """

    new: GroupedRows
    old: GroupedRows | None
    kept: tuple[int, ...]
    seed: int
    topic: int = 1

    @staticmethod
    def build(
        new: TokenRows,
        old: TokenRows | None,
        replay_share: float,
        seed: int,
        *,
        slots: int,
        lengths: Sequence[int],
        positive_gain: float,
        mined: MinedProducts | None = None,
        topic: int = 1,
        link_queries: bool = False,
    ) -> "TrainingPools":
        """`replay_share` of the run's groups come from `old` (fewer when there are not so many).

        `topic`: groups of like queries that stay together, see `GroupedRows.of`.
        """
        links = Links.of([new] if old is None else [new, old], positive_gain) if link_queries else None

        grouped_from = partial(
            GroupedRows.of,
            slots=slots,
            lengths=lengths,
            positive_gain=positive_gain,
            seed=seed,
            mined=mined,
            by_topic=topic > 1,
            links=links,
        )
        grouped = grouped_from(new)
        if old is None or replay_share == 0.0:
            return TrainingPools(grouped, None, (0,) * len(grouped.sizes), seed, topic)
        before = grouped_from(old)
        wanted = sum(grouped.sizes) * replay_share / (1.0 - replay_share)
        share = min(1.0, wanted / max(1, sum(before.sizes)))
        return TrainingPools(grouped, before, tuple(round(size * share) for size in before.sizes), seed, topic)

    @property
    def slots(self) -> int:
        """Judged products of a group."""
        return self.new.slots

    @property
    def sizes(self) -> tuple[int, ...]:
        """Groups of each length."""
        return tuple(a + b for a, b in zip(self.new.sizes, self.kept, strict=True))

    def read(self, pools: Int64s, numbers: Int64s, length: int, epoch: int = 0) -> Arrays:
        """Read groups by (pool, number in the pool) in the order of `numbers`, see GroupedRows.read."""
        new_sizes = np.array(self.new.sizes, dtype=np.int64)
        replayed = numbers >= new_sizes[pools]
        if self.old is None or not replayed.any():
            return self.new.read(pools, numbers, length, epoch)
        chosen = numbers.copy()
        for pool in np.unique(pools[replayed]):
            here = replayed & (pools == pool)
            key = stream_key(self.seed, _REPLAY, int(pool))
            chosen[here] = permute_runs(numbers[here] - new_sizes[pool], self.old.sizes[pool], key, self.topic)
        result: Arrays = {}
        for mask, source in ((~replayed, self.new), (replayed, self.old)):
            if not mask.any():
                continue
            places = np.flatnonzero(mask)
            for name, values in source.read(pools[mask], chosen[mask], length, epoch).items():
                each = len(values) // len(places)  # rows of a group: one, or its slots
                if name not in result:
                    result[name] = np.empty((len(numbers) * each, *values.shape[1:]), values.dtype)
                result[name][(places[:, None] * each + np.arange(each)).reshape(-1)] = values
        return result


def _all_rows(source: RowSource) -> Int64s:
    """Return the numbers of all rows over all buckets."""
    return np.arange(sum(source.sizes), dtype=np.int64)


def _blocks(source: RowSource, rows: Int64s, fields: Sequence[str]) -> Iterator[Arrays]:
    """Yield fields of rows [N] block by block, with texts as wide as the block's largest bucket."""
    for start in range(0, len(rows), _BLOCK_ROWS):
        pools, numbers = locate(source.sizes, rows[start : start + _BLOCK_ROWS])
        yield source.read(pools, numbers, int(pools.max()), fields)


def text_lengths(source: RowSource, pad_id: int, field: str, rows: Int64s) -> Int64s:
    """Return the number of tokens in `field` of rows [N], which are numbered over all buckets."""
    lengths = ((texts[field] != pad_id).sum(axis=1) for texts in _blocks(source, rows, (field,)))
    return np.concatenate([_NOTHING, *lengths])


_TOPIC_TOKENS = 12
"""First tokens of a query by which topics are told apart."""
_TOKEN_BITS = 21
"""Room for the id of a token: three of them in an integer, and no vocabulary has 2 million."""


def _topic_order(source: RowSource, query_id: Int64s, first: Int64s) -> Int64s:
    """Return the order of groups by their number among those of a query, then by the query's first tokens.

    `first` [G]: a row of each group.
    """
    place, _ = rank_among_equals(query_id[first])
    keys = [np.zeros((0, _TOPIC_TOKENS // 3), dtype=np.int64)]
    for texts in _blocks(source, first, ("query",)):
        shown = texts["query"][:, 1 : 1 + _TOPIC_TOKENS]  # the first one begins every text
        tokens = np.pad(shown.astype(np.int64), ((0, 0), (0, _TOPIC_TOKENS - shown.shape[1])))
        keys.append((tokens.reshape(len(tokens), -1, 3) << (np.arange(3)[::-1] * _TOKEN_BITS)).sum(axis=2))
    return np.lexsort((*np.concatenate(keys).T[::-1], place))


def _lined_up(
    query: npt.NDArray[np.int32], product: npt.NDArray[np.int32], has_text: npt.NDArray[np.bool_], length: int, pad: int
) -> Arrays:
    """Queries [G, Tq] and products [G S, Tp] of groups as rows of tokens, all int32 [G, length].

    `has_text` [G, S]: a product without it takes no room. Padding within a text is left out: sets of earlier versions
    have it where a text spells it out.
    """
    groups, slots = has_text.shape
    is_query = query != pad
    is_product = (product != pad).reshape(groups, slots, -1) & has_text[:, :, None]
    sizes = np.concatenate([is_query.sum(axis=1)[:, None], is_product.sum(axis=2)], axis=1)  # [G, 1 + S]
    starts = np.cumsum(sizes, axis=1) - sizes
    texts = {name: np.zeros((groups, length), dtype=np.int32) for name in ("tokens", "positions", "segments")}
    texts["tokens"][:] = pad
    row, place = np.nonzero(is_query)[0], (is_query.cumsum(axis=1) - 1)[is_query]
    at = row, starts[row, 0] + place
    texts["tokens"][at], texts["positions"][at], texts["segments"][at] = query[is_query], place, 1
    row, slot, _ = np.nonzero(is_product)
    place = (is_product.cumsum(axis=2) - 1)[is_product]
    at = row, starts[row, 1 + slot] + place
    ids = product.reshape(groups, slots, -1)[is_product]
    texts["tokens"][at], texts["positions"][at], texts["segments"][at] = ids, place, slot + 2
    return texts
