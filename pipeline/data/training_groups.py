"""Build the groups that a run is trained on.

All rows of the new partitions and a sample of the old ones are grouped by query. If configured, each group also has
slots for mined negatives of its query, which follow the slots for judged rows. All texts of a group are concatenated to
a single row of tokens to reduce the amount of padding in a batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Bools, Float32s, Int32s, Int64s
from pipeline.core.batch_order import (
    EMPTY,
    Groups,
    deal_groups,
    first_rows,
    locate,
    rank_among_equals,
    repeated_positives,
)
from pipeline.core.shuffle import mix64, permute_runs, stream_key
from pipeline.data.loader import RowSource
from pipeline.data.shards import Arrays, TokenRows, text_hashes
from pipeline.data.taught import TaughtRows, taught_scores, taught_vectors

NONE = -1
MAX_LINKED = 64  # larger sets are usually linked by generic products (WDC has about 20 offers per product)
_EMPTY_IDS: Int64s = np.zeros(0, dtype=np.int64)
_BLOCK_ROWS = 65_536  # number of rows to read at a time
_REPLAY, _FIRST = 3, 5  # ids of random streams, which must differ from those in core/batch_order and train/loop
_PER_SLOT = ("product", "label", "gain", "numeric", "categorical", "sample_id")

# Mined negatives. They are stored as the row numbers of products in the token shards.


@dataclass(frozen=True)
class MinedProducts:
    """The mined products of Q queries, of which every group uses up to `slots`.

    `query_id` [Q] is sorted. `product` [Q, K] contains row numbers, counted over all buckets of `rows` and padded with
    NONE. `pad_id` is the padding token of `rows`. With a teacher, `taught` contains what it computed for `rows`, and
    `score` [Q, K] the scores of the mined pairs, if it has any.
    """

    rows: RowSource
    pad_id: int
    query_id: Int64s
    product: Int64s
    slots: int
    seed: int
    taught: TaughtRows | None = None
    score: Float32s | None = None

    def indices(self, query_id: Int64s) -> Int64s:
        """Look up the indices of N queries. The index of a query without mined products is NONE."""
        return _find(self.query_id, query_id)

    def choose(self, indices: Int64s, visits: Int64s) -> Int64s:
        """Choose mined products for N groups, given the index of each group's query. Returns [N, slots].

        `visits` [N] counts how often each query has been visited before. Every visit continues with the next products
        in the list, wrapping around at the end, and the first visit starts at a random offset. This ensures that each
        product is used equally often over all groups and epochs. Slots that cannot be filled contain NONE.
        """
        empty = np.full((len(indices), self.slots), NONE, dtype=np.int64)
        if not self.product.size:
            return empty
        products = np.where(indices[:, None] == NONE, NONE, self.product[indices])
        count = (products != NONE).sum(axis=1)
        period = np.maximum(count, 1)
        key = np.uint64(stream_key(self.seed, _FIRST))
        first = (mix64(self.query_id[indices].astype(np.uint64) ^ key) % period.astype(np.uint64)).astype(np.int64)
        slot = np.arange(self.slots)
        chosen = (first[:, None] + visits[:, None] * self.slots + slot) % period[:, None]
        return np.where(slot < count[:, None], np.take_along_axis(products, chosen, axis=1), empty)

    def tokens(self, products: Int64s) -> Int32s:
        """Read the tokens of N products, padded to the largest bucket."""
        largest = len(self.rows.sizes) - 1
        tokens: Int32s = self.rows.read(*locate(self.rows.sizes, products), largest, ("product",))["product"]
        return tokens

    def max_tokens(self, query_id: Int64s) -> Int64s:
        """Return the maximum number of tokens that mined products can add to a group, for each of N queries."""
        unique, inverse = np.unique(self.product[self.product != NONE], return_inverse=True)
        sizes = np.zeros(self.product.shape, dtype=np.int64)
        sizes[self.product != NONE] = text_lengths(self.rows, self.pad_id, "product", unique)[inverse]
        largest = -np.sort(-sizes, axis=1)[:, : self.slots].sum(axis=1)
        indices = self.indices(query_id)
        return np.where(indices == NONE, 0, largest[indices]) if len(largest) else np.zeros_like(query_id)


# Links between equivalent queries, for data in which items are matched with other items.


@dataclass(frozen=True)
class Links:
    """Sets of queries that are equivalent because they are positive products of each other, possibly transitively.

    When offers of the same product are matched, a batch of similar queries contains many unjudged positives. Linking
    equivalent queries prevents these from being used as negatives. Sets of more than MAX_LINKED queries are not linked.

    Args:
        key: Sorted text keys [N] that have to be replaced by their canonical key.
        canonical: The canonical keys [N].
        queries: Number of distinct query texts.
        linked: Number of queries that are equivalent to at least one other query.
        unlinked: Number of queries that are not linked because their set is larger than MAX_LINKED.
    """

    key: Int64s
    canonical: Int64s
    queries: int
    linked: int
    unlinked: int

    @staticmethod
    def build(sources: Sequence[RowSource], positive_gain: float) -> "Links":
        """Find equivalent queries. This reads every row once, and needs about 70 bytes of memory per row."""
        query, product, positive = [_EMPTY_IDS], [_EMPTY_IDS], [np.zeros(0, dtype=np.bool_)]
        for source in sources:
            for arrays in _blocks(source, _all_rows(source), ("query", "product", "gain")):
                query.append(text_hashes(arrays["query"], source.pad_id).view(np.int64))
                product.append(text_hashes(arrays["product"], source.pad_id).view(np.int64))
                positive.append(arrays["gain"] >= np.float32(positive_gain))
        is_positive = np.concatenate(positive)
        key, query_index = np.unique(np.concatenate(query), return_inverse=True)
        first, second = query_index[is_positive], _find(key, np.concatenate(product)[is_positive])
        component = _connected_components(len(key), first[second != NONE], second[second != NONE])
        size = np.bincount(component, minlength=len(key))[component]
        is_small = size <= MAX_LINKED
        replaced = is_small & (component != np.arange(len(key)))
        linked, unlinked = int((is_small & (size > 1)).sum()), int((~is_small).sum())
        return Links(key[replaced], key[component[replaced]], len(key), linked, unlinked)

    def canonical_keys(self, keys: Int64s) -> Int64s:
        """Replace the keys of N texts by their canonical keys. Keys of texts that are not linked are unchanged."""
        index = _find(self.key, keys)
        return np.where(index == NONE, keys, self.canonical[index]) if len(self.key) else keys


def _find(ascending: Int64s, keys: Int64s) -> Int64s:
    """Look up the indices of N keys in a sorted array. The index of a missing key is NONE."""
    if not len(ascending):
        return np.full(len(keys), NONE, dtype=np.int64)
    indices = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    return np.where(ascending[indices] == keys, indices, NONE)


def _connected_components(size: int, first: Int64s, second: Int64s) -> Int64s:
    """Find the connected components of a graph with `size` nodes and with edges from `first` to `second`.

    Each component is identified by its lowest node, which is returned for every node.
    """
    lowest = np.arange(size, dtype=np.int64)
    while True:
        previous, lowest = lowest, lowest.copy()
        low = np.minimum(previous[first], previous[second])
        for nodes in (first, second, previous[first], previous[second]):
            np.minimum.at(lowest, nodes, low)
        lowest = lowest[lowest]
        if np.array_equal(lowest, previous):
            return lowest


# Groups of judged rows, with slots for mined products.


@dataclass(frozen=True)
class MinedGroups:
    """The assignment of mined products to G groups, ordered by sequence length.

    Args:
        starts: The first group of each length.
        index: The index [G] of each group's query in `products`, or NONE.
        ordinal: The number [G] of each group among all groups of its query.
        count: The number [G] of groups that have the same query.
    """

    products: MinedProducts
    starts: Int64s
    index: Int64s
    ordinal: Int64s
    count: Int64s

    @staticmethod
    def build(products: MinedProducts, query_id: Sequence[Int64s]) -> "MinedGroups":
        """Look up the queries of all groups. `query_id` contains one array for each sequence length."""
        ids = np.concatenate(list(query_id))
        starts = first_rows([len(array) for array in query_id])
        return MinedGroups(products, starts, products.indices(ids), *rank_among_equals(ids))

    def choose(self, pools: Int64s, numbers: Int64s, epoch: int) -> Int64s:
        """Choose mined products [N, slots] for N groups in an epoch, where group i is `numbers[i]` in `pools[i]`."""
        groups = self.starts[pools] + numbers
        return self.products.choose(self.index[groups], self.ordinal[groups] + epoch * self.count[groups])

    def scores(self, pools: Int64s, numbers: Int64s, chosen: Int64s) -> Float32s:
        """Return the teacher's scores of the products that were chosen for N groups. Those that are missing are NaN."""
        if self.products.score is None or not self.products.product.size:
            return np.full(chosen.shape, np.nan, dtype=np.float32)
        index = self.index[self.starts[pools] + numbers]
        column = (self.products.product[index][:, None, :] == chosen[:, :, None]).argmax(axis=2)
        return np.take_along_axis(self.products.score[index], column, axis=1)

    @property
    def fill(self) -> float:
        """Fraction of the slots for mined products that are filled."""
        products = self.products
        if not len(self.index) or not products.product.size:
            return 0.0
        available = np.where(self.index == NONE, 0, (products.product != NONE).sum(axis=1)[self.index])
        return float(np.minimum(available, products.slots).mean()) / products.slots


