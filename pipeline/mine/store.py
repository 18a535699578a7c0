"""Commit mined negatives to the workspace and load them again.

The manifest records the inputs and settings that the negatives were mined with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, JsonValue, ValidationError

from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError
from pipeline.core.record import Record
from pipeline.io import atomic
from pipeline.io.commit import commit_files, fetch_dir, file_record, read_manifest
from pipeline.io.storage import Storage

KIND = "negatives"
MINE = "trnpipe mine"
_QUERIES, _PRODUCTS = "query_id.npy", "product.npy"


class NegativesInfo(Record):
    """The manifest fields of a set of negatives. Products are stored as row numbers in the train split."""

    schema_version: int = 1
    dataset: str
    token_sets: tuple[str, ...] = Field(description="Fingerprints of the prepared partitions, in order")
    rows: tuple[int, ...] = Field(description="Number of training rows in each bucket")
    source: str = Field(description="bm25, or the digest of the checkpoint that ranked the products")
    settings: dict[str, JsonValue] = Field(description="Everything that the negatives depend on, by name")
    figures: dict[str, int | float] = Field(description="Statistics of the negatives, by name")


@dataclass(frozen=True)
class NegativeSet:
    """A committed set of negatives, identified by the digest of its content."""

    prefix: str
    info: NegativesInfo
    digest: str


@dataclass(frozen=True)
class Negatives:
    """The negatives of Q queries.

    `query_id` [Q] is sorted, and `product` [Q, K] contains the row numbers of the negatives, padded with NONE. Both
    arrays are int64.
    """

    query_id: Int64s
    product: Int64s


def commit_negatives(
    workspace: Storage, prefix: str, negatives: Negatives, info: NegativesInfo, scratch: Path
) -> NegativeSet:
    """Commit negatives to the workspace, using a staging folder below `scratch`.

    It is safe for several processes to do this at the same time, because they write the same bytes and never delete a
    manifest that another has written.
    """
    with atomic.staging_dir(scratch) as folder:
        np.save(folder / _QUERIES, negatives.query_id)
        np.save(folder / _PRODUCTS, negatives.product)
        files = {path.name: file_record(path, workspace.stop) for path in sorted(folder.iterdir())}
        workspace.upload_dir(prefix, folder, sorted(files))
        manifest = commit_files(workspace, prefix, kind=KIND, fields=info.model_dump(mode="json"), files=files)
    return NegativeSet(prefix, info, manifest.digest)


def find_negatives(workspace: Storage, prefix: str) -> NegativeSet | None:
    """Look up committed negatives. Returns None if they do not exist, and raises DataError if they cannot be read."""
    manifest = read_manifest(workspace, prefix)
    if manifest is None:
        return None
    try:
        return NegativeSet(prefix, NegativesInfo.model_validate(manifest.fields), manifest.digest)
    except ValidationError as error:
        raise _damaged(workspace, prefix, f"{error.errors(include_url=False)[0]['loc']}") from error


def check_negatives(negatives: NegativeSet, token_sets: Sequence[str], workspace: Storage) -> None:
    """Verify that negatives were mined from the given token sets (fingerprints). Raises DataError otherwise."""
    mined = negatives.info.token_sets
    if mined != tuple(token_sets):
        raise DataError(
            f"{workspace.uri(negatives.prefix)} was mined from different data: {len(set(mined) & set(token_sets))} of"
            f" its {len(mined)} prepared partitions are among the {len(token_sets)} partitions of this run",
            expected="negatives that were mined from the data of this run",
            next_command=f"{MINE}, with the settings of this run",
        )


def open_negatives(workspace: Storage, negatives: NegativeSet, rows: Sequence[int], cache_dir: Path) -> Negatives:
    """Memory-map negatives. Raises DataError if they do not match the number of rows in each bucket."""
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
        f"{workspace.uri(prefix)} does not contain valid negatives: {reason}",
        expected=f"negatives committed by this version of {MINE}",
        next_command=f"delete the folder, then run {MINE}",
    )
