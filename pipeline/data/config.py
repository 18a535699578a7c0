"""Settings of the data side: where rows come from, what they are called, how they become shards."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from pipeline.core.batch_order import Bucket, check_buckets
from pipeline.core.record import Record


class ColumnMapping(Record):
    """Input column names for the fields we use. Optional ones are ignored when the input lacks them."""

    query: str = Field("query", description="Column of the query text")
    title: str = Field("title", description="Column of the product title")
    text: str = Field("text", description="Column of longer product text, appended to the title (optional)")
    label: str = Field("label", description="Column of the relevance label (class name)")
    gain: str = Field("gain", description="Column of the graded gain, 0 to 1 (optional)")
    query_id: str = Field("query_id", description="Column of the query id (optional; default: hash of the query)")
    product_id: str = Field("product_id", description="Column of the product id (optional; default: hash of the title)")
    split: str = Field(
        "split", description="Column naming train / valid / test (optional; default: hash of the query id)"
    )


class CategoricalFeature(Record):
    """A categorical column, hashed to a fixed number of ids (no vocabulary to keep in step)."""

    short: ClassVar[tuple[str, ...]] = ("column", "num_ids")
    column: str = Field(description="Input column")
    num_ids: int = Field(1024, ge=2, le=2**24, description="Number of hash ids; id 0 means missing")


class SyntheticConfig(Record):
    """The built-in deterministic catalogue, used when no input is given."""

    retired: ClassVar[Mapping[str, Any]] = {"candidates_per_query": 12, "first_day": "2026-01-01", "seed": 17}
    num_queries: int = Field(1500, ge=10, description="Queries of a day, each with 12 judged products")
    num_days: int = Field(
        1, ge=1, le=366, description="dt= partitions; one more is a new day, and leaves the others as they are"
    )


class TokenizerConfig(Record):
    """A given tokenizer.json, or a lower-case WordPiece trained on the corpus."""

    retired: ClassVar[Mapping[str, Any]] = {"train_rows": 1_000_000, "lowercase": True}
    path: str | None = Field(None, description="URI of a tokenizer.json (default: the parent's, else train one)")
    vocab_size: int = Field(8192, ge=256, le=250_000, description="Entries of a trained vocabulary")
    split_digits: bool = Field(
        False,
        description="Cut words where letters and digits meet, so that tp1724 and tp 1724 are the same tokens; "
        "a parent's tokenizer stays as it is",
    )


class DataConfig(Record):
    """Input and its preparation."""

    retired: ClassVar[Mapping[str, Any]] = {"esci_locale": None, "quarantine_rows": 1000, "worker": None}
    name: str = Field("catalogue", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Dataset name in the workspace")
    path: str | None = Field(None, description="File or folder (file:// or s3://); none: the synthetic catalogue")
    format: Literal["auto", "parquet", "csv", "jsonl", "esci"] = Field(
        "auto", description="Input layout; auto: by suffix"
    )
    columns: ColumnMapping = ColumnMapping()
    labels: tuple[str, ...] = Field(
        (),
        description="Class names from least to most relevant; empty: from the data, by mean gain or as grades",
    )
    numeric: tuple[str, ...] = Field((), description="Numeric feature columns")
    categorical: tuple[CategoricalFeature, ...] = Field((), description="Categorical feature columns")
    slices: tuple[str, ...] = Field(
        (), description="Columns by which evaluation tells rows apart (category, language); not seen by the model"
    )
    lexical: bool = Field(True, description="Add features of the word overlap between query and title")
    filter: dict[str, str] = Field(
        {}, description="Keep rows whose column equals the value, as column=value or column=value|value"
    )
    valid_fraction: float = Field(
        0.05, ge=0, lt=0.5, description="Queries held out for validation when there is no split column"
    )
    test_fraction: float = Field(
        0.05, ge=0, lt=0.5, description="Queries held out for test when there is no split column"
    )
    max_bad_fraction: float = Field(0.05, ge=0, le=1, description="Share of bad rows above which the input is refused")
    buckets: tuple[str, ...] = Field(("16x16", "16x32", "64x64"), description="Static shapes, QUERYxPRODUCT tokens")
    rows_per_chunk: int = Field(50_000, ge=100, description="Rows tokenised at a time by one worker (bounds memory)")
    num_workers: int = Field(0, ge=0, description="Tokenising processes; 0: one per core")
    workers: int = Field(1, ge=1, le=10_000, description="Jobs that share the partitions, such as the size of an array")
    tokenizer: TokenizerConfig = TokenizerConfig()
    query_prefix: str = Field(
        "", max_length=200, description="Put before every query, as its encoder was trained: 'query: ' for e5"
    )
    product_prefix: str = Field(
        "", max_length=200, description="Put before every product text, also in embed: 'passage: ' for e5"
    )
    synthetic: SyntheticConfig = SyntheticConfig()

    @field_validator("buckets")
    @classmethod
    def _nested(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(bucket.name for bucket in check_buckets([Bucket.parse(text) for text in value]))

    @field_validator("labels", "numeric", "categorical", "slices")
    @classmethod
    def _each_once(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [one.column if isinstance(one, CategoricalFeature) else one for one in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(map(repr, twice))} more than once; expected each name once")
        return value

    @field_validator("labels")
    @classmethod
    def _none_or_several(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) == 1:
            raise ValueError(f"only {value[0]!r}; expected two classes or more, the least relevant first, or none")
        return value

    @property
    def bucket_shapes(self) -> tuple[Bucket, ...]:
        return tuple(Bucket.parse(text) for text in self.buckets)
