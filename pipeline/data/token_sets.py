"""Read the token sets that the prepare stage has committed, and select the partitions that a run should train on."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError

from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.record import Record
from pipeline.data.config import CategoricalFeature, SplitBy
from pipeline.data.shards import ShardFile, TokenRows
from pipeline.io.commit import fetch_dir, read_manifest
from pipeline.io.storage import KeyNotFound, Storage, read_record
from pipeline.model.config import Attribute, InputSpec

# The `fields` in the MANIFEST.json of a folder of token shards.

FORMAT_VERSION = 1
KIND = "tokens"
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


class ShardInfo(Record):
    """A shard file and its number of rows in each bucket. Buckets without rows do not have any tensors."""

    file: str
    rows: tuple[int, ...]


class SliceInfo(Record):
    """A slice column for evaluation and its distinct values. Rows only store a hash of the value (data/validate.py)."""

    column: str
    names: tuple[str, ...]


class FileRows(Record):
    """The numbers of good, bad and filtered rows in an input file. Blank lines are not counted as rows."""

    file: str
    rows: int = Field(description="Number of rows in the Parquet footer, of CSV records, or of lines of JSON")
    good: int = Field(description="Number of rows that are stored in shards")
    bad: int
    filtered: int = Field(description="Number of rows excluded by data.filter or data.esci_locale")
    blank: int


class JudgedSplit(Record):
    """Counts of the judgements in one split. Gains are in hundredths, rounded down, and zero counts are omitted."""

    gains: tuple[dict[int, int], ...] = Field(description="Number of rows by gain, for each bucket")
    labels: tuple[int, ...] = Field(description="Number of rows with each label")
    label_gain_sums: tuple[float, ...] = Field(description="Sum of the gains of each label")
    query_best: dict[int, int] = Field(description="Number of queries by the highest gain of their rows")
    query_worst: dict[int, int] = Field(description="Number of queries by the lowest gain of their rows")
    queries_in_train: int = Field(
        0, description="Number of validation or test queries that are also in the train split of the partition"
    )
    products: int = Field(0, description="Number of products in the validation or test split (0 if not counted)")
    products_in_train: int = Field(0, description="Number of these that are also in the train split of the partition")
    rows_new_product: int = Field(0, description="Number of rows whose product is not in the train split")


QUARANTINE = "quarantine.jsonl"  # contains the first bad rows, stored in the same folder as the shards
QUARANTINE_ROWS = 1000  # maximum number of bad rows stored for a partition
RowContent = str | dict[str, str | int | float | None]


class QuarantinedRow(Record):
    """A row that cannot be used, stored as one line of quarantine.jsonl.

    `row` is its 0-based number in the input file, not counting the header. `line` is the 1-based number of its first
    line in a text file, or 0 in other formats. `content` is its values by column, or its text if it cannot be parsed.
    `count`, which is not stored, is greater than 1 if a single defect affects several lines, for example an unclosed
    quote in a CSV file.
    """

    file: str
    row: int
    line: int = 0
    reason: str
    content: RowContent
    count: int = Field(1, exclude=True)

    @property
    def text(self) -> str:
        """The content formatted as a single line of text."""
        return self.content if isinstance(self.content, str) else json.dumps(self.content, ensure_ascii=False)


class TokenSetInfo(Record):
    """The metadata of a prepared partition.

    `rows_read` counts the rows that pass the filter, including bad rows. `label_gains` is the mean gain of each label.
    If the data does not have gains, they are spaced evenly between 0 and 1.
    """

    retired: ClassVar[Mapping[str, Any]] = {"texts_of_several_ids": ...}
    schema_version: int = FORMAT_VERSION
    dataset: str
    partition: str = Field(description="dt=YYYY-MM-DD or flat")
    watermark: str = Field(description="The date of the partition (empty if flat)")
    fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    pad_id: int
    query_prefix: str = Field("", description="Text prepended to every query")
    product_prefix: str = Field("", description="Text prepended to every product text")
    split_by: SplitBy = Field("query", description="Items by which rows were assigned to splits")
    buckets: tuple[str, ...]
    labels: tuple[str, ...]
    label_gains: tuple[float, ...]
    numeric: tuple[str, ...] = Field(description="Names of the configured columns, followed by the lexical features")
    attributes: tuple[Attribute, ...] = Field((), description="Attributes with their columns and kinds")
    categorical: tuple[CategoricalFeature, ...]
    splits: dict[Split, tuple[ShardInfo, ...]]
    rows_read: int
    rows_bad: int
    reasons: dict[str, int]
    truncated_rows: int = Field(description="Number of rows with a text that is longer than the largest bucket")
    tokens: int = Field(description="Number of tokens, including special tokens but not padding")
    slices: tuple[SliceInfo, ...] = Field((), description="Slice columns, in the order of the values stored with rows")
    files: tuple[FileRows, ...] = Field(
        (), description="Input files, in the order in which they were read (empty in sets from earlier versions)"
    )

    judged: dict[Split, JudgedSplit] = Field(
        {}, description="Counts for each split that has rows (empty in sets from earlier versions)"
    )
    without_category: dict[str, int] = Field(
        {}, description="Number of rows without a value, by categorical column (empty in sets from earlier versions)"
    )
    without_number: dict[str, int] = Field(
        {}, description="Number of rows without a value, by numeric feature (empty in sets from earlier versions)"
    )

    @property
    def slice_columns(self) -> tuple[str, ...]:
        return tuple(info.column for info in self.slices)

    def rows_by_bucket(self, *splits: Split) -> tuple[int, ...]:
        """Return the number of good rows in each bucket, summed over the given splits."""
        counts = [shard.rows for split in splits for shard in self.splits.get(split, ())]
        return tuple(map(sum, zip(*counts, strict=True))) or (0,) * len(self.buckets)

    @property
    def rows(self) -> int:
        """Number of good rows in all splits."""
        return sum(sum(shard.rows) for shards in self.splits.values() for shard in shards)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest text in any bucket."""
        return longest_in_buckets(self.buckets)


