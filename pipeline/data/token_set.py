"""What a folder of token shards says about itself: the `fields` of its MANIFEST.json."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT_VERSION = 1
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardInfo(_Record):
    """One shard file and its rows in each bucket (a bucket without rows has no tensors)."""

    file: str
    rows: tuple[int, ...]


class CategoricalInfo(_Record):
    """A hashed categorical column; id 0 means missing."""

    column: str
    num_ids: int


class SliceInfo(_Record):
    """A column for evaluation and its values; rows hold the hashes of them (data/slices.py)."""

    column: str
    names: tuple[str, ...]


class FileRows(_Record):
    """What became of every row of an input file. Blank lines are no rows."""

    file: str
    rows: int = Field(description="As the format counts them: the Parquet footer, CSV records, lines of JSON")
    good: int = Field(description="In the shards")
    bad: int
    filtered: int = Field(description="Left out by data.filter or data.esci_locale")
    blank: int


class JudgedSplit(_Record):
    """Counts of the judgements of one split. Gains are in hundredths, rounded down; what has no rows is left out."""

    gains: tuple[dict[int, int], ...] = Field(description="Rows by gain, for each bucket")
    labels: tuple[int, ...] = Field(description="Rows of each label")
    label_gain_sums: tuple[float, ...] = Field(description="Sum of the gains of each label")
    query_best: dict[int, int] = Field(description="Queries by the highest gain of their rows")
    query_worst: dict[int, int] = Field(description="Queries by the lowest gain of their rows")


class TokenSetInfo(_Record):
    """One prepared partition.

    `label_gains` are the mean gain of each label when it was prepared, or evenly spaced from 0 to 1 when labels were
    configured for data without gains. `rows_read` counts rows after the filter, bad ones included.
    """

    schema_version: int = FORMAT_VERSION
    dataset: str
    partition: str = Field(description="dt=YYYY-MM-DD or flat")
    watermark: str = Field(description="The date of the partition; empty when flat")
    fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    pad_id: int
    buckets: tuple[str, ...]
    labels: tuple[str, ...]
    label_gains: tuple[float, ...]
    numeric: tuple[str, ...] = Field(description="Configured columns, then lexical features")
    categorical: tuple[CategoricalInfo, ...]
    splits: dict[Split, tuple[ShardInfo, ...]]
    rows_read: int
    rows_bad: int
    reasons: dict[str, int]
    truncated_rows: int = Field(description="Rows of which a side was longer than the largest bucket")
    tokens: int = Field(description="Tokens without padding, special tokens included")
    slices: tuple[SliceInfo, ...] = Field((), description="In the order in which rows hold their values")
    files: tuple[FileRows, ...] = Field((), description="In the order of reading; empty in sets of earlier versions")

    judged: dict[Split, JudgedSplit] = Field({}, description="Of each split with rows; empty in earlier versions")

    @property
    def slice_columns(self) -> tuple[str, ...]:
        return tuple(info.column for info in self.slices)

    @property
    def rows(self) -> int:
        """Usable rows over all splits."""
        return sum(sum(shard.rows) for shards in self.splits.values() for shard in shards)
