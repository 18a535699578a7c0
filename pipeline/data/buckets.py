"""Choose the buckets of a dataset from the lengths of its texts.

The choice is stored in the workspace and kept even if the texts change, because with other buckets all partitions would
have to be prepared and all graphs compiled again.
"""

from typing import Literal

from pipeline.core.batch_order import Bucket, fit_buckets
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.encode import tokenize_pairs
from pipeline.data.sources import Source
from pipeline.data.survey import survey
from pipeline.data.token_sets import KIND
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage, read_record

_KEY, _SAMPLE_ROWS = "tokens/{}/buckets.json", 20_000


class PinnedBuckets(Record):
    """The buckets that were chosen for a dataset, stored as tokens/<dataset>/buckets.json."""

    schema_version: Literal[1] = 1
    buckets: tuple[str, ...]


def pinned_buckets(config: DataConfig, workspace: Storage) -> tuple[str, ...]:
    """Return the buckets that were chosen for a dataset, or an empty tuple if none were chosen."""
    key = _KEY.format(config.name)
    pinned = read_record(workspace, key, PinnedBuckets, "a record of chosen buckets", "trnpipe prepare")
    return pinned.buckets if pinned else ()


def given_buckets(config: DataConfig, workspace: Storage, parent: tuple[str, ...]) -> tuple[str, ...]:
    """Return the configured buckets, or else those of the parent model, or else those of prepared partitions.

    The latter are only used if none were chosen for the dataset, because earlier versions had default buckets. Returns
    an empty tuple if there are no such buckets.
    """
    if config.buckets or parent or pinned_buckets(config, workspace):
        return config.buckets or parent
    folder = f"tokens/{config.name}"
    manifests = (read_manifest(workspace, f"{folder}/{name}") for name in workspace.list_dirs(folder))
    with_rows = (each.fields["buckets"] for each in manifests if each and each.kind == KIND and each.fields["splits"])
    buckets = next(with_rows, None)
    return tuple(map(str, buckets)) if isinstance(buckets, list) else ()


def choose_buckets(
    config: DataConfig,
    source: Source,
    workspace: Storage,
    tokenizer: TextTokenizer,
    longest: int,
    products: int,
    stop: StopSignal,
) -> tuple[str, ...]:
    """Return the buckets that were chosen for a dataset. If there are none, choose them for a sample of its texts.

    The sample depends only on the input. If several workers choose buckets at the same time, the first one wins.
    """
    if pinned := pinned_buckets(config, workspace):
        return pinned
    rows = survey(source, config, want_labels=False, want_sample=True, stop=stop).sample.rows
    sample = [[value.decode("utf-8", "ignore") for value in row] for _, row in rows[:: len(rows) // _SAMPLE_ROWS + 1]]
    texts = [(query, title, " ".join(text)) for query, title, *text in sample if query.strip() and title.strip()]
    if not texts:
        return (Bucket(longest, longest).name,)
    query, product = tokenize_pairs(config, tokenizer, *zip(*texts, strict=True))
    chosen = fit_buckets(query.lengths, product.lengths, longest, products)
    record = PinnedBuckets(buckets=tuple(bucket.name for bucket in chosen))
    workspace.write_if_absent(_KEY.format(config.name), record.model_dump_json().encode() + b"\n")
    return pinned_buckets(config, workspace)
