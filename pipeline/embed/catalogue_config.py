"""Settings of what surrounds the device in offline embedding: the catalogue, the output, its verification."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class CatalogueConfig(BaseModel):
    """What is to be embedded: a table with one row for each text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | None = Field(
        None, description="File or folder (file:// or s3://); none: the distinct products of the data input"
    )
    format: Literal["auto", "parquet", "csv", "jsonl"] = Field("auto", description="Input layout; auto: by suffix")
    id: str = Field("product_id", min_length=1, description="Column of the id: text or whole numbers, each value once")
    title: str = Field("title", min_length=1, description="Column of the title")
    text: str = Field("text", min_length=1, description="Column of longer text, appended to the title (optional)")
    filter: Annotated[
        dict[str, str],
        Field(description="Keep rows whose column equals the value, as column=value or column=value|value"),
    ] = {}
    max_bad_fraction: float = Field(
        0.05, ge=0, le=1, description="Share of rows without a usable id or text above which the catalogue is refused"
    )
    quarantine_rows: int = Field(1000, ge=1, description="Bad rows kept, with reasons")
    window_rows: int = Field(
        16_384, ge=1, le=1_000_000, description="Rows tokenised at a time, and texts sorted by length together"
    )


class OutputConfig(BaseModel):
    """How vectors are stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["parquet", "npy"] = Field(
        "parquet", description="parquet: id and vector in one file; npy: the bare matrix, ids in a Parquet file beside"
    )
    dtype: Literal["fp16", "fp32", "int8"] = Field(
        "fp16", description="Of stored vectors; int8: with a scale for each vector, in a column of its own"
    )
    dimensions: int = Field(0, ge=0, description="Leading dimensions kept, normalised again; 0: all")
    rows_per_part: int = Field(65_536, ge=1, le=10_000_000, description="Rows of one file: the unit of work and resume")
    carry_over: str = Field(
        "auto",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="Earlier cycle whose vectors of unchanged rows are taken over; auto: the newest that fits; none",
    )


class VerifyConfig(BaseModel):
    """What `trnpipe embed verify` looks at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    catalogue: bool = Field(True, description="Read the catalogue again and hold its ids and texts against the parts")
    sample: int = Field(256, ge=0, description="Texts embedded again in fp32 on the CPU; 0: none")
    min_cosine: float = Field(
        0.999, ge=-1, le=1, description="Lowest cosine between a stored vector and its recomputation"
    )
    norm_tolerance: float = Field(0.01, gt=0, description="Largest distance of a stored vector's length from one")
    min_drift_cosine: float | None = Field(
        None, ge=-1, le=1, description="Lowest mean cosine to the previous cycle; none: drift is only told"
    )
    ann_queries: int = Field(200, ge=0, description="Vectors searched with an ANN index (extra: ann); 0: none")
    ann_rows: int = Field(100_000, ge=2, description="Vectors put into that index, spread over the catalogue")
    min_recall: float = Field(0.9, ge=0, le=1, description="Lowest recall@10 of that index against exact search")
