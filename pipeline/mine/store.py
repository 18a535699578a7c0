"""Commit mined negatives with what they were mined from, and read them as memory maps."""

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
    """The fields of the manifest. Products are rows of the train split of `token_sets`, in that order."""

    schema_version: int = 1
    dataset: str
    token_sets: tuple[str, ...] = Field(description="Fingerprints of the prepared partitions, in order")
    rows: tuple[int, ...] = Field(description="Their training rows in each bucket")
    source: str = Field(description="bm25, or the digest of the checkpoint whose vectors were searched")
    settings: dict[str, JsonValue] = Field(description="What else decides the negatives, by name")
    figures: dict[str, int | float] = Field(description="Counts of mining")


@dataclass(frozen=True)
class NegativeSet:
    prefix: str
    info: NegativesInfo
    digest: str
    """Names their content."""


@dataclass(frozen=True)
class Negatives:
    """query_id int64 [Q] ascending; product int64 [Q, K].

    A product is the number of a row over all buckets of the training rows, smallest bucket first; NONE behind the last.
    """

    query_id: Int64s
    product: Int64s


def commit_negatives(
    workspace: Storage, prefix: str, negatives: Negatives, info: NegativesInfo, scratch: Path
) -> NegativeSet:
    """Publish negatives by way of a folder below `scratch`. Several writers may: they write the same bytes."""
    with atomic.staging_dir(scratch) as folder:
        np.save(folder / _QUERIES, negatives.query_id)
        np.save(folder / _PRODUCTS, negatives.product)
        manifest = commit_dir(workspace, folder, prefix, kind=KIND, fields=info.model_dump(mode="json"))
    return NegativeSet(prefix, info, manifest.digest)


def find_negatives(workspace: Storage, prefix: str) -> NegativeSet | None:
    """Return the committed negatives, None if there are none. Raises DataError if they cannot be read."""
    manifest = read_manifest(workspace, prefix)
    if manifest is None:
        return None
    try:
        return NegativeSet(prefix, NegativesInfo.model_validate(manifest.fields), manifest.digest)
    except ValidationError as error:
        raise _damaged(workspace, prefix, f"{error.errors(include_url=False)[0]['loc']}") from error


def check_negatives(found: NegativeSet, token_sets: Sequence[str], workspace: Storage) -> None:
    """Raise DataError unless negatives were mined from the partitions with these fingerprints, in this order."""
    mined = found.info.token_sets
    if mined != tuple(token_sets):
        raise DataError(
            f"{workspace.uri(found.prefix)} was mined from other data: {len(mined)} prepared partitions, of which"
            f" {len(set(mined) & set(token_sets))} are among the {len(token_sets)} of this run",
            expected="negatives mined from the data that is trained on",
            next_command=f"{MINE}, with the settings of this run",
        )


def open_negatives(workspace: Storage, found: NegativeSet, rows: Sequence[int], cache_dir: Path) -> Negatives:
    """Map negatives into memory. Raises DataError unless they are of `rows`, the training rows in each bucket."""
    folder = fetch_dir(workspace, found.prefix, cache_dir, deep=True)
    try:
        query_id, product = (np.load(folder / name, mmap_mode="r") for name in (_QUERIES, _PRODUCTS))
    except (OSError, ValueError) as error:
        raise _damaged(workspace, found.prefix, str(error)) from error
    if found.info.rows != tuple(rows) or product.shape[:1] != query_id.shape or product.ndim != 2:
        raise _damaged(workspace, found.prefix, f"{product.shape} products of {found.info.rows} rows")
    return Negatives(query_id, product)


def _damaged(workspace: Storage, prefix: str, seen: str) -> DataError:
    return DataError(
        f"{workspace.uri(prefix)} holds no mined negatives for this data: {seen}",
        expected="what this version of trnpipe mine commits",
        next_command=f"delete that folder, then {MINE}",
    )
