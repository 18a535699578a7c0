"""Settings that describe the input data and how its rows are converted to token shards."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from pipeline.core.batch_order import LONGEST, Bucket, check_buckets
from pipeline.core.record import Record
from pipeline.model.config import Attribute

SplitBy = Literal["query", "product", "both"]


class ColumnMapping(Record):
    """Names of the input columns. Optional columns may be missing from the input, and are not read if "" is set."""

    query: str = Field("query", description="Column with the query text")
    title: str = Field("title", description="Column with the product title")
    text: str = Field("text", description="Column with longer product text, which is appended to the title (optional)")
    label: str = Field("label", description="Column with the relevance label (class name)")
    gain: str = Field("gain", description="Column with the graded gain, from 0 to 1 (optional)")
    query_id: str = Field("query_id", description="Column with the query id (optional, default: hash of the query)")
    product_id: str = Field("product_id", description="Column with the product id (optional, default: hash of title)")
    split: str = Field("split", description="Column with train, valid or test (optional, default: see split_by)")


class CategoricalFeature(Record):
    """A categorical column. Values are hashed to a fixed number of ids so that no vocabulary has to be maintained."""

    short: ClassVar[tuple[str, ...]] = ("column", "num_ids")
    column: str = Field(description="Input column")
    num_ids: int = Field(1024, ge=2, le=2**24, description="Number of hash ids (id 0 means missing)")


class SyntheticConfig(Record):
    """Settings of the built-in, deterministic catalogue, used when `data.path` is not set."""

    retired: ClassVar[Mapping[str, Any]] = {"candidates_per_query": 12, "first_day": "2026-01-01", "seed": 17}
    num_queries: int = Field(1500, ge=10, description="Queries per day, each with 12 judged products")
    num_days: int = Field(
        1, ge=1, le=366, description="Number of dt= partitions. Increasing it adds days without changing existing ones"
    )


class TokenizerConfig(Record):
    """Settings for using an existing tokenizer.json, or for training a lower-case WordPiece tokenizer on the input."""

    retired: ClassVar[Mapping[str, Any]] = {"train_rows": 1_000_000, "lowercase": True}
    path: str | None = Field(
        None, description="URI of a tokenizer.json (default: the parent model's tokenizer if any, else train one)"
    )
    vocab_size: int = Field(8192, ge=256, le=250_000, description="Vocabulary size when a tokenizer is trained")
    split_digits: bool = Field(
        False,
        description="Split words between letters and digits so that tp1724 and tp 1724 produce the same tokens "
        "(ignored when the parent model's tokenizer is used)",
    )


class DataConfig(Record):
    """Settings of the input and of the prepare stage."""

    retired: ClassVar[Mapping[str, Any]] = {"esci_locale": None, "quarantine_rows": 1000, "worker": None}
    name: str = Field("catalogue", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Dataset name in the workspace")
    path: str | None = Field(
        None,
        description="File or folder (file:// or s3://), or a table as iceberg://catalog/namespace.table (default: the"
        " synthetic catalogue)",
    )
    format: Literal["auto", "parquet", "csv", "jsonl", "esci"] = Field(
        "auto", description="Input format (auto: determined by the file suffix)"
    )
    columns: ColumnMapping = ColumnMapping()
    labels: tuple[str, ...] = Field(
        (),
        description="Class names, least relevant first (default: read from the data and ordered by mean gain or grade)",
    )
    numeric: tuple[str, ...] = Field((), description="Numeric feature columns")
    categorical: tuple[CategoricalFeature, ...] = Field((), description="Categorical feature columns")
    attributes: tuple[Attribute, ...] = Field(
        (),
        description="Attributes of queries and products, such as brand, model_number and price. Texts are appended to"
        " queries and titles and compared, and numbers are subtracted and divided",
    )
    slices: tuple[str, ...] = Field(
        (), description="Columns by which evaluation breaks down metrics (category, language). Not used by the model"
    )
    lexical: bool = Field(True, description="Add features that measure the word overlap between query and title")
    filter: dict[str, str] = Field({}, description="Keep only rows that match: column=value or column=a|b")
    valid_fraction: float = Field(
        0.05, ge=0, lt=0.5, description="Fraction of queries held out for validation if the input has no split column"
    )
    test_fraction: float = Field(
        0.05, ge=0, lt=0.5, description="Fraction of queries held out for testing if the input has no split column"
    )
    split_by: SplitBy = Field(
        "query",
        description="What is held out if the input has no split column: queries, products (the fractions are then those"
        " of products), or both (a row is in the test split if either its query or its product is)",
    )
    max_bad_fraction: float = Field(0.05, ge=0, le=1, description="Fraction of bad rows above which prepare fails")
    buckets: tuple[str, ...] = Field(
        (),
        description="Static input shapes, as QUERYxPRODUCT numbers of tokens (default: those of the parent model, or up"
        " to 3 that fit the texts, chosen when a dataset is prepared for the first time)",
    )
    rows_per_chunk: int = Field(
        50_000, ge=100, description="Number of rows that a process tokenises at a time. Lower it to save memory"
    )
    num_workers: int = Field(0, ge=0, description="Number of tokeniser processes (0: one per core)")
    workers: int = Field(1, ge=1, le=10_000, description="Number of array tasks that prepare partitions in parallel")
    tokenizer: TokenizerConfig = TokenizerConfig()
    query_prefix: str = Field(
        "", max_length=200, description="Text prepended to every query, as some encoders expect ('query: ' for e5)"
    )
    product_prefix: str = Field(
        "", max_length=200, description="Text prepended to every product, including in embed ('passage: ' for e5)"
    )
    synthetic: SyntheticConfig = SyntheticConfig()

    @field_validator("buckets")
    @classmethod
    def _nested(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(bucket.name for bucket in check_buckets([Bucket.parse(text) for text in value])) if value else ()

    @field_validator("labels", "numeric", "categorical", "attributes", "slices")
    @classmethod
    def _each_once(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [getattr(item, "column", getattr(item, "name", item)) for item in value]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"duplicate names {', '.join(map(repr, duplicates))}; expected each name once")
        return value

    @field_validator("labels")
    @classmethod
    def _none_or_several(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) == 1:
            raise ValueError(f"only one class {value[0]!r}; expected at least two, least relevant first, or none")
        return value

    @property
    def bucket_shapes(self) -> tuple[Bucket, ...]:
        """The configured buckets, or the largest one that could be chosen."""
        return tuple(Bucket.parse(text) for text in self.buckets) or (Bucket(LONGEST, LONGEST),)