@dataclass(frozen=True)
class GroupedRows:
    """The rows of a source, arranged in groups of a query and up to `slots` of its judged products.

    Groups are identified by pool and group number. Each pool contains all groups of one sequence length.
    """

    source: RowSource
    groups: Groups
    slots: int
    lengths: tuple[int, ...]
    mined: MinedGroups | None = None
    links: Links | None = None
    taught: TaughtRows | None = None
    repeats: Int64s = field(default_factory=lambda: _EMPTY_IDS)
    """Positive rows that occur once more. As members of groups, they are numbered after all rows."""

    @staticmethod
    def build(
        source: RowSource,
        *,
        slots: int,
        lengths: Sequence[int],
        positive_gain: float,
        seed: int,
        mined: MinedProducts | None = None,
        by_topic: bool = False,
        links: Links | None = None,
        taught: TaughtRows | None = None,
        repeat_positives: bool = False,
    ) -> "GroupedRows":
        """Assign the rows of a source to groups (see core/batch_order). This reads all rows once.

        Args:
            lengths: Sequence lengths in ascending order. The longest group must fit into the last one.
            by_topic: Sort groups by the first tokens of their queries, so that adjacent groups are similar. Every query
                occurs once before any query occurs again.
        """
        all_rows = _all_rows(source)
        judged = list(_blocks(source, all_rows, ("query_id", "gain")))
        query_id = np.concatenate([_EMPTY_IDS, *(block["query_id"] for block in judged)])
        positive = (block["gain"] >= np.float32(positive_gain) for block in judged)
        is_positive = np.concatenate([np.zeros(0, dtype=np.bool_), *positive])
        repeats = repeated_positives(query_id, is_positive, slots=slots) if repeat_positives else _EMPTY_IDS
        dealt = np.concatenate([all_rows, repeats])
        members = deal_groups(query_id[dealt], is_positive[dealt], slots=slots, seed=seed)
        if by_topic:
            members = members[_topic_order(source, query_id, dealt[members[:, 0]])]
        query, product = (text_lengths(source, source.pad_id, field, all_rows) for field in ("query", "product"))
        first = dealt[members[:, 0]]
        tokens = query[first] + np.where(members == EMPTY, 0, product[dealt[members]]).sum(axis=1)
        if mined is not None:
            tokens += mined.max_tokens(query_id[first])
        groups = Groups.from_members(members, tokens, lengths)
        mined_groups = None
        if mined is not None:
            mined_groups = MinedGroups.build(mined, [query_id[dealt[members[:, 0]]] for members in groups.members])
        return GroupedRows(source, groups, slots, tuple(lengths), mined_groups, links, taught, repeats)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of groups for each sequence length."""
        return self.groups.sizes

    def numeric_sample(self, max_rows: int) -> npt.NDArray[np.float32]:
        """Read the numeric features of at most `max_rows` rows, evenly spaced over the source."""
        total = sum(self.source.sizes)
        chosen = np.arange(0, total, max(1, -(-total // max_rows)), dtype=np.int64)
        largest = len(self.source.sizes) - 1
        return self.source.read(*locate(self.source.sizes, chosen), largest, ("numeric",))["numeric"]

    def read(self, pools: Int64s, numbers: Int64s, length: int, epoch: int = 0) -> Arrays:
        """Read groups, where group i has the number `numbers[i]` in pool `pools[i]`.

        The arrays `tokens`, `positions` and `segments` (see model/relevance.GroupInputs) have one row of length
        `lengths[length]` per group, and `query_key` has one value per group. All other arrays have one row per slot. In
        each group, the slots for judged rows are followed by the slots for mined products, which change every epoch.
        `is_row` and `is_mined` indicate which slots are filled. The label, gain and features of a slot are undefined
        unless it has a judged row. A positive that is repeated has a gain, but a label of -1.

        Equal queries have the same `query_key`, and products with equal tokens have the same `product_key`. If queries
        are linked, equivalent texts have the same keys as well. With a teacher, there are also the arrays of
        `taught_scores` or `taught_vectors`.
        """
        slots = self.slots + (self.mined.products.slots if self.mined else 0)
        members = np.full((len(numbers), slots), EMPTY, dtype=np.int64)
        for pool in np.unique(pools):
            in_pool = pools == pool
            members[in_pool, : self.slots] = self.groups.members[pool][numbers[in_pool]]
        total, largest = sum(self.source.sizes), len(self.source.sizes) - 1
        is_row, is_repeat = members != EMPTY, members >= total
        members[is_repeat] = self.repeats[members[is_repeat] - total]
        rows = np.where(is_row, members, members[:, :1]).reshape(-1)
        arrays = self.source.read(*locate(self.source.sizes, rows), largest, _PER_SLOT)
        arrays["label"] = np.where(is_repeat.reshape(-1), -1, arrays["label"])
        queries = self.source.read(*locate(self.source.sizes, members[:, 0]), largest, ("query", "query_id"))
        is_mined, chosen = np.zeros_like(is_row), np.zeros((len(numbers), 0), dtype=np.int64)
        if self.mined is not None:
            chosen = self.mined.choose(pools, numbers, epoch)
            is_mined[:, self.slots :] = chosen != NONE
            if is_mined.any():
                arrays["product"][is_mined.reshape(-1)] = self.mined.products.tokens(chosen[chosen != NONE])
        product = arrays.pop("product")
        query_key, product_key = queries["query_id"], text_hashes(product, self.source.pad_id).view(np.int64)
        if self.links is not None:
            query_key = self.links.canonical_keys(text_hashes(queries["query"], self.source.pad_id).view(np.int64))
            product_key = self.links.canonical_keys(product_key)
            # A product that is equivalent to the query must not be used as a negative.
            is_mined &= product_key.reshape(is_mined.shape) != query_key[:, None]
        flags = {"is_row": is_row.reshape(-1), "is_mined": is_mined.reshape(-1)}
        texts = _concatenate(queries["query"], product, is_row | is_mined, self.lengths[length], self.source.pad_id)
        if self.taught is not None:
            arrays |= self._taught(self.taught, pools, numbers, rows, chosen, (is_row, is_mined))
        return {**arrays, **texts, **flags, "query_key": query_key, "product_key": product_key}

    def _taught(
        self,
        taught: TaughtRows,
        pools: Int64s,
        numbers: Int64s,
        rows: Int64s,
        chosen: Int64s,
        filled: tuple[Bools, Bools],
    ) -> Arrays:
        """Return what the teacher computed for G groups, whose slots have the given rows and chosen mined products."""
        is_row, is_mined = filled
        slots = is_mined[:, self.slots :]
        if not taught.width:
            score = taught.scores(rows).reshape(is_row.shape)
            score[~is_row] = np.nan
            if self.mined is not None:
                score[:, self.slots :][slots] = self.mined.scores(pools, numbers, chosen)[slots]
            return taught_scores(score.reshape(-1))
        product = taught.vectors("product", rows)
        product[~is_row.reshape(-1)] = 0
        if self.mined is not None and self.mined.products.taught is not None:
            product[is_mined.reshape(-1)] = self.mined.products.taught.vectors("product", chosen[slots])
        return taught_vectors(taught.vectors("query", rows.reshape(is_row.shape)[:, 0]), product)


@dataclass(frozen=True)
class TrainingPools:
    """All new groups, and a sample of the old groups that are replayed.

    The sample depends only on the seed. `num_replayed` is the number of old groups for each sequence length. `topic` is
    the number of adjacent groups that are kept together when groups are sampled.
    """

    new: GroupedRows
    old: GroupedRows | None
    num_replayed: tuple[int, ...]
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
        repeat_positives: bool = False,
        taught: tuple[TaughtRows | None, TaughtRows | None] = (None, None),
    ) -> "TrainingPools":
        """Group the rows of the new and the old partitions.

        Args:
            replay_share: Fraction of old groups among all groups. It is lower if there are not enough old groups.
            topic: Number of similar groups to keep together. If it is greater than 1, groups are sorted by topic (see
                `GroupedRows.build`).
            link_queries: Treat queries that are positive products of each other as equivalent (see `Links`).
            repeat_positives: Repeat positives so that every group can contain one (see `repeated_positives`).
            taught: What a teacher computed for the new and the old rows.
        """
        links = Links.build([new] if old is None else [new, old], positive_gain) if link_queries else None

        build_groups = partial(
            GroupedRows.build,
            slots=slots,
            lengths=lengths,
            positive_gain=positive_gain,
            seed=seed,
            mined=mined,
            by_topic=topic > 1,
            links=links,
            repeat_positives=repeat_positives,
        )
        new_groups = build_groups(new, taught=taught[0])
        if old is None or replay_share == 0.0:
            return TrainingPools(new_groups, None, (0,) * len(new_groups.sizes), seed, topic)
        old_groups = build_groups(old, taught=taught[1])
        target = sum(new_groups.sizes) * replay_share / (1.0 - replay_share)
        fraction = min(1.0, target / max(1, sum(old_groups.sizes)))
        num_replayed = tuple(round(size * fraction) for size in old_groups.sizes)
        return TrainingPools(new_groups, old_groups, num_replayed, seed, topic)

    @property
    def slots(self) -> int:
        """The maximum number of judged products in a group."""
        return self.new.slots

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of groups for each sequence length."""
        return tuple(a + b for a, b in zip(self.new.sizes, self.num_replayed, strict=True))

    def read(self, pools: Int64s, numbers: Int64s, length: int, epoch: int = 0) -> Arrays:
        """Read groups by pool and number. Numbers beyond the new groups refer to replayed groups.

        See `GroupedRows.read` for the arrays that are returned.
        """
        new_sizes = np.array(self.new.sizes, dtype=np.int64)
        replayed = numbers >= new_sizes[pools]
        if self.old is None or not replayed.any():
            return self.new.read(pools, numbers, length, epoch)
        chosen = numbers.copy()
        for pool in np.unique(pools[replayed]):
            mask = replayed & (pools == pool)
            key = stream_key(self.seed, _REPLAY, int(pool))
            chosen[mask] = permute_runs(numbers[mask] - new_sizes[pool], self.old.sizes[pool], key, self.topic)
        result: Arrays = {}
        for mask, source in ((~replayed, self.new), (replayed, self.old)):
            if not mask.any():
                continue
            indices = np.flatnonzero(mask)
            for name, values in source.read(pools[mask], chosen[mask], length, epoch).items():
                per_group = len(values) // len(indices)  # either 1 or the number of slots
                if name not in result:
                    result[name] = np.empty((len(numbers) * per_group, *values.shape[1:]), values.dtype)
                result[name][(indices[:, None] * per_group + np.arange(per_group)).reshape(-1)] = values
        return result


