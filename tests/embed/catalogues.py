"""Small catalogues, and a whole embedding run on them with a model that costs nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.arrays import Float32s
from pipeline.core.stop import StopSignal
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import TextTokenizer, Tokens, train_tokenizer
from pipeline.embed.carry_over import find_earlier, open_earlier, open_row_index
from pipeline.embed.catalogue import CatalogueColumns, TextRules, cut_tokens, read_footers
from pipeline.embed.flow import Flow, embed_shards
from pipeline.embed.parts import finish, part_store
from pipeline.embed.plan import EmbedPlan, pin_plan
from pipeline.embed.vectors import ModelRef, VectorLayout, VectorSet
from pipeline.io import atomic
from pipeline.io.storage import Storage, open_storage

WIDTH, MAX_TOKENS = 16, 12
COLUMNS = CatalogueColumns(id="product_id", title="title")
KINDS = ("phone", "laptop", "camera", "drill", "kettle", "shoe", "monitor", "vacuum")


@cache
def tokenizer_json() -> bytes:
    """A small WordPiece of the words below."""
    texts = [title(number) for number in range(200)]
    return train_tokenizer(texts, TokenizerConfig(vocab_size=256))


def title(number: int) -> str:
    """Titles of one to nine words."""
    words = [KINDS[number % 8], f"model {number}", "black edition", "with case and charger"]
    return " ".join(words[: 1 + number % 4])


def products(numbers: Iterable[int]) -> pa.Table:
    numbers = list(numbers)
    return pa.table({"product_id": [f"p{n}" for n in numbers], "title": [title(n) for n in numbers]})


def write_catalogue(folder: Path, tables: Sequence[pa.Table], group_rows: int = 40) -> Path:
    """One file for each table."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, table in enumerate(tables):
        pq.write_table(table, folder / f"file-{number}.parquet", row_group_size=group_rows)
    return folder


@cache
def _table() -> Float32s:
    """A row for each token id."""
    return np.random.default_rng(3).normal(size=(4096, WIDTH)).astype(np.float32)


@dataclass
class HashEmbedder:
    """Unit vectors that depend on the tokens alone. `acts`: what happens before the vectors of a window."""

    acts: Mapping[int, Callable[[], object]] = field(default_factory=dict)
    sign: float = 1.0
    """-1: other hardware, other vectors."""
    windows: list[int] = field(default_factory=list)

    def stream(self, windows: Iterable[Tokens]) -> Iterator[Float32s]:
        for number, tokens in enumerate(windows):
            if number in self.acts:
                self.acts[number]()
            self.windows.append(len(tokens.lengths))
            yield self.vectors(tokens)

    def vectors(self, tokens: Tokens) -> Float32s:
        sums = np.add.reduceat(_table()[tokens.ids], tokens.offsets[:-1]) + tokens.lengths[:, None]
        vectors: Float32s = (self.sign * sums / np.linalg.norm(sums, axis=1, keepdims=True)).astype(np.float32)
        return vectors


def failing(error: BaseException) -> Callable[[], NoReturn]:
    def act() -> NoReturn:
        raise error

    return act


def inline(function: Callable[[Any, Any], Any], context: Any, tasks: Iterator[Any], **options: Any) -> Iterator[Any]:
    """Do what run_tasks does, without processes."""
    return (function(context, task) for task in tasks)


