"""The built-in synthetic catalogue, prepared as `trnpipe prepare` does it."""

from dataclasses import dataclass
from pathlib import Path

from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, SyntheticConfig, TokenizerConfig
from pipeline.data.prepare import prepare
from pipeline.data.shards import TokenRows
from pipeline.data.token_sets import Split, TokenSet, open_rows, read_token_sets, spec_of
from pipeline.io.storage import Storage, open_storage
from pipeline.model.config import InputSpec
from pipeline.telemetry.events import EventName


@dataclass(frozen=True)
class Catalogue:
    """Committed token shards in a local workspace."""

    workspace: Storage
    folder: Path
    sets: list[TokenSet]

    @property
    def spec(self) -> InputSpec:
        return spec_of(self.sets[0].info)

    def rows(self, split: Split) -> TokenRows:
        return open_rows(self.workspace, self.sets, split, self.folder / "cache")


def prepared_catalogue(folder: Path, num_queries: int, vocab_size: int = 8192) -> Catalogue:
    """Default settings and buckets; `num_queries` times 12 rows."""
    workspace = open_storage(str(folder / "workspace"))
    config = DataConfig(
        name="bench",
        synthetic=SyntheticConfig(num_queries=num_queries),
        tokenizer=TokenizerConfig(vocab_size=vocab_size),
    )
    done = prepare(config, workspace, scratch=folder / "scratch", events=_no_events, stop=StopSignal())
    return Catalogue(workspace, folder, read_token_sets(workspace, done.token_set_prefixes))


def _no_events(name: EventName, /, **fields: object) -> None:
    del name, fields
