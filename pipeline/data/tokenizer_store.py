"""Which tokenizer to use: given, found in the workspace, or trained; and where it is kept."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import JsonValue

from pipeline.core.errors import ConfigError
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.partitions import Partition, Source
from pipeline.data.tokenizer import TextTokenizer, train_tokenizer
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.errors import KeyNotFound
from pipeline.io.storage import Storage, open_storage
from pipeline.proc.pool import WorkerPool

TOKENIZER_FILE = "tokenizer.json"


def given_tokenizer(config: DataConfig, parent: bytes | None, stop: StopSignal) -> TextTokenizer | None:
    """The one named in the settings, else the parent model's. Raises DataError or ConfigError when it is no use."""
    if config.tokenizer.path is None:
        return None if parent is None else TextTokenizer(parent, "the parent model's tokenizer")
    path = config.tokenizer.path
    folder, _, name = path.rpartition("/")
    if not name or (path.startswith("s3://") and not urlsplit(path).path.strip("/")):
        raise ConfigError(
            f"tokenizer path {path!r}", expected="the URI of a tokenizer.json", next_command="set --data.tokenizer.path"
        )
    try:
        data = open_storage(folder or ("/" if path.startswith("/") else "."), stop=stop).read_bytes(name)
    except KeyNotFound as error:
        raise ConfigError(
            f"tokenizer {path} does not exist",
            expected="the URI of a tokenizer.json",
            next_command="correct --data.tokenizer.path, or leave it out to train one",
        ) from error
    return TextTokenizer(data, path)


def find_tokenizer(config: DataConfig, source: Source, workspace: Storage) -> TextTokenizer | None:
    """One trained earlier with these settings on data that is still all there, unchanged.

    So new days do not change the vocabulary, which would make every old partition be tokenised again. Of several, the
    one trained on most partitions.
    """
    root = _root(config)
    present = {partition.name: partition.content_id for partition in source.partitions}
    best, best_size = None, 0
    for name in workspace.list_dirs(root):
        manifest = read_manifest(workspace, f"{root}/{name}")
        if manifest is None or manifest.fields.get("training") != _training(config):
            continue
        trained_on = manifest.fields.get("partitions")
        if isinstance(trained_on, dict) and trained_on.items() <= present.items() and len(trained_on) > best_size:
            best, best_size = f"{root}/{name}/{TOKENIZER_FILE}", len(trained_on)
    return TextTokenizer(workspace.read_bytes(best), workspace.uri(best)) if best else None


def train_in_worker(config: DataConfig, texts: list[str], stop: StopSignal) -> TextTokenizer:
    """Train in another process: the library cannot be interrupted, a process can."""
    pool = WorkerPool[TokenizerConfig, list[str], bytes](
        _train, config.tokenizer, num_workers=1, stop=stop, doing="training the tokenizer"
    )
    # The library says nothing while it works, so there is no total; that it goes on, and since when, is shown.
    with pool, progress("training the tokenizer", None, "texts") as advance:
        advance(len(texts))
        (data,) = pool.run(iter([texts]), waiting=lambda: advance(0))
    return TextTokenizer(data, "the tokenizer just trained")


def _train(config: TokenizerConfig, texts: list[str]) -> bytes:
    return train_tokenizer(texts, config)


def store_tokenizer(
    config: DataConfig,
    trained_on: Sequence[Partition] | None,
    workspace: Storage,
    tokenizer: TextTokenizer,
    scratch: Path,
) -> str:
    """Commit it unless it is there; returns its prefix. `trained_on`: None for a tokenizer that was given."""
    prefix = f"{_root(config)}/{tokenizer.fingerprint}"
    if read_manifest(workspace, prefix) is None:
        folder = scratch / "tokenizer" / tokenizer.fingerprint
        # A new file: what stands there may be one with what an earlier or another commit has published.
        write_bytes_atomic(folder / TOKENIZER_FILE, tokenizer.data)
        commit_dir(workspace, folder, prefix, kind="tokenizer", fields=_fields(config, trained_on, tokenizer))
    return prefix


def _fields(
    config: DataConfig, trained_on: Sequence[Partition] | None, tokenizer: TextTokenizer
) -> dict[str, JsonValue]:
    return {
        "training": None if trained_on is None else _training(config),
        "partitions": {partition.name: partition.content_id for partition in trained_on or ()},
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
    }


def _training(config: DataConfig) -> JsonValue:
    """What a trained vocabulary depends on besides the data."""
    return {
        **config.tokenizer.model_dump(mode="json", exclude={"path"}),
        "columns": config.columns.model_dump(mode="json"),
        "filter": dict(config.filter),
        "esci_locale": config.esci_locale,
        "buckets": list(config.buckets),
    }


def _root(config: DataConfig) -> str:
    return f"tokens/{config.name}/tokenizers"