def _all_rows(source: RowSource) -> Int64s:
    """Return the numbers of all rows, counted over all buckets."""
    return np.arange(sum(source.sizes), dtype=np.int64)


def _blocks(source: RowSource, rows: Int64s, fields: Sequence[str]) -> Iterator[Arrays]:
    """Read fields of the given rows in blocks. Texts are padded to the largest bucket in the block."""
    for start in range(0, len(rows), _BLOCK_ROWS):
        pools, numbers = locate(source.sizes, rows[start : start + _BLOCK_ROWS])
        yield source.read(pools, numbers, int(pools.max()), fields)


def text_lengths(source: RowSource, pad_id: int, field: str, rows: Int64s) -> Int64s:
    """Return the number of tokens in a text field for each of N rows, which are numbered over all buckets."""
    lengths = ((texts[field] != pad_id).sum(axis=1) for texts in _blocks(source, rows, (field,)))
    return np.concatenate([_EMPTY_IDS, *lengths])


_TOPIC_TOKENS = 12  # number of first tokens of a query that identify its topic
_TOKEN_BITS = 21  # three token ids fit into a 64-bit integer because vocabularies have fewer than 2 million tokens


def _topic_order(source: RowSource, query_id: Int64s, first: Int64s) -> Int64s:
    """Sort groups by topic and return their order. `first` [G] contains one row of each group.

    Groups are sorted by their number within their query, and then by the first tokens of the query.
    """
    ordinal, _ = rank_among_equals(query_id[first])
    keys = [np.zeros((0, _TOPIC_TOKENS // 3), dtype=np.int64)]
    for texts in _blocks(source, first, ("query",)):
        prefix = texts["query"][:, 1 : 1 + _TOPIC_TOKENS]  # skip [CLS], which is the first token of every text
        tokens = np.pad(prefix.astype(np.int64), ((0, 0), (0, _TOPIC_TOKENS - prefix.shape[1])))
        keys.append((tokens.reshape(len(tokens), -1, 3) << (np.arange(3)[::-1] * _TOKEN_BITS)).sum(axis=2))
    return np.lexsort((*np.concatenate(keys).T[::-1], ordinal))


def _concatenate(
    query: npt.NDArray[np.int32], product: npt.NDArray[np.int32], has_text: npt.NDArray[np.bool_], length: int, pad: int
) -> Arrays:
    """Concatenate the queries [G, Tq] and products [G S, Tp] of G groups to rows of tokens.

    `has_text` [G, S] indicates which products to include. Padding tokens within a text are removed, because old token
    sets may contain them. Returns the arrays `tokens`, `positions` and `segments`, each int32 [G, length].
    """
    groups, slots = has_text.shape
    is_query = query != pad
    is_product = (product != pad).reshape(groups, slots, -1) & has_text[:, :, None]
    sizes = np.concatenate([is_query.sum(axis=1)[:, None], is_product.sum(axis=2)], axis=1)  # [G, 1 + S]
    starts = np.cumsum(sizes, axis=1) - sizes
    texts = {name: np.zeros((groups, length), dtype=np.int32) for name in ("tokens", "positions", "segments")}
    texts["tokens"][:] = pad
    row, position = np.nonzero(is_query)[0], (is_query.cumsum(axis=1) - 1)[is_query]
    index = row, starts[row, 0] + position
    texts["tokens"][index], texts["positions"][index], texts["segments"][index] = query[is_query], position, 1
    row, slot, _ = np.nonzero(is_product)
    position = (is_product.cumsum(axis=2) - 1)[is_product]
    index = row, starts[row, 1 + slot] + position
    ids = product.reshape(groups, slots, -1)[is_product]
    texts["tokens"][index], texts["positions"][index], texts["segments"][index] = ids, position, slot + 2
    return texts
