"""One size of bench.embed_flow in a process of its own, so that its peak of memory is its own.

All of offline embedding but the model, with default settings: plan, read, judge, tokenise, batch, write, finish. A
vector is a row of a table instead.
"""

import argparse
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
from pydantic import BaseModel, ConfigDict

from pipeline.backends import Batch, open_backend
from pipeline.core.arrays import Float32s
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer, Tokens
from pipeline.embed.catalogue import CatalogueColumns, look_at
from pipeline.embed.config import CatalogueConfig, OutputConfig
from pipeline.embed.engine import Embedder, HostBatch, Start, Wait, flat_batches
from pipeline.embed.flow import Flow, embed_shards
from pipeline.embed.parts import finish
from pipeline.embed.plan import QUARANTINE_ROWS, WINDOW_ROWS, EmbedPlan, pin_plan
from pipeline.embed.texts import TextRules
from pipeline.embed.vectors import ModelRef, VectorLayout
from pipeline.io.storage import Storage, open_storage

WIDTH, MAX_TOKENS, TOKENS_PER_BATCH = 384, 128, 32_768
_TABLE_ROWS = 4096
_SAMPLE_S = 0.05
_CHILDREN_S = 1.0
_PAGE_BYTES = resource.getpagesize()


class Passed(BaseModel):
    """What one run took."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    """Vectors left behind."""
    bad: int
    parts: int
    plan_s: float
    embed_s: float
    finish_s: float
    cpu_s: float
    """Of this process and its workers, from the plan to the end."""
    resident_bytes: int
    """Peak of all processes together, code and mapped files included."""
    anonymous_bytes: int
    """Peak of what belongs to no file: heaps and stacks."""
    start_bytes: int
    """Anonymous memory before the plan: interpreter and libraries."""

    @property
    def seconds(self) -> float:
        return self.plan_s + self.embed_s + self.finish_s


class TableEngine:
    """Batches like those of a GPU; the vector of a text is a row of a table, by its first word."""

    dim = WIDTH
    ahead = 2

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id
        self._table = np.random.default_rng(1).normal(size=(_TABLE_ROWS, WIDTH)).astype(np.float32)

    def batches(self, texts: Tokens) -> Iterator[HostBatch]:
        return flat_batches(texts, TOKENS_PER_BATCH, self._pad_id)

    @contextmanager
    def opened(self) -> Iterator[Start]:
        yield self._start

    def _start(self, batch: Batch, host: HostBatch) -> Wait:
        second = np.cumsum(host.lengths) - host.lengths + 1  # the first is [CLS]
        vectors: Float32s = self._table[batch["ids"].numpy()[second] % _TABLE_ROWS]
        return lambda: vectors


class MemoryPeak:
    """Largest memory of this process and its children together, looked at every 50 ms. Use as a context manager."""

    def __init__(self) -> None:
        self.resident_bytes = self.anonymous_bytes = 0
        self._processes: list[int] = [os.getpid()]
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memory", daemon=True)

    def __enter__(self) -> "MemoryPeak":
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self._thread.join()

    def _work(self) -> None:
        looked = 0.0
        while not self._left.wait(_SAMPLE_S):
            if time.monotonic() - looked > _CHILDREN_S:
                looked = time.monotonic()
                self._processes = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
            self._look()

    def _look(self) -> None:
        found = [pages_of(process) for process in self._processes]
        self.resident_bytes = max(self.resident_bytes, _PAGE_BYTES * sum(resident for resident, _ in found))
        self.anonymous_bytes = max(self.anonymous_bytes, _PAGE_BYTES * sum(anonymous for _, anonymous in found))


def pages_of(process: int) -> tuple[int, int]:
    """(resident, anonymous) pages, 0 of a process that has ended; /proc/<pid>/statm counts shared ones in its third."""
    try:
        resident, shared = map(int, Path(f"/proc/{process}/statm").read_text().split()[1:3])
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return resident, resident - shared


def make_plan(catalogue: Storage, num_files: int, workspace: Storage) -> EmbedPlan:
    """Look at the footers of the first files and pin what follows from them."""
    stats = [stat for stat in catalogue.list("") if stat.key.endswith(".parquet")]
    found = look_at(catalogue, stats[:num_files], CatalogueColumns(id="product_id", title="title"))
    output = OutputConfig()
    plan = EmbedPlan(
        cycle="bench",
        generation=1,
        asked={},
        catalogue=found,
        model=ModelRef(name="table", place="nowhere", digest="0"),
        made_by={"checkpoint_digest": "0"},
        layout=VectorLayout(format=output.format, dtype=output.dtype, dim=WIDTH, id_type=found.id_type),
        max_tokens=MAX_TOKENS,
        rows_per_part=output.rows_per_part,
        window_rows=WINDOW_ROWS,
        quarantine_rows=QUARANTINE_ROWS,
        previous=None,
        carry_from=None,
    )
    return pin_plan(workspace, plan)


def embed(folder: Path, num_files: int, workspace: Storage, scratch: Path, workers: int) -> Passed:
    """Embed the first files of a catalogue with its tokenizer.json."""
    stop, catalogue = StopSignal(), open_storage(str(folder))
    tokenizer = TextTokenizer(catalogue.read_bytes("tokenizer.json"))
    embedder = Embedder(
        TableEngine(tokenizer.pad_id), open_backend("cpu"), limit=MAX_TOKENS, sep_id=tokenizer.sep_id, stop=stop
    )
    with MemoryPeak() as memory:
        start_bytes, before, started = memory.anonymous_bytes, cpu_seconds(), time.monotonic()
        plan = make_plan(catalogue, num_files, workspace)
        planned = time.monotonic()
        rules = TextRules(tokenizer.data, plan.max_tokens, plan.layout.id_type)
        flow = Flow(plan, catalogue, workspace, rules, workers, None, stop)
        embed_shards(flow, plan.shards, embedder.stream)
        embedded = time.monotonic()
        limit = CatalogueConfig().max_bad_fraction
        info = finish(workspace, plan, scratch, stop, max_bad_fraction=limit).info
        finished = time.monotonic()
    return Passed(
        rows=info.rows,
        bad=info.counts.bad,
        parts=len(info.parts),
        plan_s=planned - started,
        embed_s=embedded - planned,
        finish_s=finished - embedded,
        cpu_s=cpu_seconds() - before,
        resident_bytes=memory.resident_bytes,
        anonymous_bytes=memory.anonymous_bytes,
        start_bytes=start_bytes,
    )


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.embed_flow_side", description=__doc__)
    parser.add_argument("catalogue", type=Path, help="folder of Parquet files and a tokenizer.json")
    parser.add_argument("files", type=int, help="how many of the files to embed")
    parser.add_argument("place", type=Path, help="empty folder for workspace and scratch")
    parser.add_argument("--workers", type=int, default=0, help="processes that tokenise; 0: one per core")
    arguments = parser.parse_args()
    workspace = open_storage(str(arguments.place / "workspace"))
    scratch = arguments.place / "scratch"
    passed = embed(arguments.catalogue, arguments.files, workspace, scratch, arguments.workers)
    print(passed.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