@dataclass
class Case:
    """A workspace in which catalogues are embedded, cycle after cycle."""

    folder: Path
    layout: dict[str, Any] = field(default_factory=dict)
    rows_per_part: int = 30
    window_rows: int = 16
    columns: CatalogueColumns = COLUMNS
    stop: StopSignal = field(default_factory=StopSignal)
    model: str = "model-1"

    @property
    def workspace(self) -> Storage:
        return open_storage(str(self.folder / "workspace"))

    def plan(self, catalogue: Path, cycle: str = "c1", carry_over: str = "auto") -> EmbedPlan:
        storage = open_storage(str(catalogue))
        found = read_footers(storage, list(storage.list("")), self.columns)
        values: dict[str, Any] = {"format": "parquet", "dtype": "fp32", "dim": WIDTH, "id_type": found.id_type}
        layout = VectorLayout(**{**values, **self.layout})
        made_by: dict[str, Any] = {"checkpoint_digest": self.model}
        earlier = find_earlier(self.workspace, cycle, carry_over, made_by, layout)
        plan = EmbedPlan(
            cycle=cycle,
            generation=earlier.generation + 1,
            asked={},
            catalogue=found,
            model=ModelRef(name="relevance", place="checkpoints/c0/step-1", digest=self.model),
            made_by=made_by,
            layout=layout,
            max_tokens=MAX_TOKENS,
            rows_per_part=self.rows_per_part,
            window_rows=self.window_rows,
            quarantine_rows=1000,
            previous=earlier.previous,
            carry_from=earlier.carry_from,
        )
        return pin_plan(self.workspace, plan)

    def rules(self, plan: EmbedPlan) -> TextRules:
        index = ""
        if plan.carry_from is not None:
            index = str(
                open_row_index(open_earlier(self.workspace, plan.carry_from), self.folder / "scratch", self.stop)
            )
        filters = tuple(plan.catalogue.columns.filter.items())
        return TextRules(tokenizer_json(), plan.max_tokens, plan.layout.id_type, filters, index)

    def work(
        self, plan: EmbedPlan, worker: int = 0, workers: int = 1, embedder: HashEmbedder | None = None
    ) -> HashEmbedder:
        """What one worker does."""
        embedder = embedder or HashEmbedder()
        done = part_store(self.workspace, plan).done()
        todo = [shard for shard in plan.shards[worker::workers] if shard.index not in done]
        earlier = open_earlier(self.workspace, plan.carry_from) if plan.carry_from else None
        catalogue = open_storage(plan.catalogue.root, stop=self.stop)
        flow = Flow(plan, catalogue, self.workspace, self.rules(plan), 1, earlier, self.stop)
        with mock.patch("pipeline.embed.flow.run_tasks", inline):
            embed_shards(flow, todo, embedder.stream)
        return embedder

    def finish(self, plan: EmbedPlan, max_bad_fraction: float = 0.05, scratch: Path | None = None) -> VectorSet:
        scratch = scratch or self.folder / "scratch"
        return finish(self.workspace, plan, scratch, self.stop, max_bad_fraction=max_bad_fraction)

    def embed(self, catalogue: Path, cycle: str = "c1", **options: Any) -> VectorSet:
        """A whole cycle with one worker."""
        plan = self.plan(catalogue, cycle)
        self.work(plan)
        return self.finish(plan, **options)

    def files(self, cycle: str = "c1") -> dict[str, bytes]:
        """Everything below embeddings/<cycle>, but for what a killed writer left."""
        folder = self.folder / "workspace" / "embeddings" / cycle
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not atomic.is_temp(path.name)}


def rows_of(vectors: VectorSet) -> dict[Any, Float32s]:
    """Every vector by id; asserts that each id is there once."""
    found: dict[Any, Float32s] = {}
    for part in range(len(vectors.info.parts)):
        for batch, values in vectors.blocks(part):
            for name, value in zip(batch["id"].to_pylist(), values, strict=True):
                assert name not in found, f"{name} is there twice"
                found[name] = value
    assert len(found) == vectors.info.rows
    return found


def expected_vector(text: str) -> Float32s:
    """What HashEmbedder makes of one text, cut to MAX_TOKENS."""
    tokenizer = TextTokenizer(tokenizer_json())
    vector: Float32s = HashEmbedder().vectors(cut_tokens(tokenizer.encode([text]), MAX_TOKENS, tokenizer.sep_id))[0]
    return vector