def check_trainable(info: TokenSetInfo, max_positions: int) -> None:
    """Raise DataError if prepared data has fewer than two labels, or ConfigError if its texts are too long."""
    if len(info.labels) < 2:
        raise DataError(
            f"the prepared data has {len(info.labels)} relevance classes ({', '.join(info.labels)})",
            expected="a label column with at least two classes",
            next_command="set --data.columns.label NAME and run trnpipe prepare again",
        )
    check_longest(info.longest, max_positions)


def longest_in_buckets(buckets: Iterable[str]) -> int:
    """Return the number of tokens of the longest text in any of these buckets, or 0 if there are none."""
    return max((max(bucket.query_tokens, bucket.product_tokens) for bucket in map(Bucket.parse, buckets)), default=0)


def check_longest(longest: int, max_positions: int) -> None:
    """Raise ConfigError if the model cannot read a text of this many tokens."""
    if longest > max_positions:
        raise ConfigError(
            f"the longest bucket has {longest} tokens, but model.max_positions is {max_positions}",
            expected="buckets that fit the position embeddings",
            next_command=f"--model.max-positions {longest}, or smaller data.buckets",
        )


# Selection of the partitions for an incremental run.


@dataclass(frozen=True)
class Partition:
    """A prepared partition.

    It is named `dt=YYYY-MM-DD` (a day), `snapshot=<number>-<id>` (an append to a table), or `flat` (no watermark).
    """

    name: str
    watermark: str
    fingerprint: str


@dataclass(frozen=True)
class Selection:
    """The partitions that are used by a run.

    A run trains on all rows of the `new` partitions, and on a sample of the `old` partitions. The `late` partitions are
    old partitions that have changed since the parent was trained on them.
    """

    new: tuple[Partition, ...]
    old: tuple[Partition, ...]
    late: tuple[Partition, ...]

    @property
    def watermark(self) -> str:
        """The latest date of any partition, or an empty string for flat data."""
        return max((p.watermark for p in (*self.new, *self.old)), default="")


