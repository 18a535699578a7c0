"""Commit mined negatives together with their inputs and settings, and read them as memory maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, JsonValue, ValidationError

from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError
from pipeline.core.record import Record
from pipeline.io import atomic
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest
from pipeline.io.storage import Storage

KIND = "negatives"
MINE = "trnpipe mine"
_QUERIES, _PRODUCTS = "query_id.npy", "product.npy"


class NegativesInfo(Record):
    """The manifest fields of mined negatives. Products are row numbers in the train split of `token_sets`."""

    schema_version: int = 1
    dataset: str
    token_sets: tuple[str, ...] = Field(description="Fingerprints of the prepared partitions, in order")
    rows: tuple[int, ...] = Field(description="Number of training rows in each bucket")
    source: str = Field(description="bm25, or the digest of the checkpoint whose vectors were searched")
    settings: dict[str, JsonValue] = Field(description="Everything else that determines the negatives, by name")
    figures: dict[str, int | float] = Field(description="Counts of mining")


@dataclass(frozen=True)
class NegativeSet:
    """A committed set of negatives. `digest` is a hash of its content."""

    prefix: str
    info: NegativesInfo
    digest: str


@dataclass(frozen=True)
class Negatives:
    """Negatives of Q queries: query_id int64 [Q], ascending, and product int64 [Q, K], row numbers padded with NONE."""

    query_id: Int64s
    product: Int64s


def commit_negatives(
    workspace: Storage, prefix: str, negatives: Negatives, info: NegativesInfo, scratch: Path
) -> NegativeSet:
    """Write negatives to a folder below `scratch` and publish it. Concurrent writers write the same bytes."""
    with atomic.staging_dir(scratch) as folder:
        np.save(folder / _QUERIES, negatives.query_id)
        np.save(folder / _PRODUCTS, negatives.product)
        manifest = commit_dir(workspace, folder, prefix, kind=KIND, fields=info.model_dump(mode="json"))
    return NegativeSet(prefix, info, manifest.digest)


def find_negatives(workspace: Storage, prefix: str) -> NegativeSet | None:
    """Return the committed negatives, or None. Raises DataError if they cannot be read."""
    manifest = read_manifest(workspace, prefix)
    if manifest is None:
        return None
    try:
        return NegativeSet(prefix, NegativesInfo.model_validate(manifest.fields), manifest.digest)
    except ValidationError as error:
        raise _damaged(workspace, prefix, f"{error.errors(include_url=False)[0]['loc']}") from error


def check_negatives(negatives: NegativeSet, token_sets: Sequence[str], workspace: Storage) -> None:
    """Raise DataError unless negatives were mined from the partitions with these fingerprints, in this order."""
    mined = negatives.info.token_sets
    if mined != tuple(token_sets):
        raise DataError(
            f"{workspace.uri(negatives.prefix)} was mined from other data: {len(set(mined) & set(token_sets))} of its"
            f" {len(mined)} prepared partitions are among the {len(token_sets)} of this run",
            expected="negatives mined from the data of this run",
            next_command=f"{MINE}, with the settings of this run",
        )


def open_negatives(workspace: Storage, negatives: NegativeSet, rows: Sequence[int], cache_dir: Path) -> Negatives:
    """Map negatives into memory. Raises DataError unless their row counts per bucket are `rows`."""
    folder = fetch_dir(workspace, negatives.prefix, cache_dir, deep=True)
    try:
        query_id, product = (np.load(folder / name, mmap_mode="r") for name in (_QUERIES, _PRODUCTS))
    except (OSError, ValueError) as error:
        raise _damaged(workspace, negatives.prefix, str(error)) from error
    if negatives.info.rows != tuple(rows) or product.shape[:1] != query_id.shape or product.ndim != 2:
        raise _damaged(workspace, negatives.prefix, f"products {product.shape} for {negatives.info.rows} rows")
    return Negatives(query_id, product)


def _damaged(workspace: Storage, prefix: str, reason: str) -> DataError:
    return DataError(
        f"{workspace.uri(prefix)} contains no usable negatives: {reason}",
        expected=f"negatives committed by this version of {MINE}",
        next_command=f"delete that folder, then run {MINE}",
    )