def select_partitions(
    prepared: Sequence[Partition], *, parent_watermark: str | None, parent_partitions: Mapping[str, str]
) -> Selection:
    """Divide partitions into new and old ones.

    A partition is new if its date is after the parent's watermark. A partition without a date is new if the parent was
    not trained on its content. If there is no parent (`parent_watermark` is None), all partitions are new.
    """
    if parent_watermark is None:
        return Selection(tuple(prepared), (), ())

    def is_new(partition: Partition) -> bool:
        if partition.watermark:
            return partition.watermark > parent_watermark
        return partition.fingerprint not in parent_partitions.values()

    new = tuple(p for p in prepared if is_new(p))
    old = tuple(p for p in prepared if not is_new(p))
    late = tuple(p for p in old if parent_partitions.get(p.name) != p.fingerprint)
    return Selection(new, old, late)


@dataclass(frozen=True)
class TokenSet:
    prefix: str
    info: TokenSetInfo

    @property
    def partition(self) -> Partition:
        return Partition(self.info.partition, self.info.watermark, self.info.fingerprint)


_TEXTS = ("tokenizer_fingerprint", "pad_id", "query_prefix", "product_prefix", "buckets")
# These fields must be equal in all partitions of a run.
_COMMON = (*_TEXTS, "labels", "numeric", "attributes", "categorical", "slice_columns", "split_by")


def read_token_sets(workspace: Storage, prefixes: Sequence[str]) -> list[TokenSet]:
    """Read the metadata of token sets.

    Raises DataError if a token set has not been committed, and ConfigError if they were prepared with different
    settings.
    """
    sets: list[TokenSet] = []
    for prefix in prefixes:
        manifest = read_manifest(workspace, prefix)
        if manifest is None or manifest.kind != KIND:
            raise DataError(
                f"{workspace.uri(prefix)} does not contain prepared data",
                expected="token shards that were committed by the prepare stage",
                next_command="trnpipe prepare",
            )
        try:
            sets.append(TokenSet(prefix, TokenSetInfo.model_validate(manifest.fields)))
        except ValidationError as error:
            raise DataError(
                f"{workspace.uri(prefix)} was prepared by a different version: field {error.errors()[0]['loc']}",
                expected=f"token shards of format {FORMAT_VERSION}",
                next_command="trnpipe prepare",
            ) from error
    if not sets:
        raise DataError("no prepared partition", expected="at least one", next_command="trnpipe prepare")
    for other in sets[1:]:
        for name in _COMMON:
            value, expected = getattr(other.info, name), getattr(sets[0].info, name)
            if value != expected:
                raise ConfigError(
                    f"partition {other.info.partition} was prepared with {name} {value}",
                    expected=f"{expected}, as in {sets[0].info.partition}",
                    next_command="trnpipe prepare, with the settings of this run",
                )
    # Sets of earlier versions do not count missing numbers, but a new model has indicators if any of its sets does.
    counts = dict.fromkeys((name for each in sets for name in each.info.without_number), 0)
    return [replace(s, info=s.info.model_copy(update={"without_number": counts | s.info.without_number})) for s in sets]


def open_rows(
    workspace: Storage, sets: Sequence[TokenSet], split: Split, cache_dir: Path, extra: Sequence[str] = ()
) -> TokenRows:
    """Open the rows of one split in all of the given token sets.

    Shards that are stored on S3 are first downloaded and verified. `extra` lists additional arrays to read (see
    `shards.EXTRA`). The array `partition` contains indices into `sets`.
    """
    shards = []
    for index, token_set in enumerate(sets):
        folder = fetch_dir(workspace, token_set.prefix, cache_dir, deep=False)
        files = token_set.info.splits.get(split, ())
        shards += [ShardFile(folder / shard.file, shard.rows, index) for shard in files]
    buckets = [Bucket.parse(text) for text in sets[0].info.buckets]
    return TokenRows(shards, buckets, sets[0].info.pad_id, extra)


def token_set_prefixes(outputs: Mapping[str, str]) -> tuple[str, ...]:
    """Return the prefixes of all token sets among the outputs of the prepare stage, in partition order."""
    return tuple(outputs[name] for name in sorted(outputs) if name.startswith("token_set_"))


def spec_of(info: TokenSetInfo) -> InputSpec:
    """Return the part of the model configuration that is determined by the prepared data."""
    shared = info.model_dump(include={*InputSpec.model_fields})
    categorical_ids = tuple(feature.num_ids for feature in info.categorical)
    return InputSpec(**shared, categorical_ids=categorical_ids).with_numbers(tuple(info.without_number))


# The summary of the prepared data that is shown in reports, stored in cycles/<cycle>/prepare/digest.json.

SAMPLES_PER_REASON = 5
MAX_REASONS, MAX_FILES, MAX_CONTENT = 50, 20, 200
"""Maximum number of reasons, of partitions whose bad rows are read (newest first), and of characters in a row."""


class PartitionDigest(Record):
    """The row counts of a prepared partition."""

    partition: str
    watermark: str = Field(description="Date of the partition (empty if flat)")
    rows: Mapping[Split, int]
    labels: Mapping[Split, tuple[int, ...]] = Field(
        description="Number of rows with each label (empty for sets from earlier versions)"
    )
    bucket_rows: tuple[int, ...] = Field(description="Number of rows in each bucket, summed over all splits")
    bad: int
    filtered: int
    blank: int
    truncated: int
    tokens: int
    without_category: Mapping[str, int] = Field({}, description="Number of rows without a value, by feature")


class PrepareDigest(Record):
    schema_version: Literal[1] = 1
    cycle: str
    labels: tuple[str, ...] = Field(description="Labels, ordered from least to most relevant")
    buckets: tuple[str, ...]
    partitions: tuple[PartitionDigest, ...] = Field(description="Partitions, ordered by date")
    reasons: Mapping[str, int] = Field(description="Number of bad rows by reason, most frequent first")
    samples: tuple[QuarantinedRow, ...] = Field(
        description=f"At most {SAMPLES_PER_REASON} bad rows per reason, or none if report.examples is 0"
    )


def digest_key(cycle: str) -> str:
    return f"cycles/{cycle}/prepare/digest.json"


def store_digest(
    workspace: Storage, cycle: str, token_sets: Mapping[str, TokenSetInfo], *, labels: tuple[str, ...], examples: int
) -> None:
    """Store a summary of the token sets of a cycle, with at most `examples` bad rows for each reason."""
    infos = token_sets.values()
    reasons = dict(sum((Counter(info.reasons) for info in infos), Counter[str]()).most_common(MAX_REASONS))
    samples: dict[str, list[QuarantinedRow]] = {reason: [] for reason in reasons}
    newest = sorted(token_sets.items(), key=lambda item: item[1].watermark, reverse=True)
    limit = min(examples, SAMPLES_PER_REASON)
    for prefix in [prefix for prefix, info in newest if info.rows_bad and limit][:MAX_FILES]:
        with suppress(KeyNotFound):  # token sets from early versions do not have a quarantine file
            for line in workspace.read_bytes(f"{prefix}/{QUARANTINE}").splitlines():
                row = QuarantinedRow.model_validate_json(line)
                if len(samples.get(row.reason, range(limit))) < limit:
                    samples[row.reason].append(row.model_copy(update={"content": row.text[:MAX_CONTENT]}))
    digest = PrepareDigest(
        cycle=cycle,
        labels=labels,
        buckets=next(iter(infos)).buckets,
        partitions=tuple(sorted(map(_partition_digest, infos), key=lambda part: (part.watermark, part.partition))),
        reasons=reasons,
        samples=tuple(row for rows in samples.values() for row in rows),
    )
    workspace.write_bytes(digest_key(cycle), digest.to_json())


def load_digest(workspace: Storage, cycle: str) -> PrepareDigest | None:
    """Load the summary of a cycle, or return None if it does not exist. Raises DataError if it cannot be read."""
    return read_record(
        workspace, digest_key(cycle), PrepareDigest, "a digest of prepared data", f"trnpipe prepare --cycle {cycle}"
    )


def _partition_digest(info: TokenSetInfo) -> PartitionDigest:
    counts = [shard.rows for shards in info.splits.values() for shard in shards]
    return PartitionDigest(
        partition=info.partition,
        watermark=info.watermark,
        rows={split: sum(sum(shard.rows) for shard in shards) for split, shards in info.splits.items()},
        labels={split: judged.labels for split, judged in info.judged.items()},
        bucket_rows=tuple(map(sum, zip(*counts, strict=True))),
        bad=info.rows_bad,
        filtered=sum(file.filtered for file in info.files),
        blank=sum(file.blank for file in info.files),
        truncated=info.truncated_rows,
        tokens=info.tokens,
        without_category=info.without_category | info.without_number,
    )
